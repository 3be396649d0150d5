"""KLScoring and GroupAdvantage together in TorchRL's replay buffers as Ray actors."""

from __future__ import annotations

import pytest
from torchrl.data import RayReplayBuffer, ReplayBuffer

from tests.support.buffers import fill_and_sample, make_buffer
from tests.support.models import make_tiny_model
from torchrl_grpo.models.scoring import TokenScorer
from torchrl_grpo.runtime.cluster import Cluster
from torchrl_grpo.transforms import KLScoring


@pytest.fixture(scope="module")
def ray_buffers(ray_cluster: Cluster) -> dict[str, ReplayBuffer]:
    """Start the buffers' actors in parallel."""
    options = {"remote_config": {"num_cpus": 0}}
    return {
        kind: make_buffer(kind, RayReplayBuffer, **options) for kind in ("advantage", "scored last")
    }


@pytest.mark.parametrize("kind", ["advantage", "scored last"])
def test_a_ray_buffer_holds_and_samples_what_a_plain_one_does(
    ray_buffers: dict[str, ReplayBuffer], kind: str
) -> None:
    fill_and_sample(ray_buffers[kind], scored=kind != "advantage")


def test_a_ray_buffer_takes_kl_scoring_later(ray_buffers: dict[str, ReplayBuffer]) -> None:
    """The transform and its model are sent to the buffer's process."""
    buffer = ray_buffers["advantage"]
    buffer.empty()
    buffer.append_transform(KLScoring(TokenScorer(make_tiny_model())))
    fill_and_sample(buffer, scored=True)
