"""Decoding a model token by token: the interface, and an implementation for every causal language
model.

A :class:`Decoder` starts a :class:`Batch`. Prompts are added to the batch; it then computes the
next logits from the latest token of every row, and drops rows on request. Each prompt is computed
once, however many rows continue it. The engine draws the tokens and decides when a row is finished.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from torchrl_grpo.checks import context_length
from torchrl_grpo.images import Prompt, images_of, tokens_of
from torchrl_grpo.images.families import family_of, language_model_of
from torchrl_grpo.images.features import (
    ImageFeatures,
    bidirectional_masks,
    grid_positions,
    has_grid,
    with_features,
)


class Batch(ABC):
    """Rows in flight.

    Attributes:
        refills: whether prompts may be added to a batch that has rows.
    """

    refills = False

    @abstractmethod
    def add(self, prompts: Sequence[Tensor | Prompt], n: int) -> Tensor:
        """Compute prompts, and append ``n`` rows for each to the batch, prompt by prompt.

        Args:
            prompts: one [T] int64 tensor per prompt, or a ``Prompt`` with images.
            n: rows per prompt.

        Returns:
            [number of prompts, V] logits of the token after each prompt.
        """

    @abstractmethod
    def step(self, tokens: Tensor) -> Tensor:
        """Append one token to every row.

        Args:
            tokens: [R] int64.

        Returns:
            [R, V] logits of the next token.
        """

    @abstractmethod
    def keep(self, rows: Tensor) -> None:
        """Keep some rows and drop the others; row ``rows[i]`` becomes row ``i``.

        Args:
            rows: [R'] int64, R' >= 1, without repeats. Rows that stay in place cost least.
        """


class Decoder(ABC):
    """Decodes rows with a model. It reads the model's current parameters at each call.

    Attributes:
        kept: device memory that is kept for later batches; None releases it.
    """

    kept: Any = None

    @abstractmethod
    def start(self, max_new_tokens: int) -> Batch:
        """Return an empty batch.

        Args:
            max_new_tokens: maximum tokens of a row; a row takes part in at most
                ``max_new_tokens - 1`` steps.
        """

    @abstractmethod
    def cache_bytes(self, prompt_length: int, n: int, max_new_tokens: int) -> int:
        """Maximum bytes of keys and values for one prompt and its ``n`` rows."""


class GenericDecoder(Decoder):
    """Decodes through the model's own forward and a ``DynamicCache``; prompts are padded on the
    left.

    Args:
        model: any causal language model of transformers.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        accepted = inspect.signature(model.forward).parameters
        self._takes_position_ids = "position_ids" in accepted
        self._kwargs = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self._image_features = None if family_of(model.config) is None else ImageFeatures(model)

    def start(self, max_new_tokens: int) -> Batch:
        return _GenericBatch(self, max_new_tokens)

    def cache_bytes(self, prompt_length: int, n: int, max_new_tokens: int) -> int:
        config = self.model.config.get_text_config(decoder=True)
        # An upper bound: grouped-query attention keeps less.
        per_token = 2 * config.num_hidden_layers * config.hidden_size * self.model.dtype.itemsize
        return n * (prompt_length + max_new_tokens) * per_token

    def prefill(self, tokens: Tensor, prompts: Sequence[Tensor | Prompt], **kwargs: Any) -> Tensor:
        """Return the logits after prompts with images, [B, V].

        Args:
            tokens: [B, T] int64, padded on the left.
            prompts: the prompts.
            **kwargs: the attention mask, positions and cache of ``forward``.
        """
        assert self._image_features is not None
        spans, places = [], []
        for row, prompt in enumerate(prompts):
            first = (row + 1) * tokens.shape[1] - len(prompt)
            for span in images_of(prompt):
                spans.append(span.image)
                places.append(first + span.offset + span.is_embed.nonzero().squeeze(-1))
        embeddings = self.model.get_input_embeddings()(tokens)
        where = torch.cat(places).to(tokens.device)
        inputs = with_features(embeddings, self._image_features(spans), where)
        mask, cache = kwargs["attention_mask"], kwargs["past_key_values"]
        kwargs |= bidirectional_masks(self.model, embeddings, where, mask, cache)
        out = language_model_of(self.model)(**inputs, **kwargs, use_cache=True)
        return self.model.get_output_embeddings()(out.last_hidden_state[:, -1])

    def forward(
        self, tokens: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache
    ) -> Tensor:
        """Return the logits after the last of ``tokens``.

        Args:
            tokens: [B, T] int64.
            mask: [B, S] int64, 0 on padding; S counts the cached tokens and ``tokens``.
            positions: [B, T] int64.
            cache: extended by ``tokens``.

        Returns:
            [B, V] logits.
        """
        kwargs = self._kwargs | ({"position_ids": positions} if self._takes_position_ids else {})
        out = self.model(
            input_ids=tokens, attention_mask=mask, past_key_values=cache, use_cache=True, **kwargs
        )
        return out.logits[:, -1]


class _GenericBatch(Batch):
    def __init__(self, decoder: GenericDecoder, max_new_tokens: int) -> None:
        self._decoder = decoder
        self._max_new_tokens = max_new_tokens
        self._context = context_length(decoder.model.config)

    def add(self, prompts: Sequence[Tensor | Prompt], n: int) -> Tensor:
        decoder = self._decoder
        device = decoder.model.device
        lengths = torch.tensor([len(p) for p in prompts], device=device)
        self._width = int(lengths.max())
        tokens = torch.zeros(len(prompts), self._width, dtype=torch.int64, device=device)
        mask = torch.ones(
            len(prompts), self._width + self._max_new_tokens, dtype=torch.int64, device=device
        )
        for row, prompt in enumerate(prompts):
            tokens[row, self._width - len(prompt) :] = tokens_of(prompt)
            mask[row, : self._width - len(prompt)] = 0
        positions = (mask[:, : self._width].cumsum(-1) - 1).clamp_(min=0)
        self._cache = DynamicCache(config=decoder.model.config)
        following, mask_of_prompts = lengths, mask[:, : self._width]
        if any(map(images_of, prompts)):
            if has_grid(decoder.model):
                positions, following = self._grid(prompts, positions)
            logits = decoder.prefill(
                tokens,
                prompts,
                attention_mask=mask_of_prompts,
                position_ids=positions,
                past_key_values=self._cache,
            )
        else:
            logits = decoder.forward(tokens, mask_of_prompts, positions, self._cache)

        rows = torch.arange(len(prompts), device=device).repeat_interleave(n)
        # `reorder_cache` is an index_select along the batch, so it also repeats and drops rows, in
        # every kind of layer.
        self._cache.reorder_cache(rows)
        self._mask = mask[rows]
        self._positions = following[rows]
        return logits

    def _grid(self, prompts: Sequence[Tensor | Prompt], positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the positions of prompts with three axes, [3, B, T], and the position of what
        follows each prompt, [B].
        """
        grid = positions.expand(3, -1, -1).clone()
        for row, prompt in enumerate(prompts):
            own = grid_positions(self._decoder.model, tokens_of(prompt), images_of(prompt))
            grid[:, row, self._width - len(prompt) :] = own
        return grid, grid.amax((0, 2)) + 1

    def step(self, tokens: Tensor) -> Tensor:
        self._width += 1
        # A finished row may continue for a few steps before it is dropped; its positions must stay
        # within the context.
        positions = self._positions.clamp(max=self._context - 1).unsqueeze(-1)
        self._positions = self._positions + 1
        return self._decoder.forward(
            tokens.unsqueeze(-1), self._mask[:, : self._width], positions, self._cache
        )

    def keep(self, rows: Tensor) -> None:
        self._cache.reorder_cache(rows)
        self._mask = self._mask[rows]
        self._positions = self._positions[rows]
