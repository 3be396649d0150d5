"""Accelerators of this machine, as reported by their driver."""

from __future__ import annotations

import subprocess


def accelerators_in_use() -> dict[str, tuple[int, int]]:
    """Return used and total bytes of each NVIDIA device. The driver reports them, so CUDA is not
    initialized here.
    """
    query = [
        "nvidia-smi",
        "--query-gpu=index,memory.used,memory.total",
        "--format=csv,noheader,nounits",
    ]
    try:
        lines = subprocess.run(
            query, capture_output=True, text=True, timeout=20, check=True
        ).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return {}
    rows = [[cell.strip() for cell in line.split(",")] for line in lines]
    numbers = [[int(cell) for cell in row] for row in rows if all(map(str.isdecimal, row))]
    return {f"cuda:{index}": (used << 20, total << 20) for index, used, total in numbers}
