"""A reward function as TRL's GRPOTrainer takes it, unchanged:

    python sota/grpo/grpo.py --config-name grpo_arithmetic env.reward=examples/trl_reward.py:accuracy

It is told by its parameter ``completions`` and called with lists of one, as soon as a response is finished. Columns of
the data arrive as lists under their names; ``answer`` is one of them.
"""

import re


def accuracy(prompts, completions, answer, **kwargs):
    rewards = []
    for completion, expected in zip(completions, answer):
        found = re.search(r"####\s*(-?\d+)\s*$", completion)
        rewards.append(1.0 if found and found.group(1) == expected else 0.0)
    return rewards
