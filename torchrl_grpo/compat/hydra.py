"""Private names of Hydra."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, NoReturn

from hydra._internal.utils import get_args_parser


def options_parser(refuse: Callable[[str], NoReturn]) -> ArgumentParser:
    """Return the parser of Hydra's own command line options, with our version.

    Args:
        refuse: called with the problem, instead of printing the usage and exiting.
    """
    parser: Any = get_args_parser()
    parser.error = refuse
    option = parser._option_string_actions["--version"]
    option.version = f"torchrl_grpo {version('torchrl_grpo')} ({option.version})"
    return parser


def option_names() -> list[str]:
    """Return Hydra's options, such as ``--multirun`` and ``-m``."""
    return [*get_args_parser()._option_string_actions]
