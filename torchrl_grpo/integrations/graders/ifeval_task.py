"""IFEval: 541 prompts with instructions that a program can verify (arXiv:2311.07911)."""

from __future__ import annotations

from typing import Any, ClassVar

from torchrl_grpo.tasks.dataset import PresetTask


class IFEvalTask(PresetTask):
    """IFEval's prompts, scored by the reward ``ifeval``: the mean of its four accuracies.

    The data has one split. A tenth of it is the test split, unless ``test_fraction`` is set; with
    ``test_split="train"`` all of it is the test split, and nothing is left to train on.

    Args:
        dataset_path: a folder with ``input_data.jsonl``; None for ``google/IFEval`` on the hub.
        **options: options of ``DatasetTask`` that differ from the defaults.

    >>> IFEvalTask().messages(IFEvalTask().make_problem({"prompt": "Write a poem without commas."}))
    [{'role': 'user', 'content': 'Write a poem without commas.'}]
    """

    name = "ifeval"
    reward: ClassVar[Any] = {"fn": "ifeval", "weight": 0.25}  # the mean of its four accuracies
    hub_name = "google/IFEval"
    title = "IFEval"
    files = "input_data.jsonl"
    defaults: ClassVar[dict[str, Any]] = {"prompt_column": "prompt", "test_fraction": 0.1}
