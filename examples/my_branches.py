"""An agent that asks the same problem four times and compares the answers.

    python sota/grpo/grpo.py --config-name grpo_arithmetic env.agent=examples/my_branches.py:play \\
        env.max_turns=4 policy.turn_credit=per_turn

The rewards of the four answers sum to 0, so every trajectory has a reward of 0, and the policy learns
only from the turns' credit.
"""

from __future__ import annotations

from typing import Any


async def play(client: Any, problem: dict[str, Any]) -> float:
    """Reward each answer by its difference from the mean of all four.

    Args:
        client: an ``openai.AsyncOpenAI``, with ``reward``.
        problem: ``prompt``, ``messages``, ``answer`` and the columns of the data set's row.
    """
    answers = []
    for _ in range(4):
        create = client.chat.completions.create
        answers.append(await create(model="policy", messages=problem["messages"]))
    texts = [answer.choices[0].message.content for answer in answers]
    right = [text.endswith(f"#### {problem['answer']}") for text in texts]
    for answer, value in zip(answers, right, strict=True):
        client.reward(value - sum(right) / len(right), answer)
    return 0.0
