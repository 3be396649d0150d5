"""Sleeping and waking of the vLLM engine on a device that it shares, with vLLM's calls replaced."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.models import make_tiny_model
from torchrl_grpo.errors import MemoryShortError, ReceiptError
from torchrl_grpo.generation.vllm import VLLMEngine
from torchrl_grpo.weights import ObjectSender, TransferHandle, named_weights
from torchrl_grpo.weights.handle import DirectHandle
from torchrl_grpo.weights.receipts import receipt_of
from torchrl_grpo.weights.shared import SharedBlock

GIB = 2**30
RECEIVES = ("receive", "receipt")


class Library:
    """Stand-in for ``vllm.LLM`` that records its calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.damaged: list[str] = []
        self.error: RuntimeError | None = None

    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(tags)
        if self.error is not None:
            raise self.error

    def collective_rpc(self, method: str, **keywords: Any) -> list[Any]:
        """Answer for one worker, which got what it was sent."""
        self.calls.append(method)
        if method == "receive":
            _, _, update, *_ = keywords["args"]
            place = [update[name] for name in ("path", "name", "part") if update]
            self.received = receipt_of(SharedBlock(*place).weights()) if place else {}
            return [""]
        return [(self.received, [], 0.0)] if method == "receipt" else [self.damaged]

    def reset_prefix_cache(self) -> bool:
        return True


class Once(TransferHandle):
    """Weights that workers can receive once."""

    backend = "ipc"

    def updates(self) -> Iterator[dict[str, Any]]:
        return iter([{}])


def make_engine() -> tuple[VLLMEngine, Library]:
    engine = VLLMEngine.__new__(VLLMEngine)
    library = Library()
    engine._llm, engine._enable_sleep, engine._asleep, engine._latest = library, True, [], None
    engine._device, engine._share = torch.device("cuda:0"), 0.4
    engine._num_workers, engine._dtype = 1, torch.float32
    engine._hf_config, engine._trust_remote_code = make_tiny_model().config, False
    return engine, library


def handle_of(model: torch.nn.Module) -> DirectHandle:
    return DirectHandle(lambda: named_weights(model))


def test_new_weights_come_before_the_cache_has_its_memory_back() -> None:
    engine, library = make_engine()
    engine.load(handle_of(make_tiny_model()), 1)
    engine.sleep()
    engine.load(handle_of(make_tiny_model()), 2)
    assert library.calls == [*RECEIVES, "sleep 2", ["weights"], *RECEIVES, ["kv_cache"]]
    assert engine.policy_version == 2
    engine.wake()  # it is awake
    assert len(library.calls) == 7


def test_what_the_trainer_has_freed_is_given_back_before_memory_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, library = make_engine()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: library.calls.append("collect"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: library.calls.append("empty"))
    engine.sleep()
    engine.load(handle_of(make_tiny_model()), 1)
    gives = ["collect", "empty"]
    assert library.calls[1:] == [*gives, ["weights"], *RECEIVES, *gives, ["kv_cache"]]


def test_weights_that_sleep_has_dropped_are_read_again_to_wake() -> None:
    engine, library = make_engine()
    engine.load(handle_of(make_tiny_model()), 7)
    engine.sleep()
    engine.wake()
    assert library.calls[2:] == ["sleep 2", ["weights"], *RECEIVES, ["kv_cache"]]
    assert engine.policy_version == 7


def test_weights_of_the_object_store_are_read_again_and_a_transfer_is_not() -> None:
    engine, library = make_engine()
    engine.load(ObjectSender(None).pack(named_weights(make_tiny_model()), 3), 3)
    engine.sleep()
    engine.wake()
    assert library.calls[2:] == ["sleep 2", ["weights"], *RECEIVES, ["kv_cache"]]
    engine.load(Once(), 4)
    library.calls.clear()
    engine.sleep()
    engine.wake()
    assert library.calls == ["sleep 1", ["weights"], ["kv_cache"], "damaged"]


def test_weights_that_cannot_be_read_again_are_kept_in_main_memory() -> None:
    engine, library = make_engine()
    engine.load(handle_of(make_tiny_model()), 1)
    engine.update_weights(named_weights(make_tiny_model()), 2)
    library.calls.clear()
    engine.sleep()
    engine.wake()
    assert library.calls == ["sleep 1", ["weights"], ["kv_cache"], "damaged"]
    library.damaged = ["model.norm.weight"]
    engine.wake()  # it is awake
    engine.sleep()
    with pytest.raises(ReceiptError, match=r"after waking, 1 .*: model.norm.weight"):
        engine.wake()


def test_a_full_device_at_wake_up_is_one_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20 * GIB, 80 * GIB))
    engine, library = make_engine()
    engine.sleep()
    library.error = RuntimeError(
        "Worker failed with error 'CUDA Error: out of memory at cumem.cpp:62', please check"
    )
    with pytest.raises(MemoryShortError) as raised:
        engine.wake()
    assert str(raised.value).startswith(
        "Waking vLLM (weights) ran out of memory (Worker failed with error 'CUDA Error"
    )
    assert "about 34.4 GB of the engine's share and 64.4 GB of memory in use" in str(raised.value)
    assert "inference_model.gpu_memory_utilization=0.2 (about 17.2 GB)" in str(raised.value)
    library.error = RuntimeError("Worker failed with error 'something else'")
    with pytest.raises(RuntimeError, match="something else") as other:
        engine.wake()
    assert not isinstance(other.value, MemoryShortError)
