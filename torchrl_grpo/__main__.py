"""``python -m torchrl_grpo`` lists the commands."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

COMMANDS = {
    "grpo": "trains: collects a batch, trains on it, repeats",
    "grpo-async": "trains while it samples, in processes on Ray",
    "python -m torchrl_grpo.view": "shows runs in the browser, also while they train",
    "python -m torchrl_grpo.samples": "shows prompts and responses of a run",
    "python -m torchrl_grpo.sweep": "writes a page that compares the runs of a sweep",
    "python -m torchrl_grpo.export": "writes the model of a checkpoint for Hugging Face and vLLM",
    "python -m torchrl_grpo.plan": "advises how to split accelerators over the roles",
    "python -m torchrl_grpo.migrate": (
        "translates the config of another library into a command line"
    ),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """List the commands."""
    width = max(map(len, COMMANDS))
    parser = argparse.ArgumentParser(
        "python -m torchrl_grpo",
        description=(
            "GRPO post-training for language models, as TorchRL components. Commands (each has "
            "--help):"
        ),
        epilog="\n".join(f"  {name:{width}}  {text}" for name, text in COMMANDS.items())
        + "\n\nA first run, in a minute on a CPU: grpo --config-name grpo_arithmetic",
        usage=argparse.SUPPRESS,
        add_help=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-h", "--help", action="store_true", help=argparse.SUPPRESS)
    parser.parse_args(arguments)
    parser.print_help()


if __name__ == "__main__":
    main()
