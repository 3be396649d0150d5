"""What every benchmark says about the machine that it ran on."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PREFIXES = ("OMP_", "GOMP_", "KMP_", "MKL_", "MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")


def surroundings(packages: Sequence[str]) -> dict[str, Any]:
    """The machine, the versions of the packages that are installed, and what a process inherits; Linux alone."""
    versions = {package: version(package) for package in packages if find_spec(package)}
    cpu = Path("/proc/cpuinfo").read_text().partition("model name")[2].partition("\n")[0].strip("\t :")
    return {
        "machine": {"platform": platform.platform(), "cpu": cpu, "cores": os.cpu_count()},
        "versions": versions | {"python": platform.python_version()},
        "environment": {name: value for name, value in os.environ.items() if name.startswith(PREFIXES)},
        "allocator": f"glibc {platform.libc_ver()[1]}, with its defaults but for what the environment says",
    }
