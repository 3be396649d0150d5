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
from torchrl_grpo.models.head import HeadGradients, autocast_head, chunk_width, chunks_of

_ARRAYS = 4
"""Arrays of the size of a chunk that are held at once."""


@dataclass(frozen=True)
class Teacher:
    """The other side of a divergence: the kind of the teacher's states, and of the divergence.

    Args:
        beta: 0 is the forward KL(teacher || policy), 1 the reverse KL(policy || teacher); between
            them it is the generalized Jensen-Shannon divergence ``beta KL(teacher || m) + (1 -
            beta) KL(policy || m)`` of the mixture ``m = beta teacher + (1 - beta) policy`` (arXiv
            2306.13649, section 2). It is bounded, and not the limit of the two: they are it over
            beta, and over 1 - beta.
        weight_VE: the teacher's LM head; a state is then what goes into it, [E]. None takes a state
            for the log-probs of the teacher's K most likely tokens, their ids, and the log of the
            probability of all others, [2 K + 1], which is shared out evenly among these. A server
            does not say the latter: of [2 K], it is 1 less the sum, as exactly as rounding allows.
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

        Args:
            states: [N, E] or [N, 2 K + 1].
            vocabulary: tokens over which they are normalized, the first ones.
            width: tokens in a part.
            temperature: divides the logits of a head; the most likely tokens have it in their
                log-probs.
        """
        if self.weight_VE is None:
            k = states.shape[-1] // 2
            log_probs, tokens, rest = states[:, :k], states[:, k : 2 * k].long(), states[:, 2 * k :]
            if not rest.shape[-1]:
                # In float64, because the sum may round to 1.
                total = log_probs.double().logsumexp(-1, keepdim=True)
                rest = (-total.expm1()).clamp(min=1e-9).log().to(log_probs.dtype)
            rest = rest.clamp(min=-100)  # no -inf, even with a teacher of K tokens
            inside = tokens < vocabulary
            parts = torch.cat([log_probs.where(inside, -math.inf), rest], -1)
            total = parts.logsumexp(-1, keepdim=True)
            log_probs = log_probs - total
            others = (vocabulary - inside.sum(-1, keepdim=True)).clamp(min=1)
            rest = rest - total - others.log()
            for start in range(0, vocabulary, width):
                size = min(width, vocabulary - start)
                # One more column takes the tokens of other parts.
                place = tokens - start
                place = place.where((place >= 0) & (place < size), size)
                yield rest.expand(-1, size + 1).scatter(-1, place, log_probs)[:, :size]
            return
        weight = self.weight_VE[:vocabulary]
        bias = None if self.bias_V is None else self.bias_V[:vocabulary]
        head = (states.to(weight.dtype), weight, bias, width, temperature)
        yield from _log_probs(_lse(_logits(*head)), *head)


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

    Returns:
        [N], the part's sum; and [N, W], p times the derivative by p. With S the sum of the latter
        over the vocabulary, the derivative by the policy's logits is it less p S.
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
        head = (hidden_ND, weight_VD, bias_V, width, temperature)
        lse_N = _lse(_logits(*head))
        total_N, slope_N = torch.zeros_like(lse_N), torch.zeros_like(lse_N)
        others = teacher.chunks(states, len(weight_VD), width, temperature)
        for log_p, log_q in zip(_log_probs(lse_N, *head), others, strict=True):
            terms, slope = divergence_terms(log_p, log_q, teacher.beta)
            total_N, slope_N = total_N + terms, slope_N + slope.sum(-1)
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, states, lse_N, slope_N)
        return total_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, bias_V, states, lse_N, slope_N = ctx.saved_tensors
        gradients = HeadGradients(ctx, hidden_ND, weight_VD, bias_V, lse_N.dtype)
        head = (hidden_ND, weight_VD, bias_V, ctx.width, ctx.temperature)
        chunks = zip(
            chunks_of(weight_VD, bias_V, ctx.width),
            _log_probs(lse_N, *head),
            ctx.teacher.chunks(states, len(weight_VD), ctx.width, ctx.temperature),
            strict=True,
        )
        for (part, weight, _), log_p, log_q in chunks:
            _, slope = divergence_terms(log_p, log_q, ctx.teacher.beta)
            grad = slope.sub_(log_p.exp_().mul_(slope_N[:, None]))
            gradients.add(part, weight, grad.mul_(grad_N[:, None] / ctx.temperature))
        return *gradients.result(), None, None, None, None


def _logits(
    hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, width: int, temperature: float
) -> Iterator[Tensor]:
    """Yield the logits of a head chunk by chunk, [N, width] float32 or wider."""
    for _, weight, bias in chunks_of(weight_VD, bias_V, width):
        yield head_logits(hidden_ND, weight, bias).div_(temperature)


def _log_probs(lse_N: Tensor, *head: Any) -> Iterator[Tensor]:
    """Yield the log-probs of a head (arguments of ``_logits``) whose normalizer is known."""
    return (logits.sub_(lse_N[:, None]) for logits in _logits(*head))


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

    Args:
        hidden_ND: [N, D], the state from which the policy predicts each token.
        weight_VD: [V, D], the policy's LM head; under autocast both are cast to its dtype.
        states: [N, E] or [N, 2 K + 1], the teacher's, see ``Teacher``; no gradient flows to them.
        teacher: the divergence, and the teacher's head.
        bias_V: [V] or None, of the policy's head.
        temperature: the logits of both are divided by it; more than 0.
        max_chunk_elements: bound on the numbers held at once; by default ``MAX_CHUNK_ELEMENTS`` of
            the device.

    Returns:
        [N] in nats, float32 (float64 for float64 input), differentiable.
    """
    hidden_ND, weight_VD, bias_V = autocast_head(hidden_ND, weight_VD, bias_V)
    if teacher.weight_VE is not None and len(teacher.weight_VE) < len(weight_VD):
        # Rows that no token has.
        weight_VD = weight_VD[: len(teacher.weight_VE)]
        bias_V = None if bias_V is None else bias_V[: len(teacher.weight_VE)]
    width = chunk_width(hidden_ND, len(weight_VD), max_chunk_elements, _ARRAYS)
    with torch.autocast(hidden_ND.device.type, enabled=False):
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
    """Return the largest log-probs at each token, the ids that have them, and the log of the
    probability of all others, [N, 2 K + 1] float32.

    An id is exact in float32 up to 16,777,216.

    Args:
        hidden_NE: [N, E], the state from which each token is predicted.
        weight_VE: [V, E], the LM head.
        k: how many, at most V.
        bias_V: [V] or None.
        temperature: the logits are divided by it; more than 0.
    """
    width = chunk_width(hidden_NE, len(weight_VE), arrays=_ARRAYS)
    likely_logits, likely_ids, others = [], [], []
    for number, logits in enumerate(_logits(hidden_NE, weight_VE, bias_V, width, temperature)):
        best, place = logits.topk(min(k, logits.shape[1]), -1)
        likely_logits.append(best)
        likely_ids.append(place + number * width)
        others.append(logits.scatter_(-1, place, -math.inf).logsumexp(-1, keepdim=True))
    candidates = torch.cat(likely_logits, -1)
    best, place = candidates.topk(min(k, candidates.shape[1]), -1)
    tokens = torch.cat(likely_ids, -1).gather(-1, place)
    unlikely = candidates.scatter(-1, place, -math.inf)
    rest = torch.cat([unlikely, *others], -1).logsumexp(-1, keepdim=True)
    lse = torch.cat([best, rest], -1).logsumexp(-1, keepdim=True)
    return torch.cat([best - lse, tokens, rest - lse], -1).float()
