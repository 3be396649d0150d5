"""Engines with controlled errors (``benchmarks/bench_mismatch.py``)."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.configs import ROOT

SHORT = ("train.total_steps=3", "env.num_envs=16", "evaluation.num_prompts=4")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("bench_mismatch")


def test_rounded_rows_have_the_levels_of_their_bits(bench: Any) -> None:
    weight = 2 * torch.rand(5, 1000, generator=torch.Generator().manual_seed(0)) - 1
    rounded = bench.Fault(bits=4).rounded(weight)
    assert [len(row.unique()) for row in rounded] == [15] * 5
    step = weight.abs().amax(-1, keepdim=True) / 7
    assert bool(((rounded - weight).abs() <= step * 0.5001).all())
    bias = weight[0]
    assert bench.Fault(bits=4).rounded(bias) is bias


@pytest.mark.slow  # five short runs
def test_each_engine_is_wrong_as_it_says_and_evaluations_are_not(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, figure = tmp_path / "mismatch.json", tmp_path / "figure.png"
    engines = ("float32", "4 bits", "8 steps old", "top_p 0.8", "top_p 0.8, raw")
    command = ["bench_mismatch.py", "--only", "learning", "--jobs", "lr 2e-4", "--seeds", "0"]
    command += ["--engines", *engines, "--corrections", "token truncation, 2"]
    command += [f"--override={override}" for override in SHORT]
    command += ["--output", str(output), "--figure", str(figure)]
    monkeypatch.setattr(sys, "argv", command)
    bench.main()

    runs = json.loads(output.read_text())["learning"]
    names = [f"lr 2e-4/{engine}/token truncation, 2/0" for engine in engines]
    assert list(runs) == names
    kl = [runs[name]["kl_median"] for name in names]
    assert max(kl[0], kl[4]) < 1e-6  # a truncation with raw log-probs cannot be detected
    assert min(kl[1:4]) > 1e-5
    assert len({runs[name]["accuracy"]["0"] for name in names}) == 1
    assert figure.read_bytes().startswith(b"\x89PNG")
