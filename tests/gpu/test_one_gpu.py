"""A sharded model, its checkpoint, its memory and 8-bit moments on one CUDA device.

``GPU_CHECK_DEVICE=cpu`` runs the tests that don't need CUDA on a CPU.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tests.support.models import make_tiny_model
from tests.support.training import make_batch, make_trainer
from torchrl_grpo import keys
from torchrl_grpo.learner.optimizer import make_optimizer
from torchrl_grpo.learner.shards import read_parts, write_parts
from torchrl_grpo.learner.step import PolicyTrainer
from torchrl_grpo.models import attention as attention_module
from torchrl_grpo.models.divergence import Teacher
from torchrl_grpo.models.loading import shape_of
from torchrl_grpo.models.memory import step_memory
from torchrl_grpo.models.rows import Rows
from torchrl_grpo.models.scoring import TokenScorer
from torchrl_grpo.models.sharding import leave_mesh, lone_mesh, own_parts, shard_model

DEVICE = os.environ.get("GPU_CHECK_DEVICE", "cuda")

pytestmark = pytest.mark.skipif(
    DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device"
)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    yield lone_mesh(torch.device(DEVICE, 0))
    leave_mesh()


def make_sharded(mesh: DeviceMesh, dtype: torch.dtype | None = None, **shape: Any) -> Any:
    model = make_tiny_model(**shape)
    TokenScorer(model)
    return shard_model(model, mesh, param_dtype=dtype, cpu_offload=True)


def test_a_sharded_model_in_16_bits_scores_like_one_that_is_not(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All layers of the sharded model must have one layout on the device."""
    layouts = set[int]()
    attention = attention_module.attention

    def watched(*args: Any, layout: Any = None, **kwargs: Any) -> Any:
        layouts.add(id(layout))
        return attention(*args, layout=layout, **kwargs)

    tokens = torch.randint(5, 261, (4, 12), generator=torch.Generator().manual_seed(0))
    tokens[:, :4] = tokens[0, :4]
    mask = (torch.arange(12) >= 4).expand(4, 12)
    expected = TokenScorer(make_tiny_model().to(DEVICE)).score(tokens.to(DEVICE), mask.to(DEVICE))
    scorer = TokenScorer(make_sharded(mesh, torch.bfloat16))
    assert scorer.packs(12)
    attention_module.AttentionInterface.register("sdpa", watched)
    try:
        got, _ = scorer.score(tokens.to(DEVICE), mask.to(DEVICE))
    finally:
        attention_module.AttentionInterface.register("sdpa", attention)
    torch.testing.assert_close(got.float(), expected[0], rtol=0, atol=0.2)
    assert len(layouts) == 1


def test_token_ids_of_a_teacher_reach_a_sharded_model_exactly(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    scorer = TokenScorer(make_sharded(mesh, torch.bfloat16, vocab_size=5000))
    passed = list[Tensor]()
    score = TokenScorer._score

    def watched(self: TokenScorer, layout: Any, values: dict[Any, Tensor], *rest: Any) -> Any:
        passed.append(values[keys.TEACHER_STATES])
        return score(self, layout, values, *rest)

    monkeypatch.setattr(TokenScorer, "_score", watched)
    ids = torch.tensor([4321.0, 4322.0, 4323.0, 257.0]).expand(14, 4)
    states = torch.cat([torch.full((14, 4), -2.0), ids], -1).to(DEVICE)
    tokens = torch.randint(5, 4999, (2, 10), device=DEVICE)
    mask = (torch.arange(10, device=DEVICE) >= 3).expand(2, 10)
    layout = scorer.layout(Rows.from_padded(tokens, mask))
    scorer.score_rows(layout, {keys.TEACHER_STATES: states}, teacher=Teacher(0.0))
    [used] = passed
    assert set(used[..., 4:].flatten().tolist()) == {4321.0, 4322.0, 4323.0, 257.0}


def test_a_sharded_step_is_the_step_of_a_model_that_is_not(mesh: DeviceMesh) -> None:
    expected = make_trainer(make_tiny_model().to(DEVICE)).train_batch(make_batch())
    got = make_trainer(make_sharded(mesh)).train_batch(make_batch())
    assert got["train/loss"] == pytest.approx(expected["train/loss"], abs=1e-4)
    assert got["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=1e-3)


def test_a_sharded_checkpoint_gives_back_weights_and_moments(
    mesh: DeviceMesh, tmp_path: Path
) -> None:
    trainer = make_trainer(make_sharded(mesh))
    trainer.train_batch(make_batch())
    tensors, rest = own_parts(trainer.model, trainer.optimizer)
    write_parts(tmp_path, {name: value.cpu() for name, value in tensors.items()}, dist.group.WORLD)
    expected = {name: _local(value).clone() for name, value in tensors.items()}
    trainer.train_batch(make_batch())
    read_parts(tmp_path, trainer.model, trainer.optimizer, rest)
    got, _ = own_parts(trainer.model, trainer.optimizer)
    assert got.keys() == expected.keys()
    assert all(torch.equal(_local(got[name]), expected[name]) for name in expected)


def _local(tensor: Any) -> Tensor:
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach().cpu()


@needs_cuda
@pytest.mark.parametrize("name", ["adamw", "adamw_8bit"])
def test_the_peak_of_a_step_is_close_to_the_plan(name: Any, record_property: Any) -> None:
    shape = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 32_000}
    gc.collect()  # free the model of an earlier test now, so that it isn't counted
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = make_tiny_model(**shape, **heads, initializer_range=0.02).to("cuda")
    optimizer = make_optimizer(list(model.parameters()), name, lr=1e-5)
    trainer: PolicyTrainer = make_trainer(model, optimizer=optimizer, autocast_dtype=torch.bfloat16)
    batch = make_batch((400, 500, 300, 450, 350, 410, 320, 490))
    trainer.train_batch(batch)
    torch.cuda.reset_peak_memory_stats()
    trainer.train_batch(batch)
    measured = torch.cuda.max_memory_allocated() - before
    planned = step_memory(shape_of(model), trainer.setup()).peak
    record_property("measured_mib", measured // 2**20)
    record_property("planned_mib", planned // 2**20)
    assert planned / measured == pytest.approx(1.0, abs=0.3)


@needs_cuda
def test_moments_of_8_bits_take_steps_like_those_of_32() -> None:
    losses = {}
    for name in ("adamw", "adamw_8bit"):
        model = make_tiny_model(hidden_size=128).cuda()
        optimizer: Any = make_optimizer(list(model.parameters()), name, lr=1e-3)  # type: ignore[arg-type]
        trainer = make_trainer(model, optimizer=optimizer)
        losses[name] = [trainer.train_batch(make_batch())["train/loss"] for _ in range(5)]
    assert losses["adamw_8bit"] == pytest.approx(losses["adamw"], abs=0.01)
