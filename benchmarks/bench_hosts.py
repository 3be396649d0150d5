"""Run ``grpo-async.py`` on several hosts, and let a host or its link fail. It needs root, Linux and
Ray.

    python benchmarks/bench_hosts.py
    python benchmarks/bench_hosts.py --only adapters link_10s --steps 30

The hosts are namespaces of this machine (``hosts.py``): a head without CPUs for Ray's actors, which
runs the script, and three others in its cluster, of which the run needs two. Weights are sent whole
and as adapters. In the middle of the run, the host of a sampler or of the learner is killed, or its
link goes down for 10 s or forever, or gets 100 ms of delay and 1% of loss both ways. A run that has
lost its learner is started again on the remaining hosts, with ``train.resume=auto``.

Reported are seconds, exit status, the last message of a failed run, restarts, and from the ids of
all trained groups how many are missing and how many came twice. All cases take about 20 minutes on
2 cores.
"""

from __future__ import annotations

import argparse
import json
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_faults import GROUPS, ROOT
from hosts import Host, Network, why_not
from machine import merge

from torchrl_grpo.reporting.metrics import read_jsonl

PACKAGES = ("torch", "torchrl", "ray")
STORE = 200_000_000
TIMEOUT_S = 600
SMALL = [
    "env.num_envs=32", "env.repeats=8", "inference_model.num_devices=2", "evaluation.num_prompts=0",
    "logging.tensorboard=false", "ray.actor_timeout_s=120", "ray.recovery_timeout_s=90",
    "policy.advantage._target_=bench_faults.RecordedAdvantage", "train.checkpoint_frequency=3", "ray.address=auto",
    "train.resume=auto",
]  # fmt: skip


def cut(host: Host) -> None:
    """Take its link down forever."""
    host.up = False


def cut_for_10_s(host: Host) -> None:
    """Take its link down, and up again."""
    host.up = False
    time.sleep(10)
    host.up = True


def disturb(host: Host) -> None:
    """Give its link 100 ms of delay and 1% of loss, both ways."""
    host.delay_s, host.loss = 0.1, 0.01


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        overrides: of the config.
        victim: the actor whose host fails.
        fault: what happens to it in the middle of the run.
    """

    overrides: tuple[str, ...] = ()
    victim: str = ""
    fault: Callable[[Host], None] | None = None


CASES = {
    "object_store": Case(),
    "adapters": Case(("train_model.lora.enabled=true", "optimizer.lr=1e-3")),
    "three_ranks": Case(("train_model.num_devices=3",)),
    "sampler_killed": Case((), "SamplerActor", Host.kill),
    "learner_killed": Case((), "LearnerActor", Host.kill),
    "link_10s": Case((), "SamplerActor", cut_for_10_s),
    "link_down": Case((), "SamplerActor", cut),
    "learners_link_down": Case((), "LearnerActor", cut),
    "delay_loss": Case((), "SamplerActor", disturb),
}


class Session:
    """A cluster over hosts, and runs on it.

    Args:
        network: of the hosts; the first one is the head.
        folder: shared by all hosts.
        steps: of a run.
    """

    def __init__(self, network: Network, folder: Path, steps: int) -> None:
        self.head, *self.others = network.hosts
        self.folder, self.steps, self.record = folder, steps, folder / "groups.jsonl"
        self.environment = {
            "PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks'}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_raylet_start_wait_time_s": "120",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            GROUPS: str(self.record),
        }
        self._start_ray(
            self.head, "--head", "--port=6379", "--num-cpus=0", "--include-dashboard=false"
        )
        joining = (f"--address={self.head.address}:6379", "--num-cpus=1")
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda host: self._start_ray(host, *joining), self.others))

    def _start_ray(self, host: Host, *options: str) -> None:
        ray = str(Path(sys.executable).with_name("ray"))
        common = [
            f"--node-ip-address={host.address}",
            f"--object-store-memory={STORE}",
            "--disable-usage-stats",
        ]
        common += [
            "--include-log-monitor=false"
        ]  # a process on each host, and what actors print is in files anyway
        printed = self.folder / f"ray_{host.name}.txt"
        with printed.open("w") as file:
            command = [ray, "start", *options, *common]
            status = host.popen(
                *command, env=self.environment, stdout=file, stderr=file, stdin=subprocess.DEVNULL
            ).wait()
        if status:
            raise RuntimeError(f"Ray did not start on {host.name}:\n{printed.read_text()[-2000:]}")

    def run(self, case: Case) -> dict[str, Any]:
        """Run the script, with the case's fault; return its record."""
        folder = self.folder / "run"
        command = [
            sys.executable,
            str(ROOT / "sota/grpo/grpo-async.py"),
            "--config-name",
            "grpo_arithmetic",
            *SMALL,
        ]
        command += [
            *case.overrides,
            f"train.total_dialog_turns={32 * self.steps}",
            f"hydra.run.dir={folder}",
        ]
        fault, start, failed_at = case.fault, time.monotonic(), None
        where: dict[str, list[str]] = {}
        printed = self.folder / "printed.txt"
        with printed.open("w") as file:
            process = self.head.popen(
                *command, env=self.environment, stdout=file, stderr=file, cwd=ROOT
            )
            try:
                while process.poll() is None and time.monotonic() - start < TIMEOUT_S:
                    time.sleep(0.5)
                    rows = read_jsonl(folder / "metrics.jsonl")
                    if rows and not where:
                        where = {host.name: host.actors() for host in self.others}
                    if fault is not None and len(rows) > self.steps // 2:
                        fault, failed_at = None, time.monotonic()
                        assert case.fault is not None
                        case.fault(self._victim(case.victim))
            finally:
                if process.poll() is None:
                    process.kill()
        rows = read_jsonl(folder / "metrics.jsonl")
        last = rows[-1] if rows else {}
        return {
            "seconds": round(time.monotonic() - start, 1),
            "seconds_after_fault": None
            if failed_at is None
            else round(time.monotonic() - failed_at, 1),
            "status": process.wait(),
            "steps": len(rows),
            "where": where,
            "restarts": sum(
                last.get(f"workers/restarts_{kind}", 0) for kind in ("rollout", "reference")
            ),
            "reward": last.get("rollout/reward_mean"),
            "said": "" if process.returncode == 0 else _last_words(printed.read_text("utf-8")),
        }

    def _victim(self, actor: str) -> Host:
        for host in self.others:
            if actor in (names := host.actors()) and (
                actor == "LearnerActor" or "LearnerActor" not in names
            ):
                return host
        raise RuntimeError(
            f"no host has a {actor} alone: {[host.actors() for host in self.others]}."
        )

    def go_on(self) -> int:
        """Forget the groups of batches after the newest checkpoint, and return its step."""
        names = sorted(
            path.stem for path in (self.folder / "run" / "checkpoints").glob("checkpoint_*")
        )
        step = int(names[-1].removeprefix("checkpoint_")) if names else 0
        lines = self.record.read_text("utf-8").splitlines(keepends=True)
        self.record.write_text("".join(lines[:step]), "utf-8")
        return step

    def groups(self) -> dict[str, int]:
        """Return how many groups are missing and how many came twice."""
        lines = self.record.read_text("utf-8").splitlines() if self.record.exists() else []
        trained = Counter(group for line in lines for group in set(json.loads(line)))
        return {
            "groups_missing": sum(group not in trained for group in range(4 * self.steps)),
            "groups_twice": sum(count > 1 for count in trained.values()),
        }


def measure(name: str, steps: int, keep: Path | None) -> dict[str, Any]:
    """Return the figures of one case."""
    folder = Path(tempfile.mkdtemp(prefix="hosts-", dir="/var/tmp"))  # /tmp is each host's own
    try:
        with Network("head", "a", "b", "c") as network:
            session = Session(network, folder, steps)
            result = session.run(CASES[name])
            if result["status"] and CASES[name].fault is not None:
                result["resumed_from"] = session.go_on()
                resumed = session.run(Case(CASES[name].overrides))
                result |= {
                    f"resumed_{key}": resumed[key] for key in ("seconds", "status", "steps", "said")
                }
            return result | session.groups()
    finally:
        if keep is not None:
            shutil.copytree(folder, keep / name, dirs_exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


def _last_words(printed: str) -> str:
    lines = [line for line in printed.splitlines() if line.strip()]
    errors = [index for index, line in enumerate(lines) if line.startswith("error:")]
    return " ".join(line.strip() for line in lines[errors[-1] if errors else -3 :])[:600]


def main() -> None:
    """Run the cases, print their figures and keep them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=CASES, nargs="*", default=list(CASES))
    parser.add_argument("--steps", type=int, default=60, help="of each run")
    parser.add_argument("--keep", type=Path, help="a folder for all files of the runs")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "benchmarks" / "results" / "hosts.json"
    )
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that all is ended and removed
    if reason := why_not():
        sys.exit(f"bench_hosts.py {reason}.")
    for name in args.only:
        figures = measure(name, args.steps, args.keep)
        print(json.dumps({name: figures}, indent=2), flush=True)
        merge({name: figures}, PACKAGES, args.output)


if __name__ == "__main__":
    main()
