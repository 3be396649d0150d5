"""Kill runs with SIGKILL again and again, and continue them with ``train.resume=auto``; and interrupt runs.

    python benchmarks/bench_kills.py                                          # 20 points of a save, 20 moments
    python benchmarks/bench_kills.py --script grpo.py --points 3 --moments 3 --seed 1
    python benchmarks/bench_kills.py --signals

A chain of lives is one run. Each life but the last is killed with all its processes: in a save, at some share of the
written file, or at a random moment after the process starts. After each kill every checkpoint must be whole. In the end
the run must equal an uninterrupted one: with ``grpo.py`` in metrics, weights and Adam's moments to the last bit, with
``grpo-async.py`` in that each group is trained once.

``--signals`` sends SIGTERM and SIGINT at eight moments and prints a table: seconds until the end, exit status, newest
checkpoint, and remaining temporary files, processes and shared memory. It needs Linux and, for ``grpo-async.py``, Ray.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from machine import report, surroundings

from torchrl_grpo.host.checkpoint_files import check_whole, checkpoints_in, step_of
from torchrl_grpo.host.files import read_jsonl

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ("grpo.py", "grpo-async.py")
OPTIONS = (
    "--config-name", "grpo_arithmetic", "env.num_envs=16", "env.repeats=4", "optimizer.lr=1e-3",
    "evaluation.num_prompts=0", "evaluation.k=0", "logging.tensorboard=false", "train.checkpoint_frequency=2",
    "policy.advantage._target_=bench_faults.RecordedAdvantage",
)  # fmt: skip
MEASURED = ("time/", "throughput/", "memory/", "workers/")
LONGEST_S = 900.0


class Life:
    """One life of a script: a process from its start to its end."""

    def __init__(self, script: str, folder: Path, *arguments: str) -> None:
        self.folder, self.family = folder, set[psutil.Process]()
        self.before, self.start = set(os.listdir("/dev/shm")), time.monotonic()
        path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
        changed = {
            "PYTHONPATH": path,
            "CUDA_VISIBLE_DEVICES": "",
            "TRAINED_GROUPS": str(folder / "groups.txt"),
        }
        self.log = folder / "printed.txt"
        self.log.touch()
        with self.log.open("a") as output:
            self._seen = output.tell()
            self.process = subprocess.Popen(
                [sys.executable, "-u", str(ROOT / "sota" / "grpo" / script), *OPTIONS, *arguments,
                 f"hydra.run.dir={folder}"],
                cwd=folder, env=os.environ | changed, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
            )  # fmt: skip

    def until(self, holds: Callable[[], object], tick_s: float = 0.002) -> bool:
        """Wait until a condition holds; return False if the process ended first."""
        while not holds():
            if self.process.poll() is not None or time.monotonic() - self.start > LONGEST_S:
                return False
            time.sleep(tick_s)
        return self.process.poll() is None

    def has_said(self, text: str) -> bool:
        return text in self.log.read_text(errors="replace")[self._seen :]

    def note_family(self) -> None:
        with suppress(psutil.NoSuchProcess):
            self.family |= set(psutil.Process(self.process.pid).children(recursive=True))

    def kill(self) -> None:
        """Kill all of its processes at once."""
        self.note_family()
        self.process.kill()
        for one in self.family:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        self.process.wait()
        psutil.wait_procs(self.family, timeout=60)

    def rows(self) -> int:
        """Return how many steps it and earlier lives have recorded."""
        path = self.folder / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0


def in_save(life: Life, rng: random.Random, fraction: float) -> bool:
    """Wait until a share of the first or second save is written."""
    folder, saves = life.folder / "checkpoints", rng.choice((1, 2))
    sizes = [path.stat().st_size for path in checkpoints_in(folder)] or [3_000_000]
    there = {path.name for path in checkpoints_in(folder)}

    def holds() -> bool:
        new = len({path.name for path in checkpoints_in(folder)} - there)
        with suppress(OSError):  # it was renamed meanwhile
            written = max(
                (path.stat().st_size for path in folder.glob("checkpoint_*.tmp")), default=-1
            )
            return new >= saves or (new == saves - 1 and written >= fraction * max(sizes))
        return False

    return life.until(holds, tick_s=0.0)


def at_moment(life: Life, rng: random.Random, fraction: float) -> bool:
    """Wait for a random moment: a quarter of them during the start, the others in the next eight
    steps.
    """
    if fraction < 0.25:
        return (
            not life.until(lambda: time.monotonic() - life.start > 32 * fraction)
            or life.process.poll() is None
        )
    first, rows = life.rows(), rng.randrange(1, 9)
    return life.until(lambda: life.rows() >= first + rows) and life.until(
        partial(_later, time.monotonic(), rng.random() / 3)
    )


def _later(start: float, seconds: float) -> bool:
    return time.monotonic() - start > seconds


def chain(script: str, kind: str, kills: int, seed: int, folder: Path) -> dict[str, Any]:
    """Kill and resume a run many times; return its record."""
    rng, wait = random.Random(f"{seed}{script}{kind}"), {"save": in_save, "moment": at_moment}[kind]
    steps = 10 * kills + 10
    length, groups, resumed, unreadable, ended = (
        f"train.total_dialog_turns={16 * steps}",
        folder / "groups.txt",
        [],
        0,
        0,
    )
    folder.mkdir(parents=True)
    fractions = [(index + rng.random()) / kills for index in range(kills)]
    rng.shuffle(fractions)
    for fraction in [*fractions, None]:
        newest = next(iter(checkpoints_in(folder / "checkpoints")), None)
        resumed.append(0 if newest is None else step_of(newest))
        if groups.exists():  # what a life trained after its last checkpoint is trained again
            groups.write_text("".join(groups.read_text().splitlines(keepends=True)[: resumed[-1]]))
        life = Life(script, folder, length, "train.resume=auto")
        if fraction is None:
            life.until(lambda: False, tick_s=0.2)
        elif not wait(life, rng, fraction):
            ended += 1
        life.kill()
        for path in checkpoints_in(folder / "checkpoints"):
            try:
                check_whole(path)
            except ValueError:
                unreadable += 1
    trained = Counter(
        group for line in groups.read_text().splitlines() for group in set(json.loads(line))
    )
    return {
        "script": script, "killed": kind, "kills": kills, "ended_by_itself": ended,
        "exit_status": life.process.returncode,
        "unreadable_checkpoints": unreadable, "resumed_after_steps": resumed, "steps": steps,
        "groups_missing": 4 * steps - len(trained), "groups_twice": sum(count > 1 for count in trained.values()),
        **(_compared(folder, length) if script == "grpo.py" else {}),
    }  # fmt: skip


def _compared(folder: Path, length: str) -> dict[str, Any]:
    """Return whether a run equals the uninterrupted one to the last bit."""
    from torchrl_grpo.learner.checkpoint import read_checkpoint
    from torchrl_grpo.learner.shards import tensors_in

    whole = folder.with_name(f"{folder.name}-whole")
    whole.mkdir()
    Life("grpo.py", whole, length).until(lambda: False, tick_s=0.2)
    got, expected = (
        [
            {k: v for k, v in row.items() if not k.startswith(MEASURED)}
            for row in read_jsonl(path / "metrics.jsonl")
        ]
        for path in (folder, whole)
    )
    states = []
    for path in (folder, whole):
        checkpoint = checkpoints_in(path / "checkpoints")[0]
        state = read_checkpoint(checkpoint)["trainer"]
        states.append([state, dict(tensors_in(checkpoint))])
    return {"metrics_equal": got == expected, "state_equal": _equal(*states)}


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one.equal(other)) if hasattr(one, "equal") else one == other


MOMENTS: dict[str, Callable[[Life], bool]] = {
    "first imports": lambda life: _later(life.start, 0.3),
    "importing PyTorch": lambda life: life.has_said("importing PyTorch"),
    "reading data": lambda life: life.has_said("reading data"),
    "loading": lambda life: (
        life.has_said("loading the model starter") or life.has_said("which load their models")
    ),
    "first step": lambda life: life.rows() >= 1,
    "a step": lambda life: life.rows() >= 4,
    "a save": lambda life: any((life.folder / "checkpoints").glob("checkpoint_*.tmp")),
    "the model": lambda life: (life.folder / "checkpoints" / "model.tmp").exists(),
}


def interrupted(script: str, moment: str, number: signal.Signals, folder: Path) -> dict[str, Any]:
    """Return the outcome of a signal at a moment."""
    folder.mkdir(parents=True)
    life = Life(script, folder, "train.total_dialog_turns=192")
    hit = life.until(partial(MOMENTS[moment], life), tick_s=0.0005)
    life.note_family()
    life.process.send_signal(number)
    start = time.monotonic()
    with suppress(subprocess.TimeoutExpired):
        life.process.wait(timeout=120)
    seconds = time.monotonic() - start
    _, alive = psutil.wait_procs(life.family, timeout=30)
    newest = next(iter(checkpoints_in(folder / "checkpoints")), None)
    left = [path.name for path in folder.rglob("*.tmp")] + [f"process {one.pid}" for one in alive]
    life.kill()
    return {
        "script": script, "moment": moment if hit else f"{moment} (missed)", "signal": number.name,
        "seconds": round(seconds, 1), "exit_status": life.process.returncode,
        "checkpoint": None if newest is None else step_of(newest), "steps": max(0, life.rows() - 1),
        "traceback": life.has_said("Traceback"), "left": left + sorted(set(os.listdir("/dev/shm")) - life.before),
    }  # fmt: skip


def main() -> None:
    """Run the selected cases, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--script", nargs="+", choices=SCRIPTS, default=SCRIPTS)
    parser.add_argument("--points", type=int, default=20, help="kills in a save")
    parser.add_argument("--moments", type=int, default=20, help="kills at a random moment")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--signals", action="store_true", help="interrupt runs instead")
    parser.add_argument(
        "--only", default="", help="--signals: moments with a name that contains this"
    )
    parser.add_argument("--out", type=Path, help="file for the JSON, besides standard output")
    args = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for script in args.script:
            if args.signals:
                cases = [
                    (m, n)
                    for m in MOMENTS
                    if args.only in m
                    for n in (signal.SIGTERM, signal.SIGINT)
                ]
                found += [
                    interrupted(script, *case, Path(folder, f"{script}{i}"))
                    for i, case in enumerate(cases)
                ]
            else:
                kinds = [
                    (kind, kills)
                    for kind, kills in (("save", args.points), ("moment", args.moments))
                    if kills
                ]
                found += [
                    chain(script, *kind, args.seed, Path(folder, f"{script}-{kind[0]}"))
                    for kind in kinds
                ]
    for row in found:
        sys.stderr.write(f"| {' | '.join(str(value) for value in row.values())} |\n")
    report(
        surroundings(("torch", "torchrl", "transformers", "ray"))
        | {"seed": args.seed, "results": found},
        args.out,
    )


if __name__ == "__main__":
    main()
