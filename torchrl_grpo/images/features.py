"""``ImageFeatures``: what a model's image encoder makes of images, computed once per image."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_grpo.compat.torch import version_of
from torchrl_grpo.images import EncodedImage, Spans
from torchrl_grpo.images.cache import MOST_BYTES, ByteCache
from torchrl_grpo.images.families import family_of, vision_parameters


class ImageFeatures:
    """Features of images under a vision-language model, one image at a time: they do not depend on
    which images a pass has.

    While the weights of the image encoder stay the same, features are kept and computed once.

    Args:
        base: a Hugging Face vision-language model.
    """

    def __init__(self, base: Any) -> None:
        self._base = base
        self._kept = ByteCache[tuple[Tensor, ...]](
            MOST_BYTES, lambda parts: sum(part.nbytes for part in parts)
        )
        self._versions: list[int] = []
        self._fingerprint: list[float] = []

    @cached_property
    def _parameters(self) -> list[nn.Parameter]:
        # When images come, because sharding may put others in the place of those without memory.
        return [parameter for _, parameter in vision_parameters(self._base)]

    def __call__(self, images: Sequence[EncodedImage]) -> tuple[Tensor, ...]:
        """Return the features of images, one after another: [M, D], followed by those for the first
        layers of the language model, if the model has any.
        """
        trains = torch.is_grad_enabled() and any(p.requires_grad for p in self._parameters)
        if not trains:
            self._forget_if_changed()
        each = [self._compute(image) if trains else self._look_up(image) for image in images]
        return tuple(torch.cat(parts) for parts in zip(*each, strict=True))

    def _compute(self, image: EncodedImage) -> tuple[Tensor, ...]:
        device = self._base.get_input_embeddings().weight.device
        inputs = {name: value.to(device) for name, value in image.inputs.items()}
        out = self._base.model.get_image_features(**inputs, return_dict=True)
        return _joined(out.pooler_output), *map(_joined, getattr(out, "deepstack_features", ()))

    def _look_up(self, image: EncodedImage) -> tuple[Tensor, ...]:
        device = self._base.get_input_embeddings().weight.device
        autocast = torch.is_autocast_enabled(device.type)
        dtype = torch.get_autocast_dtype(device.type) if autocast else self._base.dtype
        parts = self._kept.get((image.hash, dtype), partial(self._compute_to_keep, image))
        return tuple(part.to(device) for part in parts)

    def _compute_to_keep(self, image: EncodedImage) -> tuple[Tensor, ...]:
        with torch.inference_mode(False), torch.no_grad():
            return tuple(part.cpu() for part in self._compute(image))

    def _forget_if_changed(self) -> None:
        """Forget all features if the weights have changed. A weight sync writes the same values
        into an encoder that is not trained, and a fused optimizer writes without a new version.
        """
        versions = [version_of(parameter) for parameter in self._parameters]
        is_frozen = not any(parameter.requires_grad for parameter in self._parameters)
        if is_frozen and versions == self._versions:
            return
        sums = [parameter.detach().double().sum() for parameter in self._parameters]
        fingerprint = torch.stack(sums).tolist()
        if fingerprint != self._fingerprint:
            self._kept.clear()
        self._versions, self._fingerprint = versions, fingerprint


def with_features(embeddings: Tensor, features: Sequence[Tensor], places: Tensor) -> dict[str, Any]:
    """Return the arguments of a language model whose tokens include images.

    Args:
        embeddings: [B, T, E], of the tokens.
        features: [M, E], of the images; and those that are added after the first layers.
        places: [M] int64, ascending flat indices of the images' tokens.
    """
    first, *deep = (part.to(embeddings.dtype) for part in features)
    flat = embeddings.flatten(0, 1).index_copy(0, places, first)
    inputs: dict[str, Any] = {"inputs_embeds": flat.view(embeddings.shape)}
    if deep:
        is_image = torch.zeros_like(flat[:, 0], dtype=torch.bool).index_fill(0, places, True)
        inputs["visual_pos_masks"] = is_image.view(embeddings.shape[:2])
        inputs["deepstack_visual_embeds"] = deep
    return inputs


def bidirectional_masks(
    base: Any,
    embeddings: Tensor,
    places: Tensor,
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
) -> dict[str, Any]:
    """Return the attention mask of a model in which the tokens of an image attend to each other;
    empty for other models.

    Args:
        base: the model.
        embeddings: [B, T, E], of the tokens.
        places: [M] int64, flat indices of the images' tokens.
        attention_mask: [B, T], 0 on padding.
        past_key_values: an empty cache.
    """
    if not is_bidirectional(base):
        return {}
    kinds = torch.zeros_like(embeddings[..., 0], dtype=torch.int64)
    masks = base.create_masks_for_generate(
        config=base.config,
        inputs_embeds=embeddings,
        attention_mask=attention_mask,
        past_key_values=past_key_values,
        position_ids=None,
        token_type_ids=kinds.flatten().index_fill(0, places, 1).view(kinds.shape),
        is_first_iteration=True,
    )
    return {"attention_mask": masks}


def is_bidirectional(base: Any) -> bool:
    """Return whether the tokens of an image attend to each other in a model."""
    family = family_of(base.config)
    return family is not None and family.is_bidirectional


def _joined(features: Tensor | Sequence[Tensor]) -> Tensor:
    """Return features as [M, D]; models return them by image or by tile."""
    joined = features if isinstance(features, Tensor) else torch.cat(tuple(features))
    return joined.flatten(0, -2)


def grid_positions(base: Any, tokens: Tensor, spans: Spans) -> Tensor:
    """Return the positions of a sequence's tokens under a model with three axes, [3, T] int64.

    Args:
        base: the model.
        tokens: [T] int64.
        spans: the images; those beyond the tokens are ignored.
    """
    spans = tuple(span for span in spans if span.end <= len(tokens))
    end = spans[-1].end if spans else 0
    positions = torch.empty(3, 0, dtype=torch.int64)
    if spans:
        kinds = torch.zeros(1, end, dtype=torch.int64)
        for span in spans:
            kinds[0, span.offset : span.end] = span.is_embed
        grids = torch.cat([span.image.inputs["image_grid_thw"] for span in spans])
        positions = base.model.get_rope_index(tokens[None, :end].cpu(), kinds, grids)[0][:, 0]
    first = int(positions.max()) + 1 if spans else 0
    rest = torch.arange(first, first + len(tokens) - end).expand(3, -1)
    return torch.cat([positions, rest], 1)


def has_grid(base: Any) -> bool:
    """Return whether a model's positions have three axes."""
    family = family_of(base.config)
    return family is not None and family.has_grid
