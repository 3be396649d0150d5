"""The reward ``judge`` under its old name, for one more release."""

from pkgutil import resolve_name

judge = resolve_name("torchrl_grpo.integrations.graders.judge:judge")
