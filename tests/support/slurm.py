"""Slurm's job scripts without Slurm: its variables, and a ``srun`` that only runs its command."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.support.configs import ROOT

SCRIPTS = ROOT / "sota" / "grpo" / "slurm"
SRUN = """#!/bin/bash
# A stand-in: where the real one starts its command on each node, this one leaves it for the others and runs it here.
while [[ $1 == --* ]]; do shift; done
{ export -p; printf 'exec'; printf ' %q' "$@"; } > "$SRUN_COMMAND.part"
mv "$SRUN_COMMAND.part" "$SRUN_COMMAND"
exec "$@"
"""


def environment(folder: Path, nodes: int, gpus: int) -> dict[str, str]:
    """Return the variables of a job; its ``srun`` will write ``folder/command.sh``, to be started
    on each node.

    Args:
        folder: folder that all nodes share.
        nodes: number of nodes.
        gpus: number of GPUs per node.
    """
    (folder / "srun").write_text(SRUN)
    (folder / "srun").chmod(0o755)
    return os.environ | {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "VENV": sys.prefix,
        "CONFIG": "grpo_arithmetic",
        "RUN": str(folder / "run"),
        "SRUN_COMMAND": str(folder / "command.sh"),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_CPUS_PER_TASK": "1",
        "SLURM_GPUS_ON_NODE": str(gpus),
    }
