"""Sampling from logits: the distribution and one draw from it, as pure functions on tensors.

Log-probs always come from the distribution that the token was drawn from, in float32. A draw
inverts the cumulative distribution at a uniform random number: with a vocabulary of 32,000 that
costs half as much as Gumbel noise, and a draw depends only on its own row and number, never on the
other rows of the batch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchrl_grpo.generation.base import SamplingParams, greedy

_BLOCK = 256
"""Tokens in each of the blocks that the first of the two searches compares."""

_CPU_ELEMENTS, _GPU_ELEMENTS = 2**18, 2**27
"""Logits that are processed at once. This bounds memory; on a CPU it also keeps temporaries small
enough for the allocator to reuse: fresh pages for [64, 32000] would take several times longer than
the arithmetic.
"""


def sampling_probs(logits: Tensor, params: SamplingParams) -> Tensor:
    """Return the distribution that tokens are drawn from.

    Temperature comes first; then ``min_p`` keeps the tokens of at least that share of the largest
    probability; then ``top_k`` keeps the most likely tokens (with all that tie with the last one);
    then ``top_p`` keeps the smallest set of most likely tokens with that share of the remaining
    mass. Greedy sampling uses temperature 1.

    Args:
        logits: [B, V], any floating dtype.
        params: parameters of sampling.

    Returns:
        [B, V] float32 probabilities.
    """
    logits = logits.float()
    if greedy(params):
        return logits.softmax(-1)
    if params.temperature != 1:
        logits = logits / params.temperature
    if params.min_p:
        logits = logits.masked_fill(
            logits < logits.amax(-1, keepdim=True) + math.log(params.min_p), -torch.inf
        )
    if 0 < params.top_k < logits.shape[-1]:
        smallest_kept = logits.topk(params.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest_kept, -torch.inf)
    probs = logits.softmax(-1)
    if params.top_p < 1:
        ordered, index = probs.sort(dim=-1, descending=True)
        mass_before = ordered.cumsum(-1) - ordered
        kept = ordered.masked_fill(mass_before >= params.top_p, 0)
        # Divided by their sum, because a second softmax would compute all exponentials again.
        probs = torch.zeros_like(probs).scatter_(-1, index, kept / kept.sum(-1, keepdim=True))
    return probs


def invert_cdf(probs: Tensor, uniform: Tensor) -> Tensor:
    """Return the tokens at which cumulative distributions pass uniform numbers.

    The search has two levels, so that only sums of blocks and one block per row are accumulated.

    Args:
        probs: [B, V] float32, rows with a positive sum; they are normalized here.
        uniform: [B] in [0, 1); sums are accumulated in its dtype, float64 if the device has it.

    Returns:
        [B] int64 tokens, each of positive probability.
    """
    vocab_size = probs.shape[-1]
    if vocab_size <= _BLOCK:
        return _first_above(probs, uniform)[0]
    whole = vocab_size // _BLOCK * _BLOCK
    sums = probs[:, :whole].unflatten(-1, (-1, _BLOCK)).sum(-1)
    if whole < vocab_size:
        sums = torch.cat((sums, probs[:, whole:].sum(-1, keepdim=True)), -1)
    block, rest = _first_above(sums, uniform)
    index = block.unsqueeze(-1) * _BLOCK + torch.arange(_BLOCK, device=probs.device)
    inside = probs.gather(-1, index.clamp(max=vocab_size - 1)).masked_fill_(index >= vocab_size, 0)
    return (block * _BLOCK + _first_above(inside, rest)[0]).clamp_(
        max=vocab_size - 1
    )  # for weights that are NaN


def _first_above(weights: Tensor, fraction: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first index whose cumulative weight exceeds ``fraction`` of the sum, and the
    fraction of that index's own weight at which this happens.

    Args:
        weights: [B, N] float32.
        fraction: [B] in [0, 1).

    Returns:
        [B] int64 indices, each of positive weight, and [B] fractions in [0, 1).
    """
    cumulative = weights.cumsum(-1, dtype=fraction.dtype)
    target = fraction.unsqueeze(-1) * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, target, right=True).clamp_(max=weights.shape[-1] - 1)
    weight = weights.gather(-1, index).to(fraction.dtype)
    before = cumulative.gather(-1, index) - weight
    # Rounding can put the target just outside its interval.
    rest = ((target - before) / weight).clamp_(0, 1 - 2**-24)
    return index.squeeze(-1), rest.squeeze(-1)


def sample(logits: Tensor, params: SamplingParams, uniform: Tensor) -> tuple[Tensor, ...]:
    """Draw one token per row.

    Args:
        logits: [B, V], any floating dtype.
        params: parameters of sampling.
        uniform: [B] in [0, 1), float64 if the device has it; the only source of randomness. Not
            read when greedy.

    Returns:
        [B] int64 tokens, [B] float32 log-probs of the distribution that they were drawn from, and
        [B, top_k] int32 tokens of that distribution, padded with -1, and their log-probs, padded
        with -inf; [B, 0] for what the parameters do not ask for.
    """
    at_once = max(
        1, (_CPU_ELEMENTS if logits.device.type == "cpu" else _GPU_ELEMENTS) // logits.shape[-1]
    )
    slices = zip(logits.split(at_once), uniform.split(at_once), strict=True)
    parts = [_sample(some_logits, params, some_uniform) for some_logits, some_uniform in slices]
    return tuple(map(torch.cat, zip(*parts, strict=True)))


def _sample(logits: Tensor, params: SamplingParams, uniform: Tensor) -> tuple[Tensor, ...]:
    probs = sampling_probs(logits, params)
    if params.return_kept:
        probs, ids = probs.topk(min(params.top_k, probs.shape[-1]))
        place = invert_cdf(probs, uniform).unsqueeze(-1)
        log_probs = (probs.gather(-1, place).squeeze(-1) / probs.sum(-1)).log()
        kept = torch.nn.functional.pad(
            ids.masked_fill(probs == 0, -1).int(), (0, params.top_k - ids.shape[1]), value=-1
        )
        of_kept = probs.new_empty((len(probs), 0))
        if params.return_kept_log_probs:
            of_kept = (probs / probs.sum(-1, keepdim=True)).log()
            missing = params.top_k - ids.shape[1]
            of_kept = torch.nn.functional.pad(of_kept, (0, missing), value=-torch.inf)
        return ids.gather(-1, place).squeeze(-1), log_probs, kept, of_kept
    tokens = logits.argmax(-1) if greedy(params) else invert_cdf(probs, uniform)
    log_probs = probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).log()
    nothing = log_probs.new_empty((len(tokens), 0))
    return tokens, log_probs, nothing.int(), nothing
