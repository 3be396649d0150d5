"""The reward ``math`` under its old name, for one more release."""

from pkgutil import resolve_name

math = resolve_name("torchrl_grpo.integrations.graders.math:math")
