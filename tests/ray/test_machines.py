"""A Ray cluster of several nodes, all simulated on this machine: placement of ranks, and which node
is queried.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import forks
from tests.support.configs import ROOT

pytest.importorskip("ray")

SCRIPT = """
import json
import ray
from ray.cluster_utils import Cluster as Nodes
from tests.support import forks
from tests.support.devices import gpus
from torchrl_grpo.runtime.actors import start_actor
from torchrl_grpo.runtime.cluster import start
from torchrl_grpo.runtime.placement import DevicePlan

GIB = 2**30
forks.use_in_ray()
nodes = Nodes(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 0, "object_store_memory": GIB})
for _ in range(2):
    nodes.add_node(num_cpus=4, num_gpus=3, object_store_memory=GIB // 4)


class Part:
    def machine(self):
        return ray.get_runtime_context().get_node_id()


def refusal(call, *arguments, **options):
    try:
        call(*arguments, **options)
    except ValueError as error:
        return str(error)


cluster = start(nodes.address)
out = {}
try:
    # Two of three ranks, twice, do not leave room on a machine for both: a pair would be on two machines.
    plan = DevicePlan(gpus(0, 1, 2, 3), (gpus(4),), (), colocated=False)
    out["refused"] = refusal(cluster.place, plan, tensor_parallel_size=4)
    options = cluster.place(plan, tensor_parallel_size=2)
    actors = [start_actor("Rank", Part, given) for given in options["train"]]
    pids = ray.get([actor.setup.remote() for actor in actors])
    out["machines"] = ray.get([actor.call.remote("machine") for actor in actors])
    out["pids"], out["stacks"] = pids, cluster.stacks(pids)
    cluster.check_object_store(GIB // 4)
    out["too_small"] = refusal(cluster.check_object_store, GIB // 2)
finally:
    cluster.shutdown()
    nodes.shutdown()
print(json.dumps(out))
"""


@pytest.mark.nightly
def test_pairs_of_ranks_share_a_machine_and_all_machines_are_asked(tmp_path: Path) -> None:
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "TMPDIR": "/tmp",
        "RAY_AUTH_MODE": "disabled",
    }
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with forks.Popen(
        [sys.executable, "-c", SCRIPT], env=environment, cwd=tmp_path, **pipes
    ) as process:
        out, error = process.communicate(timeout=500)
    assert process.returncode == 0, out + error
    got = json.loads(out.strip().splitlines()[-1])
    first, second, third, fourth = got["machines"]
    assert first == second != third == fourth
    assert got["refused"].startswith(
        "train_model.tensor_parallel_size=4 must not exceed the GPUs of one machine, but no"
    )
    assert got["refused"].endswith(
        "has more than 3: use 3, or leave it out to shard over all devices."
    )
    for pid in got["pids"]:  # both machines are different from the driver's
        assert got["stacks"].count(f"\nprocess {pid}, ray::Rank") == 2
    assert got["stacks"].count("\non ") == 2
    assert (
        "needs 0.5 GB of Ray's object store for two versions of the weights, but it has 0.3 GB on"
        in got["too_small"]
    )
    assert "or start Ray there with --object-store-memory=536870912." in got["too_small"]
