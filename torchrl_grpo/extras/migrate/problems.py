"""Translation of other libraries' data and rewards."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from torchrl_grpo.extras.migrate.scripts import Unknown
from torchrl_grpo.extras.migrate.sizes import Note, Quantities
from torchrl_grpo.extras.migrate.tables import SET_ME

_BUILT_IN = {
    "gsm8k": "gsm8k",
    "openai/gsm8k": "gsm8k",
    "math": "math",
    "ifeval": "ifeval",
    "countdown": "countdown",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "EleutherAI/hendrycks_math": "math",
    "hendrycks/competition_math": "math",
}
_VERL_REWARD = "verl.utils.reward_score:default_compute_score"
_TRL_REWARDS = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
_OPEN_R1_REWARDS = {
    "accuracy": "accuracy_reward",
    "format": "format_reward",
    "tag_count": "tag_count_reward",
    "reasoning_steps": "reasoning_steps_reward",
    "length": "len_reward",
}


def problems(
    quantities: Quantities, source: str, differs: Note, unset: Note, *, scored: bool = True
) -> dict[str, Any]:
    """Return ``env.dataset`` and ``env.reward``, and no evaluation if nothing names the test
    problems.

    Args:
        asked: the quantities.
        source: the file, for functions that are defined in it.
        differs: called with keys that have a different meaning here.
        unset: called with keys of ours whose values the file does not contain, and why.
        scored: whether the run scores responses.
    """
    if "train_files" in quantities:
        return _files(quantities, differs, unset)
    name = str(quantities.get("dataset", ""))
    if "environments" in quantities:
        tasks = map(_task, quantities["environments"])
        name = next((task for task in tasks if task in _BUILT_IN), "")
    builtin = _BUILT_IN.get(name)
    ours: dict[str, Any] = {"env.dataset": builtin or name}
    if builtin:
        ours |= {"env.dataset_config": None, "env.train_split": None, "env.test_split": None}
    if not name:
        ours["evaluation.num_prompts"] = 0
        unset(
            "env.dataset",
            "the data is not in the file (docs/data.md); until then evaluation.num_prompts=0",
        )
    if (test := quantities.get("test_dataset")) and test != quantities.get("dataset"):
        differs(
            "env.test_split",
            f"the test split of the data is taken: evaluation.datasets=[{{dataset: {test}}}] adds "
            "it",
        )
    if "rewards" in quantities:
        ours["env.reward"] = _rewards(quantities, source, unset)
    elif "reward_model" in quantities:
        ours["env.reward"] = [{"fn": "reward_model", "model": quantities["reward_model"]}]
    elif builtin:
        differs(
            "env.reward",
            f"our reward of {builtin} is taken, which may score otherwise than theirs "
            "(docs/rewards.md)",
        )
    elif scored:
        unset("env.reward", "the reward is not in the file (docs/rewards.md)")
    return ours


def _task(environment: Any) -> str:
    """Return the name of a verifiers environment's taskset."""
    if not isinstance(environment, dict):
        return ""
    inner = environment.get("env", environment)
    inner = inner if isinstance(inner, dict) else {}
    task = inner.get("taskset", {})
    return str(task.get("id", "") if isinstance(task, dict) else "") or str(
        environment.get("id", "")
    )


def _rewards(quantities: Quantities, source: str, unset: Note) -> Any:
    """Translate TRL's functions: a plain name is a function of the script or, in a yaml file, of
    TRL.
    """
    value = quantities["rewards"]
    names = value if isinstance(value, list) else [value]
    weights = quantities.get("reward_weights") or [1.0] * len(names)
    functions = [_function(name, source, unset) for name in names]
    entries = [
        {"fn": name, "weight": weight} if weight != 1 else name
        for name, weight in zip(functions, weights, strict=False)
    ]
    return entries if len(entries) > 1 or not isinstance(entries[0], str) else entries[0]


def _function(name: Any, source: str, unset: Note) -> str:
    if isinstance(name, Unknown):
        unset("env.reward", f"{name} is known only when the file runs: set file.py:function")
        return SET_ME
    if ":" in name:
        return str(name)
    if source.endswith(".py"):
        return f"{source}:{name}"
    if name in _TRL_REWARDS:
        return f"trl.rewards:{name}"
    if name in _OPEN_R1_REWARDS:
        return f"open_r1.rewards:{_OPEN_R1_REWARDS[name]}"
    if "." in name:
        return ":".join(name.rsplit(".", 1))
    unset(
        "env.reward",
        f"{name} is not a plain function but is made with arguments: set file.py:function",
    )
    return SET_ME


def _paths(value: Any) -> list[PurePosixPath]:
    files = value if isinstance(value, list) else [value]
    return [PurePosixPath(str(file)) for file in files]


def _files(quantities: Quantities, differs: Note, unset: Note) -> dict[str, Any]:
    """Translate verl's files: to a folder if it has both train and test."""
    train = _paths(quantities["train_files"])
    test = _paths(quantities.get("test_files") or [])
    folders = {path.parent for path in test if path.stem == "test"}
    has_test = [path.stem == "train" and path.parent in folders for path in train]
    names = [str(path.parent if both else path) for path, both in zip(train, has_test, strict=True)]
    ours: dict[str, Any] = {"env.dataset": names[0]}
    if len(names) > 1:
        ours = {"env.dataset": None, "env.datasets": [{"dataset": name} for name in names]}
    if not all(has_test):
        ours["evaluation.num_prompts"] = 0
        test_sets = ", ".join(f"{{dataset: {path}}}" for path in test)
        differs(
            "data.val_files",
            f"set env.test_fraction, and also evaluation.datasets=[{test_sets}]",
        )
    if model := quantities.get("reward_model"):
        ours["env.reward"] = [{"fn": "reward_model", "model": model}]
    elif path := quantities.get("reward_path"):
        ours["env.reward"] = f"{path}:{quantities['reward_name']}"
        if options := quantities.get("reward_options"):
            ours["env.reward"] = [{"fn": ours["env.reward"], **options}]
    else:
        ours["env.reward"] = _VERL_REWARD
        differs(
            "env.reward",
            "verl's own choice by data_source, which needs verl to be installed (docs/rewards.md)",
        )
    return ours
