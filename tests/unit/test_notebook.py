"""The notebook of the first run, executed by a Jupyter kernel."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.support.configs import ROOT
from torchrl_grpo.host.files import read_jsonl

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

NOTEBOOK = ROOT / "docs" / "tutorials" / "first_run.ipynb"


def test_the_notebook_is_kept_without_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [(cell.outputs, cell.execution_count) for cell in cells] == [([], None)] * len(cells)


def printed(outputs: Iterable[Any]) -> str:
    return "".join(output.text for output in outputs if output.get("name") == "stdout")


@pytest.mark.slow
@pytest.mark.nightly
def test_the_notebook_of_the_first_run_learns(tmp_path: Path) -> None:
    folder = tmp_path / "docs" / "tutorials"
    folder.mkdir(parents=True)
    for name in ("sota", "config"):
        (tmp_path / name).symlink_to(ROOT / name)
    notebook = nbformat.read(shutil.copy(NOTEBOOK, folder), as_version=4)
    [command] = [cell for cell in notebook.cells if "grpo.py" in cell.source]
    # Fewer and larger steps, and fewer problems at fewer evaluations.
    shorter = (
        "train.total_dialog_turns=3840 optimizer.lr=2e-4 evaluation.num_prompts=100 evaluation.k=0"
    )
    command.source = f"{command.source.rstrip()} {shorter} evaluation.frequency=30"
    nbclient.NotebookClient(
        notebook, timeout=600, resources={"metadata": {"path": str(folder)}}
    ).execute()
    train, curves, responses, used = (
        cell.outputs for cell in notebook.cells if cell.get("outputs")
    )
    assert "report.html" in printed(train)
    accuracy = [
        row["eval/pass@1"]
        for row in read_jsonl(tmp_path / "outputs" / "notebook" / "metrics.jsonl")[::30]
    ]
    assert len(accuracy) == 2 and accuracy[0] < 0.5 and accuracy[1] > 0.9
    assert ["image/png" in output.get("data", {}) for output in curves] == [True]
    assert len(printed(responses).splitlines()) == 5
    assert "#### 85" in printed(used)
