"""The reward ``reward_model`` under its old name, for one more release."""

from pkgutil import resolve_name

reward_model = resolve_name("torchrl_grpo.integrations.graders.reward_model:reward_model")
