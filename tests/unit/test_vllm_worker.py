"""The code of vLLM's workers, without vLLM: weights in shared memory, and the state of random
generators.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from contextlib import nullcontext, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from tests.support import forks
from torchrl_grpo.generation.base import SamplingParams, preserve_rng
from torchrl_grpo.generation.vllm import VLLMBase
from torchrl_grpo.weights import worker as worker_module
from torchrl_grpo.weights.shared import SharedWeights
from torchrl_grpo.weights.worker import WeightSyncExtension

READER = """
import pickle, sys
weights = dict(pickle.loads(bytes.fromhex(sys.argv[1])).weights())
print(weights["norm"].sum().item(), flush=True)
sys.stdin.readline()
print(weights["norm"].sum().item(), flush=True)
"""


@pytest.mark.slow
def test_another_process_keeps_the_weights_that_their_maker_dropped():
    shared = SharedWeights(
        [("norm", torch.full((3,), 2.0)), ("embed", torch.zeros(4, 2))], torch.float32
    )
    block = shared.block
    command = [sys.executable, "-c", READER, pickle.dumps(block).hex()]
    with forks.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert float(reader.stdout.readline()) == 6.0
        shared.close()
        assert reader.communicate("\n")[0].strip() == "6.0"
    with pytest.raises(RuntimeError, match="are gone: their process"):
        list(block.weights())


def test_another_file_at_the_same_place_is_not_taken_for_the_weights():
    shared = SharedWeights([("norm", torch.zeros(3))], torch.float32)
    block = shared.block
    shared.close()
    others = [SharedWeights([("norm", torch.zeros(3))], torch.float32)]
    while others[-1].block.path != block.path:  # the lowest free number comes first
        others.append(SharedWeights([("norm", torch.zeros(3))], torch.float32))
    with pytest.raises(RuntimeError, match="are gone"):
        list(block.weights())
    for other in others:
        other.close()


def blocks() -> set[str]:
    """Return the names of the blocks that this process has open."""
    names = set()
    for file in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that lists the folder
            names.add(os.readlink(f"/proc/self/fd/{file}"))
    return {name for name in names if "torchrl_grpo_weights" in name}


def test_weights_that_cannot_all_be_had_leave_no_block_behind():
    def broken():
        yield "norm", torch.zeros(3)
        raise ValueError("no more")

    before = blocks()
    with pytest.raises(ValueError, match="no more"):
        SharedWeights(broken(), torch.float32)
    assert blocks() <= before


def test_many_updates_leak_no_memory_and_no_file():
    weights = {f"layer.{i}": torch.randn(1000, 250) for i in range(4)}  # 4 MB

    before = blocks()
    for update in range(60):
        shared = SharedWeights(weights.items(), torch.float32)
        held = dict(shared.block.weights())  # until the next update
        assert torch.equal(held["layer.3"], weights["layer.3"])
        shared.close()
        if update == 10:
            memory = psutil.Process().memory_info().rss
    assert blocks() <= before
    assert psutil.Process().memory_info().rss < memory + 40e6


class Worker(WeightSyncExtension):
    """Stand-in for a vLLM worker on CUDA: a request's seed is drawn from NumPy, its tokens from
    torch.
    """

    device = torch.device("cpu")

    def draw(self) -> tuple[int, float]:
        return int(np.random.randint(-(2**63), 2**63 - 1)), torch.rand(1).item()


class Engine(VLLMBase):
    """An engine with that worker."""

    def __init__(self) -> None:
        model = SimpleNamespace(max_model_len=8, dtype=torch.float32, trust_remote_code=False)
        parallel = SimpleNamespace(world_size=1)
        super().__init__(None, SimpleNamespace(model_config=model, parallel_config=parallel))
        self.worker = Worker()

    def _rpc(self, method: str, *args: Any) -> list[Any]:
        return [getattr(self.worker, method)(*args)]

    def _updating(self, version: int) -> Any:
        raise NotImplementedError

    _attaching = _updating

    def generate(self, prompts: Any, n: int, params: SamplingParams) -> Any:
        raise NotImplementedError


@pytest.fixture
def engine() -> Any:
    numpy_state = np.random.get_state()
    torch_state = torch.get_rng_state()
    yield Engine()
    np.random.set_state(numpy_state)
    torch.set_rng_state(torch_state)


def test_each_seed_has_its_own_request_seeds_and_repeats_them(engine: Engine) -> None:
    def draws(seed: int) -> list[tuple[int, float]]:
        engine.seed(seed)
        return [engine.worker.draw() for _ in range(3)]

    first, second, again = draws(0), draws(1), draws(0)
    assert first == again
    assert not set(first) & set(second) and not {seed for seed, _ in first} & {
        seed for seed, _ in second
    }
    draws(2**40)  # NumPy needs 32 bits


def test_the_engine_s_state_repeats_the_request_seeds(engine: Engine) -> None:
    engine.seed(3)
    np.random.standard_normal()  # leaves a second one in the state
    state = engine.state_dict()
    expected = engine.worker.draw(), np.random.standard_normal(), engine.worker.draw()
    engine.seed(4)
    assert all(
        tensor.dtype == torch.uint8 for name, tensor in state.items() if name != "policy_version"
    )
    engine.load_state_dict(state)
    assert (engine.worker.draw(), np.random.standard_normal(), engine.worker.draw()) == expected


def test_what_is_sampled_in_between_changes_no_request_seed(engine: Engine) -> None:
    engine.seed(5)
    expected = [engine.worker.draw() for _ in range(2)]
    engine.seed(5)
    got = [engine.worker.draw()]
    with preserve_rng(engine):
        engine.seed(0)
        engine.worker.draw()
    assert [*got, engine.worker.draw()] == expected


def test_weights_arrive_on_the_workers_device_in_any_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A trial receives them in another thread, and CUDA's current device belongs to a thread."""
    here = threading.local()
    calls = list[Any]()
    names = ("start_weight_update", "finish_weight_update")
    engine = SimpleNamespace(
        model=SimpleNamespace(load_weights=None),
        update_weights=lambda update: calls.append(getattr(here, "device", torch.device("cuda:0"))),
        **{name: partial(calls.append, name) for name in names},
    )
    modules = SimpleNamespace(set_current_vllm_config=lambda config: nullcontext())
    monkeypatch.setattr(worker_module, "import_module", lambda name: modules)
    monkeypatch.setattr(worker_module, "_transfer_engine", lambda worker, backend: engine)
    monkeypatch.setattr(worker_module, "_repair", lambda worker: calls.append("repair"))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(here, "device", device))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronize"))
    worker: Any = Worker()
    worker.device, worker.vllm_config = torch.device("cuda:1"), None
    # As in vLLM's own ``finish_weight_update``: LoRA state of the old weights is dropped.
    worker.model_runner = SimpleNamespace(reset_lora_state=partial(calls.append, "lora"))
    assert worker.receive("nccl", None, {}, True, True, deadline_s=30) == ""
    start, finish = names
    assert calls == [start, worker.device, finish, "lora", "repair", "synchronize"]
