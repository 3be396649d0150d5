"""Counts of what a step asks of a card (``benchmarks/bench_launches.py``)."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from tests.support.configs import ROOT
from torchrl_grpo import keys
from torchrl_grpo.models.rows import Rows
from torchrl_grpo.models.scoring import TokenScorer

LAYERS, HIDDEN = 3, 96
TOKENS = 2 * 8 + 3 + 4 + 6 + 7  # two prompts, and responses of 4, 5, 7 and 8 without their last
SMALL = ["--model=tiny", "--sequences=4", "--groups=2", "--prompt=8", "--operations=99"]
SMALL += ["--responses", "4", "8"]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("bench_launches")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "side", "waits"),
    [("step", "ours", 2), ("step", "plain", 2), ("update", "ours", 1), ("token", "ours", 0)],
)
def test_two_counts_of_a_step_are_equal(bench: Any, kind: str, side: str, waits: int) -> None:
    args = bench.parser().parse_args(SMALL)
    first, second = (bench.count(kind, side, args) for _ in range(2))
    assert first == second
    assert first["waits"] == waits, first["waits_in"]


@pytest.mark.slow
def test_scores_over_kept_tokens_do_not_wait(bench: Any) -> None:
    tokens, mask = torch.randint(2, 100, (4, 9)), (torch.arange(9) >= 6).expand(4, 9)
    with bench.MetaCuda() as card:
        scorer = TokenScorer(bench.make_model("tiny", "bfloat16"))
        rows = Rows.from_padded(tokens, mask)
        rows.values[keys.KEPT] = torch.randint(-1, 50, (len(rows.scored), 5), dtype=torch.int32)
        scores = scorer.score_rows(scorer.layout(rows), rows.values)
        card.reset()
        scores = scorer.score_rows(scorer.layout(rows), rows.values)
        (scores["log_prob"].sum() + scores["entropy"].sum()).backward()
    assert card.totals()["launches"] > 100
    assert not card.waits


@pytest.mark.slow
def test_what_a_layer_does_more_is_counted(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    args = bench.parser().parse_args(SMALL)
    before, make_model = bench.count("step", "ours", args), bench.make_model

    def with_sums(*names: str) -> Any:
        model = make_model(*names)
        for layer in model.model.layers:
            layer.mlp.register_forward_hook(lambda module, inputs, out: out + out.sum().item())
        return model

    monkeypatch.setattr(bench, "make_model", with_sums)
    after = bench.count("step", "ours", args)
    more = {name: after[name] - before[name] for name in ("launches", "waits", "teraflops")}
    # The sum, its copy to the host, and the addition, whose gradient is the same tensor.
    assert more == {"launches": 3 * LAYERS, "waits": LAYERS, "teraflops": 0}
    by_operation = [counts["operations"]["aten.add"]["gigabytes"] for counts in (before, after)]
    assert by_operation[1] - by_operation[0] == pytest.approx(
        LAYERS * 2 * TOKENS * HIDDEN * 2 / 1e9
    )
