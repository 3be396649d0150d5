r"""MATH: competition problems whose answer is an expression in ``\boxed{}`` (arXiv:2103.03874)."""

from __future__ import annotations

from typing import Any, ClassVar

from torchrl_grpo.tasks.dataset import PresetTask
from torchrl_grpo.tasks.fields import checked_text
from torchrl_grpo.tasks.sources import Row

INSTRUCTION = r"Reason step by step, and put your final answer within \boxed{}."


def last_boxed(text: str) -> str | None:
    r"""Return the contents of the last ``\boxed{}`` of a text; None if it is empty, not closed or
    missing.

    ``\boxed 5`` and ``\fbox{5}`` count, as in the data set.

    >>> last_boxed(r"so \boxed{1} and \boxed{\frac{1}{2}}."), last_boxed(r"It is \boxed 5.")
    ('\\frac{1}{2}', '5')
    """
    start, end = max((text.rfind(box), text.rfind(box) + len(box)) for box in (r"\boxed", r"\fbox"))
    if start < 0:
        return None
    rest = text[end:].lstrip()
    if not rest.startswith("{"):
        words = rest.split("$")[0].split()
        return words[0].rstrip(".,") or None if words else None
    depth = 0
    for i, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[1:i].strip() or None
    return None


class MathTask(PresetTask):
    r"""MATH's problems, scored by the reward ``math``; a problem's answer is the last ``\boxed{}``
    of its solution.

    Args:
        dataset_path: a file or folder with the columns ``problem`` and ``solution``; None is
            ``DigitalLearningGmbH/MATH-lighteval`` on the hub.

    >>> task = MathTask()
    >>> task.read_answer({"problem": "Halve 1.", "solution": r"It is $\boxed{\frac{1}{2}}$."}, "solution")
    '\\frac{1}{2}'
    """

    name = "math"
    reward = "math"
    drops_shared = True  # its splits are fixed, and many of its problems are one short line
    hub_name = "DigitalLearningGmbH/MATH-lighteval"
    title = "MATH"
    files = "train.jsonl and test.jsonl"
    defaults: ClassVar[dict[str, Any]] = {
        "prompt_column": "problem",
        "answer_column": "solution",
        "prompt_template": f"{{problem}}\n\n{INSTRUCTION}",
    }

    def read_answer(self, row: Row, column: str) -> str:
        r"""Return the last ``\boxed{}`` of the solution, or the text of another column."""
        text = checked_text(row, column)
        answer = last_boxed(text) if column == "solution" else text
        if answer is None:
            raise ValueError(
                "must have a solution with its answer in \\boxed{}, but it ends with "
                f"{text[-80:]!r}: add it or remove the row."
            )
        return answer
