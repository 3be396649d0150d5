"""A tool: a plain function. Its type hints and its docstring are the schema that the model is shown.

python sota/grpo/grpo.py --config-name grpo_arithmetic 'env.tools=[examples/my_tools.py:calculator]' env.max_turns=2
"""

from torchrl_grpo.rewards.expressions import evaluate


def calculator(expression: str) -> str:
    """Evaluates an arithmetic expression.

    Args:
        expression: such as "3*(4+5)".
    """
    return str(evaluate(expression))
