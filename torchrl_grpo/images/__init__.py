"""Images of problems and prompts: files, their encoded form, and where they are in a prompt.

An image is an object that its users share. Pickle keeps that, so the pixels of a group travel once,
however many of its sequences have the image.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # data is read without torch
    from torch import Tensor

MAX_PIXELS = 2**26
"""Default limit of an image's pixels (``env.max_image_pixels``)."""
_ORIENTATION = 0x0112
"""Exif tag of how a camera was held."""
_TURNS = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}
"""Pillow's transposition for each orientation; those from 5 on exchange width and height."""
_FORMATS = ("BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
"""Pillow's names of the formats that are read. Others may start programs, such as Ghostscript."""
Content = str | list[dict[str, Any]]
"""Content of a message: text, or its parts."""
PLACEHOLDER = "<image>"
"""Stands for an image in text shown to people, and in the text of data sets."""


@dataclass(frozen=True)
class ImageFile:
    """An encoded image, such as a PNG or JPEG file.

    Args:
        data: bytes of the file.
        origin: description for messages.

    >>> from PIL import Image
    >>> ImageFile.of(Image.new("RGB", (4, 3))).open().size
    (4, 3)
    """

    data: bytes = field(repr=False)
    origin: str = field(default="an image", repr=False, compare=False)

    @classmethod
    def of(cls, image: Any) -> ImageFile:
        """Return a PIL image as a PNG file, as ``open`` returns it.

        Raises:
            ValueError: its pixels cannot be read.
        """
        file = io.BytesIO()
        try:
            _as_shown(image).save(file, "PNG")
        except Exception as error:  # a lazily opened file may raise any type
            raise ValueError(
                f"a PIL image must have pixels, but reading them failed ({error}): use another."
            ) from error
        return cls(file.getvalue())

    def open(self) -> Any:
        """Return the image, a PIL image in RGB: turned as its Exif data say, on white where it is
        transparent.

        Raises:
            ValueError: the file is not an image, or is broken.
        """
        return self._read(_as_shown)

    def thumbnail(self) -> bytes:
        """Return the image as a PNG file of at most 128 x 128 pixels."""
        image = self.open()
        image.thumbnail((128, 128))
        image.info.clear()  # a color profile may be larger than the pixels
        return ImageFile.of(image).data

    @cached_property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels, from the head of the file.

        Raises:
            ValueError: the file is not an image.
        """
        (width, height), orientation = self._read(lambda image: (image.size, _orientation(image)))
        return (height, width) if orientation in (5, 6, 7, 8) else (width, height)

    def check_size(self, max_pixels: int) -> None:
        """Refuse an image of more than ``max_pixels`` pixels, without decoding it.

        Raises:
            ValueError: it has more, or the file is not an image.
        """
        width, height = self.size
        if width * height > max_pixels:
            raise ValueError(
                f"{self.origin} must have at most env.max_image_pixels={max_pixels} pixels, but it has "
                f"{width} x {height}: make it smaller, or raise the limit."
            )

    @property
    def media_type(self) -> str:
        """Media type, such as ``image/png``."""
        return str(self._read(lambda image: image.get_format_mimetype()))

    def _read(self, read: Callable[[Any], Any]) -> Any:
        from PIL import Image

        try:
            with Image.open(io.BytesIO(self.data), formats=_FORMATS) as image:
                return read(image)
        except Exception as error:  # Pillow raises any type for broken files
            raise ValueError(
                f"{self.origin} must be a file of the format {', '.join(_FORMATS)}, but "
                f"{self.data[:8]!r}... is not ({str(error).partition(' <')[0]}): save it as PNG or "
                "JPEG."
            ) from error

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the file."""
        return hashlib.sha256(self.data).hexdigest()


def _orientation(image: Any) -> Any:
    """Return how the camera was held, from the head of a PIL image's file; None if it does not
    say.
    """
    from PIL import Image

    with suppress(Exception):  # broken Exif data turn nothing
        if image.format != "TIFF":  # Pillow turns these itself
            return Image.Image.getexif(image).get(
                _ORIENTATION
            )  # a method of PNG files would decode them
    return None


def _as_shown(image: Any) -> Any:
    """Return a PIL image in RGB, turned as its Exif data say, on white where it is transparent."""
    from PIL import Image

    turn = _TURNS.get(_orientation(image))
    if image.mode.startswith("I;16") or (image.mode == "I" and image.getextrema()[1] > 255):
        image = image.convert("I").point(lambda value: value * (1 / 257) + 0.5)  # 16 bits to 8
    elif image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGB", image.size, "white")
        white.paste(image, mask=image.getchannel("A"))
        image = white
    image = image.convert("RGB")
    return image if turn is None else image.transpose(turn)


@dataclass(frozen=True, eq=False)
class EncodedImage:
    """An image as a model reads it. Equal images have the same hash.

    Args:
        file: the image.
        hash: of the file and the processor's settings.
        tokens: [L] int64, tokens of the image in a prompt: placeholders, and markers around them.
        is_embed: [L] bool, True on placeholders, whose embeddings are the image's features.
        inputs: arguments of the model's forward for only this image, such as ``pixel_values``.
    """

    file: ImageFile
    hash: str
    tokens: Tensor
    is_embed: Tensor
    inputs: Mapping[str, Tensor]

    @property
    def num_features(self) -> int:
        """Number of tokens whose embeddings are replaced by features."""
        return int(self.is_embed.sum())

    @property
    def nbytes(self) -> int:
        """Bytes of the inputs."""
        return sum(value.nbytes for value in self.inputs.values())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EncodedImage) and self.hash == other.hash

    def __hash__(self) -> int:
        return hash(self.hash)

    def __deepcopy__(self, memo: Any) -> EncodedImage:
        return self  # never changed, and shared by the sequences of a group


@dataclass(frozen=True)
class ImageSpan:
    """The tokens of an image in a sequence.

    Args:
        offset: index of its first token.
        image: the image.
    """

    offset: int
    image: EncodedImage

    @property
    def hash(self) -> str:
        return self.image.hash

    @property
    def is_embed(self) -> Tensor:
        return self.image.is_embed

    @property
    def length(self) -> int:
        return len(self.image.tokens)

    @property
    def end(self) -> int:
        """Index after its last token."""
        return self.offset + self.length


Spans = tuple[ImageSpan, ...]
"""The images of a sequence, in order."""


@dataclass(frozen=True, eq=False)
class Prompt:
    """A prompt with images. A prompt without images is a tensor.

    Args:
        tokens: [T] int64, with the tokens of the images.
        images: where they are.
    """

    tokens: Tensor
    images: Spans

    def __len__(self) -> int:
        return len(self.tokens)


def tokens_of(prompt: Tensor | Prompt) -> Tensor:
    """Return the tokens of a prompt, [T] int64."""
    return prompt.tokens if isinstance(prompt, Prompt) else prompt


def text_tokens(prompt: Tensor | Prompt) -> Tensor:
    """Return the tokens of a prompt without images, [T] int64.

    Raises:
        ValueError: it has images.
    """
    if isinstance(prompt, Prompt):
        raise ValueError(
            "a prompt for an engine or a model that reads only text must have no images: use a "
            "vision-language model with inference_model.backend=transformers."
        )
    return prompt


def images_of(prompt: Tensor | Prompt) -> Spans:
    """Return the images of a prompt."""
    return prompt.images if isinstance(prompt, Prompt) else ()


def prompt_text(prompt: Tensor | Prompt, decode: Callable[[Tensor], str]) -> str:
    """Return a prompt as text, with ``<image>`` for each image."""
    tokens, text, start = tokens_of(prompt), "", 0
    for span in images_of(prompt):
        text += decode(tokens[start : span.offset]) + PLACEHOLDER
        start = span.end
    return text + decode(tokens[start:])


def images_in(chat: Sequence[Mapping[str, Any]]) -> list[ImageFile]:
    """Return the images of a chat, in order."""
    contents = (message.get("content") for message in chat)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return [part["image"] for part in parts if part.get("type") == "image"]


def place_images(
    chat: Sequence[Mapping[str, Any]], files: Sequence[ImageFile]
) -> list[dict[str, Any]]:
    """Return a chat with its images: at the parts ``{"type": "image"}`` and the places of
    ``<image>`` in texts or, without these, at the start of the user's first message.

    Raises:
        ValueError: there are more places than images, or fewer.

    >>> place_images([{"role": "user", "content": "How many?"}], [ImageFile(b"...")])[0]["content"]
    [{'type': 'image', 'image': ImageFile()}, {'type': 'text', 'text': 'How many?'}]
    """
    messages = [{**message, "content": _parts(message["content"])} for message in chat]
    contents = [message["content"] for message in messages]
    places = [part for content in contents for part in content if part["type"] == "image"]
    if not places:
        places = [{"type": "image"} for _ in files]
        first = next((m for m in messages if m["role"] == "user"), messages[0])
        first["content"] = [*places, *first["content"]]
    if len(places) != len(files):
        raise ValueError(
            f"must have an image for each {PLACEHOLDER} and each part of the type image, but it "
            f"has {len(files)} images and {len(places)} of these: fix the row, or remove it."
        )
    for place, file in zip(places, files, strict=True):
        place["image"] = file
    return [
        {**message, "content": old["content"]} if not images_in([message]) else message
        for message, old in zip(messages, chat, strict=True)
    ]


_IMAGE_KEYS = {"type", "image"}


def message_content(value: Any, what: str) -> Content | None:
    """Return what a tool, an environment or a task shows as the content of a message; None if it
    is neither an image nor a list of texts and images.

    An image is a PIL image, the bytes of a file, or an ``ImageFile``. A list has parts ``{"type":
    "text", "text": ...}`` and ``{"type": "image", "image": ...}``; one without images becomes a
    text.

    Args:
        value: the value.
        what: who returned it, for messages.

    Raises:
        ValueError: a part beside images is neither a text nor an image.

    >>> message_content([{"type": "text", "text": "You "}, {"type": "text", "text": "win."}], "a tool")
    'You win.'
    """
    if not isinstance(value, list):
        file = _file(value)
        return None if file is None else [{"type": "image", "image": file}]
    dicts = [part if isinstance(part, dict) else {} for part in value]
    # Other keys, as an element of a page has, make it data.
    has_image = any(part.get("type") == "image" and part.keys() <= _IMAGE_KEYS for part in dicts)
    are_texts = [part.get("type") == "text" and type(part.get("text")) is str for part in dicts]
    if not has_image and not (value and all(are_texts)):
        return None
    parts: list[dict[str, Any]] = []
    for part, is_text in zip(value, are_texts, strict=True):
        is_image = isinstance(part, dict) and part.get("type") == "image"
        file = _file(part.get("image")) if is_image else None
        if file is not None:
            parts.append({"type": "image", "image": file})
        elif is_text:
            parts.append({"type": "text", "text": part["text"]})
        else:
            raise ValueError(
                f'{what} must have parts such as {{"type": "text", "text": ...}} or {{"type": '
                f'"image", "image": a PIL image}}, but it has {part!r:.80}: fix this part.'
            )
    return parts if has_image else text_of(parts)


def _file(value: Any) -> ImageFile | None:
    """Return an image as a file, which may be broken; None if it is something else."""
    if isinstance(value, ImageFile):
        return value
    if isinstance(value, bytes):
        from PIL import UnidentifiedImageError

        file = ImageFile(value)
        try:
            _ = file.size
        except ValueError as error:
            return None if isinstance(error.__cause__, UnidentifiedImageError) else file
        return file
    if callable(getattr(value, "save", None)) and callable(getattr(value, "convert", None)):
        return ImageFile.of(value)
    return None


def _parts(content: Any) -> list[dict[str, Any]]:
    """Return the content of a message as new parts; images have the key ``image``."""
    if isinstance(content, list):
        images = ({"image": None} if part["type"] == "image" else {} for part in content)
        return [{**part, **image} for part, image in zip(content, images, strict=True)]
    parts: list[dict[str, Any]] = []
    for number, text in enumerate(content.split(PLACEHOLDER)):
        parts += [{"type": "image", "image": None}] * bool(number)
        parts += [{"type": "text", "text": text}] * bool(text)
    return parts


def text_of(content: Any) -> str:
    """Return the content of a message as text, with ``<image>`` for each image.

    >>> text_of([{"type": "image"}, {"type": "text", "text": "How many?"}])
    '<image>How many?'
    """
    if not isinstance(content, list):
        return str(content)
    return "".join(
        PLACEHOLDER if part["type"] == "image" else str(part.get("text", "")) for part in content
    )
