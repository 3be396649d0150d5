"""``python -m torchrl_grpo.plan``: which split of the devices over the roles suits a config, by simulation."""
