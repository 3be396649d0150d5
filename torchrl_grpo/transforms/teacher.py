"""A teacher's entries in a batch: its scores, after a prompt of its own or not, and its share of the
advantage.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, lazy_stack
from torch import Tensor
from torchrl.envs import Transform

from torchrl_grpo import keys
from torchrl_grpo.functional import kl_k1
from torchrl_grpo.models.entries import has, images_of_row, pad
from torchrl_grpo.models.passes import Pass
from torchrl_grpo.models.rows import Rows
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

    def _pass(self, each: Pass) -> Tensor:
        assert each.layout is not None
        return self.scorer.teacher_states(each.layout, self.top_k)

    def _split(self, rows: Rows, scores: Tensor, width: int | None) -> list[Tensor]:
        return list(scores.split(rows.of_scored.sizes.tolist()))


class TeacherScoring(Transform):
    """Lets a teacher score responses after the prompts that were written for it,
    ``("teacher", "prompt")``, if there are any, and writes ``"teacher_valid"``: False where there is
    an empty prompt, or another teacher's data set.

    Args:
        scoring: the teacher. It sees its own prompt and everything after the policy's prompt, and
            its scores are aligned with the policy's tokens.
        width: size of a state; 0 for log-probs.
        datasets: names of the data sets whose responses it scores; None scores all.
    """

    def __init__(
        self,
        scoring: Transform,
        width: int = 0,
        datasets: Collection[str] | None = None,
    ) -> None:
        super().__init__(
            in_keys=[keys.FULL, keys.RESPONSE, keys.ASSISTANT_MASK],
            out_keys=[scoring.out_key, keys.TEACHER_VALID],
        )
        self.scoring = scoring
        self.width = width
        self.datasets = datasets

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Score a batch [B] (or one sequence) in place, except for what other teachers have scored."""
        key = self.out_keys[0]
        rows = [row for row in flatten(tensordict).unbind(0) if self._is_open(row)]
        views = [self._view(row) for row in rows]
        seen = [view for view in views if view is not None]
        scores = iter(self.scoring(lazy_stack(seen)).unbind(0) if seen else ())
        for row, view in zip(rows, views, strict=True):
            mask = row.get(keys.ASSISTANT_MASK)
            size = (int(mask.sum()), self.width) if self.width else mask.shape
            values = torch.zeros(size, device=mask.device)
            if view is not None:
                scored = next(scores).get(key)
                if self.width:
                    values = scored
                else:
                    values[mask] = scored[view.get(keys.ASSISTANT_MASK)]
            row.set(key, values)
            row.set(keys.TEACHER_VALID, torch.tensor([view is not None], device=mask.device))
        return tensordict

    def _is_open(self, row: TensorDictBase) -> bool:
        """Return whether no teacher has seen a row yet, or it belongs to this teacher's data sets and
        is not what a replay buffer samples, already scored.
        """
        valid = row.get(keys.TEACHER_VALID, None)
        is_for_this = self.datasets is None or row[keys.DATASET] in self.datasets
        return valid is None or (is_for_this and (self.training or not bool(valid)))

    def _view(self, row: TensorDictBase) -> TensorDict | None:
        """Return a sequence as the teacher sees it; None if it scores none."""
        other = self.datasets is not None and row[keys.DATASET] not in self.datasets
        return None if other else _as_teacher_sees(row)


def _as_teacher_sees(row: TensorDictBase) -> TensorDict | None:
    """Return a sequence with the teacher's prompt, if there is one, in place of the policy's; None if
    that is empty.
    """
    full, mask, response = (row.get(key) for key in (keys.FULL, keys.ASSISTANT_MASK, keys.RESPONSE))
    prompt = row.get(keys.TEACHER_PROMPT, full[: len(full) - len(response)])
    if not len(prompt):
        return None
    view = TensorDict(
        {
            keys.FULL: torch.cat([prompt, response]),
            keys.ASSISTANT_MASK: torch.cat(
                [torch.zeros_like(prompt, dtype=torch.bool), mask[len(mask) - len(response) :]]
            ),
        }
    )
    images = images_of_row(row)
    start = len(full) - len(response)
    before = [span for span in images if span.offset < start]
    if row.get(keys.TEACHER_IMAGES, None) is not None:
        before = list(images_of_row(row, keys.TEACHER_IMAGES))
    moved = len(prompt) - start
    later = [replace(span, offset=span.offset + moved) for span in images if span.offset >= start]
    view.set(keys.IMAGES, NonTensorData((*before, *later)))
    kept = row.get(keys.KEPT, None)
    return view if kept is None else view.set(keys.KEPT, kept)


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
        clip: bound on ``|log p_t - log q_t|`` in nats; None is unbounded. Where
            ``"teacher_valid"`` is False, the KL counts as 0.

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

    def __init__(self, coef: float, reward_coef: float = 1.0, clip: float | None = None) -> None:
        log_prob_keys = [keys.LOG_PROBS, keys.TEACHER_LOG_PROBS] if coef else []
        super().__init__(
            in_keys=[keys.ADVANTAGE, keys.ASSISTANT_MASK, *log_prob_keys], out_keys=[keys.ADVANTAGE]
        )
        self.coef = coef
        self.reward_coef = reward_coef
        self.clip = clip

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the advantage of each token of a batch, in place."""
        flat = flatten(tensordict)
        mask = pad(flat, keys.ASSISTANT_MASK, False)
        advantage = self.reward_coef * pad(flat, keys.ADVANTAGE).expand(mask.shape)
        if self.coef:
            kl = kl_k1(pad(flat, keys.LOG_PROBS), pad(flat, keys.TEACHER_LOG_PROBS))
            if self.clip is not None:
                kl = kl.clamp(-self.clip, self.clip)
            if has(flat, keys.TEACHER_VALID):
                kl = torch.where(pad(flat, keys.TEACHER_VALID, False), kl, 0.0)
            advantage = advantage - self.coef * kl
        advantage = torch.where(mask, advantage, 0.0)
        return set_tokens(tensordict, keys.ADVANTAGE, advantage)
