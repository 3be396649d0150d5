"""Objects that tests hand to ``torchrl_grpo.train`` and that travel to worker processes, which import
this module: it imports nothing heavy.
"""

from __future__ import annotations

from typing import Any


def right(response: str, answer: str) -> float:
    return float(response.strip().endswith(answer))


class Game:
    def reset(self, seed: int) -> str:
        return f"{seed % 10}+1=? #### n"

    def step(self, response: str) -> tuple[str, float, bool]:
        return "again", float("####" in response), True


async def play(client: Any, problem: Any) -> float:
    answer = await client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": problem["prompt"]}]
    )
    return float("####" in answer.choices[0].message.content)
