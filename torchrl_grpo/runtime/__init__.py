"""Roles as Ray actors. Nothing here imports ray before it is used, so the package imports without it."""

from torchrl_grpo.host.startup import import_as_in_driver

import_as_in_driver("torchrl_grpo.assembly.parts")
