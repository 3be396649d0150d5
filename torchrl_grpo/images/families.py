"""Vision-language models that images work with, and what differs among them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from torchrl_grpo.weights.named import is_critic


@dataclass(frozen=True)
class Family:
    """How a kind of vision-language model reads images.

    Args:
        language_model: attribute of the model's body that has the language model.
        placeholder: text that the chat template writes for an image.
        has_grid: whether positions have three axes (M-RoPE, arXiv 2409.12191).
        is_bidirectional: whether the tokens of an image attend to each other, also to later ones.
    """

    language_model: str
    placeholder: str
    has_grid: bool = False
    is_bidirectional: bool = False


FAMILIES = {
    "gemma3": Family("language_model", "<start_of_image>", is_bidirectional=True),
    "idefics3": Family("text_model", "<image>"),
    "llava": Family("language_model", "<image>"),
    "qwen2_5_vl": Family("language_model", "<|image_pad|>", has_grid=True),
    "qwen3_vl": Family("language_model", "<|image_pad|>", has_grid=True),
    "smolvlm": Family("text_model", "<image>"),
}
"""By ``model_type``."""


def family_of(config: Any) -> Family | None:
    """Return the family of a model's config; None for a model without images, or without a config."""
    return FAMILIES.get(getattr(config, "model_type", ""))


def language_model_of(base: Any) -> Any:
    """Return the part of a causal LM that reads embeddings: without the LM head and, in a
    vision-language model, without the image encoder.
    """
    # Llama 4 has the prefix of a larger model.
    body = base.base_model if base.base_model is not base else base.model
    family = family_of(base.config)
    return body if family is None else getattr(body, family.language_model)


def vision_parameters(base: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of a vision-language model's image encoder and projector, by name; none
    for other models. A critic is neither.
    """
    if family_of(getattr(base, "config", None)) is None:
        return
    text_ids = set(map(id, language_model_of(base).parameters()))
    text_ids |= set(map(id, base.get_output_embeddings().parameters()))
    for name, parameter in base.named_parameters():
        if id(parameter) not in text_ids and not is_critic(name):
            yield name, parameter
