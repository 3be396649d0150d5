"""The engine of ``grpo_sample.engines``."""

from typing import Any

from torchrl_grpo.generation import Completion, TransformersEngine


class Counting(TransformersEngine):
    """Prints how many responses it samples."""

    def generate(self, *args: Any, **kwargs: Any) -> list[list[Completion]]:
        groups = super().generate(*args, **kwargs)
        print("counted", sum(map(len, groups)), flush=True)
        return groups
