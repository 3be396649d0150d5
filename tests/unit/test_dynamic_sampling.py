"""``policy.dynamic_sampling`` in a run of ``grpo.py``."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import pytest

from tests.support.runs import NUMBERS, at, differences, run, state_of
from tests.support.scripts import SYNC, Script
from torchrl_grpo.host.files import read_jsonl

OPTIONS = (
    "algo=dapo", "policy.max_sampling_rounds=3", "policy.overlong_buffer=null", "train.total_dialog_turns=96",
    "evaluation.num_prompts=0", "logging.sample_rows=all", "logging.sample_frequency=1", "train.checkpoint_frequency=3",
    "train.keep_checkpoints=null",
)  # fmt: skip


@pytest.mark.nightly
@pytest.mark.slow
def test_a_run_replaces_groups_without_signal_and_goes_on_alike(tmp_path: Path) -> None:
    with Script(SYNC, tmp_path, *OPTIONS) as running:
        running.wait()
    assert running.process.returncode == 0, running.printed()
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(7))
    played = [row["rollout/groups_played"] for row in rows[1:]]
    dropped = [row["rollout/groups_zero_variance"] for row in rows[1:]]
    filled = [row["rollout/groups_filled"] for row in rows[1:]]
    # A batch is 4 groups, and at most 3 rollouts of 16 dialogs are played for it.
    assert max(played) <= 12 and sum(dropped) > 0
    assert [all_of_them - gone for all_of_them, gone in zip(played, dropped, strict=True)] == [
        4
    ] * 6
    assert [row["rollout/zero_variance_groups"] * 4 for row in rows[1:]] == filled
    groups: list[int] = []
    samples = [row for row in read_jsonl(tmp_path / "samples.jsonl") if row["split"] == "train"]
    for step, of_step in groupby(samples, key=lambda row: row["step"]):
        members = [list(group) for _, group in groupby(of_step, key=lambda row: row["group"])]
        assert [len(group) for group in members] == [4] * 4
        flat = sum(len({row["reward"] for row in group if row["valid"]}) < 2 for group in members)
        assert flat == filled[step - 1]
        groups += [group[0]["group"] for group in members]
    assert groups == sorted(set(groups))
    source = state_of(at(tmp_path, 6))["source"]
    assert source["ahead"] == [] and source["drawing"]["next_group"] == sum(played)
    # A resumed run draws, drops and trains the same.
    resumed = run(tmp_path / "resumed", *OPTIONS, f"train.resume={at(tmp_path, 3)}")
    for name in (
        *NUMBERS,
        "rollout/groups_played",
        "rollout/groups_zero_variance",
        "rollout/groups_filled",
    ):
        assert [row.get(name) for row in resumed[1:]] == [row.get(name) for row in rows[4:]], name
    assert differences(state_of(at(tmp_path / "resumed", 6)), state_of(at(tmp_path, 6))) == []
