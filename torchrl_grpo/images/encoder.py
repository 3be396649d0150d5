"""``ImageEncoder``: images as a model's processor prepares them, and prompts with their tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from torchrl_grpo.compat.transformers import load_image_processor
from torchrl_grpo.images import MAX_PIXELS, EncodedImage, ImageFile, ImageSpan, Prompt
from torchrl_grpo.images.cache import MOST_BYTES, ByteCache
from torchrl_grpo.images.families import FAMILIES

_OF_TEXT = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")
"""Entries that a processor returns for the text."""


def _new_cache() -> ByteCache[EncodedImage]:
    return ByteCache(MOST_BYTES, lambda image: image.nbytes)


class ImageEncoder:
    """Encodes images with the processor of a vision-language model.

    Chats are written by the chat template and tokenized like any other. Then the placeholder of
    each image is replaced by what the processor writes for only that image. So text cannot forge an
    image (``ChatEncoder``), and no image is prepared twice.

    Args:
        processor: a Hugging Face processor.
        config: config of the model, whose ``model_type`` is one of ``FAMILIES``.

    Raises:
        ValueError: the tokenizer has no such placeholder.
    """

    max_pixels = MAX_PIXELS
    """Maximum number of pixels of an image."""

    def __init__(self, processor: Any, config: PretrainedConfig) -> None:
        self.processor = processor
        self.placeholder = FAMILIES[config.model_type].placeholder
        tokenizer = processor.tokenizer
        self._placeholder_id = tokenizer.convert_tokens_to_ids(self.placeholder)
        self._feature_id = config.image_token_id
        if self._placeholder_id in (None, tokenizer.unk_token_id):
            raise ValueError(
                f"model.name must have a tokenizer with the token {self.placeholder}, which a "
                f"model of the type {config.model_type} reads images with, but it does not: use "
                "the tokenizer that the model was trained with."
            )
        self._settings = repr(sorted(processor.image_processor.to_dict().items(), key=str))
        self._cache = _new_cache()
        self._lengths: dict[tuple[int, int], int] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cache": _new_cache()}

    @classmethod
    def load(
        cls, path: str, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase
    ) -> ImageEncoder:
        """Load the processor of a checkpoint.

        Raises:
            ValueError: the checkpoint has none, or it does not fit.
        """
        return cls(load_image_processor(path, config, tokenizer), config)

    def equals(self, other: ImageEncoder) -> bool:
        """Return whether another encoder prepares images in the same way."""
        from PIL import Image

        file = ImageFile.of(Image.new("RGB", (64, 48)))
        image, other_image = self.encode(file), other.encode(file)
        return image == other_image and torch.equal(image.tokens, other_image.tokens)

    def encode(self, file: ImageFile) -> EncodedImage:
        """Return an image as the model reads it.

        Raises:
            ValueError: the file is not an image, it is too large, or the processor refuses it.
        """
        return self._cache.get(file.hash, partial(self._prepare, file))

    def _prepare(self, file: ImageFile) -> EncodedImage:
        file.check_size(self.max_pixels)
        image = file.open()
        try:
            out = dict(
                self.processor(
                    text=[self.placeholder],
                    images=[image],
                    add_special_tokens=False,
                    return_tensors="pt",
                )
            )
        except Exception as error:  # depends on the processor
            raise ValueError(
                f"{file.origin} must be one that {type(self.processor).__name__} accepts, but it "
                f"refuses one of {image.width} x {image.height} pixels ({error}): leave it out."
            ) from error
        [tokens] = out["input_ids"]
        inputs = {name: value for name, value in out.items() if name not in _OF_TEXT}
        digest = hashlib.sha256((file.hash + self._settings).encode()).hexdigest()
        return EncodedImage(file, digest, tokens, tokens == self._feature_id, inputs)

    def expand(self, ids: Sequence[int], files: Sequence[ImageFile]) -> Tensor | Prompt:
        """Return a prompt with the tokens of its images in place of their placeholders.

        Args:
            ids: tokens of the chat.
            files: the chat's images, in order.

        Raises:
            ValueError: the chat template wrote another number of placeholders.
        """
        tokens, spans, last = list[int](), list[ImageSpan](), 0
        for place, file in zip(self.places(ids, len(files)), files, strict=True):
            image = self.encode(file)
            self._append(tokens, ids[last:place])
            self._append(tokens, image.tokens.tolist())
            spans.append(ImageSpan(len(tokens) - len(image.tokens), image))
            last = place + 1
        self._append(tokens, ids[last:])
        tensor = torch.tensor(tokens, dtype=torch.int64)
        return Prompt(tensor, tuple(spans)) if spans else tensor

    def expanded_index(self, ids: Sequence[int], files: Sequence[ImageFile], index: int) -> int:
        """Return the index of a token of a chat in what ``expand`` returns."""
        before = ids[:index]
        return len(self.expand(before, files[: list(before).count(self._placeholder_id)]))

    def _append(self, tokens: list[int], more: Sequence[int]) -> None:
        """Append tokens. Line breaks before and after the border are tokenized together."""
        start, end = len(tokens), 0
        while start and self._is_break(tokens[start - 1]):
            start -= 1
        while end < len(more) and self._is_break(more[end]):
            end += 1
        if start < len(tokens) and end:
            tokenizer = self.processor.tokenizer
            text = tokenizer.decode([*tokens[start:], *more[:end]])
            more = [*tokenizer.encode(text, add_special_tokens=False), *more[end:]]
            del tokens[start:]
        tokens += more

    def _is_break(self, token: int) -> bool:
        text = self.processor.tokenizer.decode([token])
        return text != "" and not text.strip("\n")

    def expanded_length(self, ids: Sequence[int], files: Sequence[ImageFile]) -> int:
        """Return the length of ``expand``, or a little more where line breaks are joined. Images of
        the same size have the same number of tokens, so most are not encoded.
        """
        self.places(ids, len(files))
        for file in files:
            if file.size not in self._lengths:
                self._lengths[file.size] = len(self.encode(file).tokens)
        return len(ids) + sum(self._lengths[file.size] - 1 for file in files)

    def places(self, ids: Sequence[int], count: int) -> list[int]:
        """Return where the placeholders are.

        Raises:
            ValueError: there is another number of them.
        """
        places = [i for i, token in enumerate(ids) if token == self._placeholder_id]
        if len(places) != count:
            raise ValueError(
                f"model.chat_template must write {self.placeholder} once for each of the {count} "
                f"images of a prompt, but it writes it {len(places)} times: use a model or a "
                "template that writes all of them, in messages of this role."
            )
        return places
