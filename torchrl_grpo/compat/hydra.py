"""Private names of Hydra."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, NoReturn

from hydra._internal.utils import get_args_parser


def options_parser(refuse: Callable[[str], NoReturn] | None = None) -> ArgumentParser:
    """Return the parser of Hydra's own command line options.

    Args:
        refuse: called with what is wrong; by default the parser prints it and exits.
    """
    parser = get_args_parser()
    if refuse is not None:
        parser.error = refuse  # type: ignore[method-assign, assignment]
        show: Any = parser._option_string_actions["--version"]
        show.version = f"torchrl_grpo {version('torchrl_grpo')} ({show.version})"
    return parser


def option_names() -> list[str]:
    """Return Hydra's options, such as ``--multirun`` and ``-m``."""
    return [*get_args_parser()._option_string_actions]
