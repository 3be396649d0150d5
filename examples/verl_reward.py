"""A reward function for verl's ``custom_reward_function``, unchanged:

    python sota/grpo/grpo.py --config-name grpo_arithmetic env.reward=examples/verl_reward.py:compute_score

It is recognized by its parameter ``solution_str``. In a returned dict, ``score`` is the reward; other
numbers are logged.
"""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    right = solution_str.strip().endswith(f"#### {ground_truth}")
    return {"score": float(right), "letters": len(solution_str)}
