"""Roles as Ray actors. Ray is imported only when it is used, so the package works without it."""

from torchrl_grpo.host.startup import import_as_in_driver

import_as_in_driver("torchrl_grpo.assembly.parts")
