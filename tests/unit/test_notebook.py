"""The notebook of the first run, executed by a Jupyter kernel."""

from __future__ import annotations

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
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    [call] = [cell for cell in notebook.cells if "torchrl_grpo.train" in cell.source]
    # Fewer and larger steps, and fewer problems at fewer evaluations.
    call.source = call.source.replace(
        "overrides={",
        'overrides={"train.total_dialog_turns": 3840, "optimizer.lr": 2e-4, "evaluation.k": 0, '
        '"evaluation.num_prompts": 100, "evaluation.frequency": 30, ',
    )
    nbclient.NotebookClient(
        notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    train, curves, responses, used = (
        cell.outputs for cell in notebook.cells if cell.get("outputs")
    )
    assert "report.html" in printed(train)
    [page] = [output.data["text/html"] for output in train if "text/html" in output.get("data", {})]
    assert "<b>step 30</b>" in page and "3,840 of 3,840 sequences" in page
    assert page.count("<svg") == 4 and "<figcaption>Reward</figcaption>" in page
    accuracy = [
        row["eval/pass@1"]
        for row in read_jsonl(tmp_path / "outputs" / "notebook" / "metrics.jsonl")[::30]
    ]
    assert len(accuracy) == 2 and accuracy[0] < 0.5 and accuracy[1] > 0.9
    assert ["image/png" in output.get("data", {}) for output in curves] == [True]
    assert len(printed(responses).splitlines()) == 5
    assert "#### 85" in printed(used)
