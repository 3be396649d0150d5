"""The reward ``code`` under its old name, for one more release."""

from pkgutil import resolve_name

code = resolve_name("torchrl_grpo.integrations.graders.code:code")
