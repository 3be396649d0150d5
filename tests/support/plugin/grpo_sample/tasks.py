"""A task, written as a change to a built-in one."""

from torchrl_grpo.tasks.arithmetic import ArithmeticTask


class Nines(ArithmeticTask):
    """Sums of numbers of one digit."""

    name = "nines"

    def __init__(self, difficulty: int = 1) -> None:
        super().__init__(difficulty)
