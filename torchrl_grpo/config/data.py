"""A data set: the settings of ``env`` itself, and of each entry of ``env.datasets``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torchrl_grpo import checks
from torchrl_grpo.config.fields import leaves, limited
from torchrl_grpo.config.rule import Rule, arguments, exclusive, is_set


@dataclass
class ColumnsConfig:
    """Roles of a data set's columns. Every column is passed to the reward, under its name."""

    prompt: str | None = None
    """Text, or a list of chat messages; by default prompt, question, problem, query or instruction,
    if exactly one of them exists.
    """
    answer: str | None = None
    """Column that the reward gets as answer; by default answer, solution, ground_truth or target,
    if there is one.
    """
    images: str | None = None
    """Images of the prompt, for a vision-language model: a path relative to the data's file, the
    bytes of a file, an image of the data set, or a list of these."""
    completion: str | None = None
    """algo=sft: the response to learn: text, or a list of chat messages."""
    messages: str | None = None
    """A whole chat, instead of prompt and completion: the prompt ends before the assistant's first
    turn, and algo=sft learns the assistant's turns.
    """


@dataclass
class DataConfig:
    """A data set: where its rows come from, and how a row becomes a prompt."""

    dataset: str | None = None
    """arithmetic, countdown or shapes (generated), gsm8k, math, ifeval, reasoning_gym:NAME (such as
    reasoning_gym:chain_sum), a file (jsonl, json, csv, parquet), a folder of such files, or a name
    on the Hugging Face hub. In csv files every value is text."""
    dataset_options: Any = None
    """reasoning_gym: arguments of the data set by name, such as {max_terms: 3}; seed, by default 0;
    and levels of its curriculum, such as [0, 1, 2]."""
    dataset_path: str | None = None
    """gsm8k, math, ifeval: file or folder with the data; by default the hub."""
    difficulty: int = limited(2, ge=1, le=10)
    """arithmetic: 1 to 10; up to 5 it is the number of digits, see
    torchrl_grpo/tasks/arithmetic.py. countdown: how many numbers a problem has, 2 to 6.
    shapes: 1 to 3, a third of the largest count.
    """
    dataset_config: str | None = None
    """On the hub: the data set's configuration."""
    revision: str | None = None
    """On the hub: branch, tag or commit."""
    train_split: str | None = None
    """Split to train on; by default train. A file is the split train; in a folder a split has the
    name of its file.
    """
    test_split: str | None = None
    """Split to test on; by default test, if there is one."""
    test_fraction: float | None = limited(None, gt=0, lt=1)
    """Share of the train split to test on instead, in (0, 1). A hash of the prompt decides, so the
    test problems are the same in every run. ifeval: by default 0.1."""
    max_samples: int | None = limited(None, ge=1)
    """Maximum number of rows to read from a split, from its start; null reads all. reasoning_gym:
    problems to generate for training, by default 1000, and a quarter of that for testing."""
    columns: ColumnsConfig = field(default_factory=ColumnsConfig)
    prompt_template: str | None = None
    """The user message, with columns in braces, such as "{question} Answer with a number."; other
    braces stay, and {{name}} is the text {name}. null uses only the prompt."""
    system_prompt: str | None = None
    """System message, which replaces one in the data."""
    reward: Any = None
    """Reward function: a built-in name, file.py:function, package.module:function; or a list of
    these or of {fn, weight, name, per, and options of the function} (docs/rewards.md). null uses the
    data set's own, if it has one."""


@dataclass
class DatasetConfig(DataConfig):
    """One of several data sets."""

    weight: float = limited(1.0, gt=0)
    """Its share of the training problems is this over the sum of all weights."""
    name: str | None = None
    """Name of its metrics; by default the name of the file, of the folder, or of the data set."""


def _reads(dataset: str, key: str) -> bool:
    """Return whether a data set uses a key of ``DataConfig``."""
    if key in ("dataset", "reward"):
        return True
    if dataset.startswith(checks.REASONING_GYM):
        return key in ("dataset_options", "max_samples", "prompt_template", "system_prompt")
    if key == "columns.images":
        return dataset not in (*checks.GENERATED, *checks.PRESETS)
    if key in ("difficulty", "dataset_options"):
        return key == "difficulty" and dataset in checks.GENERATED
    return dataset in checks.PRESETS if key == "dataset_path" else dataset not in checks.GENERATED


def unread(data: DataConfig, reads: Callable[[str], bool]) -> str | None:
    """Return the first key of a data set that is set but never read."""
    names = (name for name, _, _ in leaves(DataConfig()))
    return next((name for name in names if is_set(data, name) and not reads(name)), None)


def _unread_by_dataset(data: DataConfig) -> dict[str, str] | None:
    key = unread(data, lambda name: _reads(str(data.dataset), name))
    if key is None:
        return None
    examples = ("arithmetic", "gsm8k", "reasoning_gym:chain_sum")
    return {"key": key, "reader": next(name for name in examples if _reads(name, key))}


DATA_RULES = (
    Rule(
        "dataset",
        "must be a data set",
        "use {at}dataset=arithmetic, a file, a folder or a name on the Hugging Face hub",
        lambda data: not data.dataset,
    ),
    arguments("dataset_options", "max_terms: 3"),
    Rule(
        "KEY",
        "must be left out with {dataset=}, which does not read it",
        "to use it, set {at}dataset={reader}, for example",
        _unread_by_dataset,
    ),
    *(
        Rule(
            key,
            "must be left out with {dataset_path=}",
            "it is for data on the hub",
            "dataset_path",
        )
        for key in ("dataset_config", "revision")
    ),
    *(
        Rule(
            "columns.messages",
            "contains both prompt and completion",
            "leave {at}columns.prompt and completion out",
            key,
        )
        for key in ("columns.prompt", "columns.completion")
    ),
    exclusive("test_split", "test_fraction"),
)
"""Rules of a data set: ``env`` itself, or an entry of ``env.datasets``."""
TEST_RULES = (
    *DATA_RULES,
    Rule("weight", "must be left out", "weights are for env.datasets"),
)
"""Rules of an entry of ``evaluation.datasets``."""
