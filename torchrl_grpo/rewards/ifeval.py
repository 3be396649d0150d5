"""The reward ``ifeval`` under its old name, for one more release."""

from pkgutil import resolve_name

ifeval = resolve_name("torchrl_grpo.integrations.graders.ifeval:ifeval")
