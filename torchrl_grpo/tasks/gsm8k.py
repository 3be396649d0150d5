"""GSM8K: grade-school word problems whose answer is one number (arXiv:2110.14168).

The problems come from a folder with ``train.jsonl`` and ``test.jsonl``, or from ``openai/gsm8k`` on
Hugging Face.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torchrl_grpo.rewards import marked_number
from torchrl_grpo.tasks.base import Problem, Score
from torchrl_grpo.tasks.dataset import PresetTask
from torchrl_grpo.tasks.fields import checked_text
from torchrl_grpo.tasks.sources import Row

INSTRUCTION = (
    "Reason step by step, then finish with a line that holds only the answer: #### <number>"
)


class GSM8KTask(PresetTask):
    """GSM8K's problems; the reward is 1 if the number after a response's last ``####`` is the
    answer, otherwise 0.

    Args:
        dataset_path: a folder with ``train.jsonl`` and ``test.jsonl``, with one JSON object per
            line and the fields ``question`` and ``answer``, where the answer ends with ``#### n``.
            None loads ``openai/gsm8k`` through ``datasets``.
        **options: options of ``DatasetTask`` that differ from the defaults.

    >>> task = GSM8KTask()
    >>> problem = Problem(query="How much is 48 + 24?", answer="72")
    >>> task.score(problem, ["48 + 24 = 72\\n#### 72.00"])
    Score(reward=1.0, correct=True)
    """

    name = "gsm8k"
    hub_name = "openai/gsm8k"
    hub_config = "main"
    title = "GSM8K"
    files = "train.jsonl and test.jsonl"
    defaults: ClassVar[dict[str, Any]] = {
        "prompt_column": "question",
        "answer_column": "answer",
        "prompt_template": f"{{question}}\n\n{INSTRUCTION}",
    }

    def read_answer(self, row: Row, column: str) -> str:
        """Return the number after ``####``, in its canonical form."""
        text = checked_text(row, column)
        answer = marked_number(text)
        if answer is None:
            raise ValueError(
                "must have an answer that ends with '#### <number>', but it ends with "
                f"{text[-80:]!r}: add the final line or remove the row."
            )
        return answer

    def score(self, problem: Problem, responses: Sequence[str]) -> Score:
        """Return 1.0 if the number after the last ``####`` of the last turn is exactly the answer,
        else 0.0.
        """
        correct = marked_number(responses[-1]) == problem.answer
        return Score(reward=float(correct), correct=correct)
