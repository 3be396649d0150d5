"""Break something every few seconds in a run of each script, and report the outcome. Linux only;
full disks need root.

    python benchmarks/bench_chaos.py
    python benchmarks/bench_chaos.py --only async --minutes 3 --every 10 --seed 1

The arithmetic task is trained with reward workers. Every ``--every`` seconds, but not before the
first step after a start, one random event happens: a process of the run is killed (SIGKILL) or
stopped for five seconds; the reward is slow, or hangs; the disk is full (a small tmpfs, which needs
root); a byte of the newest checkpoint is flipped and the script killed, so that it must continue
from the checkpoint before; the script is killed. A script that has ended is started again with the
same command, which has ``train.resume=auto``. After ``--minutes`` it gets SIGTERM.

Reported are the steps, the accuracy before and after, groups that are missing or trained twice up
to the last checkpoint, how the script ended each time, remaining processes, and for each life of
the script of a minute or more its memory, threads, sockets, open files and use of /dev/shm (which
has Ray's store), 30 s after the start and at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from bench_faults import GROUPS, ROOT
from machine import merge

from torchrl_grpo.host.checkpoint_files import check_whole, checkpoints_in, step_of
from torchrl_grpo.host.files import read_jsonl
from torchrl_grpo.tasks.arithmetic import ArithmeticTask
from torchrl_grpo.tasks.base import Problem, Score

PACKAGES = ("torch", "torchrl", "ray")
MOOD = "CHAOS_MOOD"
"""Environment variable with the path of a file: the current seconds of a reward."""
DISK_BYTES = 400_000_000
GROUPS_A_STEP = 8
SETTLED_S = 30
LONGEST_START_S = 180
SCRIPTS = {"sync": "grpo.py", "async": "grpo-async.py"}
OVERRIDES = [
    "env.task._target_=bench_chaos.MoodyTask", "policy.advantage._target_=bench_faults.RecordedAdvantage",
    "env.num_envs=64", "env.repeats=8", "env.reward_workers=2", "env.reward_timeout_s=8",
    "train.total_dialog_turns=100_000_000", "train.checkpoint_frequency=5", "train.keep_checkpoints=last:3",
    "train.resume=auto", "evaluation.frequency=25", "evaluation.num_prompts=200", "evaluation.k=0",
    "logging.tensorboard=false",
]  # fmt: skip
ASYNC = ["ray.actor_timeout_s=120", "ray.recovery_timeout_s=120"]


class MoodyTask(ArithmeticTask):
    """Arithmetic with a scorer that takes as long as a file says."""

    def score(self, problem: Problem, responses: Sequence[str]) -> Score:
        """See ``ArithmeticTask``."""
        with suppress(OSError, ValueError):
            time.sleep(float(Path(os.environ[MOOD]).read_text()))
        return super().score(problem, responses)


class Run:
    """The lives of one script.

    Args:
        kind: ``sync`` or ``async``.
        folder: for all its files, including the run's folder.
    """

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.run = kind, folder / "run"
        self.run.mkdir()
        self.mood, self.record, self.printed = (
            folder / "mood",
            folder / "groups.jsonl",
            folder / "printed.txt",
        )
        self.family: set[psutil.Process] = set()
        self.lives: list[dict[str, Any]] = []
        self.ends: list[str] = []
        self.ballast = self.run / "ballast"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the script, after forgetting the groups of batches after the last checkpoint."""
        done = self.last_step()
        if self.record.exists():
            lines = self.record.read_text("utf-8").splitlines(keepends=True)
            self.record.write_text("".join(lines[:done]), "utf-8")
        modules = os.pathsep.join(
            [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
        )
        command = [
            sys.executable,
            str(ROOT / "sota" / "grpo" / SCRIPTS[self.kind]),
            "--config-name",
            "grpo_arithmetic",
        ]
        command += [
            *OVERRIDES,
            *(ASYNC if self.kind == "async" else []),
            f"hydra.run.dir={self.run}",
        ]
        variables = {
            "PYTHONPATH": modules,
            MOOD: str(self.mood),
            GROUPS: str(self.record),
            "HF_HUB_OFFLINE": "1",
        }
        with self.printed.open("ab") as file:
            self.process = subprocess.Popen(
                command,
                env=os.environ | variables,
                stdout=file,
                stderr=file,
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
            )
        self.lives.append(
            {"from_step": done, "started": time.monotonic(), "since": time.time(), "seen": []}
        )

    def at_work(self) -> bool:
        """Return whether this life has done a step, or is so old that it should have."""
        metrics, life = self.run / "metrics.jsonl", self.lives[-1]
        last = max(
            (row["step"] for row in read_jsonl(metrics)), default=0
        )  # a resumed run drops rows before it works
        worked = last > life["from_step"] and metrics.stat().st_mtime > life["since"] + 1
        return worked or time.monotonic() > life["started"] + LONGEST_START_S

    def last_step(self) -> int:
        """Return the step of the newest whole checkpoint."""
        for path in checkpoints_in(self.run / "checkpoints"):
            with suppress(ValueError, OSError):
                check_whole(path)
                return step_of(path) or 0
        return 0

    def look(self) -> None:
        """Measure the script, and restart it if it has ended."""
        assert self.process is not None
        if self.process.poll() is None:
            with suppress(psutil.Error):
                script = psutil.Process(self.process.pid)
                self.family |= set(script.children(recursive=True))
                self.lives[-1]["seen"].append((time.monotonic(), _measured(script)))
            return
        self._note_end()
        self.start()

    def _note_end(self) -> None:
        assert self.process is not None
        status = self.process.wait()
        if status != -signal.SIGKILL:
            lines = [
                line
                for line in self.printed.read_text("utf-8", "replace").splitlines()
                if line.strip()
            ]
            message = next((line for line in reversed(lines) if line.startswith("error:")), "")
            if status == 2:
                raise RuntimeError(f"the script was refused: {message}")
            self.ends.append(f"{status}: {message[:300] or ' / '.join(lines[-3:])[:300]}")

    def finish(self) -> list[str]:
        """End the script with SIGTERM; return the command lines of remaining processes."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(180)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.ends.append(f"told to end: {self.process.wait()}")
        return self.leftovers()

    def leftovers(self) -> list[str]:
        """Return the script's child processes that still live a while after its end."""
        end, lines = time.monotonic() + 60, list[str]()
        while time.monotonic() < end and any(process.is_running() for process in self.family):
            time.sleep(0.5)
        for process in filter(psutil.Process.is_running, self.family):
            with suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE:
                    lines.append(called(process, 100))
                    process.kill()
        return lines

    def victims(self) -> list[psutil.Process]:
        """Return the processes below the script that do its work, without Ray's own."""
        assert self.process is not None
        processes = []
        with suppress(psutil.Error):
            for process in psutil.Process(self.process.pid).children(recursive=True):
                with suppress(psutil.Error):
                    line = " ".join(process.cmdline())
                    if (
                        ("ray::" in line and "Actor" in line)
                        or "reward_pool" in line
                        or "EngineCore" in line
                    ):
                        processes.append(process)
        return processes

    def close(self) -> None:
        """End all processes."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.leftovers()


def called(process: psutil.Process, most: int = 40) -> str:
    """Return the command line of a process, without the folder of its program."""
    program, *arguments = process.cmdline() or [""]
    return " ".join([Path(program).name, *arguments])[:most]


# What may happen. Each returns what it did.


def kill_worker(run: Run, chance: random.Random) -> str:
    """Send SIGKILL to a process of the run."""
    victims = run.victims()
    if not victims:
        return "kill: nobody there"
    victim = chance.choice(victims)
    name = called(victim)
    victim.kill()
    return f"kill: {name}"


def stop(run: Run, chance: random.Random) -> str:
    """Send SIGSTOP, and SIGCONT after five seconds, to a process of the run or the script."""
    assert run.process is not None
    victim = chance.choice([*run.victims(), psutil.Process(run.process.pid)])
    name = called(victim)
    victim.suspend()
    time.sleep(5)
    victim.resume()
    return f"stop: {name}"


def slow_reward(run: Run, chance: random.Random) -> str:
    """Make rewards take half a second, for five seconds."""
    return _reward(run, 0.5)


def hung_reward(run: Run, chance: random.Random) -> str:
    """Make rewards take longer than their limit, for five seconds."""
    return _reward(run, 1000)


def _reward(run: Run, seconds: float) -> str:
    run.mood.write_text(str(seconds))
    time.sleep(5)
    run.mood.unlink()
    return f"reward: {seconds:g} s"


def fill_disk(run: Run, chance: random.Random) -> str:
    """Fill the disk of the run's folder, for ten seconds."""
    with suppress(OSError), run.ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 20))
    time.sleep(10)
    run.ballast.unlink()
    return "disk full"


def corrupt(run: Run, chance: random.Random) -> str:
    """Flip a byte in the newest checkpoint, and kill the script."""
    checkpoints = checkpoints_in(run.run / "checkpoints")
    if (
        len(checkpoints) < 2 or run.process is None
    ):  # resume=auto refuses a folder that has nothing but a damaged one
        return "corrupt: no checkpoint before the newest"
    place = chance.randrange(checkpoints[0].stat().st_size)
    run.process.kill()
    run.process.wait()
    with checkpoints[0].open("r+b") as file:
        file.seek(place)
        byte = file.read(1)
        file.seek(place)
        file.write(bytes([byte[0] ^ 255]))
    return f"corrupt: {checkpoints[0].name} at {place}"


def kill_script(run: Run, chance: random.Random) -> str:
    """Send SIGKILL to the script."""
    if run.process is not None:
        run.process.kill()
        run.process.wait()
    return "kill: the script"


EVENTS = [
    kill_worker,
    kill_worker,
    stop,
    stop,
    slow_reward,
    hung_reward,
    fill_disk,
    corrupt,
    kill_script,
]


def chaos(kind: str, minutes: float, every: float, seed: int, keep: Path | None) -> dict[str, Any]:
    """Return the figures of one script."""
    folder, chance = (
        Path(tempfile.mkdtemp(prefix=f"chaos-{kind}-")),
        random.Random(f"{seed} {kind}"),
    )
    run, mounted = Run(kind, folder), os.geteuid() == 0
    if mounted:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(run.run)], check=True
        )
    try:
        events, left = _make_trouble(
            run, [e for e in EVENTS if mounted or e is not fill_disk], chance, minutes, every
        )
        return _figures(run) | {"events": events, "left": left}
    finally:
        run.close()
        if keep is not None:
            shutil.copytree(folder, keep / kind, dirs_exist_ok=True)
        if mounted:
            subprocess.run(["umount", "--lazy", str(run.run)], check=False)
        shutil.rmtree(folder, ignore_errors=True)


def _make_trouble(
    run: Run, events: list[Any], chance: random.Random, minutes: float, every: float
) -> tuple[list[str], list[str]]:
    """Return the events, and the processes that remained at the end."""
    run.start()
    start, done = time.monotonic(), list[str]()
    next_at = start + every
    while time.monotonic() < start + 60 * minutes:
        run.look()
        if time.monotonic() > next_at and run.at_work():
            with suppress(psutil.Error):
                done.append(
                    f"{time.monotonic() - start:.0f} s {chance.choice(events)(run, chance)}"
                )
                print(f"[{run.kind}] {done[-1]}", flush=True)
            next_at = time.monotonic() + every
        time.sleep(1)
    while (
        not read_jsonl(run.run / "metrics.jsonl") and time.monotonic() < start + 60 * minutes + 120
    ):
        run.look()
        time.sleep(1)
    return done, run.finish()


def _figures(run: Run) -> dict[str, Any]:
    rows = read_jsonl(run.run / "metrics.jsonl")
    steps = run.last_step()
    lines = run.record.read_text("utf-8").splitlines()[:steps] if run.record.exists() else []
    trained = Counter(group for line in lines for group in set(json.loads(line)))
    accuracy = [row["eval/pass@1"] for row in rows if "eval/pass@1" in row]
    return {
        "steps": steps,
        "rows": len(rows),
        "rows_twice": len(rows) - len({row["step"] for row in rows}),
        "accuracy_before": accuracy[0] if accuracy else None,
        "accuracy_after": accuracy[-1] if accuracy else None,
        "groups_missing": sum(group not in trained for group in range(GROUPS_A_STEP * steps)),
        "groups_twice": sum(count > 1 for count in trained.values()),
        "invalid_rewards": sum(row.get("rollout/invalid", 0) for row in rows),
        "starts": len(run.lives),
        "ends": run.ends,
        "lives": [life for life in map(_life, run.lives) if life],
    }


def _life(life: dict[str, Any]) -> dict[str, Any]:
    samples = [measured for at, measured in life["seen"] if at - life["started"] > SETTLED_S]
    if len(samples) < 20:
        return {}
    seconds = round(life["seen"][-1][0] - life["started"])
    return {
        "from_step": life["from_step"],
        "seconds": seconds,
        "first": samples[0],
        "last": samples[-1],
    }


def _measured(process: psutil.Process) -> dict[str, float]:
    return {
        "MiB": round(process.memory_info().rss / 2**20, 1),
        "threads": process.num_threads(),
        "sockets": len(process.net_connections("all")),
        "files": process.num_fds(),
        "shm_MiB": round(shutil.disk_usage("/dev/shm").used / 2**20, 1),
    }


def _table(kind: str, figures: dict[str, Any]) -> str:
    lines = [
        f"{kind}: " + ", ".join(f"{k} {v}" for k, v in figures.items() if not isinstance(v, list))
    ]
    lines += [f"  ended with {end}" for end in figures["ends"]] + [
        f"  left: {line}" for line in figures["left"]
    ]
    for life in figures["lives"]:
        changes = [
            f"{name} {life['first'][name]:g} -> {life['last'][name]:g}" for name in life["first"]
        ]
        lines.append(
            f"  life from step {life['from_step']}, {life['seconds']} s: {', '.join(changes)}"
        )
    return "\n".join(lines)


def main() -> None:
    """Run the scripts, print the figures and keep them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=SCRIPTS, nargs="*", default=list(SCRIPTS))
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--every", type=float, default=20, help="seconds between two events")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="a folder for all files of the runs")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "benchmarks" / "results" / "chaos.json"
    )
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that all is ended and unmounted
    for kind in args.only:
        figures = chaos(kind, args.minutes, args.every, args.seed, args.keep)
        figures |= {"minutes": args.minutes, "every": args.every, "seed": args.seed}
        print(_table(kind, figures), flush=True)
        merge({kind: figures}, PACKAGES, args.output)


if __name__ == "__main__":
    main()
