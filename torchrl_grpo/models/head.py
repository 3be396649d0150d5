"""Log-probs of given tokens and the entropy of their distributions, from hidden states and the
weight of the LM head.

The head runs in chunks of the vocabulary, and is computed again in backward, so the logits of a
batch never exist at once: the peak is one chunk (``MAX_CHUNK_ELEMENTS``). Of a weight that is the
embedding too (``tied_embedding``), the embedding's gradient is added to the head's, row by row,
where it lies: PyTorch makes one as large as the weight, nearly all of it zeros, and sums the two
into a third. With a vocabulary of 152k these are the largest tensors of a pass.

Shape suffixes: N scored tokens, R different tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_grpo.functional import head_logits, rounds_logits
from torchrl_grpo.models.compiled import Compiled
from torchrl_grpo.models.sharding import mesh_of

Centering = Callable[[Tensor, Tensor], Tensor]
"""The trainer's and the sampler's log-probs of kept tokens -> shares in the mean score; all [N, K].
"""
MAX_CHUNK_ELEMENTS = {"cpu": 2**21, "other": 2**25, "cuda": 2**27}
"""Logits held at once: in float32 8 MiB, which fits a CPU's caches, 128 MiB to keep an accelerator
busy, and up to 512 MiB on CUDA, but there at most 1/128 of the memory (``_most_elements``).
"""
ALIGNED = 64
"""Large chunks of the vocabulary are multiples of this many tokens (``chunk_width``)."""


def _most_elements(hidden_ND: Tensor, most: int | None) -> int:
    """Return a bound on the numbers held at once, by default the device's bound."""
    device = hidden_ND.device
    limit = MAX_CHUNK_ELEMENTS.get(device.type, MAX_CHUNK_ELEMENTS["other"])
    if device.type == "cuda":
        limit = min(limit, torch.cuda.get_device_properties(device).total_memory // (4 * 128))
    return most or limit


def chunk_width(
    hidden_ND: Tensor, vocabulary: int, max_elements: int | None = None, arrays: int = 1
) -> int:
    """Return the tokens in a chunk of the vocabulary; the chunks are of about equal size.

    Large chunks are multiples of ``ALIGNED`` tokens: where the rows of a matrix do not begin at
    multiples of 16 bytes, cuBLAS falls back to kernels that are several times slower.

    Args:
        hidden_ND: [N, D].
        vocabulary: number of tokens.
        max_elements: bound on the numbers held at once; by default ``MAX_CHUNK_ELEMENTS``.
        arrays: how many arrays of the size of a chunk are held at once.
    """
    limit = _most_elements(hidden_ND, max_elements) // arrays
    chunks = -(-vocabulary // max(1, limit // max(1, len(hidden_ND))))
    width = -(-vocabulary // chunks)
    return -(-width // ALIGNED) * ALIGNED if width >= 16 * ALIGNED else width


def chunks_of(
    weight_VD: Tensor, bias_V: Tensor | None, width: int
) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Yield the chunks of a vocabulary, each with its part of the LM head's weight and bias."""
    for start in range(0, len(weight_VD), width):
        part = slice(start, start + width)
        yield part, weight_VD[part], None if bias_V is None else bias_V[part]


def autocast_head(
    hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return an LM head and its input in the dtype of autocast, if it is enabled."""
    device_type = hidden_ND.device.type
    if not torch.is_autocast_enabled(device_type):
        return hidden_ND, weight_VD, bias_V
    dtype = torch.get_autocast_dtype(device_type)
    bias_V = None if bias_V is None else bias_V.to(dtype)
    return hidden_ND.to(dtype), weight_VD.to(dtype), bias_V


class HeadGradients:
    """Gradients of an LM head and its input, computed chunk by chunk of the vocabulary.

    Args:
        ctx: of an autograd function whose first three inputs are the others.
        hidden_ND: [N, D].
        weight_VD: [V, D].
        bias_V: [V] or None.
        dtype: in which the gradient of the input is summed.
    """

    def __init__(
        self,
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        self._input = hidden_ND
        self._hidden = torch.zeros_like(hidden_ND, dtype=dtype) if needs_hidden else None
        self._weight = torch.empty_like(weight_VD) if needs_weight else None
        self._bias = torch.empty_like(bias_V) if needs_bias and bias_V is not None else None

    def add(self, part: slice, weight: Tensor, grad: Tensor) -> None:
        """Add the gradient of a chunk's logits to those of input, weight and bias.

        Args:
            part: the chunk.
            weight: its part of the head's weight.
            grad: [N, width].
        """
        if self._bias is not None:
            self._bias[part] = grad.sum(0)
        grad = grad.to(self._input.dtype)
        if self._weight is not None:
            torch.mm(grad.T, self._input, out=self._weight[part])
        if self._hidden is not None and self._hidden.dtype == grad.dtype:
            self._hidden.addmm_(grad, weight)
        elif self._hidden is not None:
            self._hidden += grad @ weight

    def result(self) -> tuple[Tensor | None, ...]:
        """Return the gradients of input, weight and bias; None where none is needed."""
        hidden = None if self._hidden is None else self._hidden.to(self._input.dtype)
        return hidden, self._weight, self._bias


def _target_logits(
    hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets_N: Tensor, scale: float
) -> Tensor | None:
    """Return the targets' logits in float32 if ``head_logits`` rounds to 16 bits; otherwise None.

    Rounding moves a log-prob by what it does to the target's own logit: in the normalizer it
    averages out.
    """
    if not rounds_logits(hidden_ND):
        return None
    at_once = max(1, MAX_CHUNK_ELEMENTS["cpu"] // hidden_ND.shape[1])
    parts = [
        (hidden.float() * weight_VD[targets].float()).sum(-1)
        for hidden, targets in zip(hidden_ND.split(at_once), targets_N.split(at_once), strict=True)
    ]
    logits_N = torch.cat(parts) if bias_V is None else torch.cat(parts) + bias_V[targets_N].float()
    return logits_N.mul_(scale)


class _ChunkedLogProb(torch.autograd.Function):
    """``log_softmax(hidden @ weight.T / temperature)`` at the targets, and its entropy.

    It goes through the vocabulary in chunks, so that each part of the head and of its gradient is
    touched once. The normalizer covers the chunks so far.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        scale: float,
        width: int,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden_ND.dtype, torch.float32)
        most_N = torch.full(targets_N.shape, -math.inf, dtype=dtype, device=hidden_ND.device)
        total_N, weighted_N, logit_N = (torch.zeros_like(most_N) for _ in range(3))
        exact_N = _target_logits(hidden_ND, weight_VD, bias_V, targets_N, scale)
        for _, _, *chunk in _chunks(hidden_ND, weight_VD, bias_V, targets_N, exact_N, scale, width):
            most_N, total_N, weighted_N, logit_N = _add_chunk(
                *chunk, most_N, total_N, weighted_N, logit_N
            )
        logit_N = logit_N if exact_N is None else exact_N
        lse_N = most_N + total_N.log()
        log_prob_N, entropy_N = logit_N - lse_N, lse_N - weighted_N / total_N
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, targets_N, lse_N, entropy_N, exact_N)
        ctx.scale, ctx.width = scale, width
        ctx.set_materialize_grads(False)
        return log_prob_N, entropy_N

    @staticmethod
    def backward(
        ctx: Any, grad_log_prob_N: Tensor | None, grad_entropy_N: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, bias_V, targets_N, lse_N, entropy_N, exact_N = ctx.saved_tensors
        if grad_log_prob_N is None:
            if grad_entropy_N is None:
                return (None,) * 6
            grad_log_prob_N = torch.zeros_like(grad_entropy_N)
        gradients = HeadGradients(ctx, hidden_ND, weight_VD, bias_V, lse_N.dtype)
        slope = grad_log_prob_N[:, None] * -ctx.scale
        of_entropy = None if grad_entropy_N is None else grad_entropy_N[:, None] * -ctx.scale
        dtype = lse_N.dtype if ctx.needs_input_grad[2] else hidden_ND.dtype
        for part, weight, *chunk in _chunks(
            hidden_ND, weight_VD, bias_V, targets_N, exact_N, ctx.scale, ctx.width
        ):
            (grad,) = _chunk_gradient(*chunk, lse_N, entropy_N, slope, of_entropy, dtype)
            gradients.add(part, weight, grad)
        return *gradients.result(), None, None, None


def _chunks(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    exact_N: Tensor | None,
    scale: float,
    width: int,
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor, Tensor]]:
    """Yield each chunk of the vocabulary, its part of the head, its logits, each target's position
    in the chunk that has it, [N], and whether that is this one, [N] bool.
    """
    place_N, chunk_N = targets_N % width, targets_N // width
    for number, (part, weight, bias) in enumerate(chunks_of(weight_VD, bias_V, width)):
        logits = head_logits(hidden_ND, weight, bias)
        if scale != 1.0:
            logits.mul_(scale)
        if logits.shape[1] < width:  # the last chunk
            place_N = place_N.clamp(max=logits.shape[1] - 1)
        inside_N = chunk_N == number
        if exact_N is not None:
            logit_N = torch.where(inside_N, exact_N, _at(logits, place_N))
            logits.scatter_(-1, place_N[:, None], logit_N[:, None])
        yield part, weight, logits, place_N, inside_N


def _at(logits: Tensor, place_N: Tensor) -> Tensor:
    return logits.gather(-1, place_N[:, None]).squeeze(-1)


@Compiled
def _add_chunk(
    logits: Tensor,
    place_N: Tensor,
    inside_N: Tensor,
    most_N: Tensor,
    total_N: Tensor,
    weighted_N: Tensor,
    logit_N: Tensor,
) -> tuple[Tensor, ...]:
    """Return the largest logit so far, the sums of the exponentials less it, plain and weighted
    with the logits, and the target's logit.
    """
    new_N = torch.maximum(most_N, logits.amax(-1))
    exps, shrink_N = (logits - new_N[:, None]).exp_(), (most_N - new_N).exp_()
    total_N = total_N * shrink_N + exps.sum(-1)
    weighted_N = weighted_N * shrink_N + exps.mul_(logits).sum(-1)
    logit_N = torch.where(inside_N, _at(logits, place_N), logit_N)
    return new_N, total_N, weighted_N, logit_N


@Compiled
def _chunk_gradient(
    logits: Tensor,
    place_N: Tensor,
    inside_N: Tensor,
    lse_N: Tensor,
    entropy_N: Tensor,
    slope_N1: Tensor,
    of_entropy_N1: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor]:
    """Return the gradient of a chunk's logits, in whose place it is computed unless this is
    compiled.
    """
    is_compiled = torch.compiler.is_compiling()
    log_p = (logits.clone() if is_compiled else logits).sub_(lse_N[:, None])
    # Times the temperature: dlogp(y)/dlogit = onehot(y) - p;  dH/dlogit = -p (log p + H)
    if of_entropy_N1 is None:
        grad = log_p.exp_().mul_(slope_N1)
    else:
        prob = log_p.exp()
        grad = log_p.add_(entropy_N[:, None]).mul_(of_entropy_N1).add_(slope_N1).mul_(prob)
    of_target_N1 = -slope_N1 * inside_N[:, None]
    if is_compiled:  # into the same kernel, which a scatter would not be
        columns = torch.arange(logits.shape[1], device=logits.device)
        grad = grad + torch.where(columns == place_N[:, None], of_target_N1, 0)
    else:
        grad.scatter_add_(-1, place_N[:, None], of_target_N1)
    return (grad.to(dtype),)


def chunked_log_probs(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    *,
    bias_V: Tensor | None = None,
    kept: Sequence[Tensor] = (),
    sample_NK: Tensor | None = None,
    centering: Centering | None = None,
    temperature: float = 1.0,
    max_chunk_elements: int | None = None,
) -> tuple[Tensor, ...]:
    """Log-probs of the targets and entropy of their distributions, from hidden states and the LM
    head.

    Args:
        hidden_ND: [N, D], the state from which each target is predicted.
        weight_VD: [V, D], the LM head; under autocast both are cast to its dtype.
        targets_N: [N] int64.
        bias_V: [V] or None.
        kept: the tokens that each target was drawn from, and then -1, as ``unique`` with
            ``return_inverse`` gives them: [R] int32, each once, and [N, K] int64, where in it each
            is. The distributions are over these only; () for the whole vocabulary.
        sample_NK: [N, K] float32, their log-probs under the sampling policy, for ``centering``.
        centering: returns the share of each kept token in the mean score, without gradient.
        temperature: the logits are divided by it; more than 0.
        max_chunk_elements: bound on the logits (with ``kept``, the numbers of gathered rows of
            the head) held at once; by default ``MAX_CHUNK_ELEMENTS`` of the device.

    Returns:
        log-probs [N] and entropies [N] in nats, float32 (float64 for float64 input),
        differentiable. A target that is not kept has -inf. With ``centering``, also the sums [N] of
        share times log-prob, whose gradient is the mean score.
    """
    hidden_ND, weight_VD, bias_V = autocast_head(hidden_ND, weight_VD, bias_V)
    if kept:
        limit = _most_elements(hidden_ND, max_chunk_elements)
        rows = max(1, limit // (kept[1].shape[1] * hidden_ND.shape[1]))
        with torch.autocast(hidden_ND.device.type, enabled=False):
            scores: tuple[Tensor, ...] = _KeptLogProb.apply(
                hidden_ND,
                weight_VD,
                bias_V,
                targets_N,
                *kept,
                1.0 / temperature,
                rows,
                sample_NK,
                centering,
            )
            return scores if centering else scores[:2]
    width = chunk_width(hidden_ND, len(weight_VD), max_chunk_elements)
    with torch.autocast(hidden_ND.device.type, enabled=False):
        return _ChunkedLogProb.apply(
            hidden_ND, weight_VD, bias_V, targets_N, 1.0 / temperature, width
        )


class _KeptLogProb(torch.autograd.Function):
    """``_ChunkedLogProb`` of distributions over some tokens each; it goes through the scored tokens
    in parts, and gathers the rows of the head that each part needs.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        once_R: Tensor,
        place_NK: Tensor,
        scale: float,
        rows: int,
        sample_NK: Tensor | None,
        centering: Centering | None,
    ) -> tuple[Tensor, ...]:
        kept_NK = once_R[place_NK]
        dtype = torch.promote_types(hidden_ND.dtype, torch.float32)
        logits_NK = torch.zeros(kept_NK.shape, dtype=dtype, device=hidden_ND.device)
        for logits, kept, hidden in zip(
            *(values.split(rows) for values in (logits_NK, kept_NK.clamp(min=0), hidden_ND)),
            strict=True,
        ):
            head_NKD = weight_VD[kept].to(dtype)
            torch.bmm(head_NKD, hidden.to(dtype)[:, :, None], out=logits[:, :, None])
            if bias_V is not None:
                logits += bias_V[kept]
        none_NK = kept_NK < 0
        log_p_NK = logits_NK.mul_(scale).masked_fill_(none_NK, -math.inf).log_softmax(-1)
        target_NK = kept_NK == targets_N[:, None]
        log_prob_N = log_p_NK.masked_fill(~target_NK, -math.inf).amax(-1)
        p_NK, log_p_NK = log_p_NK.exp(), log_p_NK.masked_fill_(none_NK, 0.0)
        entropy_N = -(p_NK * log_p_NK).sum(-1)
        share_NK, centering_N = None, torch.zeros_like(entropy_N)
        if centering is not None and sample_NK is not None:
            share_NK = centering(log_p_NK, sample_NK)
            centering_N = (share_NK * log_p_NK).sum(-1)
        saved = once_R, place_NK, target_NK, p_NK, log_p_NK, entropy_N, share_NK
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, *saved)
        ctx.scale, ctx.rows = scale, rows
        return log_prob_N, entropy_N, centering_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, bias_V, once_R, place_NK, *of_kept = ctx.saved_tensors
        target_NK, p_NK, log_p_NK, entropy_N, share_NK = of_kept
        grad_log_prob_N, grad_entropy_N, grad_centering_N = grads
        grad_NK = (target_NK.to(p_NK.dtype) - p_NK) * grad_log_prob_N[:, None]
        grad_NK -= p_NK * (log_p_NK + entropy_N[:, None]) * grad_entropy_N[:, None]
        if share_NK is not None:
            centered_NK = share_NK - p_NK * share_NK.sum(-1, keepdim=True)
            grad_NK += centered_NK * grad_centering_N[:, None]
        grad_NK *= ctx.scale
        once_R = once_R.clamp(min=0)
        kept_NK = once_R[place_NK]
        hidden_grad_ND = torch.empty_like(hidden_ND)
        # In float32 or wider, of the rows that are kept anywhere.
        weight_grad = grad_NK.new_zeros(len(once_R), weight_VD.shape[1])
        parts = (hidden_grad_ND, hidden_ND, grad_NK, kept_NK, place_NK)
        for hidden_grad, hidden, grad, kept, place in zip(
            *(values.split(ctx.rows) for values in parts), strict=True
        ):
            head_NKD = weight_VD[kept].to(grad.dtype)
            hidden_grad.copy_(torch.bmm(grad[:, None], head_NKD)[:, 0])
            if ctx.needs_input_grad[1]:
                rows_NKD = torch.mul(grad[:, :, None], hidden.to(grad.dtype)[:, None], out=head_NKD)
                weight_grad.index_add_(0, place.flatten(), rows_NKD.flatten(0, 1))
        weight_grad_VD = bias_grad_V = None
        if ctx.needs_input_grad[1]:
            weight_grad_VD = torch.zeros_like(weight_VD)
            # What is not kept adds zeros to the first row.
            weight_grad_VD.index_add_(0, once_R, weight_grad.to(weight_VD.dtype))
        if bias_V is not None and ctx.needs_input_grad[2]:
            summed = grad_NK.new_zeros(len(bias_V))
            bias_grad_V = summed.index_add_(0, kept_NK.flatten(), grad_NK.flatten())
            bias_grad_V = bias_grad_V.to(bias_V.dtype)
        return hidden_grad_ND, weight_grad_VD, bias_grad_V, *(None,) * 7


class _Tied(torch.autograd.Function):
    """The weight twice: for the embedding, with a sparse gradient, and for the head, with a
    gradient of its own.
    """

    @staticmethod
    def forward(ctx: Any, weight_VD: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return weight_VD.view_as(weight_VD), weight_VD.view_as(weight_VD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Tensor | None:
        rows, of_head_VD = grads
        if rows is None or of_head_VD is None:
            return of_head_VD if rows is None else rows.to_dense()
        return of_head_VD.index_add_(0, rows.indices()[0], rows.values())


class _Rows(torch.autograd.Function):
    """``weight[tokens]``, with a sparse gradient: the sums of the dense one, in the same order."""

    @staticmethod
    def forward(
        ctx: Any,
        weight_VD: Tensor,
        tokens: Tensor,
        once_R: Tensor,
        place_N: Tensor,
        padding: int | None,
    ) -> Tensor:
        ctx.save_for_backward(once_R, place_N)
        ctx.shape, ctx.padding = weight_VD.shape, padding
        return weight_VD[tokens]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        once_R, place_N = ctx.saved_tensors
        grad_ND = grads[0].reshape(len(place_N), -1)
        rows_RD = torch.ops.aten.embedding_dense_backward(grad_ND, place_N, len(once_R), -1, False)
        if ctx.padding is not None:
            rows_RD = rows_RD.masked_fill((once_R == ctx.padding)[:, None], 0.0)
        # The rows are in order, each once.
        sparse = torch.sparse_coo_tensor(
            once_R[None], rows_RD, ctx.shape, check_invariants=False, is_coalesced=True
        )
        return sparse, None, None, None, None


def tied_embedding(base: Any) -> nn.Embedding | None:
    """Return a single-rank model's embedding if it is trained, is also the head, and fits
    ``tied_rows``.
    """
    embedding = base.get_input_embeddings()
    plain = (
        type(embedding) is nn.Embedding
        and embedding.max_norm is None
        and not embedding.scale_grad_by_freq
    )
    if (
        not plain
        or embedding.weight is not base.get_output_embeddings().weight
        or mesh_of(base) is not None
        or torch.compiler.is_compiling()
    ):
        return None
    return embedding if embedding.weight.requires_grad and torch.is_grad_enabled() else None


@contextmanager
def tied_rows(embedding: nn.Embedding, once_R: Tensor, place_N: Tensor) -> Iterator[Tensor]:
    """Make a tied embedding compute its rows this way for N tokens; return the weight that the head
    must use.

    The gradient of that weight is changed in place, so its producer must not keep it.

    Args:
        embedding: of the model.
        once_R: each of the tokens once, in order.
        place_N: where in ``once_R`` each token is.
    """
    for_embedding, for_head = _Tied.apply(embedding.weight)

    def rows(module: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> Any:
        return _Rows.apply(for_embedding, inputs[0], once_R, place_N, embedding.padding_idx)

    with embedding.register_forward_hook(rows, prepend=True):
        yield for_head
