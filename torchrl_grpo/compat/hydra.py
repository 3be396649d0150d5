"""Private names of Hydra."""

from __future__ import annotations

from argparse import ArgumentParser

from hydra._internal.utils import get_args_parser


def options_parser() -> ArgumentParser:
    """Return the parser of Hydra's own command line options."""
    return get_args_parser()
