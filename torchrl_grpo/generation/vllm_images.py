"""Prompts with images as requests to vLLM.

vLLM never expands our tokens, which it would do twice without an error. Its renderer gets each
image by itself, and the request is composed of our tokens, what it returned, and our pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torchrl_grpo.images import EncodedImage, Prompt, images_of, tokens_of
from torchrl_grpo.images.families import FAMILIES


def images_alone(prompt: Tensor | Prompt, renderer: Any, config: Any) -> list[Any]:
    """Return a prompt for each image, which has nothing else, for vLLM's renderer.

    Args:
        prompt: the prompt.
        renderer: vLLM's.
        config: the model's Hugging Face config.
    """
    from vllm import TokensPrompt

    images = [span.image for span in images_of(prompt)]
    if not images:
        return []
    placeholder = FAMILIES[config.model_type].placeholder
    token = renderer.get_tokenizer().convert_tokens_to_ids(placeholder)
    return [
        TokensPrompt(
            prompt_token_ids=[token],
            multi_modal_data={"image": [image.file.open()]},
            multi_modal_uuids={"image": [image.hash]},
        )
        for image in images
    ]


def compose(prompt: Tensor | Prompt, rendered: Sequence[Any]) -> Any:
    """Return a prompt as vLLM's engine takes it.

    Args:
        prompt: the prompt.
        rendered: what vLLM's renderer returned for each of ``images_alone``.

    Raises:
        RuntimeError: vLLM gives an image other tokens, or inputs of another size.
    """
    from vllm import TokensPrompt
    from vllm.inputs import mm_input

    tokens = tokens_of(prompt).tolist()
    if not rendered:
        return TokensPrompt(prompt_token_ids=tokens)
    items, hashes, places = [], [], []
    for span, alone in zip(images_of(prompt), rendered, strict=True):
        [item], [place] = alone["mm_kwargs"]["image"], alone["mm_placeholders"]["image"]
        _check_tokens(span.image, alone["prompt_token_ids"], place)
        _use_our_inputs(span.image, item)
        items.append(item)
        hashes += alone["mm_hashes"]["image"]
        places.append(replace(place, offset=span.offset + place.offset))
    kwargs = type(rendered[0]["mm_kwargs"])({"image": items})
    return mm_input(tokens, kwargs, {"image": hashes}, {"image": places})


def check_returned(prompt: Tensor | Prompt, output: Any) -> None:
    """Check that vLLM sampled after our tokens.

    Raises:
        RuntimeError: it did not.
    """
    if images_of(prompt) and output.prompt_token_ids != tokens_of(prompt).tolist():
        raise RuntimeError(
            f"vLLM must sample after the {len(prompt)} tokens of a prompt, but it used "
            f"{len(output.prompt_token_ids)} others: use inference_model.backend=transformers."
        )


def _check_tokens(image: EncodedImage, tokens: list[int], place: Any) -> None:
    embedded = torch.zeros(len(tokens), dtype=torch.bool)
    own = slice(place.offset, place.offset + place.length)
    embedded[own] = True if place.is_embed is None else place.is_embed
    if tokens != image.tokens.tolist() or embedded.tolist() != image.is_embed.tolist():
        raise RuntimeError(
            f"vLLM must write an image as the model's processor does, but it writes {tokens} in "
            f"place of {image.tokens.tolist()}: use inference_model.backend=transformers."
        )


def _use_our_inputs(image: EncodedImage, item: Any) -> None:
    """Replace the pixels of vLLM's processor, which may have been resized by another library."""
    for name in item.keys() & image.inputs.keys():
        theirs, ours = item[name].data, image.inputs[name]
        if theirs.numel() != ours.numel():
            raise RuntimeError(
                f"vLLM must prepare an image as the model's processor does, but its {name} has "
                f"the shape {tuple(theirs.shape)} and ours {tuple(ours.shape)}: use "
                "inference_model.backend=transformers."
            )
        item[name].data = ours.view(theirs.shape).to(theirs.dtype)
