"""The asynchronous run as a whole: its losses compared with a synchronous run, its files, and a
clean exit.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.configs import compose_config
from tests.support.devices import CPU
from tests.support.documentation import undocumented
from tests.support.processes import command_line
from tests.support.scripts import ASYNC, SMALL, SYNC, Script, rows_of
from tests.support.traces import events_of, span_of
from torchrl_grpo.assembly import prepare as prepare_module
from torchrl_grpo.assembly.run import build
from torchrl_grpo.host.checkpoint_files import checkpoints_in, step_of
from torchrl_grpo.reporting.metrics import read_jsonl
from torchrl_grpo.runtime.placement import DevicePlan

pytest.importorskip("ray")


DEVICES = [f"{role}.num_devices=2" for role in ("train_model", "inference_model", "ref_model")]


def run(folder: Path, *overrides: str, asynchronous: bool) -> list[dict[str, Any]]:
    training_run = build(compose_config(*SMALL, *overrides), folder, asynchronous=asynchronous)
    try:
        training_run.fit()
    finally:
        training_run.close()
    return rows_of(folder)


def test_with_bound_0_the_losses_are_bitwise_the_synchronous_ones(tmp_path: Path) -> None:
    """The runs have everything that scores a group or travels with it: reference model, teacher,
    demonstrations.
    """
    sums = [(a, b) for a in range(10, 26) for b in range(26, 30)]
    rows = [
        json.dumps({"question": f"{a}+{b}=?", "solution": f"#### {a + b}", "answer": a + b})
        for a, b in sums
    ]
    (tmp_path / "sums.jsonl").write_text("\n".join(rows) + "\n")
    steps = (
        "train.total_dialog_turns=160", "evaluation.num_prompts=8", "evaluation.frequency=4",
        f"env.dataset={tmp_path / 'sums.jsonl'}", "env.reward=gsm8k", "env.test_fraction=0.2",
        "policy.teacher_coef=0.1", "teacher.model=starter", "policy.sft_coef=0.1", "env.columns.completion=solution",
        "env.columns.answer=answer",
    )  # fmt: skip
    expected = run(tmp_path / "sync", *steps, asynchronous=False)
    overrides = ("train.max_staleness=0", "logging.profile_steps=[1]")
    got = run(tmp_path / "async", *steps, *overrides, asynchronous=True)
    events = events_of(tmp_path / "async")
    [(begin, end)] = span_of(events, "learner: train")
    events = sorted(events, key=lambda event: -event["ts"])
    calls = {event["name"]: event for event in events if event["ph"] == "X"}  # the first ones
    assert calls["play"]["pid"].startswith("sampler 0 ") and calls["play"]["ts"] < begin
    train = calls["learner: train_batch"]
    assert train["pid"].startswith("learner 0 ")
    assert begin < train["ts"] < train["ts"] + train["dur"] < end
    losses = [row["train/loss"] for row in expected[1:]]
    assert [row["train/loss"] for row in got[1:]] == losses
    assert len(losses) == 10 and len(set(losses)) == 10
    for name in (
        "train/grad_norm", "train/kl_k3_to_ref", "train/kl_k3_to_teacher", "train/loss_sft", "rollout/reward_mean",
        "eval/pass@1", "eval/pass@2",
    ):  # fmt: skip
        assert [row.get(name) for row in got] == [row.get(name) for row in expected], name
    assert (
        got[-1]["train/kl_k3_to_teacher"] > 0
        and got[-1]["train/loss_sft"] < 0.5 * got[1]["train/loss_sft"]
    )
    assert {row["staleness/max"] for row in got[1:]} == {0}
    for name in (
        "checkpoints/checkpoint_000010",
        "checkpoints/model/model.safetensors",
        "report.html",
    ):
        assert (tmp_path / "async" / name).exists()


@pytest.mark.nightly
def test_with_two_samplers_a_seed_reproduces_a_run(tmp_path: Path) -> None:
    """Tasks go to whichever sampler is idle."""
    steps = (
        "train.total_dialog_turns=96",
        "evaluation.num_prompts=0",
        "inference_model.num_devices=2",
    )
    first, second = (
        run(tmp_path / name, *steps, asynchronous=False) for name in ("first", "second")
    )
    assert len(first) > 3
    for name in ("train/loss", "train/grad_norm", "rollout/reward_mean", "rollout/tokens"):
        assert [row.get(name) for row in first] == [row.get(name) for row in second], name


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        (ASYNC, ["ref_model.refresh_every=3"]),
        (SYNC, ["train_model.lora.enabled=true"]),
    ],
    ids=["asynchronous", "synchronous, LoRA"],
)
def test_several_ranks_replicas_and_references_train_on_fresh_enough_data(
    script: Path, arguments: list[str], tmp_path: Path
) -> None:
    bound = 1 if script == ASYNC else 0
    with Script(
        script, tmp_path, *DEVICES, *arguments, "policy.kl_coef=0.01", "train.total_dialog_turns=96",
        "evaluation.num_prompts=0",
    ) as running:  # fmt: skip
        running.wait()
    assert running.process.returncode == 0, running.printed()
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows] == list(range(7))
    assert rows[6]["rollout/sequences"] == 16
    assert undocumented(rows) == set()
    for row in rows[1:]:
        assert row["staleness/max"] <= bound
        assert row["time/wait_s"] + row["time/train_s"] + row["time/sync_s"] <= row["time/step_s"]
        assert row["buffer/waiting_max"] <= (bound + 1) * 4
        assert row["workers/restarts_rollout"] == row["workers/restarts_reference"] == 0
        assert row["workers/generate_s"] > 0
        assert (
            row["workers/reference_s" if script == ASYNC else "time/reference_s"] > 0
        )  # with LoRA, the learner scores the reference
    assert sum(rows[6][f"workers/responses_rollout_{index}"] for index in range(2)) == 96
    if script == ASYNC:
        assert rows[3]["train/kl_k3_to_ref"] > 1e-5
    assert (tmp_path / "checkpoints" / "model" / "model.safetensors").exists()
    assert len(running.family) >= 6 and running.left() == []


@pytest.mark.nightly
def test_all_ranks_and_all_samplers_take_turns_on_the_same_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On two GPUs this is ``train_model.num_devices=all inference_model.num_devices=all``."""
    plan = DevicePlan((CPU, CPU), ((CPU,), (CPU,)), (CPU,), colocated=True)
    monkeypatch.setattr(prepare_module, "plan_devices", lambda *_, **__: plan)
    settings = (
        "policy.kl_coef=0.01", "train.dialog_turns_per_batch=32", "train.total_dialog_turns=96",
        "evaluation.num_prompts=8",
    )  # fmt: skip
    rows = run(tmp_path, *settings, asynchronous=False)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert (
        max(row["train/kl_k3_to_inference"] for row in rows[1:]) < 1e-8
    )  # both engines have the weights of both ranks
    assert {row["staleness/max"] for row in rows[1:]} == {0}
    assert rows[3]["rollout/sequences"] == 32 and rows[3]["train/grad_norm"] > 0
    played = [rows[3][f"workers/responses_rollout_{index}"] for index in range(2)]
    assert (
        min(played) >= 16 and sum(played) == 96
    )  # half of each batch, unless one worker is still busy
    tasks = [span for span in read_jsonl(tmp_path / "timeline.jsonl") if span["kind"] == "sample"]
    assert len(tasks) == 6  # each unit is played in one piece


def test_a_killed_learner_ends_the_script_and_leaves_no_process(tmp_path: Path) -> None:
    with Script(
        ASYNC, tmp_path, "train_model.num_devices=2", "policy.kl_coef=0", "train.total_dialog_turns=1000000",
        "evaluation.num_prompts=0", "train.checkpoint_frequency=1",
    ) as running:  # fmt: skip
        running.wait(lambda: len(rows_of(tmp_path)) > 3)
        *_, rank = (one for one in running.family if "LearnerActor" in command_line(one))
        rank.kill()
        running.wait(timeout_s=300)
    assert running.process.returncode == 1, running.printed()
    saved = max(
        path
        for path in (tmp_path / "checkpoints").glob("checkpoint_*")
        if not path.name.endswith(".tmp")
    )
    assert re.search(
        rf"error: a training rank died when the ranks had to .*: continue with train\.resume={saved}\.",
        running.printed(),
    )
    assert "Traceback" not in running.printed()
    assert (tmp_path / "report.html").exists()
    assert running.left() == []


@pytest.mark.nightly
def test_a_killed_raylet_ends_the_script_with_a_message(tmp_path: Path) -> None:
    """Without the watch, the script ended with Ray's own text after 13 to 61 s, and without a
    command to resume.
    """
    with Script(
        ASYNC, tmp_path, "policy.kl_coef=0", "train.total_dialog_turns=1000000", "evaluation.num_prompts=0",
        "train.checkpoint_frequency=1",
    ) as running:  # fmt: skip
        running.wait(lambda: len(rows_of(tmp_path)) > 3)
        [process] = [member for member in running.family if "raylet/raylet" in command_line(member)]
        process.kill()
        running.wait()
    assert running.process.returncode == 1, running.printed()
    what = rf"Ray's raylet \(process {process.pid}\) has ended, and the run with it"
    match = re.search(
        rf"^error: {what}: continue with train\.resume=(\S+)\.$", running.printed(), re.M
    )
    assert match and Path(match[1]).exists(), running.printed()
    assert "Traceback" not in running.printed()
    assert running.left() == []


@pytest.mark.nightly
def test_dynamic_sampling_replaces_groups_without_signal(tmp_path: Path) -> None:
    """Each batch of 4 groups is filled from more groups; those without signal only pad a batch that
    would be too small.
    """
    rows = run(
        tmp_path, "algo=dapo", "train.total_dialog_turns=64", "evaluation.num_prompts=0",
        "policy.max_sampling_rounds=4", "policy.overlong_buffer=null", "train_model.lora.enabled=true",
        asynchronous=True,
    )  # fmt: skip
    assert rows[-1]["train/grad_norm"] > 0
    assert [row["rollout/sequences"] for row in rows[1:]] == [16] * 4
    counts = {
        name: sum(row.get(f"rollout/groups_{name}", 0) for row in rows[1:])
        for name in ("played", "zero_variance")
    }
    filled = sum(row.get("rollout/groups_filled", 0) for row in rows[1:])
    assert counts["zero_variance"] > 0
    assert counts["played"] - counts["zero_variance"] == 16
    assert sum(row["rollout/zero_variance_groups"] * 4 for row in rows[1:]) == filled


@pytest.mark.nightly
def test_a_sampler_that_hangs_is_shown_with_its_groups(tmp_path: Path) -> None:
    counted = "import time\ncalls = 0\ndef score(response):\n    global calls\n    calls += 1\n"
    (tmp_path / "slow.py").write_text(
        counted + "    if calls > 90:\n        time.sleep(1000)\n    return 1.0\n"
    )
    with Script(
        ASYNC, tmp_path, "train.total_dialog_turns=160", "evaluation.num_prompts=0", "train.stall_timeout_s=30",
        "policy.kl_coef=0", f"env.reward={tmp_path / 'slow.py'}:score",
    ) as running:  # fmt: skip
        running.wait()
    assert running.process.returncode == 75, running.printed()
    stacks = (tmp_path / "stacks.txt").read_text()
    assert "0 of the 4 groups of a batch wait, sampler 0 has 1 tasks" in stacks.splitlines()[0]
    _, _, actor = stacks.partition("ray::SamplerActor.play")
    assert 'slow.py", line 7 in score' in actor
    assert "ray::LearnerActor" in stacks
    [newest, *_] = checkpoints_in(tmp_path / "checkpoints")
    assert step_of(newest) == rows_of(tmp_path)[-1]["step"] >= 4
    assert running.left() == []


def test_ctrl_c_ends_the_run_with_a_checkpoint_and_no_process_left(tmp_path: Path) -> None:
    with Script(
        ASYNC,
        tmp_path,
        "train.total_dialog_turns=1000000",
        "policy.kl_coef=0",
        "evaluation.num_prompts=0",
    ) as running:
        running.wait(lambda: len(rows_of(tmp_path)) >= 3)
        os.killpg(
            running.process.pid, signal.SIGINT
        )  # as a terminal does: Ray's processes receive the signal too
        running.wait(timeout_s=300)
    assert running.process.returncode == 130, running.printed()
    assert len(running.family) >= 4 and running.left() == []  # Ray's own processes and the actors
    [newest, *_] = checkpoints_in(tmp_path / "checkpoints")
    assert step_of(newest) == rows_of(tmp_path)[-1]["step"]  # the row of the last step was lost
    assert (tmp_path / "report.html").exists()
    assert "Traceback" not in running.printed()


def test_without_ray_the_message_says_what_to_install(
    run_here: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "ray":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert run_here(ASYNC, "--config-name", "grpo_arithmetic") == 2
    stderr = capfd.readouterr().err
    assert 'ray is not installed: pip install "torchrl_grpo[ray]"' in stderr
    assert "Traceback" not in stderr
