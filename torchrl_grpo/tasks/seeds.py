"""``SeedsTask``: the problems of an environment that makes its own."""

from __future__ import annotations

from collections.abc import Sequence

from torchrl_grpo.tasks.base import Message, Problem, Split, Task
from torchrl_grpo.tasks.fields import fill_template

_TRAIN_SAMPLES = 1000
_TRAIN_PER_TEST = 4


class SeedsTask(Task):
    """Problems that are numbers, in the column ``seed``; an environment makes something of them.

    Args:
        max_samples: train problems, the seeds from 0; there is a test problem for each four of
            them, from the next on.
        prompt_template: the begin of the user's message.
        system_prompt: the system's message.

    >>> task = SeedsTask(100, system_prompt="Play well.")
    >>> task.problems("test")[0].extra
    {'seed': 100}
    """

    name = "seeds"

    def __init__(
        self,
        max_samples: int | None = None,
        prompt_template: str | None = None,
        system_prompt: str | None = None,
    ) -> None:
        self.max_samples = _TRAIN_SAMPLES if max_samples is None else max_samples
        self.prompt_template, self.system_prompt = prompt_template or "", system_prompt

    def problems(self, split: Split) -> Sequence[Problem]:
        most = self.max_samples
        seeds = range(most) if split == "train" else range(most, most + -(-most // _TRAIN_PER_TEST))
        return [Problem("", None, {"seed": seed}) for seed in seeds]

    def messages(self, problem: Problem) -> list[Message]:
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        return [
            *system,
            {"role": "user", "content": fill_template(self.prompt_template, problem.extra)},
        ]
