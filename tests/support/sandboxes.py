"""Run one program in the sandbox."""

from __future__ import annotations

from types import SimpleNamespace

from torchrl_grpo.integrations.graders.code import judging
from torchrl_grpo.integrations.sandbox import Limits


def run_python(program: str, stdin: str = "", limits: Limits | None = None) -> SimpleNamespace:
    """Run a Python program; return its ``end``, ``status``, ``output`` and ``errors``."""
    with judging(limits or Limits(), source=program) as run_test:
        return SimpleNamespace(**run_test(stdin))
