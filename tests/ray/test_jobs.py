"""Ray jobs, and the Slurm scripts without Slurm: only ``srun`` is a stand-in."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.configs import ROOT
from tests.support.ports import free_port
from tests.support.processes import alive, below, listening
from tests.support.slurm import SCRIPTS, environment
from torchrl_grpo.host.files import read_jsonl

pytest.importorskip("ray")
sys.path.insert(0, str(ROOT / "benchmarks"))
hosts = pytest.importorskip("hosts")

SMALL = (
    "train_model.num_devices=1", "inference_model.num_devices=1", "ref_model.num_devices=1", "env.num_envs=16",
    "env.repeats=4", "train.total_dialog_turns=32", "evaluation.num_prompts=0", "logging.tensorboard=false",
    "policy.kl_coef=0",
)  # fmt: skip
pytestmark = pytest.mark.skipif(
    not (Path(sys.prefix) / "bin" / "activate").exists(), reason="not in a venv"
)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a folder that all hosts share, because each has a /tmp of its own."""
    path = Path(tempfile.mkdtemp(prefix="slurm-", dir="/var/tmp"))
    yield path
    shutil.rmtree(path)


@pytest.mark.slow
@pytest.mark.nightly
def test_a_job_on_one_node_trains_and_a_restarted_one_has_nothing_to_do(folder: Path) -> None:
    job = ["bash", str(SCRIPTS / "one_node.sbatch"), *SMALL]
    for _ in range(2):
        subprocess.run(job, cwd=ROOT, env=environment(folder, 1, 8), check=True, timeout=600)
        assert [row["step"] for row in read_jsonl(folder / "run" / "metrics.jsonl")] == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.skipif(bool(hosts.why_not()), reason=hosts.why_not() or "there can be hosts")
@pytest.mark.nightly
def test_a_job_on_two_nodes_trains_over_ray_symmetric_run(folder: Path) -> None:
    job = environment(folder, 2, 0) | {"RAY_raylet_start_wait_time_s": "120"}
    command = folder / "command.sh"
    with hosts.Network("first", "second") as network, (folder / "printed.txt").open("w") as printed:
        first, second = network.hosts
        script = ["bash", str(SCRIPTS / "two_nodes.sbatch"), *SMALL]
        nodes = [first.popen(*script, cwd=ROOT, env=job, stdout=printed, stderr=printed)]
        while not command.exists() and nodes[0].poll() is None:
            time.sleep(0.1)
        nodes.append(
            second.popen("bash", str(command), cwd=ROOT, env=job, stdout=printed, stderr=printed)
        )
        seen = set[str]()
        while nodes[0].poll() is None:
            seen |= set(second.actors())
            time.sleep(0.5)
        assert nodes[0].wait() == 0, (folder / "printed.txt").read_text()
        assert nodes[1].wait(300) == 0
        assert seen  # a part of the run was on the other node
        assert [host.actors() for host in network.hosts] == [[], []]
    assert [row["step"] for row in read_jsonl(folder / "run" / "metrics.jsonl")] == [0, 1, 2]


@contextmanager
def cluster(folder: Path, env: dict[str, str]) -> Iterator[tuple[str, int]]:
    """Yield the job address and the process of a cluster with its own ports and folder."""
    names = ("port", "ray-client-server-port", "dashboard-agent-listen-port", "dashboard-port")
    ports = [free_port() for _ in names]
    own = [f"--{name}={port}" for name, port in zip(names, ports, strict=True)]
    size = [
        "--num-cpus=1",
        "--object-store-memory=200000000",
        f"--temp-dir={folder}/ray",
        "--disable-usage-stats",
    ]
    address = f"http://127.0.0.1:{ports[-1]}"
    with (folder / "cluster.txt").open("w") as printed:
        started = subprocess.Popen(
            ["ray", "start", "--head", "--block", *own, *size],
            cwd=folder,
            env=env,
            stdout=printed,
            stderr=printed,
        )
        try:
            for _ in range(600):
                with suppress(ConnectionError):
                    socket.create_connection(("127.0.0.1", ports[-1])).close()
                    break
                assert started.poll() is None, (folder / "cluster.txt").read_text()
                time.sleep(0.2)
            yield address, started.pid
        finally:
            started.terminate()
            started.wait(300)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_job_of_ray_trains_on_a_cluster_that_runs_and_leaves_nothing(folder: Path) -> None:
    pytest.importorskip("aiohttp_cors", reason="needs ray[default]")
    for name in ("sota", "config"):
        shutil.copytree(ROOT / name, folder / "work" / name)
    env = environment(folder, 1, 0) | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # it only listens on loopback
        "RAY_raylet_start_wait_time_s": "120",
    }
    script = f"python sota/grpo/grpo-async.py --config-name grpo_arithmetic hydra.run.dir={folder}/run ray.address=auto"
    with cluster(folder, env) as (address, pid):
        job = [
            "ray",
            "job",
            "submit",
            f"--address={address}",
            f"--working-dir={folder}/work",
            "--",
            *script.split(),
        ]
        done = subprocess.run(
            [*job, *SMALL], cwd=folder, env=env, capture_output=True, text=True, timeout=600
        )
        started = below(pid)
        assert listening(started) == {"127.0.0.1"}
        assert done.returncode == 0, done.stdout + done.stderr
    assert alive(started) == []
    assert [row["step"] for row in read_jsonl(folder / "run" / "metrics.jsonl")] == [0, 1, 2]
