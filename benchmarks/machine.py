"""Common output of the benchmarks: the machine that they ran on, and the JSON."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PREFIXES = ("OMP_", "GOMP_", "KMP_", "MKL_", "MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")


def surroundings(packages: Sequence[str]) -> dict[str, Any]:
    """Return the machine, the versions of the packages that are installed, and what a process
    inherits; Linux only.
    """
    versions = {package: version(package) for package in packages if find_spec(package)}
    cpu = (
        Path("/proc/cpuinfo")
        .read_text()
        .partition("model name")[2]
        .partition("\n")[0]
        .strip("\t :")
    )
    return {
        "machine": {"platform": platform.platform(), "cpu": cpu, "cores": os.cpu_count()},
        "versions": versions | {"python": platform.python_version()},
        "environment": {
            name: value for name, value in os.environ.items() if name.startswith(PREFIXES)
        },
        "allocator": f"glibc {platform.libc_ver()[1]}, with its defaults but for what the environment says",
    }


def report(result: dict[str, Any], out: Path | None) -> None:
    """Print a result as JSON, and write it to a file, making its folder if needed."""
    text = json.dumps(result, indent=2) + "\n"
    sys.stdout.write(text)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")


def merge(figures: dict[str, Any], packages: Sequence[str], out: Path) -> None:
    """Add figures by name to those of earlier runs in a file."""
    result: dict[str, Any] = json.loads(out.read_text("utf-8")) if out.exists() else {}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(
        json.dumps(result | surroundings(packages) | figures, indent=2) + "\n", encoding="utf-8"
    )
