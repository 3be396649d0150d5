"""A custom task with two turns: the policy answers, learns whether that was too high or too low,
and corrects it.

    python sota/grpo/grpo.py --config-name grpo_arithmetic env.dataset=null \\
        env.task._target_=examples/my_tasks.py:GuidedSums env.task.largest=50 env.max_turns=2
"""

import random

from torchrl_grpo.tasks import Problem, Score, Task
from torchrl_grpo.tasks.arithmetic import final_answer


class GuidedSums(Task):
    name = "guided sums"

    def __init__(self, largest: int = 99) -> None:
        self.largest = largest

    def problems(self, split):
        pairs = [(a, b) for a in range(10, self.largest) for b in range(10, self.largest)]
        random.Random(0).shuffle(pairs)
        cut = len(pairs) // 5
        return [
            Problem(f"{a}+{b}=? #### n", str(a + b))
            for a, b in (pairs[:cut] if split == "test" else pairs[cut:])
        ]

    def next_turn(self, problem, responses):
        """Return the message that follows a response; None ends the dialog."""
        answer = final_answer(responses[-1])
        if answer == problem.answer or len(responses) == 2:
            return None
        if answer is None:
            return "no number"
        return "too high" if int(answer[:9]) > int(problem.answer) else "too low"

    def score(self, problem, responses):
        right = final_answer(responses[-1]) == problem.answer
        return Score(reward=right / len(responses), correct=right)
