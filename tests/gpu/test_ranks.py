"""Training ranks on GPUs of their own, compared with one process. Never run on GPUs so far."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing

from tests.support.models import make_tiny_model
from tests.support.training import make_batch, make_trainer
from torchrl_grpo import keys
from torchrl_grpo.learner.step import PolicyTrainer
from torchrl_grpo.models.scoring import TokenScorer
from torchrl_grpo.models.sharding import init_mesh, shard_model
from torchrl_grpo.transforms.kl_scoring import KLScoring

DEVICE = "cuda"
RANKS = 2
LENGTHS = (9, 14, 6, 11, 8, 12, 7, 10, 30, 5, 17)

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="needs two CUDA devices")


def two_steps(trainer: PolicyTrainer) -> dict[str, Any]:
    """Score a batch with the initial policy, then train on it for two steps."""
    trainer.loss.proximal = "recomputed"
    batch = make_batch(LENGTHS, spread=0.3, repeats=3)
    scored = KLScoring(trainer.loss.actor_network, max_tokens=30, out_key=keys.PROX_LOG_PROBS)(
        batch
    )
    return {
        "scored": [row.get(keys.PROX_LOG_PROBS).cpu() for row in scored.unbind(0)],
        "metrics": [trainer.train_step(scored) for _ in range(2)],
        "weights": {name: value.cpu().clone() for name, value in trainer.weights()},
    }


def run_rank(rank: int, folder: str, cpu_offload: bool) -> None:
    store = dist.FileStore(f"{folder}/meet", RANKS)
    device = torch.device(DEVICE, rank) if DEVICE == "cuda" else torch.device(DEVICE)
    mesh = init_mesh(rank, RANKS, store, device=device, timeout_s=300)
    model = make_tiny_model()
    TokenScorer(model)
    model = shard_model(model, mesh, cpu_offload=cpu_offload)
    trainer = make_trainer(model, micro_batch_tokens=30)
    torch.save(two_steps(trainer), f"{folder}/{rank}.pt")
    assert {weight.device.type for _, weight in trainer.weights()} == {DEVICE}
    dist.destroy_process_group()


@pytest.mark.parametrize("cpu_offload", [False, True])
def test_two_ranks_score_and_train_like_one_process(cpu_offload: bool, tmp_path: Path) -> None:
    multiprocessing.start_processes(
        run_rank, (str(tmp_path), cpu_offload), RANKS, start_method="spawn"
    )
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(RANKS))
    expected = two_steps(make_trainer(make_tiny_model(), micro_batch_tokens=30))
    assert first["metrics"] == second["metrics"]
    for name, weight in expected["weights"].items():
        assert torch.equal(first["weights"][name], second["weights"][name]), name
        torch.testing.assert_close(first["weights"][name], weight, rtol=0, atol=1e-3)
    for one, other, own in zip(first["scored"], second["scored"], expected["scored"], strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, own, rtol=0, atol=1e-4)
    for got, metrics in zip(first["metrics"], expected["metrics"], strict=True):
        for name in ("train/loss", "train/grad_norm", "train/ratio_mean"):
            assert got[name] == pytest.approx(metrics[name], rel=1e-3, abs=1e-4), name
