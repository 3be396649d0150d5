"""A custom loss and advantage, without editing the package. From the root of the repository:

    python sota/grpo/grpo.py --config-name grpo_arithmetic policy.loss._target_=examples/my_algorithm.py:Reinforce \
        policy.advantage._target_=examples/my_algorithm.py:RankAdvantage
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_grpo.objectives import Surrogate, Tokens
from torchrl_grpo.transforms import GroupAdvantage


class Reinforce(Surrogate):
    """Plain policy gradient: no ratio and no clip."""

    def forward(self, t: Tokens) -> Tensor:
        """Return the advantage times the log-prob of each token that counts."""
        return t["advantage"] * t["log_prob"]


class RankAdvantage(GroupAdvantage):
    """Sign of the group advantage: only whether a response beats its group counts, not by how much."""

    def advantage(self, reward: Tensor, group: Tensor, valid: Tensor) -> Tensor:
        """Return the advantages [N] for the rewards [N] of whole groups."""
        return torch.sign(super().advantage(reward, group, valid))
