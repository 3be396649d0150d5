"""Write the report of a sweep: which key mattered, overlaid curves, a table.

    python -m torchrl_grpo sweep multirun/DATE/TIME

The scripts write it by themselves when a multirun ends.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from torchrl_grpo.extras.report.sweep_report import write_sweep


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        "python -m torchrl_grpo sweep",
        description="Writes a page that compares the runs of a sweep.",
    )
    parser.add_argument(
        "folder", type=Path, help="folder of the sweep; the page is written to sweep.html in it"
    )
    options = parser.parse_args(arguments)
    try:
        path = write_sweep(options.folder)
    except ValueError as error:
        parser.exit(2, f"error: {error}\n")
    print(path)
