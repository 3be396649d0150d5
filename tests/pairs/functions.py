"""Rewards, tools, a game and agents for the runs: plain functions, as a user writes them."""

from __future__ import annotations

import asyncio
import hashlib
import random
import re
from collections.abc import Sequence
from typing import Any

from torchrl_grpo.tools import ToolCall

NO = "no. Again."


def right(response: str, answer: Any = None) -> float:
    return float(response.strip().endswith(f"#### {answer}"))


def length(response: str) -> float:
    return len(response) / 40


def maybe(response: str) -> float | None:
    """Score half of the responses and return None for the others."""
    return None if len(response) % 2 else 0.5 * ("," in response)


def hint(messages: list[dict], answer: str, peers: list[dict]) -> list[dict] | None:
    """Put the answer in front of the question, unless no other response of the group has a valid
    reward.
    """
    text = f"{answer} {messages[-1]['content']}"
    return [*messages[:-1], {**messages[-1], "content": text}] if peers else None


async def slow(response: str, answer: Any = None) -> float:
    await asyncio.sleep(0.003)
    return right(response, answer) + 0.05 * ("," in response)


def failing(response: str, prompt: str, answer: Any = None) -> float:
    """Raise for one response in ten and return NaN for another one."""
    digest = int(hashlib.md5(f"{prompt}|{response}".encode()).hexdigest(), 16) % 10
    if digest == 0:
        raise RuntimeError("one of ten fails")
    return float("nan") if digest == 1 else right(response, answer)


def of_trl(
    prompts: Sequence[Any], completions: Sequence[Any], answer: Any = None, **_: Any
) -> list[float]:
    texts = [
        completion if isinstance(completion, str) else completion[-1]["content"]
        for completion in completions
    ]
    return [
        right(text, completion)
        for text, completion in zip(texts, answer or [None] * len(texts), strict=True)
    ]


def ranking(responses: Sequence[str], answer: Any = None) -> list[float]:
    """Score the share of the group's responses that are longer, and right ones above all."""
    return [
        right(text, answer) + sum(len(text) < len(other) for other in responses) / len(responses)
        for text in responses
    ]


def calculate(expression: str) -> str:
    """Evaluate a sum.

    Args:
        expression: such as 1+1.
    """
    numbers = [int(number) for number in expression.split("+")]
    if numbers[0] % 7 == 0:
        raise ValueError("seven")
    return str(sum(numbers))


def parse(text: str) -> list[ToolCall]:
    """Accept an odd result as a call."""
    match = re.search(r"#### (\d{1,6})", text)
    return (
        [ToolCall("calculate", {"expression": f"{match[1]}+0"})]
        if match and int(match[1]) % 2
        else []
    )


class Game:
    """A game of sums in which each wrong answer costs more than the one before."""

    def reset(self, seed: int) -> str:
        rng = random.Random(seed)
        self.sum, self.turns = (rng.randint(10, 99), rng.randint(10, 99)), 0
        return f"{self.sum[0]}+{self.sum[1]}=? #### n"

    def step(self, response: str) -> tuple[str, float, bool]:
        self.turns += 1
        done = bool(right(response, sum(self.sum)))
        return NO, 1.0 if done else -0.1 * self.turns, done


class Rows:
    """A game that is played on the rows of a data set."""

    def reset(self, answer: str) -> None:
        self.answer = answer

    def step(self, response: str) -> tuple[str, float, bool]:
        done = bool(right(response, self.answer))
        return NO, 1.0 if done else -0.1, done


async def play(client: Any, problem: dict[str, Any]) -> float:
    chat = list(problem["messages"])
    for reward in (1.0, 0.5):
        answer = (await client.chat.completions.create(model="p", messages=chat)).choices[0].message
        if right(answer.content, problem["answer"]):
            return reward
        chat += [answer, {"role": "user", "content": NO}]
    return 0.0


async def compact(client: Any, problem: dict[str, Any]) -> float:
    """Produce two samples: the second request drops the first answer."""
    for reward in (1.0, 0.5):
        answer = await client.chat.completions.create(model="p", messages=problem["messages"])
        if right(answer.choices[0].message.content, problem["answer"]):
            return reward
    return 0.0


async def branch(client: Any, problem: dict[str, Any]) -> float:
    """Ask three times, the last time from the point before the second request."""
    chat = list(problem["messages"])
    for reply in (None, NO, "no, again."):
        asked = chat if reply is None else [*chat, {"role": "user", "content": reply}]
        answer = (
            (await client.chat.completions.create(model="p", messages=asked)).choices[0].message
        )
        if reply is None:
            chat = [*chat, answer]
    return right(answer.content, problem["answer"])
