"""Make the task that ``env.*`` of the config describes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial, update_wrapper
from pkgutil import resolve_name
from typing import Any, Literal

from torchrl_grpo import checks
from torchrl_grpo.assembly.components import make_component
from torchrl_grpo.config.data import DataConfig, DatasetConfig
from torchrl_grpo.config.env import EnvConfig
from torchrl_grpo.config.schema import GRPOConfig
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.host.extras import load_extra
from torchrl_grpo.host.objects import OBJECTS, load_class, load_function
from torchrl_grpo.host.startup import say
from torchrl_grpo.rewards.spec import parse_rewards
from torchrl_grpo.tasks.base import Problem, Split, Task
from torchrl_grpo.tasks.conversations import WithRetry, WithTools
from torchrl_grpo.tasks.dataset import DatasetTask
from torchrl_grpo.tasks.mixed import MixedTask
from torchrl_grpo.tasks.seeds import SeedsTask
from torchrl_grpo.tasks.sources import UnknownSplitError, data_name
from torchrl_grpo.tasks.with_environment import Kind, WithEnvironment
from torchrl_grpo.tasks.with_rewards import Rewards, WithRewards, make_rewards
from torchrl_grpo.tasks.with_tests import WithTests
from torchrl_grpo.tools import Toolbox
from torchrl_grpo.tools.toolbox import Parser

_log = logging.getLogger("torchrl")  # TorchRL's logger: importing that takes seconds
Scoring = Literal["must", "may", "not"]

PYTHON = "python"
"""The built-in tool of ``env.tools``."""

BUILTINS = {
    "arithmetic": "torchrl_grpo.tasks.arithmetic:ArithmeticTask",
    "countdown": "torchrl_grpo.tasks.countdown:CountdownTask",
    "shapes": "torchrl_grpo.tasks.shapes:ShapesTask",
    "gsm8k": "torchrl_grpo.tasks.gsm8k:GSM8KTask",
    "math": "torchrl_grpo.tasks:MathTask",
    "ifeval": "torchrl_grpo.tasks:IFEvalTask",
}
"""Built-in data sets by name; each is an ordinary class that a user could write."""


def read_task(config: GRPOConfig) -> Task:
    """Make the task of a run and read its training data, which needs neither torch nor TorchRL.

    Raises:
        ConfigError: see ``make_task``.
    """
    try:
        task = make_task(
            config.env,
            config.evaluation.datasets or (),
            scored=config.scores,
            tokenizer=config.model.tokenizer_arguments,
        )
        load_extra("check_comparison")(config, task.group_rewards)
        return task
    except ValueError as error:
        raise ConfigError(str(error)) from error


def make_task(
    env: EnvConfig,
    tests: Sequence[DatasetConfig] = (),
    *,
    scored: bool = True,
    tokenizer: Mapping[str, Any] | None = None,
) -> Task:
    """Make the task of a config, with its rewards. Its training data is read now, so that errors in
    the data, or in a reward's columns, are found before a model loads.

    Args:
        env: validated.
        tests: further test sets.
        scored: whether responses are scored; if not, the data needs no reward.
        tokenizer: arguments of ``load_tokenizer``, for agents that count tokens.

    Raises:
        ValueError: the data cannot be used, there is no such task, or nothing scores its responses.

    >>> make_task(EnvConfig(dataset="arithmetic", difficulty=1)).name
    'arithmetic'
    """
    env, tests = _with_sandbox(env, tests)
    if isinstance(env.task, str):
        return _make_verifiers(env, tests)
    scoring: Scoring = "must" if scored and env.agent is None else "may"
    if env.environment is not None:
        scoring = "not"
    task = data = _make_problems(env, scoring)
    if tests:
        dataset_names_used = list(task.tasks) if isinstance(task, MixedTask) else []
        names = dataset_names(tests, "evaluation.datasets", dataset_names_used)
        sets = [
            _make_test(entry, f"evaluation.datasets[{i}]", env.reward, scoring)
            for i, entry in enumerate(tests)
        ]
        task = WithTests(task, dict(zip(names, sets, strict=True)))
    functions = _load_tools(env)
    if env.environment is not None:
        task = _with_environment(task, env, functions)
    elif PYTHON in env.tools:
        task = _with_python(task, env, functions)
    elif functions:
        task = WithTools(task, Toolbox(functions, _tool_parser(env)))
    if env.retry_prompt is not None:
        task = WithRetry(task, env.retry_prompt)
    if env.agent is not None:
        task = load_extra("agent")(
            task,
            env.agent,
            env.abandoned == "drop",
            _tool_parser(env),
            env.max_image_pixels,
            tokenizer,
            env.chat_template_kwargs,
        )
    is_played = env.environment is not None or env.agent is not None
    _check_parts(
        env, data.tasks if isinstance(data, MixedTask) and not is_played else {task.name: task}
    )
    if task.is_stateful and env.transforms:
        raise ValueError(
            f"env.transforms={list(env.transforms)} must be left out with task {task.name!r}, "
            "which keeps state between the turns of a dialog: let the task itself reply."
        )
    if env.max_turns > 1 and not (task.multi_turn or env.transforms):
        raise ValueError(
            f"env.max_turns={env.max_turns} must be 1 with task {task.name!r}, whose dialogs end "
            "after the policy's first turn: leave it out, or set env.retry_prompt, env.tools or "
            "env.transforms."
        )
    return task


def _load_tools(env: EnvConfig) -> list[Callable[..., Any]]:
    """Return the functions of ``env.tools``, including the tools of MCP servers."""
    functions: list[Callable[..., Any]] = []
    for name in env.tools:
        if name.startswith(checks.MCP):
            functions += load_extra("mcp_tools")(name, env.reward_timeout_s)
        elif name != PYTHON:
            functions.append(load_function(name, "env.tools"))
    return functions


def _check_parts(env: EnvConfig, tasks: Mapping[str, Task]) -> None:
    """Refuse tasks whose scores have no parts, if the parts are trained on."""
    without_parts = [name for name, task in tasks.items() if not task.has_parts]
    if without_parts and env.reward_combination == "gdpo":
        raise ValueError(
            "env.reward_combination=gdpo needs a reward with parts, but "
            f"{', '.join(without_parts)} has none: name reward functions in env.reward, or use "
            "env.reward_combination=sum."
        )


def _make_verifiers(env: EnvConfig, tests: Sequence[DatasetConfig]) -> Task:
    """Make the task of an environment of verifiers, which plays the dialogs."""
    if tests:
        raise ValueError(
            f"evaluation.datasets must be left out with env.task={env.task}, which is tested on "
            "its own tasks: leave it out, and evaluate on other data in another run "
            "(train.total_dialog_turns=0)."
        )
    name = env.task.removeprefix(checks.VERIFIERS)
    options = env.dataset_options or {}
    task: Task = load_extra("verifiers")(
        name, options, env.max_turns, env.max_samples, _tool_parser(env), env.abandoned == "drop"
    )
    _check_parts(env, {task.name: task})
    return task


def _tool_parser(env: EnvConfig) -> Parser | None:
    """Return the user's parser of calls; None to parse the chat template's format."""
    name = env.tool_parser
    return None if name is None else load_function(name, "env.tool_parser")


def _with_sandbox(
    env: EnvConfig, tests: Sequence[DatasetConfig]
) -> tuple[EnvConfig, Sequence[DatasetConfig]]:
    """Return the settings with ``env.sandbox`` applied to each reward that runs programs.

    Raises:
        ValueError: this machine cannot provide the sandbox.
    """

    def with_sandbox(data: Any) -> Any:
        return replace(data, reward=_with_sandbox_option(data.reward, env.sandbox))

    datasets = list(map(with_sandbox, env.datasets or ()))
    tests = list(map(with_sandbox, tests))
    env = with_sandbox(env)
    reward_runs_programs = any(_runs_programs(data.reward) for data in (env, *datasets, *tests))
    if not reward_runs_programs and PYTHON not in env.tools:
        return env, tests
    try:
        isolation = load_extra("require_isolation")(env.sandbox)
    except RuntimeError as error:
        raise ValueError(str(error).replace("sandbox=", "env.sandbox=")) from error
    user = "reward 'code'" if reward_runs_programs else f"tool '{PYTHON}'"
    if isolation == "namespaces":
        say(f"{user} runs programs in kernel namespaces: no network, no files except Python's")
    else:
        _log.warning(
            f"{user} runs programs with only time and memory limits: they can read files and use "
            "the network (docs/security.md)."
        )
    return replace(env, datasets=datasets or env.datasets), tests


def _with_sandbox_option(spec: Any, sandbox: str) -> Any:
    """Return the spec of rewards with the option ``sandbox`` for ``code``."""
    if isinstance(spec, list):
        return [_with_sandbox_option(entry, sandbox) for entry in spec]
    entry = {"fn": spec} if spec == "code" else spec
    return {**entry, "sandbox": sandbox} if _runs_programs(entry) else spec


def _runs_programs(spec: Any) -> bool:
    entries = spec if isinstance(spec, list) else [spec]
    return any(isinstance(entry, Mapping) and entry.get("fn") == "code" for entry in entries)


def dataset_names(
    entries: Sequence[DatasetConfig], field: str, reserved: Sequence[str] = ()
) -> list[str]:
    """Return the names of data sets in metrics.

    Raises:
        ValueError: two have the same name, or one has a reserved name.
    """
    names = [entry.name or data_name(entry.dataset or "") for entry in entries]
    for index, name in enumerate(names):
        if [*names, *reserved].count(name) > 1:
            raise ValueError(
                f"{field}[{index}].name={name} must differ from the other names: set another name."
            )
    return names


def _with_environment(task: Task, env: EnvConfig, tools: Sequence[Callable[..., Any]]) -> Task:
    """Wrap the task in the environments that the config names."""
    specs = {"": env.environment} if isinstance(env.environment, str) else env.environment
    parser = _tool_parser(env)

    def kind(spec: str) -> Kind:
        if spec.startswith(checks.OPENENV):
            return load_extra("openenv")(spec.removeprefix(checks.OPENENV), tools, parser)
        return Kind(load_class(spec, "env.environment"), tools, parser)

    kinds = {name: kind(spec) for name, spec in specs.items()}
    problems = task.problems("train")
    rewards = None
    if env.reward is not None:
        rewards = _rewards(task, env.reward, "env.reward", problems[0], has_environment=True)
    wrapped = WithEnvironment(task, kinds, rewards=rewards, at_a_time=env.environments_at_a_time)
    wrapped.check(problems)
    game = next((kind.name for kind in kinds.values() if kind.steps), None)
    if game is not None and env.max_turns == 1:
        _log.warning(
            f"env.max_turns=1: {game} has a step, and the policy has one turn in each dialog. "
            "For more set, for example, env.max_turns=8."
        )
    return wrapped


def _with_python(task: Task, env: EnvConfig, tools: Sequence[Callable[..., Any]]) -> Task:
    """Wrap the task in the tool ``python``: an environment that scores nothing, together with the
    other tools.
    """
    python = load_extra("python_tool")
    make = update_wrapper(partial(python, env.sandbox), python)
    kind = Kind(make, tools, _tool_parser(env), "env.tools")
    return WithEnvironment(task, {"": kind}, judged=True, at_a_time=env.environments_at_a_time)


def check_tests(task: Task, problems: Sequence[Problem]) -> None:
    """Refuse test problems without a column that their reward or environment needs.

    Args:
        task: task of the run.
        problems: problems of its test split.

    Raises:
        ValueError: a column is missing.
    """
    firsts = {problem.dataset: problem for problem in reversed(problems)}
    for name, problem in firsts.items():
        try:
            task.check_problem(problem)
        except ValueError as error:
            where = f"{name} of evaluation.datasets" if name else "the test split"
            raise ValueError(
                f"{where} must have the columns that its reward or environment needs: {error}"
            ) from error
    if isinstance(task, WithEnvironment):
        task.check(problems)


def _make_test(entry: DatasetConfig, field: str, reward: Any, scoring: Scoring) -> Task:
    """Make a test set: the test split or, if there is none and none was requested, all data."""
    try:
        return _make_dataset(entry, field, reward, "test", scoring)
    except UnknownSplitError:
        if entry.test_split is not None:
            raise
        return _make_dataset(
            replace(entry, test_split=entry.train_split or "train"), field, reward, "test", scoring
        )


def _make_problems(env: EnvConfig, scoring: Scoring) -> Task:
    """Return the task or the data of a config, with its rewards if they score it."""
    if (name := env.task.get("_target_")) is not None:
        task = OBJECTS.get(name)
        if not isinstance(task, Task):
            task = make_component("env.task", env.task, Task)
        return task if env.reward is None else _with_rewards(task, env.reward, "env.reward")
    if env.datasets is None and env.dataset is None and scoring == "not":
        return SeedsTask(env.max_samples, env.prompt_template, env.system_prompt)
    if env.datasets is None:
        return _make_dataset(env, "env", env.reward, "train", scoring)
    fields = [f"env.datasets[{index}]" for index in range(len(env.datasets))]
    names = dataset_names(env.datasets, "env.datasets")
    tasks = [
        _make_dataset(entry, field, env.reward, "train", scoring)
        for entry, field in zip(env.datasets, fields, strict=True)
    ]
    return MixedTask(tasks, [entry.weight for entry in env.datasets], names)


def _make_dataset(
    data: DataConfig, field: str, reward: Any, split: Split, scoring: Scoring
) -> Task:
    """Return a data set's task, with its scorer, unless ``scoring`` is "not". ``reward`` is for data
    without its own.
    """
    reward = reward if data.reward is None else data.reward
    name = data.dataset or ""
    if name in checks.GENERATED:
        task: Task = resolve_name(BUILTINS[name])(data.difficulty)
    elif name.startswith(checks.REASONING_GYM):
        task = load_extra("reasoning_gym")(
            name.removeprefix(checks.REASONING_GYM),
            options=data.dataset_options,
            max_samples=data.max_samples,
            prompt_template=data.prompt_template,
            system_prompt=data.system_prompt,
            field=field,
        )
        task.problems(split)
    else:
        options: dict[str, Any] = {
            "dataset_config": data.dataset_config,
            "revision": data.revision,
            "train_split": data.train_split,
            "test_split": data.test_split,
            "test_fraction": data.test_fraction,
            "max_samples": data.max_samples,
            "prompt_column": data.columns.prompt,
            "answer_column": data.columns.answer,
            "images_column": data.columns.images,
            "completion_column": data.columns.completion,
            "messages_column": data.columns.messages,
            "prompt_template": data.prompt_template,
            "system_prompt": data.system_prompt,
            "field": field,
        }
        is_preset = name in checks.PRESETS
        task = (
            resolve_name(BUILTINS[name])(data.dataset_path, **options)
            if is_preset
            else DatasetTask(name, **options)
        )
        task.problems(split)
        reward = task.reward if reward is None else reward
    if scoring == "not":
        return task
    if reward is not None:
        return _with_rewards(task, reward, f"{field}.reward", split)
    if scoring == "must" and type(task).score is Task.score and type(task).judge is Task.judge:
        raise ValueError(
            f"{field}.dataset={name} needs {field}.reward: use a built-in one, such as "
            f"{field}.reward=gsm8k, or your own function, "
            f"{field}.reward=my_rewards.py:exact_match; algo=sft with evaluation.num_prompts=0 "
            "needs none."
        )
    return task


def _with_rewards(task: Task, spec: Any, field: str, split: Split | None = None) -> Task:
    """Wrap the task in rewards, which may use the columns of the split's problems."""
    return WithRewards(
        task, _rewards(task, spec, field, None if split is None else task.problems(split)[0])
    )


def _rewards(
    task: Task, spec: Any, field: str, first: Problem | None, has_environment: bool = False
) -> Rewards:
    """Return the rewards of a spec, after checking their columns against the first problem."""
    column = getattr(task, "prompt_column", None)
    arguments = {} if column is None else {"prompt_column": column}
    rewards = make_rewards(spec, field=field, **arguments)
    if first is not None:
        rewards.check(first, has_environment)
        for entry in parse_rewards(spec, field):
            if entry.fn == "reward_model":
                load_extra("check_reward_model")(task.messages(first), **entry.options)
    return rewards
