"""``Reference``: a reference model that scores the groups of rollout tasks."""

from __future__ import annotations

import itertools
import time

import torch
from tensordict import TensorDictBase, lazy_stack
from torchrl.envs import Transform

from torchrl_grpo.transforms.kl_scoring import KLScoring
from torchrl_grpo.transforms.ragged import join_groups
from torchrl_grpo.weights import WeightHandle


class Reference:
    """A reference model on its own device, or a teacher.

    Args:
        scoring: transform that writes the model's log-probs into a batch.
        turns: whether to free GPU memory for other roles after scoring.
    """

    def __init__(self, scoring: Transform, *, turns: bool = False) -> None:
        self.scoring = scoring
        self.turns = turns

    def update(self, handle: WeightHandle) -> None:
        """Replace a reference model's weights."""
        assert isinstance(self.scoring, KLScoring)
        self.scoring.update_weights(handle.weights())

    def score(self, *groups: TensorDictBase) -> tuple[float, list[TensorDictBase]]:
        """Score the groups of a task in one batch. Return the seconds and the groups."""
        start = time.perf_counter()
        rows = self.scoring(join_groups(groups)).unbind(0)
        ends = list(itertools.accumulate(map(len, groups)))
        scored = [
            lazy_stack(list(rows[end - len(group) : end]))
            for end, group in zip(ends, groups, strict=True)
        ]
        if self.turns:
            torch.cuda.empty_cache()
        return time.perf_counter() - start, scored
