"""An agent with a tool of its own: it passes a calculator to an OpenAI client and runs the calls.

    python sota/grpo/grpo.py --config-name grpo_arithmetic model.name=tool_starter env.difficulty=4 \\
        env.agent=examples/my_tool_agent.py:play env.max_turns=2 \\
        inference_model.max_new_tokens=96 inference_model.temperature=0.5
"""

from __future__ import annotations

import json
import re
from typing import Any

EXPRESSION = {"type": "string", "description": "sums and differences, as in 123+456-7"}
PARAMETERS = {"type": "object", "properties": {"expression": EXPRESSION}}
TOOLS = [{"type": "function", "function": {"name": "calculator", "parameters": PARAMETERS}}]


async def play(client: Any, problem: dict[str, Any]) -> float:
    """Answer the calls of the first turn with their results, and return whether the turn without
    calls is right.

    Args:
        client: an ``openai.AsyncOpenAI``.
        problem: ``prompt``, ``messages``, ``answer`` and the columns of the data set's row.
    """
    chat = list(problem["messages"])
    for _ in range(2):
        completion = await client.chat.completions.create(
            model="policy", messages=chat, tools=TOOLS
        )
        message = completion.choices[0].message
        if not message.tool_calls:
            return float((message.content or "").endswith(f"#### {problem['answer']}"))
        chat.append(message)
        for call in message.tool_calls:
            expression = json.loads(call.function.arguments).get("expression", "")
            result = sum(map(int, re.findall(r"[+-]?\d+", str(expression))))
            chat.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
    return 0.0
