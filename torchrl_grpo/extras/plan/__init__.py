"""``python -m torchrl_grpo plan``: the best split of devices among the roles for a config, by
simulation.
"""
