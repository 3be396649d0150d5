"""The task and how its problems are drawn."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from torchrl_grpo import checks
from torchrl_grpo.config.data import DataConfig, DatasetConfig, unread
from torchrl_grpo.config.fields import choice, limited
from torchrl_grpo.config.rule import Rule, arguments, exclusive, is_set, read_with


@dataclass
class EnvConfig(DataConfig):
    """The task and how prompts are drawn from it."""

    datasets: list[DatasetConfig] | None = None
    """Several data sets instead of dataset: [{dataset: a.jsonl, weight: 0.7, columns: {prompt: q}},
    {dataset: gsm8k}]. Each takes the keys from dataset to reward, weight (by default 1) and name,
    for its metrics."""
    task: Any = field(default_factory=lambda: {"_target_": None})
    """A task instead of dataset: verifiers:NAME, an environment of the library verifiers, whose
    arguments are dataset_options (docs/agents.md); or one of your own, as _target_ a subclass of
    torchrl_grpo.tasks.Task as file.py:Class or package.module.Class, with its arguments next to
    it."""
    environment: Any = None
    """Class whose instances play the dialogs, one each, as file.py:Class or package.module:Class;
    or classes by the value of the column environment, {easy: my_envs.py:Easy, hard:
    my_envs.py:Hard} (docs/environments.md). In place of a class, openenv:http://localhost:8000 is a
    server of OpenEnv. With dataset=null it makes its own problems from a number, the column seed;
    given on the command line, it replaces the config file's data set. Environments run in reward
    workers, at least one of which is then started."""
    environments_at_a_time: int = limited(16, ge=1)
    """environment: dialogs that a reward worker starts, or answers, at the same time, each in a
    thread of its own.
    """
    chat_template_kwargs: Any = None
    """Arguments of the chat template, such as {enable_thinking: false}."""
    num_envs: int = limited(64, ge=2, le=2**16)
    """Trajectories sampled in parallel, a multiple of repeats, at most 65,536."""
    repeats: int = limited(8, ge=1)
    """Group size G: responses per prompt; at least 2 if the advantage compares them within their
    group.
    """
    max_prompt_tokens: int | None = limited(None, ge=1)
    """Longer prompts are dropped and counted; by default the model's context less max_new_tokens.
    Each further turn of a dialog may add max_new_tokens and 1,024 tokens to it."""
    max_image_pixels: int = limited(2**26, ge=1, le=178_956_970)
    """Maximum width times height of an image in data, or from a tool, an environment or an agent,
    which is checked before the image is decoded. At most 178,956,970, Pillow's own limit."""
    difficulty_filter: list[float] | None = None
    """Range [low, high]: a problem is drawn again only if its share of correct responses in past
    epochs is in it, so [0.05, 0.95] drops for good what was never or always solved. null draws all
    in each epoch."""
    sampling: str = choice(checks.Sampling, "uniform")
    """How problems are drawn: each once in an epoch (uniform), or with a higher probability the
    closer its share of correct responses so far is to sampling_target (pass_rate). A problem
    without responses is always drawn."""
    sampling_target: float = limited(0.5, gt=0, lt=1)
    """sampling=pass_rate: share of correct responses at which a problem is always drawn, in (0, 1).
    """
    sampling_floor: float = limited(0.1, gt=0, le=1)
    """sampling=pass_rate: lowest probability with which an epoch draws a problem, in (0, 1]."""
    curriculum: float | None = limited(None, gt=0, le=1)
    """Share of the latest 128 responses that must be correct before problems of the next level are
    drawn, in (0, 1]; levels come from the column level or from dataset_options.levels. null draws
    all levels."""
    max_turns: int = limited(1, ge=1)
    """Maximum number of the policy's turns in one dialog, at least 1. More than 1 needs tools,
    transforms, a retry_prompt, an environment, or a task that answers."""
    sandbox: str = choice(checks.Sandbox, "strict")
    """Isolation of programs that the reward code or the tool python runs: strict refuses to run
    without kernel namespaces; auto uses what the machine offers, and the run says which."""
    tools: list[str] = field(default_factory=list)
    """Functions that the policy may call, as file.py:function or package.module:function; the model
    sees their type hints and docstrings. python is built in: it runs code in a sandbox and keeps
    the dialog's variables. mcp:COMMAND or mcp:URL adds all tools of an MCP server (docs/tools.md).
    They run in reward workers, at least one of which is then started."""
    tool_parser: str | None = None
    """tools, agent: your own function that finds the calls in a text, as file.py:function; null
    parses calls in the format of the model's chat template or response template."""
    agent: str | None = None
    """Agent that plays the problems with an OpenAI client: file.py:function or
    package.module:function of an async def play(client, problem), or a command line such as "python
    solve.py" (docs/agents.md). Each request is a turn of the policy. Agents run in reward workers,
    at least one of which is then started."""
    abandoned: str = choice(checks.Abandoned, "train")
    """agent: whether to train turns that the agent abandoned by going back to an earlier point
    (docs/agents.md)."""
    transforms: list[dict[str, Any]] = field(default_factory=list)
    """TorchRL's transforms to append to each environment, in order, with arguments next to their
    _target_, such as [{_target_: torchrl.envs.StepCounter}]; docs/torchrl.md says which work. They
    run in the process that samples."""
    retry_prompt: str | None = None
    """Message to the policy after a wrong answer, if it has a turn left; null ends the dialog."""
    reasoning: bool = False
    """TorchRL's name for a retry: true sets a built-in retry_prompt, and max_turns to 2."""
    max_steps: int | None = None
    """TorchRL's name for max_turns."""
    reward_combination: str = choice(checks.RewardCombination, "sum")
    """How parts of the reward become an advantage: their weighted sum is normalized (sum), or each
    part within its group, and then their sum over the batch (gdpo, arXiv 2601.05242)."""
    reward_workers: int = limited(0, ge=0)
    """Processes per sampler that score responses, for rewards that are slow, or may hang or crash.
    0 scores in the environment's own process."""
    reward_timeout_s: float = limited(30.0, gt=0)
    """reward_workers: time limit for one response, in seconds; after it the reward is invalid."""

    @property
    def own_task(self) -> str | None:
        """The class of a task, or verifiers:NAME; None if the task is a data set."""
        return self.task if isinstance(self.task, str) else self.task.get("_target_")

    @property
    def player(self) -> str | None:
        """The setting that names who plays the problems with an OpenAI client; None without one."""
        if isinstance(self.task, str):
            return f"env.task={self.task}"
        return None if self.agent is None else f"env.agent={self.agent}"


def task_kind(env: EnvConfig) -> str:
    """Return the source of the training problems, on which the meaning of ``env.*`` depends."""
    if env.own_task is not None:
        return "verifiers" if isinstance(env.task, str) else "task"
    if env.datasets is not None:
        return "datasets"
    return "environment" if env.environment is not None and env.dataset is None else "dataset"


def _unread_in_env(kind: str, switch: str, fix: str, names: Container[str]) -> Rule:
    """Return the rule that refuses data set keys in ``env`` when the problems come from ``kind``,
    which reads only the keys in ``names``.
    """

    def broken(config: Any) -> dict[str, str] | None:
        if task_kind(config.env) != kind:
            return None
        name = unread(config.env, lambda name: name in names)
        return None if name is None else {"key": f"env.{name}", "name": name}

    return Rule("env.KEY", f"must be left out with {switch}", fix, broken)


def _unread_reward(config: Any) -> dict[str, Any] | None:
    for index, entry in enumerate(config.env.datasets or []):
        if config.env.environment is not None and entry.reward is not None:
            key = f"env.datasets[{index}].reward"
            return {"key": key, key: entry.reward}
    return None


def _are_names(environment: Any) -> bool:
    names = list(environment.values()) if isinstance(environment, dict) else [environment]
    return bool(names) and all(isinstance(name, str) for name in names)


def _is_range(low: float = 1, high: float = 0, *more: float) -> bool:
    """Return whether numbers are a range within [0, 1]."""
    return 0 <= low < high <= 1 and not more


def _needs_turns(key: str) -> Rule:
    return Rule(
        key,
        "must have env.max_turns of at least 2, but it is {env.max_turns}",
        "use env.max_turns=2",
        lambda c: attrgetter(key)(c) and c.env.max_turns < 2,
    )


RULES = (
    arguments("env.chat_template_kwargs", "enable_thinking: false"),
    Rule(
        "env.task",
        "must be verifiers:NAME or a node with _target_",
        "use env.task._target_={target}",
        lambda c: (
            not isinstance(c.env.task, dict)
            and not str(c.env.task).startswith(checks.VERIFIERS)
            and {"target": c.env.task or "my_tasks.MyTask"}
        ),
    ),
    Rule(
        "env.task",
        "must have _target_",
        "for example, env.task._target_=my_tasks.MyTask",
        lambda c: isinstance(c.env.task, dict) and len(c.env.task) > 1 and c.env.own_task is None,
    ),
    exclusive("env.task", "env.datasets"),
    Rule(
        "env.environments_at_a_time",
        "needs env.environment",
        "leave it out",
        lambda c: c.env.environment is None and is_set(c, "env.environments_at_a_time"),
    ),
    Rule(
        "env.environment",
        "must be a class or classes by name",
        "for example, my_envs.py:Guess, or {easy: my_envs.py:Easy, hard: my_envs.py:Hard}",
        bad=lambda names: names is not None and not _are_names(names),
    ),
    Rule(
        "env.environment",
        "needs a data set with the column environment, which names the class of each row",
        "give env.dataset, or one class",
        lambda c: (
            isinstance(c.env.environment, dict) and c.env.dataset is None and c.env.datasets is None
        ),
    ),
    *(
        exclusive(key, "env.environment")
        for key in ("env.task", "env.agent", "env.retry_prompt", "env.transforms")
    ),
    Rule(
        "env.datasets[].reward",
        "must be left out with env.environment",
        "use env.reward",
        _unread_reward,
    ),
    arguments("env.dataset_options", "max_terms: 3"),
    _unread_in_env(
        "environment",
        "env.environment and no env.dataset, because nothing reads it",
        "to give the environment rows of data, set env.dataset",
        ("max_samples", "prompt_template", "system_prompt", "reward"),
    ),
    _unread_in_env(
        "verifiers",
        "{env.task=}",
        "its options are env.dataset_options",
        ("dataset", "dataset_options", "max_samples"),
    ),
    _unread_in_env(
        "task",
        "env.task._target_={env.own_task}",
        "for an argument of your class use +env.task.{name}",
        ("dataset", "reward"),
    ),
    _unread_in_env("datasets", "env.datasets", "set it for each data set", ("dataset", "reward")),
    Rule(
        "env.datasets",
        "must have a data set",
        "for example, [{dataset: gsm8k}]",
        bad=lambda entries: entries == [],
    ),
    *map(_needs_turns, ("env.tools", "env.retry_prompt")),
    Rule(
        "env.tool_parser",
        "needs env.tools, env.environment or env.agent",
        "set one of them, or leave it out",
        lambda c: (
            c.env.tool_parser is not None and not (c.env.tools or c.env.player or c.env.environment)
        ),
    ),
    Rule(
        "env.tools",
        "must not contain python with {env.environment=}, whose methods are stateful tools",
        "leave python out",
        "env.environment",
        lambda tools: "python" in tools,
    ),
    *(
        Rule(
            key,
            "and {env.player} exclude each other, because the agent decides what follows a turn",
            "set only one of them",
            "env.player",
        )
        for key in ("env.tools", "env.retry_prompt", "env.transforms")
    ),
    Rule(
        "env.agent",
        "and {env.task=} exclude each other",
        "set only one of them",
        lambda c: c.env.agent is not None and isinstance(c.env.task, str),
    ),
    Rule(
        "env.abandoned",
        "needs env.agent, or env.task=verifiers:NAME",
        "set one of them, or leave it out",
        lambda c: c.env.abandoned == "drop" and not c.env.player,
    ),
    Rule(
        "env.difficulty_filter",
        "must be [low, high] with low below high, both in [0, 1]",
        "for example, [0.05,0.95]",
        bad=lambda bounds: bounds is not None and not _is_range(*bounds),
    ),
    exclusive("env.difficulty_filter", "env.curriculum"),
    Rule(
        "env.test_split",
        "must not be the split that the run trains on",
        "leave it out, or use train.total_dialog_turns=0, which only evaluates",
        lambda c: c.env.test_split == (c.env.train_split or "train") and not c.only_evaluates,
    ),
)
UNREAD = (
    *read_with(
        "env.sampling", ("pass_rate",), "pass_rate", "env.sampling_target", "env.sampling_floor"
    ),
    # Tools, environments and agents run in a reward worker, even if env.reward_workers=0.
    *read_with(
        "env.reward_workers",
        range(1, 2**31),
        "2",
        "env.reward_timeout_s",
        unless=lambda c: c.env.tools or c.env.environment or c.env.player,
    ),
)
