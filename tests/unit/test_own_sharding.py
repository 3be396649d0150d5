"""A model that the user has sharded with FSDP2 or put into DDP: two real processes over gloo,
compared with one process.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.support.models import make_tiny_model
from tests.support.ranks import start_ranks
from tests.support.training import make_batch
from torchrl_grpo import keys
from torchrl_grpo.learner import PolicyTrainer
from torchrl_grpo.models import loading
from torchrl_grpo.models.scoring import TokenScorer
from torchrl_grpo.models.sharding import mesh_of, num_replicas
from torchrl_grpo.objectives import GRPOLoss
from torchrl_grpo.transforms.kl_scoring import KLScoring

pytestmark = pytest.mark.nightly  # test_fsdp.py has two ranks of our own sharding

MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...] | None]] = {
    "unnamed": ((2,), None),
    "dp": ((2,), ("dp",)),
    "copies": ((2, 1), ("outer", "inner")),
}


def make_model(lora: bool = False) -> Any:
    torch.manual_seed(0)
    model: Any = make_tiny_model(tie_word_embeddings=False)
    if lora:
        model = loading.add_lora(model, r=3, alpha=8)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.05)
    return model


def sharded(shape: tuple[int, ...], names: tuple[str, ...] | None, lora: bool = False) -> Any:
    """Return a model sharded as torch's documentation does."""
    model = make_model(lora)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layer in loading.base_model_of(model).model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def gradients(model: nn.Module, batch: Any) -> dict[str, Any]:
    """Return the loss of a batch and the gradient of each parameter, gathered."""
    loss = GRPOLoss(TokenScorer(model), kl_to_ref_coeff=0.1, entropy_coeff=0.01)
    value = loss(batch).sum(reduce=True)
    value.backward()
    return {"loss": value.detach()} | {
        name.removeprefix("module."): getattr(p.grad, "full_tensor", lambda p=p: p.grad)()
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def trained(model: nn.Module) -> dict[str, Any]:
    """Return the metrics and the weights of two steps of the trainer."""
    loss = GRPOLoss(TokenScorer(model), kl_to_ref_coeff=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    trainer = PolicyTrainer(loss, model, optimizer, optim_batch_size=8, micro_batch_tokens=30)
    metrics = [trainer.train_batch(make_batch()) for _ in range(2)]
    norms = [metric["train/grad_norm"] for metric in metrics]
    losses = [metric["train/loss_objective"] for metric in metrics]
    weights = {name: weight.clone() for name, weight in trainer.weights()}
    return {"norms": torch.tensor(norms), "losses": torch.tensor(losses), **weights}


def scored(model: nn.Module) -> dict[str, Any]:
    batch = KLScoring(TokenScorer(model))(make_batch().exclude(keys.REF_LOG_PROBS))
    return {str(row): part[keys.REF_LOG_PROBS] for row, part in enumerate(batch.unbind(0))}


def run_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/meet", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    half = make_batch()[rank * 4 : rank * 4 + 4]
    out: dict[str, Any] = {}
    for name, mesh in MESHES.items():
        model = sharded(*mesh)
        out[name] = gradients(model, half)
        out[f"ranks of {name}"] = (mesh_of(model).size(), num_replicas(model))  # type: ignore[union-attr]
        out[f"trained {name}"] = trained(sharded(*mesh))
    out["lora"] = gradients(sharded(*MESHES["dp"], lora=True), half)
    out["scored"] = scored(sharded(*MESHES["dp"]))
    out["ddp"] = gradients(DistributedDataParallel(make_model()), half)
    out["ddp lora"] = gradients(DistributedDataParallel(make_model(lora=True)), half)
    head = make_model()
    fully_shard(head.lm_head)
    refusals: dict[str, Callable[[], Any]] = {
        "head": lambda: gradients(fully_shard(head), half),
        "trainer": lambda: trained(DistributedDataParallel(make_model())),
    }
    for name, refused in refusals.items():
        with pytest.raises(ValueError) as error:
            refused()
        out[name] = str(error.value)
    torch.save(out, f"{folder}/rank_{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    start_ranks(run_rank, 2, str(folder))
    return [torch.load(folder / f"rank_{rank}.pt", weights_only=False) for rank in range(2)]


def assert_equal(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("kind", [*MESHES, "lora", "ddp", "ddp lora"])
def test_loss_and_gradients_of_the_users_ranks_are_those_of_one_process(
    ranks: list[dict[str, Any]], kind: str
) -> None:
    expected = gradients(make_model("lora" in kind), make_batch())
    mean = {"loss": (ranks[0][kind].pop("loss") + ranks[1][kind].pop("loss")) / 2}
    assert len(expected) > 10
    for rank in ranks:
        assert_equal(rank[kind] | mean, expected)


@pytest.mark.parametrize("kind", MESHES)
def test_the_trainer_trains_a_users_shards_like_one_process(
    ranks: list[dict[str, Any]], kind: str
) -> None:
    expected = trained(make_model())
    for rank in ranks:
        assert_equal(rank[f"trained {kind}"], expected)
        assert rank[f"ranks of {kind}"] == (2, 2 if kind == "copies" else 1)


def test_ranks_of_a_users_shards_score_a_batch_together(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert_equal(rank["scored"], scored(make_model()))


def test_a_model_that_cannot_be_trained_names_the_fix(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert "lm_head" in rank["head"] and "fully_shard" in rank["head"]
        assert "DistributedDataParallel" in rank["trainer"] and "fully_shard" in rank["trainer"]
