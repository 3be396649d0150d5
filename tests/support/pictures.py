"""Pictures, and tools and environments that show them; without torch, which workers do not need."""

from __future__ import annotations

import io
import random
import struct
import zlib
from base64 import b64encode
from collections.abc import Sequence
from typing import Any

from PIL import Image, ImageDraw

from torchrl_grpo.images import ImageFile
from torchrl_grpo.tasks.base import Problem, Score, Task
from torchrl_grpo.tasks.conversations import WithTools
from torchrl_grpo.tasks.seeds import SeedsTask
from torchrl_grpo.tasks.with_environment import Kind, WithEnvironment
from torchrl_grpo.tools import Toolbox, ToolCall


def picture(number: int, size: tuple[int, int] = (32, 32)) -> ImageFile:
    """A picture that differs from those with other numbers."""
    image = Image.new("RGB", size, (255, 255, 255))
    draw = ImageDraw.Draw(image)
    for i in range(number + 1):
        x = (11 * i + 5 * number) % (size[0] - 8)
        y = (17 * i + 3 * number) % (size[1] - 8)
        draw.rectangle((x, y, x + 6, y + 6), fill=(40 * i % 256, 90 * number % 256, 60))
    return ImageFile.of(image)


class Count(Task):
    """A problem that any answer solves."""

    name = "count"

    def problems(self, split: str) -> list[Problem]:
        return [Problem(f"Count {number}.", "1") for number in range(4)]

    def score(self, problem: Problem, responses: Sequence[str]) -> Score:
        return Score(1.0, True)


def draw(number: int) -> Image.Image:
    """Draw a picture. Args: number: which one."""
    return picture(number).open()


def always_draws(text: str) -> list[ToolCall]:
    return [ToolCall("draw", {"number": len(text) % 7}), ToolCall("draw", {"number": 3})]


class Gallery:
    """A game that shows a picture at first, and two more after each turn."""

    def reset(self, seed: int) -> list[dict[str, Any]]:
        self.turns = 0
        image = {"type": "image", "image": picture(seed % 7).open()}
        return [{"type": "text", "text": "Look:"}, image]

    def step(self, response: str) -> tuple[list[dict[str, Any]], float, bool]:
        self.turns += 1
        images = [{"type": "image", "image": picture(i).data} for i in (self.turns, 5)]
        return [*images, {"type": "text", "text": "And now?"}], 0.5, self.turns == 3


class Screen:
    """A game whose observations are pictures alone."""

    def reset(self, seed: int) -> Image.Image:
        self.turns = 0
        return draw(seed % 7)

    def step(self, response: str) -> tuple[Any, float, bool]:
        self.turns += 1
        screen = draw(self.turns) if self.turns == 1 else picture(2).data
        return screen, 0.5, self.turns == 3


class Painter:
    """An environment whose tool draws."""

    def reset(self, seed: int) -> str:
        self.drawn = 0
        return "Draw."

    def draw(self, number: int) -> list[dict[str, Any]]:
        """Draw a picture. Args: number: which one."""
        self.drawn += 1
        return [
            {"type": "text", "text": f"picture {self.drawn}"},
            {"type": "image", "image": picture(number).data},
        ]

    def get_reward(self) -> float:
        return float(self.drawn)


def task_of(name: str) -> tuple[Task, int]:
    """Return a task and the number of images of each dialog with four turns."""
    if name == "tools":
        return WithTools(Count(), Toolbox([draw], always_draws)), 6
    if name == "methods":
        kind = Kind(Painter, parser=always_draws)
        return WithEnvironment(SeedsTask(4), {"": kind}), 6
    game = {"game": Gallery, "screen": Screen}[name]
    return WithEnvironment(SeedsTask(4), {"": Kind(game)}), 5 if name == "game" else 3


def url(file: ImageFile) -> str:
    return f"data:image/png;base64,{b64encode(file.data).decode()}"


def see(*shows: str | ImageFile, role: str = "user", **more: Any) -> dict[str, Any]:
    """A message of texts and images."""
    parts: list[dict[str, Any]] = [
        {"type": "text", "text": show}
        if isinstance(show, str)
        else {"type": "image_url", "image_url": {"url": url(show), "detail": "low"}}
        for show in shows
    ]
    return {"role": role, "content": parts, **more}


async def shows_pictures(client: Any, problem: dict[str, Any]) -> float:
    """An agent that shows pictures as a user and as a tool, and then another one with the same
    texts.
    """

    async def ask(chat: list[Any]) -> dict[str, Any]:
        answer = await client.chat.completions.create(model="policy", messages=chat)
        return {"role": "assistant", "content": answer.choices[0].message.content}

    chat = [see("Look: ", picture(1))]
    chat += [await ask(chat), see(picture(2), role="tool", tool_call_id="a")]
    chat += [await ask(chat), {"role": "user", "content": "again"}]
    await ask(chat)
    await ask([see("Look: ", picture(5)), *chat[1:3]])
    return 1.0


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    """A PIL image as the bytes of a file."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def claiming(width: int, height: int) -> bytes:
    """A small PNG file that claims to have a size."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", b""), (b"IEND", b""))
    parts = (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def noise(width: int, height: int) -> Image.Image:
    """A gray image that no format compresses, the same at each call."""
    return Image.frombytes("L", (width, height), random.Random(0).randbytes(width * height))


def broken_pictures() -> dict[str, bytes]:
    """Files whose heads are those of pictures, but whose pixels or Exif data cannot be read or are
    too many.
    """
    photo = noise(64, 48)
    exif = Image.Exif()
    exif[0x0112] = 6
    whole = encoded(photo, "JPEG", exif=exif)
    tag = whole.index(b"\x01\x12\x00\x03")
    return {
        "no pixels": encoded(photo, "JPEG")[:800],
        "undefined orientation": whole[: tag + 2] + b"\x00\x07" + whole[tag + 4 :],
        "no exif": encoded(photo, "JPEG", exif=b"Exif\x00\x00MM no Exif data"),
        "too large": claiming(9000, 9000),
    }
