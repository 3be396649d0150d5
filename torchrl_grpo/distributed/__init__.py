"""Roles as Ray actors. Nothing here imports ray before it is used, so the package imports without it."""

import logging

# TorchRL imports vLLM where it is installed, which warns before its logging is set up. In an actor that would reach the
# user's terminal, once for each of them.
logging.getLogger("vllm").addHandler(logging.NullHandler())
