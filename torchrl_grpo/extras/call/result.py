"""``Result``: the output of a run, as Python objects."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl_grpo.extras.report.summary import merge_steps, summarize
from torchrl_grpo.host.files import METRICS_FILE, SAMPLES_FILE, read_jsonl

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Result:
    """Output of a run, read from its folder on access. The run may still be training, in any
    process.

    Attributes:
        folder: folder of the run.

    >>> Result("outputs/mine").report
    PosixPath('outputs/mine/report.html')
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The metrics, one row per step, ready for pandas."""
        return merge_steps(read_jsonl(self.folder / METRICS_FILE))

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Prompts and responses, one row each."""
        return read_jsonl(self.folder / SAMPLES_FILE)

    @property
    def summary(self) -> dict[str, Any]:
        """The result in numbers, such as ``accuracy_before`` and ``accuracy_after``."""
        return summarize(self.folder)

    @property
    def report(self) -> Path:
        """Path of the report, a page for the browser."""
        return self.folder / "report.html"

    @cached_property
    def model(self) -> PreTrainedModel:
        """The trained model, in float32 on the CPU.

        Raises:
            ValueError: the run has not written one.
        """
        import torch

        from torchrl_grpo.models.loading import load_model

        return load_model(self._model_name(), dtype=torch.float32, device=torch.device("cpu"))

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer.

        Raises:
            ValueError: the run has not written one.
        """
        from torchrl_grpo.models.loading import load_tokenizer

        return load_tokenizer(self._model_name())

    def __repr__(self) -> str:
        summary = self.summary
        texts = [summary.get("before_text"), summary.get("after_text")]
        accuracy = " -> ".join(filter(None, texts))
        about = f", test accuracy {accuracy}" if accuracy else ""
        return f"Result({str(self.folder)!r}: {summary['steps']:,} steps{about})"

    def _model_name(self) -> str:
        folder = self.folder / "checkpoints" / "model"
        if not folder.is_dir():
            raise ValueError(
                f"{self.folder} has no model, which a run writes at its end: resume the run, or "
                f"write one with `python -m torchrl_grpo export {self.folder}`."
            )
        return str(folder)
