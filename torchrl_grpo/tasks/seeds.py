"""``SeedsTask``: seeds as the problems of an environment that makes its own."""

from __future__ import annotations

from collections.abc import Sequence

from torchrl_grpo.tasks.base import Message, Problem, Split, Task
from torchrl_grpo.tasks.fields import fill_template

_TRAIN_SAMPLES = 1000
_TRAIN_PER_TEST = 4


class SeedsTask(Task):
    """Problems that are only a number, in the column ``seed``, from which an environment makes a
    task.

    Args:
        max_samples: number of train problems, with seeds from 0; the following seeds are the test
            problems, a quarter as many.
        prompt_template: beginning of the user message.
        system_prompt: the system message.

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
        self.prompt_template = prompt_template or ""
        self.system_prompt = system_prompt

    def problems(self, split: Split) -> Sequence[Problem]:
        num_seeds = self.max_samples
        seeds = (
            range(num_seeds)
            if split == "train"
            else range(num_seeds, num_seeds + -(-num_seeds // _TRAIN_PER_TEST))
        )
        return [Problem("", None, {"seed": seed}) for seed in seeds]

    def messages(self, problem: Problem) -> list[Message]:
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        content = fill_template(self.prompt_template, problem.extra)
        return [*system, {"role": "user", "content": content}]
