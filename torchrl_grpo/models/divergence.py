"""The divergence between a policy and a teacher over the whole vocabulary, from hidden states and
LM heads.

Both heads run in chunks of the vocabulary, and are computed again in backward, so there are never
logits of [N, V] of either model.

Shape suffixes: N scored tokens, D and E hidden sizes of policy and teacher, V vocabulary, K likely
tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchrl_grpo.functional import head_logits
from torchrl_grpo.models.head import MAX_CHUNK_ELEMENTS

_HELD = 4
"""Arrays of the size of a chunk that are held at once."""


@dataclass(frozen=True)
class Teacher:
    """The other side of a divergence: what the teacher's states are, and which divergence is taken.

    Args: beta: 0 is the forward KL(teacher || policy), 1 the reverse KL(policy || teacher); between
        them it is the
            generalized Jensen-Shannon divergence ``beta KL(teacher || m) + (1 - beta) KL(policy ||
            m)`` of the mixture ``m = beta teacher + (1 - beta) policy`` (arXiv 2306.13649, section
            2). It is bounded, and not the limit of the two: they are it over beta, and over 1 -
            beta.
        weight_VE: the teacher's LM head; a state is then what goes into it, [E]. None takes a state
            for the log-probs of the teacher's K most likely tokens and their ids, [2 K]: what is
            left of its probability is shared out evenly among the other tokens.
        bias_V: of that head.
    """

    beta: float
    weight_VE: Tensor | None = None
    bias_V: Tensor | None = None

    def chunks(
        self, states: Tensor, vocabulary: int, width: int, temperature: float
    ) -> Iterator[Tensor]:
        """Yield the log-probs of the teacher over the vocabulary, part by part, [N, width] float32
        or wider.

        Args: states: [N, E] or [N, 2 K]. vocabulary: tokens over which they are normalized, the
            first ones. width: tokens in a part. temperature: divides the logits of a head; the most
            likely tokens have it in their log-probs.
        """
        starts = range(0, vocabulary, width)
        if self.weight_VE is None:
            log_probs, tokens = states.chunk(2, -1)
            inside = tokens.long() < vocabulary
            rest = (1 - torch.where(inside, log_probs.exp(), 0.0).sum(-1, keepdim=True)).clamp(
                min=1e-9
            )
            rest = rest.log() - math.log(max(1, vocabulary - log_probs.shape[1]))
            for start in starts:
                size = min(width, vocabulary - start)
                # One more column takes the tokens of other parts.
                place = torch.where(inside, tokens.long() - start, size)
                place = torch.where((place < 0) | (place > size), size, place)
                yield rest.expand(-1, size + 1).scatter(-1, place, log_probs)[:, :size]
            return
        lse_N = _lse(
            self._logits(states, start, width, vocabulary, temperature) for start in starts
        )
        for start in starts:
            yield self._logits(states, start, width, vocabulary, temperature).sub_(lse_N[:, None])

    def _logits(
        self, states: Tensor, start: int, width: int, vocabulary: int, temperature: float
    ) -> Tensor:
        assert self.weight_VE is not None
        part = slice(start, min(start + width, vocabulary))
        bias = None if self.bias_V is None else self.bias_V[part]
        return head_logits(states.to(self.weight_VE.dtype), self.weight_VE[part], bias).div_(
            temperature
        )


def _lse(parts: Iterator[Tensor]) -> Tensor:
    """[N], the logarithm of the summed exponentials of logits that come part by part."""
    total = next(parts).logsumexp(-1)
    for logits in parts:
        total = torch.logaddexp(total, logits.logsumexp(-1))
    return total


def divergence_terms(log_p: Tensor, log_q: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return the divergence of a policy p from a teacher q over a part of the vocabulary, and its
    slope.

    Args:
        log_p: [N, W], of the policy.
        log_q: [N, W], of the teacher.
        beta: as in ``Teacher``.

    Returns: [N], the part's sum; and [N, W], p times the derivative by p. With S the sum of the
        latter over the vocabulary, the derivative by the policy's logits is it less p S.
    """
    p, q = log_p.exp(), log_q.exp()
    if beta == 0:
        return (q * (log_q - log_p)).sum(-1), -q
    if beta == 1:
        slope = p * (log_p - log_q)
        return slope.sum(-1), slope
    log_m = torch.logaddexp(log_q + math.log(beta), log_p + math.log(1 - beta))
    slope = (1 - beta) * p * (log_p - log_m)
    return (beta * q * (log_q - log_m) + slope).sum(-1), slope


class _ChunkedDivergence(torch.autograd.Function):
    """The divergence of ``softmax(hidden @ weight.T / temperature)`` from a teacher at each token."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        states: Tensor,
        teacher: Teacher,
        temperature: float,
        width: int,
    ) -> Tensor:
        ctx.teacher, ctx.temperature, ctx.width = teacher, temperature, width
        lse_N = _lse(_logits(hidden_ND, weight_VD, bias_V, width, temperature))
        total_N, slope_N = torch.zeros_like(lse_N), torch.zeros_like(lse_N)
        pairs = zip(
            _logits(hidden_ND, weight_VD, bias_V, width, temperature),
            teacher.chunks(states, len(weight_VD), width, temperature),
            strict=True,
        )
        for logits, log_q in pairs:
            terms, slope = divergence_terms(logits.sub_(lse_N[:, None]), log_q, teacher.beta)
            total_N, slope_N = total_N + terms, slope_N + slope.sum(-1)
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, states, lse_N, slope_N)
        return total_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, bias_V, states, lse_N, slope_N = ctx.saved_tensors
        teacher, width = ctx.teacher, ctx.width
        grad_hidden = (
            torch.zeros_like(hidden_ND, dtype=lse_N.dtype) if ctx.needs_input_grad[0] else None
        )
        grad_weight = torch.empty_like(weight_VD) if ctx.needs_input_grad[1] else None
        grad_bias = torch.empty_like(bias_V) if ctx.needs_input_grad[2] else None
        pairs = zip(
            _logits(hidden_ND, weight_VD, bias_V, width, ctx.temperature),
            teacher.chunks(states, len(weight_VD), width, ctx.temperature),
            strict=True,
        )
        for number, (logits, log_q) in enumerate(pairs):
            part = slice(number * width, number * width + logits.shape[1])
            log_p = logits.sub_(lse_N[:, None])
            _, slope = divergence_terms(log_p, log_q, teacher.beta)
            grad = slope.sub_(log_p.exp_().mul_(slope_N[:, None])).mul_(
                grad_N[:, None] / ctx.temperature
            )
            if grad_bias is not None:
                grad_bias[part] = grad.sum(0)
            grad = grad.to(hidden_ND.dtype)
            if grad_weight is not None:
                torch.mm(grad.T, hidden_ND, out=grad_weight[part])
            if grad_hidden is not None:
                grad_hidden += grad @ weight_VD[part]
        if grad_hidden is not None:
            grad_hidden = grad_hidden.to(hidden_ND.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def _logits(
    hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, width: int, temperature: float
) -> Iterator[Tensor]:
    """Yield the logits of the policy part by part, [N, width] float32 or wider."""
    for start in range(0, len(weight_VD), width):
        part = slice(start, start + width)
        yield head_logits(
            hidden_ND, weight_VD[part], None if bias_V is None else bias_V[part]
        ).div_(temperature)


def _width(hidden_ND: Tensor, vocabulary: int, most: int | None) -> int:
    """Tokens in a part of the vocabulary; the parts are of equal size."""
    limit = (
        most or MAX_CHUNK_ELEMENTS.get(hidden_ND.device.type, MAX_CHUNK_ELEMENTS["other"])
    ) // _HELD
    chunks = -(-vocabulary // max(1, limit // max(1, len(hidden_ND))))
    return -(-vocabulary // chunks)


def chunked_divergence(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    states: Tensor,
    teacher: Teacher,
    *,
    bias_V: Tensor | None = None,
    temperature: float = 1.0,
    max_chunk_elements: int | None = None,
) -> Tensor:
    """Divergence of a policy from a teacher at each token, over the tokens that both heads have.

    Args: hidden_ND: [N, D], the state from which the policy predicts each token. weight_VD: [V, D],
        the policy's LM head; under autocast both are cast to its dtype. states: [N, E] or [N, 2 K],
        the teacher's, see ``Teacher``; no gradient flows to them. teacher: the divergence, and the
        teacher's head. bias_V: [V] or None, of the policy's head. temperature: the logits of both
        are divided by it; more than 0. max_chunk_elements: bound on the numbers held at once; by
        default ``MAX_CHUNK_ELEMENTS`` of the device.

    Returns:
        [N] in nats, float32 (float64 for float64 input), differentiable.
    """
    device_type = hidden_ND.device.type
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        hidden_ND, weight_VD = hidden_ND.to(dtype), weight_VD.to(dtype)
        bias_V = None if bias_V is None else bias_V.to(dtype)
    if teacher.weight_VE is not None and len(teacher.weight_VE) < len(
        weight_VD
    ):  # rows that no token has
        weight_VD = weight_VD[: len(teacher.weight_VE)]
        bias_V = None if bias_V is None else bias_V[: len(teacher.weight_VE)]
    width = _width(hidden_ND, len(weight_VD), max_chunk_elements)
    with torch.autocast(device_type, enabled=False):
        divergence: Tensor = _ChunkedDivergence.apply(
            hidden_ND, weight_VD, bias_V, states, teacher, temperature, width
        )
    return divergence


def likely_tokens(
    hidden_NE: Tensor,
    weight_VE: Tensor,
    k: int,
    *,
    bias_V: Tensor | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """Return the largest log-probs at each token and then the ids that have them, [N, 2 K] float32.

    An id is exact in float32 up to 16,777,216.

    Args:
        hidden_NE: [N, E], the state from which each token is predicted.
        weight_VE: [V, E], the LM head.
        k: how many, at most V.
        bias_V: [V] or None.
        temperature: the logits are divided by it; more than 0.
    """
    width = _width(hidden_NE, len(weight_VE), None)
    parts = list(_likely_of(_logits(hidden_NE, weight_VE, bias_V, width, temperature), k))
    logits, tokens = (torch.cat([part[index] for part in parts], -1) for index in (1, 2))
    best, place = logits.topk(min(k, logits.shape[1]), -1)
    lse_N = torch.stack([part[0] for part in parts]).logsumexp(0)
    return torch.cat([best - lse_N[:, None], tokens.gather(-1, place)], -1).float()


def _likely_of(parts: Iterator[Tensor], k: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield for each part of the vocabulary its normalizer [N], its largest logits and their
    tokens, [N, K] each.
    """
    start = 0
    for logits in parts:
        best, place = logits.topk(min(k, logits.shape[1]), -1)
        yield logits.logsumexp(-1), best, place + start
        start += logits.shape[1]
