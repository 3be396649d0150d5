"""A reward function for TRL's GRPOTrainer, unchanged:

    python sota/grpo/grpo.py --config-name grpo_arithmetic env.reward=examples/trl_reward.py:accuracy

It is recognized by its parameter ``completions`` and called with lists of one element, as soon as a response is
finished. Data columns, such as ``answer``, are passed as lists under their names.
"""

import re


def accuracy(prompts, completions, answer, **kwargs):
    rewards = []
    for completion, expected in zip(completions, answer):
        match = re.search(r"####\s*(-?\d+)\s*$", completion)
        rewards.append(1.0 if match and match.group(1) == expected else 0.0)
    return rewards
