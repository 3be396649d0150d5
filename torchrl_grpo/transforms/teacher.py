"""A teacher's entries in a batch: its states, for a divergence over the vocabulary, or its share of
the advantage.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.envs import Transform

from torchrl_grpo import keys
from torchrl_grpo.functional import kl_k1
from torchrl_grpo.models.packing import pad
from torchrl_grpo.models.prefix import Layout
from torchrl_grpo.models.scoring import TokenScorer
from torchrl_grpo.transforms.kl_scoring import KLScoring
from torchrl_grpo.transforms.ragged import flatten, set_tokens


class TeacherStates(KLScoring):
    """Writes ``("next", "teacher_states")``, the teacher's states that a divergence needs, at the
    sampled tokens.

    Args:
        scorer: the teacher.

    Keyword Args:
        top_k: number of the most likely tokens; None writes the inputs of the teacher's LM head.
            See ``models.divergence.Teacher``.
        **options: options of ``KLScoring``.
    """

    def __init__(self, scorer: TokenScorer, *, top_k: int | None = None, **options: Any) -> None:
        super().__init__(scorer, out_key=keys.TEACHER_STATES, **options)
        self.top_k = top_k

    def _pass(self, layout: Layout, kept: Tensor | None) -> Tensor:
        return self.scorer.teacher_states(layout, self.top_k)

    def _score(self, batch: TensorDictBase) -> list[Tensor]:
        masks = [row.get(keys.ASSISTANT_MASK) for row in batch.unbind(0)]
        return [states[mask] for states, mask in zip(super()._score(batch), masks, strict=True)]


class TeacherAdvantage(Transform):
    """Adds the reverse KL to a teacher to the advantage, token by token: on-policy distillation
    with sampled tokens.

    ``"advantage"`` becomes [T]: ``reward_coef * A - coef * (log p_t - log q_t)`` at a sampled
    token, and 0 elsewhere, with A the advantage of its sequence (or of the token), p the policy
    that sampled and q the teacher. The estimator is k1, and each token gets credit only for itself,
    a discount of 0 (K. Lu and Thinking Machines Lab, "On-Policy Distillation", 2025; the sum of
    both terms as in prime-rl).

    It works on finished sequences, after ``GroupAdvantage``.

    Args:
        coef: weight of the KL, in units of the advantage per nat; 0 if the divergence is part of
            the loss.
        reward_coef: weight of the existing advantage.

    Raises:
        KeyError: the batch has no advantage or mask or, with a ``coef``, lacks the log-probs of the
            policy or of the teacher.

    Example:
        >>> from tensordict import TensorDict
        >>> mask = torch.tensor([[True, True]])
        >>> batch = TensorDict({"advantage": torch.tensor([[0.5]]), "masks": {"all_assistant_mask": mask}})
        >>> batch["log_probs", "full"] = torch.tensor([[-1.0, -2.0]])
        >>> batch["next", "teacher_log_probs", "full"] = torch.tensor([[-3.0, -1.5]])
        >>> TeacherAdvantage(1.0)(batch.auto_batch_size_(1))["advantage"]
        tensor([[-1.5000,  1.0000]])
    """

    def __init__(self, coef: float, reward_coef: float = 1.0) -> None:
        log_prob_keys = [keys.LOG_PROBS, keys.TEACHER_LOG_PROBS] if coef else []
        super().__init__(
            in_keys=[keys.ADVANTAGE, keys.ASSISTANT_MASK, *log_prob_keys], out_keys=[keys.ADVANTAGE]
        )
        self.coef = coef
        self.reward_coef = reward_coef

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the advantage of each token of a batch, in place."""
        flat = flatten(tensordict)
        mask = pad(flat, keys.ASSISTANT_MASK, False)
        advantage = self.reward_coef * pad(flat, keys.ADVANTAGE).expand(mask.shape)
        if self.coef:
            advantage = advantage - self.coef * kl_k1(
                pad(flat, keys.LOG_PROBS), pad(flat, keys.TEACHER_LOG_PROBS)
            )
        advantage = torch.where(mask, advantage, 0.0)
        return set_tokens(tensordict, keys.ADVANTAGE, advantage)
