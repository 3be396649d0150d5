"""Errors that only a GPU would raise, found without one: parts on simulated devices, and CUDA's
calls replaced.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tensordict import lazy_stack
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.models import make_tiny_model
from tests.support.pretended import OnDevice, PretendedCuda
from tests.support.training import make_batch, make_trainer
from torchrl_grpo import keys
from torchrl_grpo.integrations.server_engine import ServerEngine
from torchrl_grpo.models.scoring import TokenScorer
from torchrl_grpo.transforms.kl_scoring import KLScoring
from torchrl_grpo.weights import (
    DirectHandle,
    ObjectSender,
    handle,
    ipc,
    named_weights,
)
from torchrl_grpo.weights.ipc import IpcSender, IpcStream, LocalSender
from torchrl_grpo.weights.shared import SharedWeights

FIRST, SECOND = "meta:0", "meta:1"
METRICS = ("train/loss", "train/grad_norm", "train/kl_k3_to_ref", "train/entropy")


def on(device: str, packs: bool) -> Any:
    """Return the tiny model on a device, with packed or padded sequences."""
    model = make_tiny_model()
    TokenScorer(model)  # checks whether it can be packed
    model = model.to(device)
    model.tie_weights()  # a real device keeps them tied
    if not packs:
        model.unpacked_because = "it is to be padded"
    return model


def test_tensors_on_two_devices_are_refused_as_on_gpus() -> None:
    with PretendedCuda():
        one, two = torch.ones(3, device=FIRST), torch.ones(3, device=SECOND)
        with pytest.raises(RuntimeError, match="to be on the same device, but found"):
            one + two
        with pytest.raises(RuntimeError, match="to be on the same device, but found"):
            one * torch.ones(3)
        assert (one * torch.tensor(2.0)).tolist() == [2.0] * 3
        assert (one + two.to(FIRST)).device == one.device
        assert one[torch.tensor([0, 1])].sum().item() == 2


@pytest.mark.slow
@pytest.mark.parametrize("packs", [True, False])
def test_a_training_step_keeps_to_its_device(packs: bool) -> None:
    expected = make_trainer().train_batch(make_batch(repeats=4))
    with PretendedCuda():
        model = on(FIRST, packs)
        got = make_trainer(model).train_batch(make_batch(repeats=4))  # the batch comes from the CPU
        assert all(isinstance(parameter.data, OnDevice) for parameter in model.parameters())
    for name in METRICS:
        assert got[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


@pytest.mark.slow
def test_reference_and_trainer_work_on_devices_of_their_own() -> None:
    expected = KLScoring(TokenScorer(make_tiny_model()), max_tokens=10_000)(
        make_batch().exclude(keys.REF_LOG_PROBS)
    )
    with PretendedCuda():
        scored = KLScoring(TokenScorer(on(SECOND, packs=True)), max_tokens=10_000)(
            make_batch().exclude(keys.REF_LOG_PROBS)
        )
        for row, want in zip(scored.unbind(0), expected.unbind(0), strict=True):
            got = row[keys.REF_LOG_PROBS]
            assert got.device.type == "cpu"
            torch.testing.assert_close(got, want[keys.REF_LOG_PROBS], rtol=0, atol=1e-5)
        metrics = make_trainer(on(FIRST, packs=True)).train_batch(
            lazy_stack(list(scored.unbind(0)))
        )
    assert abs(metrics["train/kl_k3_to_ref"]) < 1e-5  # a model of its own


def test_a_pretended_device_notes_where_the_cpu_waits_for_it() -> None:
    with PretendedCuda() as cuda:
        one = torch.arange(3.0).to(FIRST, non_blocking=True)
        two = one * 2 + torch.full((3,), 1.0, device=FIRST)
        assert cuda.waited == []
        for wait in (
            lambda: two.sum().item(),
            lambda: two.tolist(),
            lambda: two.cpu(),
            lambda: torch.ones(3).to(FIRST),
            lambda: two.nonzero(),
            lambda: two[two > 1],
            lambda: bool(two.any()),
            lambda: torch.equal(one, two),
            lambda: two.repeat_interleave(torch.tensor([1, 2, 3]).to(FIRST, non_blocking=True)),
        ):
            before = len(cuda.waited)
            wait()
            assert len(cuda.waited) == before + 1


@pytest.mark.slow
def test_a_step_waits_for_its_device_twice_and_scoring_once_a_pass() -> None:
    """A step reads loss and gradient norm to decide whether to continue, and the metrics at its
    end.
    """
    with PretendedCuda() as cuda:
        trainer = make_trainer(on(FIRST, packs=True), micro_batch_tokens=30)
        batch = make_batch(repeats=4)
        cuda.waited.clear()
        metrics = trainer.train_step(batch)
        assert (metrics["train/micro_batches"], cuda.waited) == (3, ["aten._to_copy"] * 2)
        scoring = KLScoring(TokenScorer(on(FIRST, packs=True)), max_tokens=30)
        cuda.waited.clear()
        scoring(batch.exclude(keys.REF_LOG_PROBS))
        assert cuda.waited == ["aten._to_copy"] * 3


class Crossings(TorchDispatchMode):
    """Record the dtypes of each copy from a simulated device to the CPU, before and after it."""

    def __enter__(self) -> Any:
        self.dtypes: list[tuple[torch.dtype, torch.dtype]] = []
        return super().__enter__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        is_copy = func.overloadpacket is torch.ops.aten._to_copy
        if is_copy and args[0].device.type == "meta" and out.device.type == "cpu":
            self.dtypes.append((args[0].dtype, out.dtype))
        return out


def to_objects(weights: dict[str, torch.Tensor], folder: Path) -> dict[str, torch.Tensor]:
    sent = ObjectSender(torch.bfloat16).pack(weights.items(), 0)
    return {name: weight.clone() for name, weight in sent.weights()}


def to_shared_memory(weights: dict[str, torch.Tensor], folder: Path) -> dict[str, torch.Tensor]:
    shared = SharedWeights(weights.items(), torch.bfloat16)
    got = {name: weight.clone() for name, weight in shared.block.weights()}
    shared.close()
    return got


def to_a_server(weights: dict[str, torch.Tensor], folder: Path) -> dict[str, torch.Tensor]:
    engine: Any = ServerEngine.__new__(ServerEngine)
    engine.address, engine._folder, engine._dtype, engine._tied = "", folder, torch.bfloat16, {}
    return load_file(engine._write(weights.items()))


@pytest.mark.parametrize("send", [to_objects, to_shared_memory, to_a_server])
def test_weights_are_converted_before_they_leave_their_device(send: Any, tmp_path: Path) -> None:
    """The CPU would compute a converting copy between devices, on twice the bytes."""
    expected = {"norm": torch.randn(8), "embed": torch.randn(4, 8).T}
    with PretendedCuda():
        weights = {name: weight.to(FIRST) for name, weight in expected.items()}
        with Crossings() as crossings:
            got = send(weights, tmp_path)
    receipt = [(torch.int64, torch.int64)] * (send is not to_a_server)
    assert crossings.dtypes == [(torch.bfloat16, torch.bfloat16)] * 2 + receipt
    assert all(torch.equal(got[name], weight.bfloat16()) for name, weight in expected.items())


class FakeIpc:
    """CUDA's calls for shared memory, in one process. Torch frees an exported tensor when its count
    is 0.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.memory: dict[bytes, torch.Tensor] = {}
        self.counts: dict[bytes, int] = {}
        monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
        monkeypatch.setattr(
            torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None)
        )
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-7")
        )
        monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
        monkeypatch.setattr(ipc, "reduce_tensor", self.reduce)
        monkeypatch.setattr(ipc, "release_shared_memory", self.release)

    def reduce(self, flat: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
        counter = f"counter {len(self.memory)}".encode()
        self.memory[counter], self.counts[counter] = flat, 1
        own = (
            torch.Tensor,
            flat.size(),
            flat.stride(),
            0,
            torch.storage.TypedStorage,
            flat.dtype,
            0,
        )
        return rebuild_cuda_tensor, (
            *own,
            b"handle",
            flat.nbytes,
            0,
            False,
            counter,
            len(self.memory),
            b"event",
            True,
        )

    def rebuild(self, *arguments: Any) -> torch.Tensor:
        by_name = inspect.signature(rebuild_cuda_tensor).bind(*arguments).arguments
        counter = by_name["ref_counter_handle"]
        flat = self.memory[counter]
        assert (by_name["tensor_size"], by_name["dtype"], by_name["storage_device"]) == (
            flat.size(),
            flat.dtype,
            0,
        )
        self.counts[counter] -= 1
        return flat

    def release(self, counter: bytes, place: int) -> None:
        self.counts[counter] -= 1

    def received(self, updates: Iterable[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Return the weights that vLLM's engine reads from update infos."""
        got: dict[str, torch.Tensor] = {}
        for update in updates:
            info = ipc.opened(pickle.loads(pickle.dumps(update)))
            assert info["ipc_handles"].keys() == {"GPU-7"}
            packed = self.rebuild(*info["ipc_handles"]["GPU-7"]).split(info["tensor_sizes"])
            for name, dtype, shape, part in zip(
                info["names"], info["dtype_names"], info["shapes"], packed, strict=True
            ):
                got[name] = part.view(getattr(torch, dtype)).view(shape)
        return got


def test_the_arguments_of_shared_memory_are_those_of_torch() -> None:
    names = list(inspect.signature(rebuild_cuda_tensor).parameters)
    assert names == [
        "tensor_cls", "tensor_size", "tensor_stride", "tensor_offset", "storage_cls", "dtype", "storage_device",
        "storage_handle", "storage_size_bytes", "storage_offset_bytes", "requires_grad", "ref_counter_handle",
        "ref_counter_offset", "event_handle", "event_sync_required",
    ]  # fmt: skip


def test_weights_are_exported_from_the_gpu_that_they_are_on() -> None:
    """One process uses the second GPU, while torch's current device is the first."""
    with FakeTensorMode():
        weight = torch.empty(3, device="cuda:1")
        [(_, read)] = ipc.on_gpu([("norm", weight)])
    assert read is weight


def test_what_an_engine_on_the_same_gpu_reads_is_counted_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = FakeIpc(monkeypatch)
    monkeypatch.setattr(handle, "PART_BYTES", 20_000)
    sender = IpcSender(torch.bfloat16, "127.0.0.1")
    models = {version: make_tiny_model(version) for version in (1, 2)}
    sent = {
        version: sender.pack(named_weights(model), version) for version, model in models.items()
    }
    assert len(sent[2].infos) > 2
    assert sent[2].init_info(1) == {"packed": True}
    got = cuda.received(sent[2].updates())
    assert all(
        torch.equal(got[name], weight.bfloat16()) for name, weight in named_weights(models[2])
    )
    assert [(name, tuple(got[name].shape)) for name in got] == sent[2].layout
    sender.release(1)  # not read yet
    sender.release(2)
    assert set(cuda.counts.values()) == {0}
    sender.close()
    assert set(cuda.counts.values()) == {0}


def test_an_engine_in_the_trainers_process_gets_a_part_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = FakeIpc(monkeypatch)
    model = make_tiny_model()
    monkeypatch.setattr(handle, "PART_BYTES", 20_000)
    sender = LocalSender(torch.bfloat16)
    stream = sender.handle(lambda: named_weights(model))
    assert isinstance(stream, IpcStream)
    updates = stream.updates()
    next(updates)
    assert len(cuda.memory) == 1
    got = cuda.received(stream.updates())
    assert all(torch.equal(got[name], weight.bfloat16()) for name, weight in named_weights(model))
    assert isinstance(sender.resend(0, "no such link"), DirectHandle)
    assert isinstance(sender.handle(lambda: named_weights(model)), DirectHandle)
