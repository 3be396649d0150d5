"""A dry run whose roles are Ray actors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.configs import compose_config
from tests.support.runs import SMALL, steps
from torchrl_grpo.extras.doctor.doctor import examine


@pytest.mark.nightly
def test_a_dry_run_tries_overlapping_roles_on_several_devices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    config = compose_config(*SMALL, steps(4), "train_model.num_devices=2", "train.max_staleness=1")
    assert examine(config, tmp_path / "out", asynchronous=True)
    printed = capsys.readouterr().out
    results = dict(re.findall(r"^\s*(\w+) +(ok|warning|FAILED|skipped) ", printed, re.MULTILINE))
    played = ("parts", "sync", "rollout", "train", "reward", "mismatch", "steps")
    assert {name: results[name] for name in played} == dict.fromkeys(played, "ok")
    assert "2 x cpu" in printed and re.search(r"memory \(cpu\) +[\d.]+ GB", printed)
    assert list(tmp_path.iterdir()) == []
