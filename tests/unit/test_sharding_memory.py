"""What a rank holds while a model is sharded: one layer at a time."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tests.support.models import make_tiny_model
from torchrl_grpo.models import sharding
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
    sharded, alive = 0, list[str]()
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
