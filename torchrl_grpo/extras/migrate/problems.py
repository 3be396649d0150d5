"""Data and rewards of other libraries in terms of ours."""

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
    asked: Quantities, source: str, differs: Note, unset: Note, *, scored: bool = True
) -> dict[str, Any]:
    """Return ``env.dataset`` and ``env.reward``, and no evaluation if nothing names the test
    problems.

    Args:
        asked: the quantities.
        source: the file that was read, for functions that are defined in it.
        differs: called with what means something else here.
        unset: called with a key of ours whose value the file does not tell, and why.
        scored: whether the run scores responses.
    """
    if "train_files" in asked:
        return _files(asked, differs, unset)
    name = str(asked.get("dataset", ""))
    if "environments" in asked:
        name = next(
            (found for found in map(_task, asked["environments"]) if found in _BUILT_IN), ""
        )
    known = _BUILT_IN.get(name)
    ours: dict[str, Any] = {"env.dataset": known or name}
    if known:
        ours |= {"env.dataset_config": None, "env.train_split": None, "env.test_split": None}
    if not name:
        ours["evaluation.num_prompts"] = 0
        unset(
            "env.dataset",
            "the data is not in the file (docs/data.md); until then evaluation.num_prompts=0",
        )
    if (test := asked.get("test_dataset")) and test != asked.get("dataset"):
        differs(
            "env.test_split",
            f"the test split of the data is taken: evaluation.datasets=[{{dataset: {test}}}] adds it",
        )
    if "rewards" in asked:
        ours["env.reward"] = _rewards(asked, source, unset)
    elif "reward_model" in asked:
        ours["env.reward"] = [{"fn": "reward_model", "model": asked["reward_model"]}]
    elif known:
        differs(
            "env.reward",
            f"our reward of {known} is taken, which may score otherwise than theirs (docs/rewards.md)",
        )
    elif scored:
        unset("env.reward", "the reward is not in the file (docs/rewards.md)")
    return ours


def _task(environment: Any) -> str:
    """The name of a verifiers environment's task set."""
    if not isinstance(environment, dict):
        return ""
    inner = environment.get("env", environment)
    inner = inner if isinstance(inner, dict) else {}
    task = inner.get("taskset", {})
    return str(task.get("id", "") if isinstance(task, dict) else "") or str(
        environment.get("id", "")
    )


def _rewards(asked: Quantities, source: str, unset: Note) -> Any:
    """TRL's functions by name: a name alone is one of the script's, or one of TRL's where a yaml
    gives it.
    """
    given = asked["rewards"]
    several = given if isinstance(given, list) else [given]
    weights = asked.get("reward_weights") or [1.0] * len(several)
    named = [_function(one, source, unset) for one in several]
    entries = [
        {"fn": name, "weight": weight} if weight != 1 else name
        for name, weight in zip(named, weights, strict=False)
    ]
    return entries if len(entries) > 1 or not isinstance(entries[0], str) else entries[0]


def _function(name: Any, source: str, unset: Note) -> str:
    if isinstance(name, Unknown):
        unset("env.reward", f"{name} is known only when the file runs: give file.py:function")
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
        f"{name} is no function of a name, it is made with arguments: give file.py:function",
    )
    return SET_ME


def _files(asked: Quantities, differs: Note, unset: Note) -> dict[str, Any]:
    """verl's files: a folder where train and test lie side by side."""
    train, test = (
        [PurePosixPath(str(one)) for one in (value if isinstance(value, list) else [value])]
        for value in (asked["train_files"], asked.get("test_files") or [])
    )
    folders = {path.parent for path in test if path.stem == "test"}
    whole = [path.stem == "train" and path.parent in folders for path in train]
    names = [str(path.parent if both else path) for path, both in zip(train, whole, strict=True)]
    ours: dict[str, Any] = {"env.dataset": names[0]}
    if len(names) > 1:
        ours = {"env.dataset": None, "env.datasets": [{"dataset": name} for name in names]}
    if not all(whole):
        ours["evaluation.num_prompts"] = 0
        listed = ", ".join(f"{{dataset: {path}}}" for path in test)
        differs(
            "data.val_files",
            f"give env.test_fraction, and evaluation.datasets=[{listed}] beside it",
        )
    if model := asked.get("reward_model"):
        ours["env.reward"] = [{"fn": "reward_model", "model": model}]
    elif path := asked.get("reward_path"):
        named = f"{path}:{asked['reward_name']}"
        ours["env.reward"] = (
            [{"fn": named, **asked["reward_options"]}] if asked.get("reward_options") else named
        )
    else:
        ours["env.reward"] = _VERL_REWARD
        differs(
            "env.reward",
            "verl's own choice by data_source, which needs verl to be installed (docs/rewards.md)",
        )
    return ours
