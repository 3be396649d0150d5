"""The pages that list things list all of them: ``docs/config.md`` each config key, ``docs/metrics.md`` each metric."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.conftest import make_tiny_model
from torchrl_grpo.collectors.dynamic import GroupCounts
from torchrl_grpo.models import TokenScorer
from torchrl_grpo.objectives import GRPOLoss

ROOT = Path(__file__).resolve().parents[2]


def undocumented(rows: Iterable[Mapping[str, Any]]) -> set[str]:
    """The metrics in rows of ``metrics.jsonl`` that ``docs/metrics.md`` has not; ``{k}`` there is a number."""
    cells = re.findall(r"^\| (`[^|]*) \|", (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8"), re.MULTILINE)
    listed = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    pattern = "|".join(re.sub(r"\\{\w\\}", r"\\d+", re.escape(name)) for name in listed)
    return {name for row in rows for name in row if name != "step" and not re.fullmatch(pattern, name)}


def test_a_metric_that_the_page_has_not_is_found() -> None:
    assert undocumented([{"step": 1, "eval/pass@16": 1.0, "eval/pass@": 1.0, "train/nothing": 0.0}]) == {
        "eval/pass@",
        "train/nothing",
    }


def test_every_output_of_the_loss_and_count_of_dynamic_sampling_is_on_the_page() -> None:
    loss = GRPOLoss(
        TokenScorer(make_tiny_model()),
        proximal="recomputed",
        behaviour_weight="mask",
        kl_to_ref_coeff=0.1,
        kl_to_inference_coeff=0.1,
        entropy_coeff=0.1,
    )
    counts = dataclasses.asdict(GroupCounts())
    assert {"behaviour_capped", "loss_entropy", "kl_k3_to_ref"} <= set(loss.out_keys)
    names = [*(f"train/{name}" for name in loss.out_keys), *(f"rollout/groups_{name}" for name in counts)]
    assert undocumented([dict.fromkeys(names)]) == set()


def test_the_page_of_config_keys_is_up_to_date() -> None:
    path = ROOT / "tools" / "make_config_docs.py"
    spec = importlib.util.spec_from_file_location("make_config_docs", path)
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    is_current = tool.page() == tool.PAGE.read_text(encoding="utf-8")
    assert is_current, "docs/config.md is not that of the config's dataclasses: run `python tools/make_config_docs.py`"
