"""``env.difficulty_filter`` where samplers in other processes play the tasks that the driver draws."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.configs import compose_config
from tests.support.runs import SMALL, at, state_in
from torchrl_grpo.assembly.run import build
from torchrl_grpo.reporting.metrics import read_jsonl

pytest.importorskip("ray")


@pytest.mark.nightly
@pytest.mark.slow
def test_later_epochs_leave_out_what_samplers_never_solved(tmp_path: Path) -> None:
    """Three of the six problems are never solved, whatever the response is."""
    rows = [json.dumps({"question": f"{n}+{n}=", "answer": str(2 * n)}) for n in range(1, 7)]
    (tmp_path / "data.jsonl").write_text("\n".join(rows) + "\n")
    reward = "def even(response, answer):\n    return {'reward': len(response), 'correct': int(answer) % 4 == 0}\n"
    (tmp_path / "rewards.py").write_text(reward)
    config = compose_config(
        *SMALL, f"env.dataset={tmp_path / 'data.jsonl'}", f"env.reward={tmp_path / 'rewards.py'}:even",
        "env.difficulty_filter=[0.5,1]", "inference_model.max_new_tokens=4", "train.total_dialog_turns=96",
        "policy.kl_coef=0", "logging.sample_rows=all", "logging.sample_frequency=1",
    )  # fmt: skip
    run = build(config, tmp_path / "run", asynchronous=True)
    try:
        run.fit()
    finally:
        run.close()
    skipped = [
        row["rollout/problems_skipped"]
        for row in read_jsonl(tmp_path / "run" / "metrics.jsonl")[1:]
    ]
    assert skipped[0] == 0 and skipped[-1] == 3
    last = {
        row["query"] for row in read_jsonl(tmp_path / "run" / "samples.jsonl") if row["step"] == 6
    }
    assert last == {"2+2=", "4+4=", "6+6="}
    source = state_in(at(tmp_path / "run", 6))["source"]
    counts = {(index, correct): count for index, correct, count in source["drawing"]["outcomes"]}
    assert sum(counts.values()) == 96 and {correct for index, correct in counts if index % 2} == {1}
