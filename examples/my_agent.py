"""An agent that knows only an OpenAI client, played by the policy that is trained.

    python sota/grpo/grpo.py --config-name grpo_arithmetic env.agent=examples/my_agent.py:play env.max_turns=2

Each request is a turn of the policy: its tokens are trained with the reward that ``play`` returns.
"""

from __future__ import annotations

from typing import Any


async def play(client: Any, problem: dict[str, Any]) -> float:
    """Ask for an answer, again if it is wrong, and return half of the reward for the second one.

    Args:
        client: an ``openai.AsyncOpenAI``.
        problem: ``prompt``, ``messages``, ``answer`` and the columns of the data set's row.
    """
    chat = list(problem["messages"])
    for reward in (1.0, 0.5):
        completion = await client.chat.completions.create(model="policy", messages=chat)
        message = completion.choices[0].message
        if message.content.endswith(f"#### {problem['answer']}"):
            return reward
        chat += [message, {"role": "user", "content": "That is wrong. Try again."}]
    return 0.0
