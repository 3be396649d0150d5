"""The command that resumes a run, from the one that started it."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

from torchrl_grpo.host import interrupts
from torchrl_grpo.host.checkpoint_files import AUTO

_PLAIN = re.compile(r"[\w./~@%+:-]*")
"""Values that Hydra reads without quotes."""


def resume_command(checkpoint: Path, directory: Path) -> str:
    """Return the whole command that resumes a run or, in a sweep and outside our scripts, only the
    override; after a call from Python, the arguments to add.

    Args:
        checkpoint: the latest checkpoint, the run's own or the one that it resumed from.
        directory: the run's folder.
    """
    if interrupts.in_call():
        return f'torchrl_grpo.train(..., folder="{directory}", resume="{AUTO}")'
    words = sys.orig_argv
    if not interrupts.in_script() or {"--multirun", "-m"} & {*words}:
        return f"train.resume={checkpoint}"
    values = {"train.resume": str(checkpoint)}
    if checkpoint.is_relative_to(directory):
        values = {"train.resume": AUTO, "hydra.run.dir": str(directory)}
    kept = [word for word in words if word.lstrip("+").partition("=")[0] not in values]
    added = [
        f"{key}={value}" if _PLAIN.fullmatch(value) else f"{key}='{value}'"
        for key, value in values.items()
    ]
    return shlex.join([*kept, *added])
