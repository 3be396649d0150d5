"""A hand-written decoder for models of the Llama architecture: Llama, Mistral, Qwen2 and Qwen3.

It is faster than the model's own forward because the query, key and value projections are one
matrix, and so are gate and up; keys and values are in tensors that grow in blocks; the query heads
of a group are laid out as query positions, so that grouped-query attention repeats nothing; and
masks and positions are prepared once per step, not per layer.

The fused matrices own the storage, and the model's own parameters become views of them. Writing
new values into the model's parameters therefore updates this decoder.

On a CPU, a matrix product with the few rows of a decoding step would spend up to half of its time
reordering the weight for the kernel. So each batch begins by packing the weights that have changed,
through oneDNN, which costs a second copy of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrl import torchrl_logger
from transformers import PreTrainedModel

from torchrl_grpo.compat.torch import pack_linear, packed_linear, packs_linear, version_of
from torchrl_grpo.functional import head_logits
from torchrl_grpo.generation.adapters import join_adapters
from torchrl_grpo.generation.decoder import Batch, Decoder
from torchrl_grpo.images import Prompt, text_tokens

_LEAST = 2**17
"""Smallest weight that is packed, in elements: for smaller ones the call costs more than it
saves.
"""
_ROWS = 64
"""Number of rows that the packed order is optimized for; it suits other numbers too."""


class PackedLinear:
    """``x @ weight.T + bias``, plus adapters and an optional residual.

    Args:
        weight: [out, in], of which the weights of ``layers`` are views.
        bias: [out] or None.
        layers: ``refresh`` checks them for changed weights and for adapters.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, layers: tuple[nn.Linear, ...]) -> None:
        self._weight, self._bias, self._layers = weight, bias, layers
        self._adapters: tuple[Tensor, Tensor] | None = None
        self._packed: Tensor | None = None
        self._versions: list[int] | None = None
        self._packs = weight.numel() >= _LEAST and packs_linear(weight)

    def refresh(self) -> bool:
        """Pack the weight if it has changed, and take the layers' adapters. Return whether any
        memory that calls read is no longer the same.
        """
        before, self._adapters = self._adapters, join_adapters(self._layers)
        versions = [version_of(layer.weight) for layer in self._layers]
        if self._packs and versions != self._versions:
            self._packed = pack_linear(self._weight, _ROWS)
            self._versions = versions
        return (before or self._adapters) is not None

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[N, in] to [N, out]; ``residual`` is [N, out]."""
        if self._adapters is not None:
            a, b = self._adapters
            added = x @ a.T @ b.T
            residual = added if residual is None else added + residual
        if self._packed is not None:
            return packed_linear(x, self._packed, self._bias, residual)
        if residual is None:
            return F.linear(x, self._weight, self._bias)
        if self._bias is not None:
            residual = residual + self._bias
        return torch.addmm(residual, x, self._weight.t())


_MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
_STATIC_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
_PREFILL_TOKENS = 8192
"""Maximum prompt tokens, padding included, of one forward pass; it bounds the memory of the
activations.
"""

_BLOCK = 64
"""Columns by which the cache of responses grows."""

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [N, Hq, D], k [N, Hkv, D], v [N, Hkv, D]) -> [N, Hq * D]"""


class _Layer:
    """A decoder layer with fused weights."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.attention = attention
        self.mlp = mlp
        self.input_norm = layer.input_layernorm
        self.post_norm = layer.post_attention_layernorm
        self.qkv = _join(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out = _join(attention.o_proj)
        self.gate_up = _join(mlp.gate_proj, mlp.up_proj)
        self.down = _join(mlp.down_proj)
        self.linears = (self.qkv, self.out, self.gate_up, self.down)


def can_fuse(model: PreTrainedModel) -> bool:
    """Return whether :class:`FusedDecoder` supports the model's architecture."""
    config = model.config
    if config.model_type not in _MODEL_TYPES:
        return False
    slides = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    if config.model_type == "mistral":
        slides = config.sliding_window is not None
    # Adapters and quantized layers replace a linear layer and keep its attributes.
    plain = all(
        type(linear) is nn.Linear
        for layer in model.model.layers
        for name, linear in layer.named_modules()
        if name.endswith("_proj")
    )
    return plain and not slides and config.rope_parameters["rope_type"] in _STATIC_ROPE_TYPES


class FusedDecoder(Decoder):
    """Decodes with fused weights; prompts are padded on the right.

    Attributes:
        static: whether steps use the few shapes that CUDA graphs need; False after a graph could
            not be captured.

    Args:
        model: a model that :func:`can_fuse` accepts; its projections become views of the fused
            matrices.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        body, config = model.model, model.config
        attention = body.layers[0].self_attn
        self.head_dim: int = attention.head_dim
        self.kv_heads: int = config.num_key_value_heads
        self.query_heads: int = config.num_attention_heads
        self.scaling: float = attention.scaling
        self.num_layers = len(body.layers)
        self._body = body
        self._lm_head = model.lm_head
        self._layers = [_Layer(layer) for layer in body.layers]
        self._head = _join(model.lm_head)
        self.static = self.device.type == "cuda"

    @property
    def device(self) -> torch.device:
        return self._lm_head.weight.device

    def start(self, max_new_tokens: int) -> Batch:
        linears = [linear for layer in self._layers for linear in layer.linears]
        if any([linear.refresh() for linear in (self._head, *linears)]):
            self.kept = None
        return (_StaticBatch if self.static else _FusedBatch)(self, max_new_tokens)

    def cache_bytes(self, prompt_length: int, n: int, max_new_tokens: int) -> int:
        per_token = (
            2 * self.num_layers * self.kv_heads * self.head_dim * self._lm_head.weight.itemsize
        )
        return (prompt_length * (n if self.static else 1) + n * max_new_tokens) * per_token

    def empty_cache(self, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Return empty tensors for a layer's keys, [rows, Hkv, D, length], and values, [rows, Hkv,
        length, D].

        Each has the order that its matrix product is fastest with: with transposed keys the product
        takes twice as long in bfloat16 on a CPU.
        """
        weight = self._lm_head.weight
        shape = (rows, self.kv_heads)
        return weight.new_empty(*shape, self.head_dim, length), weight.new_empty(
            *shape, length, self.head_dim
        )

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and signed sines of positions, [N] int64, each [N, 1, D].

        The rotation is ``x * cos + roll(x, D / 2) * sin``: the sines of the first half have their
        sign already.
        """
        cos, sin = self._body.rotary_emb(self._lm_head.weight, positions.unsqueeze(0))
        sin[..., : self.head_dim // 2].neg_()
        return cos[0].unsqueeze(1), sin[0].unsqueeze(1)

    def forward(self, tokens: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """Return the last hidden states, normalized.

        Args:
            tokens: [N] int64, from any rows and positions; only ``attend`` needs to know which.
            cos: [N, 1, D].
            sin: [N, 1, D], signed.
            attend: computes attention and extends the cache.

        Returns:
            [N, hidden size].
        """
        hidden = F.embedding(tokens, self._body.embed_tokens.weight)
        rotated_heads = self.query_heads + self.kv_heads
        for i, layer in enumerate(self._layers):
            normed = _rms_norm(hidden, layer.input_norm)
            qkv = layer.qkv(normed).unflatten(-1, (-1, self.head_dim))
            qk = qkv[:, :rotated_heads]
            v = qkv[:, rotated_heads:]
            if hasattr(layer.attention, "q_norm"):
                q = qk[:, : self.query_heads]
                k = qk[:, self.query_heads :]
                qk = torch.cat(
                    (_rms_norm(q, layer.attention.q_norm), _rms_norm(k, layer.attention.k_norm)), 1
                )
            qk = torch.addcmul(qk * cos, qk.roll(self.head_dim // 2, -1), sin)
            attended = attend(i, qk[:, : self.query_heads], qk[:, self.query_heads :], v)
            hidden = layer.out(attended, hidden)

            normed = _rms_norm(hidden, layer.post_norm)
            gate, up = layer.gate_up(normed).chunk(2, -1)
            hidden = layer.down(layer.mlp.act_fn(gate) * up, hidden)
        return _rms_norm(hidden, self._body.norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden size] to [N, V]."""
        if hidden.is_cuda:
            return head_logits(hidden, self._lm_head.weight, self._lm_head.bias)
        return self._head(hidden)


class _FusedBatch(Batch):
    """Rows in flight, with two caches: one of the prompts, shared by the rows of a group, and one
    of the responses.

    The rows of a group attend to their prompt together, in one matrix product that reads the
    prompt's keys and values once, and each to its own response; one softmax spans both. Groups may
    have lost different numbers of rows: ``_slots`` gathers the rows of each group into a rectangle,
    and ``_places`` scatters them back.

    A column of the response cache holds the tokens that all rows appended in one step, so rows that
    joined later begin at a later column, and a mask hides the columns before it. When the cache is
    full it grows by ``_BLOCK`` columns and drops those that no row needs anymore. (Attending rows
    of similar ages together, each over its own columns, was no faster.)

    Shorter prompts are padded on the right. A mask hides the padding, and positions do not count
    it.
    """

    refills = True

    def __init__(self, decoder: FusedDecoder, max_new_tokens: int) -> None:
        self._decoder = decoder
        self._max_new_tokens = max_new_tokens
        none = torch.zeros(0, dtype=torch.int64, device=decoder.device)
        self._lengths = self._group = self._positions = self._starts = none
        self._width = self._length = self._room = 0
        self._prompts = [decoder.empty_cache(0, 0) for _ in range(decoder.num_layers)]
        self._own = [decoder.empty_cache(0, 0) for _ in range(decoder.num_layers)]

    def add(self, prompts: Sequence[Tensor | Prompt], n: int) -> Tensor:
        decoder = self._decoder
        texts = list(map(text_tokens, prompts))
        rows = len(self._group)
        old = len(self._lengths)
        width = max(self._width, *(len(prompt) for prompt in prompts))
        for layer, (keys, values) in enumerate(self._prompts):
            wider = decoder.empty_cache(old + len(prompts), width)
            # Masked values must still be finite.
            wider[0][:old] = F.pad(keys, (0, width - self._width))
            wider[1][:old] = F.pad(values, (0, 0, 0, width - self._width))
            self._prompts[layer] = wider
        if width > self._width:
            self._width = width
            positions = torch.arange(width + self._max_new_tokens, device=decoder.device)
            self._cos, self._sin = decoder.rotary(positions)
        at_once = max(1, _PREFILL_TOKENS // width)
        slices = range(0, len(prompts), at_once)
        logits = torch.cat([self._prefill(texts[i : i + at_once], old + i) for i in slices])

        lengths = torch.tensor([len(prompt) for prompt in prompts], device=decoder.device)
        numbers = torch.arange(old, old + len(prompts), device=decoder.device)
        self._lengths = torch.cat((self._lengths, lengths))
        if rows + len(prompts) * n > len(self._own[0][0]):
            self._move(rows + len(prompts) * n)
        for keys, values in self._own:
            keys[rows:, ..., : self._length] = 0
            values[rows:, :, : self._length] = 0
        self._positions = torch.cat((self._positions, lengths.repeat_interleave(n)))
        self._starts = torch.cat(
            (self._starts, torch.full_like(numbers, self._length).repeat_interleave(n))
        )
        self._arrange(torch.cat((self._group, numbers.repeat_interleave(n))))
        return logits

    def _prefill(self, prompts: Sequence[Tensor], first: int) -> Tensor:
        """Compute the prompts from number ``first`` on, fill their cache, return [P, V] logits."""
        decoder = self._decoder
        tokens = nn.utils.rnn.pad_sequence(list(prompts), batch_first=True)
        count, width = tokens.shape

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.unflatten(0, (count, width)).transpose(1, 2) for x in (q, k, v))
            keys, values = (cache[first : first + count] for cache in self._prompts[layer])
            keys[..., :width] = k.transpose(-1, -2)
            values[..., :width, :] = v
            keys[..., width:] = 0
            values[..., width:, :] = 0
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=decoder.scaling, enable_gqa=True
            )
            return out.transpose(1, 2).flatten(2).flatten(0, 1)

        cos, sin = (table[:width].repeat(count, 1, 1) for table in (self._cos, self._sin))
        hidden = decoder.forward(tokens.flatten(), cos, sin, attend).unflatten(0, (count, width))
        last = torch.tensor([len(prompt) - 1 for prompt in prompts], device=hidden.device)
        return decoder.logits(hidden[torch.arange(count, device=hidden.device), last])

    def _move(self, rows: int) -> None:
        """Move the responses to a cache with this many rows and more columns, dropping columns that
        no row needs.
        """
        live = len(self._starts)
        first = int(self._starts.min()) if len(self._starts) else self._length
        used = self._length - first
        self._length, self._room, self._starts = used, used + _BLOCK, self._starts - first
        for layer, (keys, values) in enumerate(self._own):
            wider = self._decoder.empty_cache(rows, self._room)
            wider[0][:live, ..., :used] = keys[:live, ..., first : first + used]
            wider[1][:live, :, :used] = values[:live, :, first : first + used]
            self._own[layer] = wider

    def _arrange(self, group: Tensor) -> None:
        """Make the masks and gather indices for rows of these groups ([R] int64, each group at
        least once).
        """
        kv_heads = self._decoder.kv_heads
        device = group.device
        rows = torch.arange(len(group), device=device)
        heads = torch.arange(kv_heads, device=device)
        counts = group.bincount()
        widest = int(counts.max())
        order = group.argsort(stable=True)
        rank = torch.empty_like(rows)
        rank[order] = rows - (counts.cumsum(0) - counts)[group[order]]
        self._group = group
        # Indices count rows and key-value heads: row * kv_heads + head.
        self._places = (
            ((group.unsqueeze(-1) * kv_heads + heads) * widest) + rank.unsqueeze(-1)
        ).flatten()
        self._slots = torch.zeros(len(counts) * kv_heads * widest, dtype=torch.int64, device=device)
        self._slots[self._places] = (rows.unsqueeze(-1) * kv_heads + heads).flatten()
        self._prompt_mask = self._hide(
            torch.arange(self._width, device=device) >= self._lengths.unsqueeze(-1)
        )
        self._mask_own()

    def _mask_own(self) -> None:
        """Make the mask of the columns before each row's first one, if rows joined at different
        times.
        """
        starts = self._starts.tolist()
        self._first = min(starts)
        columns = torch.arange(self._room, device=self._starts.device)
        self._own_mask = (
            None if max(starts) == self._first else self._hide(columns < self._starts.unsqueeze(-1))
        )

    def _hide(self, hidden: Tensor) -> Tensor:
        """Return [N, T] bool as a mask that is added to scores, [N * Hkv, 1, T]."""
        mask = self._cos.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
        return mask.repeat_interleave(self._decoder.kv_heads, 0).unsqueeze(1)

    def step(self, tokens: Tensor) -> Tensor:
        if self._length == self._room:
            self._move(
                len(self._own[0][0]) if 2 * len(tokens) > len(self._own[0][0]) else len(tokens)
            )
            self._mask_own()
        column = self._length
        self._length += 1

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = (cache[: len(tokens)] for cache in self._own[layer])
            keys[..., column] = k
            values[..., column, :] = v
            # Below, a row is a pair of row and key-value head, and its queries are the heads that
            # share that key-value head.
            keys, values = keys.flatten(0, 1), values.flatten(0, 1)
            prompt_keys, prompt_values = (cache.flatten(0, 1) for cache in self._prompts[layer])
            q = (q * self._decoder.scaling).reshape(len(keys), -1, q.shape[-1])
            queries = q.shape[1]
            width = self._width

            grouped = q.index_select(0, self._slots).view(len(prompt_keys), -1, q.shape[-1])
            scores = torch.baddbmm(self._prompt_mask, grouped, prompt_keys)
            scores = scores.view(-1, queries, width).index_select(0, self._places)
            own = slice(self._first, column + 1)
            if self._own_mask is None:
                of_own = torch.bmm(q, keys[..., own])
            else:
                of_own = torch.baddbmm(self._own_mask[..., own], q, keys[..., own])
            scores = torch.cat((scores, of_own), -1).softmax(-1)

            on_prompt, on_response = scores.split((width, column + 1 - self._first), -1)
            grouped = on_prompt.index_select(0, self._slots).view(len(prompt_keys), -1, width)
            attended = torch.bmm(grouped, prompt_values).view(-1, queries, q.shape[-1])
            attended = attended.index_select(0, self._places)
            return torch.baddbmm(attended, on_response, values[:, own]).view(len(tokens), -1)

        cos, sin = self._cos[self._positions], self._sin[self._positions]
        self._positions = self._positions + 1
        return self._decoder.logits(self._decoder.forward(tokens, cos, sin, attend))

    def keep(self, rows: Tensor) -> None:
        used = slice(self._length)
        _move_rows(rows, *(m for k, v in self._own for m in (k[..., used], v[:, :, used])))
        self._positions, self._starts = self._positions[rows], self._starts[rows]
        groups, group = self._group[rows].unique(return_inverse=True)
        if len(groups) < len(self._lengths):
            self._lengths = self._lengths[groups]
            for layer, (keys, values) in enumerate(self._prompts):
                self._prompts[layer] = keys[groups], values[groups]
        self._arrange(group)


class _StaticBatch(_FusedBatch):
    """Rows in flight whose steps use few shapes and fixed memory, so that each shape can run as one
    CUDA graph: one launch instead of hundreds.

    Each row has one cache of its final size, with a copy of its prompt's keys and values. A step
    computes a power of 2 of rows, over a multiple of ``_BLOCK`` columns. The first step of a shape
    runs without a graph, and then a graph is captured for the next ones. The next batch uses the
    memory and its graphs again if it fits in and no layer has adapters, which are in new memory
    each time; weights change in place.

    Attributes:
        rows: number of rows.
    """

    rows = 0

    def add(self, prompts: Sequence[Tensor | Prompt], n: int) -> Tensor:
        decoder, first, end = self._decoder, self.rows, self.rows + len(prompts) * n
        eager = _FusedBatch(decoder, 0)
        logits, width = eager.add(prompts, 1), eager._width
        if not first:
            columns = (width + self._max_new_tokens) // _BLOCK * _BLOCK + _BLOCK
            # Later additions may fill the memory, and what is left of it is less than a group.
            shape = end + n, decoder.num_layers, decoder.kv_heads, columns, 2 * decoder.head_dim
            if decoder.kept is None or any(map(int.__lt__, decoder.kept[0].shape, shape)):
                decoder.kept = None  # before more is allocated
                # The latest token of each row and its position.
                state = eager._positions.new_zeros(end + n, 2)
                decoder.kept = eager._cos.new_empty(shape), state, {}
            self._cache, self._state, self._graphs = decoder.kept
        new = self._cache[first:end].zero_()  # masked values must still be finite
        for layer, (keys, values) in enumerate(eager._prompts):
            pair = torch.cat((keys.mT, values), -1)
            new[:, layer, :, :width] = pair.repeat_interleave(n, 0)
        self._state[first:end, 1] = eager._positions.repeat_interleave(n)
        self.rows, self._length = end, max(self._length, width)
        return logits

    def keep(self, rows: Tensor) -> None:
        self.rows = len(rows)
        _move_rows(rows, self._cache, self._state)
        self._length = int(self._state[: self.rows, 1].max())

    def step(self, tokens: Tensor) -> Tensor:
        decoder, rows = self._decoder, self.rows
        self._state[rows:] = 0
        self._state[:rows, 0] = tokens
        columns = self._length // _BLOCK * _BLOCK + _BLOCK
        key = min(1 << (rows - 1).bit_length(), len(self._state)), columns
        self._length += 1
        if key in self._graphs:
            graph, hidden = self._graphs[key]
            graph.replay()
        else:
            hidden = self._advance(*key)
            if decoder.static:
                try:
                    graph = torch.cuda.CUDAGraph()
                    pool = next((graph.pool() for graph, _ in self._graphs.values()), None)
                    with torch.cuda.graph(graph, pool, capture_error_mode="thread_local"):
                        captured = self._advance(*key)
                    self._graphs[key] = graph, captured
                except RuntimeError as error:
                    decoder.static, decoder.kept = False, None
                    torchrl_logger.warning(f"sampling is slower without CUDA graphs: {error}")
        return decoder.logits(hidden[:rows])

    def _advance(self, rows: int, columns: int) -> Tensor:
        """Return the next hidden states of the first rows, [rows, hidden size]."""
        decoder = self._decoder
        tokens, positions = self._state[:rows].T
        each = torch.arange(rows, device=tokens.device)
        mask = torch.arange(columns, device=tokens.device) <= positions[:, None, None, None]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache = self._cache[:rows, layer, :, :columns]
            cache[each, :, positions] = torch.cat((k, v), -1)
            # The query heads that share a key-value head are its query positions.
            q = q.unflatten(1, (decoder.kv_heads, -1))
            keys, values = cache.chunk(2, -1)
            return F.scaled_dot_product_attention(
                q, keys, values, mask, scale=decoder.scaling
            ).flatten(1)

        hidden = decoder.forward(tokens, *decoder.rotary(positions), attend)
        positions += 1
        return hidden


def _move_rows(rows: Tensor, *memories: Tensor) -> None:
    """Copy row ``rows[i]`` of each memory to row ``i``."""
    moved = (rows != torch.arange(len(rows), device=rows.device)).nonzero().squeeze(-1)
    for memory in memories:
        memory[moved] = memory[rows[moved]]


def _join(*linears: nn.Linear) -> PackedLinear:
    """Return one linear layer for several; their parameters become views of its weight and bias."""
    weights = [linear.weight for linear in linears]
    biases = [linear.bias for linear in linears if linear.bias is not None]
    return PackedLinear(_join_storage(weights), _join_storage(biases) if biases else None, linears)


def _join_storage(parameters: Sequence[Tensor]) -> Tensor:
    if len(parameters) == 1:
        return parameters[0].detach()
    joined = torch.cat([p.detach() for p in parameters])
    for parameter, view in zip(parameters, joined.split([len(p) for p in parameters]), strict=True):
        parameter.data = view
    return joined


def _rms_norm(x: Tensor, norm: Any) -> Tensor:
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)
