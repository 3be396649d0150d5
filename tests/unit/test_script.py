"""The real command line, through Hydra, in a process of its own."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import forks
from tests.support.configs import ROOT, last_of_each

SYNC, ASYNC = ROOT / "sota" / "grpo" / "grpo.py", ROOT / "sota" / "grpo" / "grpo-async.py"
DEVICES = ("train_model.num_devices=2", "ref_model.num_devices=2", "inference_model.num_devices=2")
SMALL = (
    "--config-name",
    "grpo_arithmetic",
    "env.num_envs=16",
    "env.repeats=4",
    "train.total_dialog_turns=32",
    "evaluation.num_prompts=8",
    "evaluation.k=2",
)


def run(
    script: Path,
    *arguments: str,
    cwd: Path,
    popen: type[subprocess.Popen[str]] = subprocess.Popen,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(script), *last_of_each(arguments)]
    with popen(
        command,
        cwd=cwd,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""} | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        printed = process.communicate(timeout=600)
    return subprocess.CompletedProcess(command, process.returncode, *printed)


@pytest.mark.slow
@pytest.mark.parametrize("script", [SYNC, pytest.param(ASYNC, marks=pytest.mark.nightly)])
def test_help_and_cfg_work_without_cuda(script: Path, tmp_path: Path) -> None:
    result = run(script, "--help", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "num_envs" in result.stdout
    composed = run(script, "--cfg", "job", *DEVICES, cwd=tmp_path, VLLM_USE_V1="0")
    assert composed.returncode == 0, composed.stderr
    assert "num_devices: 2" in composed.stdout
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        (
            SYNC,
            ["env.num_envs=30"],
            "error: env.num_envs=30 must be a multiple of env.repeats=8: use 24 or 32.",
        ),
        (SYNC, ["optimizer.lr=abc"], "error: optimizer.lr=abc must have the type float"),
        (SYNC, ["optimiser.lr=1e-4"], "did you mean optimizer.lr?"),
        (
            ASYNC,
            ["--config-name", "grpo_arithmetic", "inference_model.in_flight=keep"],
            "error: inference_model.in_flight=keep must be wait with inference_model.backend=transformers",
        ),
    ],
)
def test_a_user_error_is_one_line_without_a_traceback(
    script: Path, arguments: list[str], message: str, tmp_path: Path
) -> None:
    done = run(script, *arguments, cwd=tmp_path, VLLM_USE_V1="0")
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("checkpoints"))


IFEVAL = "error: env.dataset=ifeval without env.dataset_path must reach google/IFEval"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--config-name", "grpo_arithmetic", "train_model.devices=[0,1]"],
            "error: train_model.devices=[0, 1] must be accelerators of this machine",
        ),
        (["train.max_staleness=1"], "error: train.max_staleness=1 must be 0 in grpo.py"),
        (["--config-name", "grpo_ifeval", "model.name=starter"], IFEVAL),
        (["env.dataset=ifeval", "model.name=starter"], IFEVAL),
    ],
)
def test_an_error_of_the_plan_is_one_line_too(
    run_here: Callable[..., int],
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert run_here(SYNC, *arguments, "inference_model.backend=transformers") == 2
    stderr = capfd.readouterr().err
    assert message in stderr and "Traceback" not in stderr
    assert not list(tmp_path.rglob("checkpoints"))


@pytest.mark.slow
def test_a_run_leaves_its_files_in_outputs_date_time(tmp_path: Path) -> None:
    done = run(SYNC, *SMALL, cwd=tmp_path, popen=forks.Popen, VLLM_USE_V1="0")
    assert done.returncode == 0, done.stderr
    [folder] = (tmp_path / "outputs").glob("????-??-??/??-??-??")
    names = {path.name for path in folder.iterdir()}
    assert names >= {
        ".hydra", "checkpoints", "metrics.jsonl", "samples.jsonl", "tensorboard", "report.html", "curves.png",
    }  # fmt: skip
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {
        "checkpoint_000002",
        "model",
    }
    assert (folder / ".hydra" / "config.yaml").stat().st_size > 0
    for text in (
        "Device plan",
        "Batch geometry",
        "step 2: 32/32 sequences",
        "Samples after step",
        str(folder),
    ):
        assert text in done.stdout
    assert (done.stdout + done.stderr).count("VLLM_USE_V1 has no effect") == 1


@pytest.mark.nightly
@pytest.mark.slow
def test_multirun_runs_each_combination(run_here: Callable[..., int], tmp_path: Path) -> None:
    status = run_here(
        SYNC, "--multirun", *SMALL, "optimizer.lr=1e-4,1e-5", "policy.kl_coef=0.0,0.1",
        "train.total_dialog_turns=16", "evaluation.num_prompts=0", "logging.tensorboard=false",
    )  # fmt: skip
    assert status == 0
    metrics = sorted((tmp_path / "multirun").glob("*/*/*/metrics.jsonl"))
    assert [path.parent.name for path in metrics] == ["0", "1", "2", "3"]
    rows = [json.loads(path.read_text().splitlines()[-1]) for path in metrics]
    assert [row["train/lr"] for row in rows] == [1e-4, 1e-4, 1e-5, 1e-5]
    assert ["train/kl_k3_to_ref" in row for row in rows] == [False, True, False, True]


@pytest.mark.slow
def test_sigterm_ends_a_run_in_order_and_its_resume_line_works(
    run_here: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = [*SMALL, "evaluation.num_prompts=0", "logging.tensorboard=false"]
    with (tmp_path / "printed").open("w") as printed, subprocess.Popen(
        [sys.executable, str(SYNC), *last_of_each([*arguments, "train.total_dialog_turns=1000000"])],
        cwd=tmp_path, stdout=printed, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            metrics = list(tmp_path.glob("outputs/*/*/metrics.jsonl"))
            if metrics and len(metrics[0].read_text().splitlines()) > 3:
                break
            time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=600) == 143
    [folder] = (tmp_path / "outputs").glob("*/*")
    [checkpoint] = (folder / "checkpoints").glob("checkpoint_*")
    assert (folder / "report.html").exists()
    last_line = (tmp_path / "printed").read_text().splitlines()[-1]
    python, script, *words = shlex.split(last_line)
    assert (python, script) == (sys.executable, str(SYNC))
    assert {"train.resume=auto", f"hydra.run.dir={folder}"} < {*words}

    step = int(checkpoint.stem.removeprefix("checkpoint_"))
    length = "train.total_dialog_turns="
    words = [f"{length}{16 * (step + 2)}" if word.startswith(length) else word for word in words]
    assert run_here(SYNC, *words) == 0
    assert f"Resuming after step {step:,} from" in capfd.readouterr().out
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [*range(step + 3)]
    recorded = json.loads((folder / "environment.json").read_text())["command"]
    assert shlex.split(recorded)[:2] == sys.orig_argv[:2]  # of this process, which resumed the run
