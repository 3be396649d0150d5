"""``python -m torchrl_grpo view RUN`` starts a command, ``python -m torchrl_grpo`` lists them all."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

SCRIPTS = {
    "grpo": "trains: collects a batch, trains on it, repeats",
    "grpo-async": "trains while it samples, in processes on Ray",
}
COMMANDS = {
    "view": ("view.command", "shows runs in the browser, also while they train"),
    "samples": ("report.samples", "shows prompts and responses of a run"),
    "sweep": ("report.sweep", "writes a page that compares the runs of a sweep"),
    "export": ("export.command", "writes the model of a checkpoint for Hugging Face and vLLM"),
    "plan": ("plan.command", "advises how to split accelerators over the roles"),
    "migrate": ("migrate.command", "translates the config of another library into a command line"),
}
"""The module of each command in ``extras``, and what it does."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command, or list them.

    Args:
        arguments: the command's name and its arguments; by default this process's.
    """
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or [""]
    if name in COMMANDS:
        import_module(f"torchrl_grpo.extras.{COMMANDS[name][0]}").main(rest)
        return
    lines = dict(SCRIPTS)
    lines |= {f"python -m torchrl_grpo {name}": text for name, (_, text) in COMMANDS.items()}
    width = max(map(len, lines))
    parser = argparse.ArgumentParser(
        "python -m torchrl_grpo",
        description=(
            "GRPO post-training for language models, as TorchRL components. Commands (each has "
            "--help):"
        ),
        epilog="\n".join(f"  {line:{width}}  {text}" for line, text in lines.items())
        + "\n\nA first run, in a minute on a CPU: grpo --config-name grpo_arithmetic",
        usage=argparse.SUPPRESS,
        add_help=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-h", "--help", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("command", nargs="?", choices=COMMANDS, help=argparse.SUPPRESS)
    parser.parse_args(arguments)
    parser.print_help()


if __name__ == "__main__":
    main()
