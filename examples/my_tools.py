"""A tool is a plain function. The model is shown its type hints and docstring as the schema.

python sota/grpo/grpo.py --config-name grpo_arithmetic model.name=tool_starter env.difficulty=4 \\
    'env.tools=[examples/my_tools.py:calculator]' env.max_turns=2 \\
    inference_model.max_new_tokens=96 inference_model.temperature=0.5
"""

from torchrl_grpo.rewards.expressions import evaluate


def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression: for example "3*(4+5)".
    """
    return str(evaluate(expression))
