"""Memory of a rank while a model is sharded: one layer at a time."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor

from tests.support.models import make_tiny_model
from tests.support.training import make_batch, make_trainer
from torchrl_grpo.models import sharding
from torchrl_grpo.models.loading import shape_of
from torchrl_grpo.models.memory import step_memory
from torchrl_grpo.models.scoring import TokenScorer
from torchrl_grpo.models.sharding import init_mesh, shard_model


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def mesh(request: pytest.FixtureRequest) -> Iterator[DeviceMesh]:
    device = torch.device(request.param, 0)
    if device.type == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    yield init_mesh(0, 1, dist.HashStore(), device=device, timeout_s=60)
    dist.destroy_process_group()


def test_no_parameter_outlives_the_sharding_of_its_layer(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny_model()
    TokenScorer(model)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    sharded = 0
    alive = list[str]()
    fully_shard = sharding.fully_shard

    def watched(module: Any, **options: Any) -> Any:
        nonlocal sharded
        whole = {
            n: weakref.ref(p) for n, p in module.named_parameters() if not isinstance(p, DTensor)
        }
        out = fully_shard(module, **options)
        sharded += len(whole)
        alive.extend(name for name, parameter in whole.items() if parameter() is not None)
        return out

    monkeypatch.setattr(sharding, "fully_shard", watched)
    shard_model(model, mesh, cpu_offload=True)
    assert sharded == len(before)
    assert alive == []
    for name, value in model.named_parameters():
        assert isinstance(value, DTensor)
        assert torch.equal(value.to_local(), before[name]), name


@pytest.mark.slow
def test_gradients_summed_on_the_device_are_reduced_once_a_step(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    reduced = list[int]()
    reduce = _fsdp_param_group.foreach_reduce
    monkeypatch.setattr(
        _fsdp_param_group, "foreach_reduce", lambda *args: (reduced.append(1), reduce(*args))[1]
    )

    def two_steps(sums_on_device: bool) -> tuple[list[dict[str, float]], Any, int]:
        model = make_tiny_model()
        TokenScorer(model)
        shard_model(model, mesh, cpu_offload=True)
        trainer = make_trainer(model, micro_batch_tokens=30)
        vars(trainer)["_sums_on_device"] = sums_on_device
        reduced.clear()
        metrics = [trainer.train_batch(make_batch(repeats=4)) for _ in range(2)]
        assert [step["train/micro_batches"] for step in metrics] == [3, 3]
        return metrics, dict(trainer.weights()), len(reduced)

    (metrics, weights, once), (expected, own, each) = two_steps(True), two_steps(False)
    assert each == 3 * once
    for step, other in zip(metrics, expected, strict=True):
        assert step == pytest.approx(other, rel=1e-5, nan_ok=True)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, own[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("spare", "fits"), [(1, True), (-1, False)])
def test_offloaded_gradients_are_summed_on_a_device_with_room_for_them(
    spare: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(micro_batch_tokens=100)
    assert not trainer._sums_on_device  # nothing is offloaded
    setup = replace(trainer.setup(), offloads=True)
    monkeypatch.setattr(trainer, "setup", lambda: setup)
    gradients = 4 * sum(parameter.numel() for parameter in trainer.parameters)
    room = math.ceil((step_memory(shape_of(trainer.model), setup).peak + gradients) / 0.9) + spare
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (room - 30, 10 * room))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 50)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 20)
    del trainer._sums_on_device
    assert trainer._sums_on_device is fits


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mesh", ["cuda"], indirect=True)
def test_a_gpu_holds_one_layer_of_an_offloaded_model_at_a_time(mesh: DeviceMesh) -> None:
    model = make_tiny_model(hidden_size=512, intermediate_size=2048, num_hidden_layers=16)
    TokenScorer(model)
    sizes = [sum(p.nbytes for p in layer.parameters()) for layer in model.model.layers]
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    shard_model(model, mesh, cpu_offload=True)
    assert torch.cuda.max_memory_allocated() - start < 4 * max(sizes) < sum(sizes) / 2
