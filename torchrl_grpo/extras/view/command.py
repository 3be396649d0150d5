"""Serves a dashboard of running or finished runs: curves, groups of responses, tokens, a timeline,
alarms, configs.

    python -m torchrl_grpo view outputs/DATE/TIME
    python -m torchrl_grpo view outputs/first outputs/second

It prints the page's address, which contains a token and works only on this machine, and serves
until Ctrl-C.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from torchrl_grpo.extras.view.start import listen, serve
from torchrl_grpo.host.files import METRICS_FILE, SAMPLES_FILE


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve the page.

    Args:
        arguments: arguments on the command line; by default this process's.
    """
    parser = argparse.ArgumentParser(
        "python -m torchrl_grpo view", description="Serves a dashboard of running or finished runs."
    )
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", type=Path, help="a run's folder; several are compared"
    )
    options = parser.parse_args(arguments)
    if not all(map(find_spec, ("starlette", "uvicorn"))):
        parser.error('it needs packages that are not installed: pip install "torchrl_grpo[view]".')
    for run in options.runs:
        if not any((run / name).is_file() for name in (METRICS_FILE, SAMPLES_FILE)):
            problem = f"it has no {METRICS_FILE}" if run.is_dir() else "there is no such folder"
            parser.error(f"RUN={run} must be a run's folder, but {problem}: use outputs/DATE/TIME.")
    listening, token, address = listen()
    print(f"Run dashboard: {address}\nPress Ctrl-C to stop.", flush=True)
    serve(options.runs, listening, token)
