"""A weight that is embedding and LM head: the embedding's gradient is added to the head's, row by row, where it lies.

PyTorch makes one as large as the weight, nearly all of it zeros, and sums the two into a third. With a vocabulary of
152k these are the largest tensors of a pass.

Shape suffixes: N tokens, R different tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_grpo.models.sharding import mesh_of


class _Tied(torch.autograd.Function):
    """The weight twice: for the embedding, with a sparse gradient, and for the head, with a gradient of its own."""

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
        ctx: Any, weight_VD: Tensor, tokens: Tensor, once_R: Tensor, place_N: Tensor, padding: int | None
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
        sparse = torch.sparse_coo_tensor(once_R[None], rows_RD, ctx.shape, check_invariants=False, is_coalesced=True)
        return sparse, None, None, None, None


def tied_embedding(base: Any) -> nn.Embedding | None:
    """Return a single-rank model's embedding if it is trained, is also the head, and fits ``tied_rows``."""
    embedding = base.get_input_embeddings()
    plain = type(embedding) is nn.Embedding and embedding.max_norm is None and not embedding.scale_grad_by_freq
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
    """Make a tied embedding compute its rows this way for N tokens; return the weight that the head must use.

    The gradient of that weight is changed in place, so that whoever computes it must not keep it.

    Args:
        embedding: of the model.
        once_R: each of the tokens once, in order.
        place_N: where in ``once_R`` each token is.
    """
    for_embedding, for_head = _Tied.apply(embedding.weight)

    def rows(module: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> Tensor:
        taken: Tensor = _Rows.apply(for_embedding, given[0], once_R, place_N, embedding.padding_idx)
        return taken

    with embedding.register_forward_hook(rows, prepend=True):
        yield for_head
