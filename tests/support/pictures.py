"""Pictures, and tools and environments that show them; without torch, which workers do not need."""

from __future__ import annotations

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
