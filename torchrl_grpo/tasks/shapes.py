"""Generated pictures of 32 x 32 pixels: how many shapes of a color does one have? It needs no data
and no download.

Shapes stand in the cells of a 4 x 4 grid, at random places and in random sizes. Half of the
shapes, on average, have the color that the question names. As in the arithmetic task, a hash of the
picture's description decides its split.

A response is correct if it ends with ``#### n`` and n is the number.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from torchrl_grpo.images import ImageFile
from torchrl_grpo.tasks.arithmetic import INSTRUCTION, FinalAnswerTask
from torchrl_grpo.tasks.base import Message, Problem, Split
from torchrl_grpo.tasks.generated import SPLIT_SIZES, split_by_hash

SIZE = 32
"""Width and height of a picture in pixels."""
COLORS = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 80, 230),
    "yellow": (230, 210, 40),
}
KINDS = ("circle", "square", "triangle")

_GRID = 4
_CELL = SIZE // _GRID


class ShapesTask(FinalAnswerTask):
    """Pictures of colored shapes, drawn by a seeded generator.

    ``problems`` returns 4096 train and 512 test problems. ``Problem.extra["quadrants"]`` has the
    count in each quarter of the picture: top left, top right, bottom left, bottom right. The reward
    is 1.0 for a correct answer in the right format and 0.0 for everything else.

    Args:
        difficulty: 1 to 3; a third of the largest count.
        seed: decides which problems are drawn and in what order, but not their split.

    Raises:
        ValueError: ``difficulty`` is out of range.

    >>> problem = ShapesTask().problems("test")[0]
    >>> problem.images[0].size
    (32, 32)
    """

    name = "shapes"
    hint = "up to 6 shapes of a color"
    max_difficulty = 3

    def messages(self, problem: Problem) -> list[Message]:
        """Return one user message: the question, the answer format, and then the picture."""
        text = {"type": "text", "text": problem.query + INSTRUCTION}
        pictures = ({"type": "image", "image": image} for image in problem.images)
        return [{"role": "user", "content": [text, *pictures]}]

    def draw(self, split: Split) -> list[Problem]:
        # A string seeds Random through SHA-512, so the stream is the same in every process.
        rng = random.Random(f"shapes {self.difficulty} {self.seed} {split}")
        drawn: dict[str, Problem] = {}
        while len(drawn) < SPLIT_SIZES[split]:
            color = rng.choice(list(COLORS))
            shapes = _random_shapes(rng, color, 3 * self.difficulty)
            description = repr(shapes)
            if split_by_hash(description) == split:
                drawn[description] = _problem(color, shapes)
        return list(drawn.values())


Shape = tuple[str, str, int, int, int]
"""Kind, color, left and top edge, and size in pixels."""


def _random_shapes(rng: random.Random, color: str, largest: int) -> list[Shape]:
    """Return up to ``largest`` shapes of a color, and as many of others."""
    others = [name for name in COLORS if name != color]
    count = rng.randint(0, largest)
    colors = [color] * count + rng.choices(others, k=rng.randint(0, min(largest, 16 - count)))
    shapes = []
    for cell, name in zip(rng.sample(range(_GRID**2), len(colors)), colors, strict=True):
        size = rng.randint(_CELL - 3, _CELL - 1)
        left = cell % _GRID * _CELL + rng.randint(0, _CELL - size)
        top = cell // _GRID * _CELL + rng.randint(0, _CELL - size)
        shapes.append((rng.choice(KINDS), name, left, top, size))
    return shapes


def _problem(color: str, shapes: Sequence[Shape]) -> Problem:
    from PIL import Image, ImageDraw

    picture = Image.new("RGB", (SIZE, SIZE), (25, 25, 25))
    canvas = ImageDraw.Draw(picture)
    quadrants = [0, 0, 0, 0]
    for kind, name, left, top, size in shapes:
        right, bottom = left + size - 1, top + size - 1
        if kind == "circle":
            canvas.ellipse((left, top, right, bottom), COLORS[name])
        elif kind == "square":
            canvas.rectangle((left, top, right, bottom), COLORS[name])
        else:
            canvas.polygon([(left, bottom), (right, bottom), (left + size // 2, top)], COLORS[name])
        half = SIZE // 2
        quadrants[2 * (top >= half) + (left >= half)] += name == color
    images = (ImageFile.of(picture),)
    return Problem(
        f"{color}=?", str(sum(quadrants)), {"quadrants": tuple(quadrants)}, images=images
    )
