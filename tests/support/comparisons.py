"""Functions that compare responses, an environment and an agent. Reward workers import this module,
so it stays free of torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any


def longer(responses: Sequence[str], prompt: str, answer: str) -> list[float]:
    """Return how many of the other responses are shorter, with the number of all as a part."""
    assert "=?" in prompt and answer.isdigit()
    return [float(sum(len(b) < len(a) for b in responses)) for a in responses]


async def longer_later(responses: Sequence[str]) -> list[dict[str, float]]:
    await asyncio.sleep(0.01)
    lengths = sorted(map(len, responses))
    return [{"": lengths.index(len(each)), "seen": len(responses)} for each in responses]


def own(response: str) -> float | None:
    """Score the first letter, if it is a digit."""
    if response.startswith("x"):
        raise ValueError("no score")
    return None if response.startswith("n") else float(response[:1] == "1")


def said(response: str) -> dict[str, Any]:
    return {"": 1.0, "feedback": f"own {response}"} if response != "22" else {"": 1.0}


def said_to_group(responses: Sequence[str]) -> list[Any]:
    return [
        {"": float(i), "feedback": f"{text}\nof group"} if text != "4444" else 0.0
        for i, text in enumerate(responses)
    ]


class Counting:
    """An environment whose episodes have as many turns as the first letter says."""

    def reset(self, **columns: Any) -> str:
        self.left = None
        return ""

    def step(self, response: str) -> tuple[str, float, bool]:
        self.left = int(response[0]) - 1 if self.left is None else self.left - 1
        return "go on", 0.25, self.left < 1


async def play_twice(client: Any, problem: Mapping[str, Any]) -> None:
    chat = [{"role": "user", "content": problem["prompt"]}]
    answer = await client.chat.completions.create(model="policy", messages=chat)
    if answer.choices[0].message.content != "1":
        chat += [answer.choices[0].message, {"role": "user", "content": "again"}]
        await client.chat.completions.create(model="policy", messages=chat)
