"""Export the model of a checkpoint, for Hugging Face's ``from_pretrained`` and vLLM.

    python -m torchrl_grpo export outputs/DATE/TIME
    python -m torchrl_grpo export outputs/DATE/TIME/checkpoints/checkpoint_000100 --output my_model
    python -m torchrl_grpo export outputs/DATE/TIME --adapters
    python -m torchrl_grpo export outputs/DATE/TIME --push USER/NAME

A run's folder means its newest complete checkpoint. The run's base model must be where it was.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from torchrl_grpo.errors import RunLostError


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m torchrl_grpo export",
        description="Writes the model of a checkpoint as a Hugging Face model.",
    )
    parser.add_argument(
        "checkpoint", help="a checkpoint, or a run's folder for its newest complete one"
    )
    parser.add_argument(
        "--output", type=Path, help="the folder to write; by default next to the checkpoint"
    )
    parser.add_argument("--adapters", action="store_true", help="write only LoRA's adapters")
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="use code and files that the base model's repository and the run's options name",
    )
    parser.add_argument(
        "--push",
        metavar="USER/NAME",
        help="upload the folder to this model of the Hugging Face hub",
    )
    options = parser.parse_args(arguments)
    # Here, so that a mistake or --help needs no torch.
    from transformers.utils import logging as transformers_logging

    from torchrl_grpo.extras.export.export import export
    from torchrl_grpo.extras.export.hub import create_repository, upload

    transformers_logging.disable_progress_bar()
    try:
        if options.push is not None:
            create_repository(options.push)
        target = export(
            options.checkpoint,
            options.output,
            adapters=options.adapters,
            trust_remote_code=options.trust_remote_code,
            hub_name=options.push or ".",
        )
        address = "" if options.push is None else upload(target, options.push)
    except (ValueError, RunLostError) as error:
        parser.exit(2, f"error: {str(error).replace('train.resume=', '')}\n")
    print(target, *filter(None, [address]), sep="\n")
