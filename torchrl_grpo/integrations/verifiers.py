"""Environments of the library verifiers: their tasks are the problems, which they also play and
score.

An environment runs in the agents' process, with all its episodes in one event loop, as in
verifiers' own evaluation. Its harnesses query the policy through verifiers' own server, which
forwards the requests to ours.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torchrl_grpo.errors import InvalidRewardError
from torchrl_grpo.integrations import verifiers_harness
from torchrl_grpo.integrations.agents import Program, WithAgent
from torchrl_grpo.integrations.agents.protocol import MODEL
from torchrl_grpo.tasks.base import Message, Problem, Split, Task
from torchrl_grpo.tasks.generated import split_by_hash
from torchrl_grpo.tools.toolbox import Parser

_TRAIN_SAMPLES = 1000
_TRAIN_PER_TEST = 4
_DRAWS_PER_PROBLEM = 20
"""Number of tasks of an infinite taskset to inspect per problem, because they may repeat, or be all
of one split.
"""
_RESPONSE_TIMEOUT_S = 10.0
"""Seconds after which an unresponsive event loop is abandoned, with the environment that blocks it.
"""
_NO_KEY = "TORCHRL_GRPO_HAS_NO_KEY"
"""Environment variable of the endpoint's key, which is not set, because the session's name is the
key.
"""
_REPLACED = ("bash", "null")
"""Default harnesses of verifiers, which ours replaces: it is ``null`` in this process."""


class VerifiersTask(Task):
    """The tasks of an environment, each with the data to rebuild it. It has no scorer, because the
    environment scores.

    A hash of a task's data decides its split.

    Args:
        config: config of the environment; see ``make_config``.
    """

    def __init__(self, config: Any, max_samples: int | None = None) -> None:
        self.name = config.taskset.id
        self._config = config
        self.max_samples = max_samples
        self._problems: dict[Split, list[Problem]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_problems": None}

    def problems(self, split: Split) -> Sequence[Problem]:
        """Return the split's problems, in the order of the environment's tasks.

        Raises:
            ValueError: the split is empty.
        """
        if self._problems is None:
            self._problems = self._load()
        if not self._problems[split]:
            raise ValueError(
                f"env.task=verifiers:{self.name} must have tasks for both splits, but it has none "
                f"for the split {split}: use options that yield more tasks."
            )
        return self._problems[split]

    def messages(self, problem: Problem) -> list[Message]:
        """Return the environment's initial chat; only the system message if its user speaks first."""
        data = problem.extra["task"]
        prompt = data.get("prompt") or []
        chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        system = (
            [{"role": "system", "content": data["system_prompt"]}]
            if data.get("system_prompt")
            else []
        )
        messages = [
            {"role": message["role"], "content": _text(message.get("content"))}
            for message in [*system, *chat]
        ]
        return messages or [{"role": "user", "content": ""}]

    def _load(self) -> dict[Split, list[Problem]]:
        taskset = import_module("verifiers.v1.utils.loaders").load_taskset(self._config.taskset)
        cap = _TRAIN_SAMPLES if self.max_samples is None and taskset.INFINITE else self.max_samples
        sizes: dict[Split, float] = {"train": float("inf"), "test": float("inf")}
        if cap is not None:
            sizes = {"train": cap, "test": -(-cap // _TRAIN_PER_TEST)}
        problems: dict[Split, list[Problem]] = {"train": [], "test": []}
        max_draws = int(_DRAWS_PER_PROBLEM * sum(sizes.values())) if taskset.INFINITE else None
        for task in itertools.islice(taskset, max_draws):
            data = task.data.model_dump(mode="json", exclude_none=True)
            split = split_by_hash(
                str(sorted((name, value) for name, value in data.items() if name != "idx"))
            )
            if len(problems[split]) < sizes[split]:
                problems[split].append(Problem(task.data.prompt_text, None, {"task": data}))
            if all(len(problems[split]) == sizes[split] for split in problems):
                break
        return problems


def _text(content: Any) -> str:
    if isinstance(content, str | None):
        return content or ""
    return "".join(part.get("text") or "" for part in content)


class Verifiers(Program):
    """Plays the tasks of an environment; the reward of the policy's agent counts.

    Args:
        config: of the environment, see ``make_config``.
    """

    def __init__(self, config: Any) -> None:
        self._config = config
        self._policy_name = _policy_name(config)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._environment: asyncio.Future[Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_loop": None, "_environment": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _library()  # takes seconds, which the first episode should not wait for

    def start(
        self, problem: Mapping[str, Any], url: str, key: str, reward: Callable[..., None]
    ) -> tuple[Future[float | None], Callable[[], None]]:
        if self._loop is None or not _is_responsive(self._loop):
            self._serve()
        assert self._loop is not None
        future: Future[float | None] = asyncio.run_coroutine_threadsafe(
            self._play(problem["task"], url, key), self._loop
        )
        return future, future.cancel  # type: ignore[return-value]

    def _serve(self) -> None:
        """Start an event loop with the environment in it."""
        self._loop = asyncio.new_event_loop()
        self._environment = self._loop.create_future()
        threading.Thread(
            target=_run,
            args=(self._loop, self._host(self._environment)),
            name="verifiers",
            daemon=True,
        ).start()

    async def _host(self, ready: asyncio.Future[Any]) -> None:
        forever = asyncio.Event()
        try:
            environment = _library().load_environment(self._config)
            async with environment.serving():
                ready.set_result(environment)
                await forever.wait()
        except Exception as error:  # reported by each episode
            ready.set_exception(error)
            await forever.wait()

    async def _play(self, data: Mapping[str, Any], url: str, key: str) -> float:
        assert self._environment is not None
        environment = await asyncio.shield(self._environment)
        library = import_module("verifiers.v1")
        numbers = itertools.count()

        def name(trace: Any) -> None:
            """Name a session by the key of the episode, because verifiers keeps one connection with
            one key for all episodes, and sends the session's name in each request.
            """
            trace.id = f"{key}.{next(numbers)}"

        task_class = type(environment.taskset).task_type()
        task = task_class(
            task_class.data_type().model_validate(data), environment.config.taskset.task
        )
        client = library.EvalClientConfig(base_url=url, api_key_var=_NO_KEY)
        (slot,) = environment.slots(task)
        episode = await environment.run_slot(
            slot, library.ModelContext(MODEL, client), on_trace=name
        )
        return _reward(episode, self._policy_name, environment.complete(episode))


def _run(loop: asyncio.AbstractEventLoop, host: Coroutine[Any, Any, None]) -> None:
    """Run a loop until a coroutine ends, even if another one in it raises one of these two errors,
    at which asyncio stops.
    """
    task = loop.create_task(host)
    while not task.done():
        with suppress(KeyboardInterrupt, SystemExit):
            loop.run_until_complete(task)


def _is_responsive(loop: asyncio.AbstractEventLoop) -> bool:
    has_responded = threading.Event()
    loop.call_soon_threadsafe(has_responded.set)
    return has_responded.wait(_RESPONSE_TIMEOUT_S)


def _reward(episode: Any, agent: str, complete: bool) -> float:
    """Return the reward of the policy's agent.

    Raises:
        InvalidRewardError: the episode failed, or has no score.
    """
    traces = [trace for trace in episode.traces if trace.agent.name == agent]
    if not complete:
        errors = [error for part in (episode, *episode.traces) for error in part.errors]
        reasons = "; ".join(f"{error.type}: {error.message}" for error in errors)
        raise InvalidRewardError(f"the environment failed: {reasons}", "exception")
    rewards = [] if len(traces) != 1 else list(traces[0].rewards.values())
    if not rewards or None in rewards:
        raise InvalidRewardError(
            f"an environment must let the agent {agent!r} play once and score it, but it has "
            f"{len(traces)} plays and the rewards {rewards}: use another environment.",
            "none",
        )
    return float(traces[0].reward)


def make_task(
    name: str,
    options: Mapping[str, Any],
    max_turns: int,
    max_samples: int | None,
    parser: Parser | None,
    drops_abandoned: bool,
) -> WithAgent:
    """Return the task that an environment plays, after reading its problems.

    Args:
        name: name of the environment.
        options: ``env.dataset_options``.
        max_turns: turns of the policy.
        max_samples: maximum number of problems.
        parser: finds tool calls in the policy's text.
        drops_abandoned: see ``WithAgent``.

    Raises:
        ValueError: see ``make_config``.
    """
    config = make_config(name, options, max_turns)
    task = VerifiersTask(config, max_samples)
    task.problems("train")
    return WithAgent(task, Verifiers(config), parser, drops_abandoned=drops_abandoned)


def make_config(name: str, options: Mapping[str, Any], max_turns: int) -> Any:
    """Return the config of an environment.

    Args:
        name: name of the package with its taskset.
        options: verifiers' own options, those under ``[env]`` in its files: ``taskset``, agents
            (such as ``agent``), and others.
        max_turns: maximum number of the policy's requests in an episode, unless the options set it.

    Raises:
        ValueError: the library is not installed, there is no such environment, it refuses the
            options, or the policy would not play exactly one of its agents.
    """
    what = f"env.task=verifiers:{name}"
    if find_spec("verifiers") is None or find_spec("verifiers.v1") is None:
        raise ValueError(
            f'{what} needs verifiers 0.4, which is not installed: pip install "torchrl_grpo[verifiers]".'
        )
    loaders = _library()
    taskset = options.get("taskset", {})
    if not isinstance(taskset, Mapping):
        raise ValueError(
            f"env.dataset_options.taskset={taskset} must be arguments by name: for example, "
            "{split: a}."
        )
    try:
        kind = loaders.env_config_type(name, options.get("id") or "")
        default_harness = loaders.default_harness_id(name)
        agents = {
            agent: _with_defaults(
                item.default, options.get(agent) or {}, default_harness, max_turns
            )
            for agent, item in kind.model_fields.items()
            if hasattr(item.default, "harness")
        }
        config = loaders.resolve_env_config(
            {**options, **agents, "taskset": {**taskset, "id": name}}
        )
        loaders.load_environment(config)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{what} must be an installed environment ({error}): install it, or put its folder on "
            "PYTHONPATH."
        ) from error
    except (AttributeError, TypeError, ValueError, ImportError) as error:
        raise ValueError(
            f"{what} must be an environment of verifiers 0.4, with env.dataset_options that it "
            f"accepts ({error}): correct them."
        ) from error
    _policy_name(config)
    return config


def _with_defaults(
    agent: Any, options: Mapping[str, Any], default_harness: str, max_turns: int
) -> dict[str, Any]:
    """Return the options of an agent, which runs on this machine and, by default, in this
    process.
    """
    out = {"max_turns": max_turns if agent.max_turns is None else agent.max_turns, **options}
    if "runtime" not in agent.model_fields_set:
        out.setdefault("runtime", {"type": "subprocess"})
    if (agent.harness.id if agent.harness is not None else default_harness) in _REPLACED:
        out.setdefault("harness", {"id": verifiers_harness.NAME})
    return out


def _policy_name(config: Any) -> str:
    """Return the name of the agent that the policy plays: the one without its own client."""
    names = [name for name, agent in config if hasattr(agent, "harness") and agent.client is None]
    if len(names) != 1:
        raise ValueError(
            f"env.task=verifiers:{config.taskset.id} must have one agent that the policy plays, "
            f"but it has {names}: give the others a client, such as "
            "env.dataset_options.judge.client.base_url, or use another environment."
        )
    return names[0]


def _library() -> Any:
    """Import verifiers and register our harness; return verifiers' loaders."""
    verifiers_harness.register()
    return import_module("verifiers.v1.utils.loaders")
