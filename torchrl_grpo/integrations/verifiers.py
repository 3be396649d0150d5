"""Environments of the library verifiers: their tasks are the problems, and they play them and score
them.

An environment runs in the process of the agents, all of its episodes in one event loop, as in
verifiers' own evaluation. Its harnesses ask the policy through verifiers' own server, which passes
the requests on to ours.
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

from torchrl_grpo.agents.programs import Program
from torchrl_grpo.agents.protocol import MODEL
from torchrl_grpo.errors import InvalidRewardError
from torchrl_grpo.integrations import verifiers_harness
from torchrl_grpo.tasks.base import Message, Problem, Split, Task
from torchrl_grpo.tasks.generated import split_by_hash

_TRAIN_SAMPLES = 1000
_TRAIN_PER_TEST = 4
_DRAWS_PER_PROBLEM = 20
"""Tasks without end that are looked at for each problem: they may be few different ones, all of one
split.
"""
_REACTS_S = 10.0
"""Seconds after which an event loop that does nothing else is given up, with the environment that
blocks it.
"""
_NO_KEY = "TORCHRL_GRPO_HAS_NO_KEY"
"""Environment variable of the endpoint's key, which is not set: the name of the session is the key.
"""
_REPLACED = ("bash", "null")
"""Harnesses of verifiers that nobody asked for; ours is the second of them in this process."""


class VerifiersTask(Task):
    """The tasks of an environment, each with the data that rebuilds it. It has no scorer: the
    environment scores.

    A hash of a task's data decides which split it belongs to.

    Args:
        config: of the environment, see ``make_config``.
        max_samples: number of train problems; there is a test problem for each four of them. By
            default all tasks or, where there is no end of them, 1,000.
    """

    def __init__(self, config: Any, max_samples: int | None = None) -> None:
        self.name = config.taskset.id
        self._config, self.max_samples = config, max_samples
        self._problems: dict[Split, list[Problem]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_problems": None}

    def problems(self, split: Split) -> Sequence[Problem]:
        """Return the split's problems, in the order of the environment's tasks.

        Raises:
            ValueError: there is none.
        """
        if self._problems is None:
            self._problems = self._load()
        if not self._problems[split]:
            raise ValueError(
                f"env.task=verifiers:{self.name} must have tasks for both splits, it has none for "
                f"the split {split}: use options that give more tasks."
            )
        return self._problems[split]

    def messages(self, problem: Problem) -> list[Message]:
        """Return the chat that the environment begins with; of one whose user speaks first, the
        system's message alone.
        """
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
        most = _TRAIN_SAMPLES if self.max_samples is None and taskset.INFINITE else self.max_samples
        sizes: dict[Split, float] = {"train": float("inf"), "test": float("inf")}
        if most is not None:
            sizes = {"train": most, "test": -(-most // _TRAIN_PER_TEST)}
        problems: dict[Split, list[Problem]] = {"train": [], "test": []}
        drawn = int(_DRAWS_PER_PROBLEM * sum(sizes.values())) if taskset.INFINITE else None
        for task in itertools.islice(taskset, drawn):
            data = task.data.model_dump(mode="json", exclude_none=True)
            split = split_by_hash(
                str(sorted((name, value) for name, value in data.items() if name != "idx"))
            )
            if len(problems[split]) < sizes[split]:
                problems[split].append(Problem(task.data.prompt_text, None, {"task": data}))
            if all(len(problems[each]) == sizes[each] for each in problems):
                break
        return problems


def _text(content: Any) -> str:
    return (
        content or ""
        if isinstance(content, str | None)
        else "".join(part.get("text") or "" for part in content)
    )


class Verifiers(Program):
    """Plays the tasks of an environment; its reward is that of the policy's seat.

    Args:
        config: of the environment, see ``make_config``.
    """

    def __init__(self, config: Any) -> None:
        self._config, self._seat = config, _seat(config)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._environment: asyncio.Future[Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_loop": None, "_environment": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _library()  # takes seconds, which are not to be the first episode's

    def start(
        self, problem: Mapping[str, Any], url: str, key: str
    ) -> tuple[Future[float | None], Callable[[], None]]:
        if self._loop is None or not _reacts(self._loop):
            self._serve()
        assert self._loop is not None
        done: Future[float | None] = asyncio.run_coroutine_threadsafe(
            self._play(problem["task"], url, key), self._loop
        )
        return done, done.cancel  # type: ignore[return-value]

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
        except Exception as error:  # that of each episode
            ready.set_exception(error)
            await forever.wait()

    async def _play(self, data: Mapping[str, Any], url: str, key: str) -> float:
        assert self._environment is not None
        environment = await asyncio.shield(self._environment)
        library = import_module("verifiers.v1")
        numbers = itertools.count()

        def name(trace: Any) -> None:
            """Name a session by the key of the episode: verifiers keeps one connection for all of
            them, with one key, and says the session's name in each request.
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
        return _reward(episode, self._seat, environment.complete(episode))


def _run(loop: asyncio.AbstractEventLoop, host: Coroutine[Any, Any, None]) -> None:
    """Run a loop to the end of a coroutine, whatever another one in it raises: asyncio stops at
    these two.
    """
    task = loop.create_task(host)
    while not task.done():
        with suppress(KeyboardInterrupt, SystemExit):
            loop.run_until_complete(task)


def _reacts(loop: asyncio.AbstractEventLoop) -> bool:
    reacts = threading.Event()
    loop.call_soon_threadsafe(reacts.set)
    return reacts.wait(_REACTS_S)


def _reward(episode: Any, seat: str, complete: bool) -> float:
    """Return the reward of the policy's seat.

    Raises:
        InvalidRewardError: something failed, or scored nothing.
    """
    traces = [trace for trace in episode.traces if trace.agent.name == seat]
    if not complete:
        errors = [error for part in (episode, *episode.traces) for error in part.errors]
        reasons = "; ".join(f"{error.type}: {error.message}" for error in errors)
        raise InvalidRewardError(f"the environment failed: {reasons}", "exception")
    rewards = [] if len(traces) != 1 else list(traces[0].rewards.values())
    if not rewards or None in rewards:
        raise InvalidRewardError(
            f"an environment must let the seat {seat!r} play once and score it, it has "
            f"{len(traces)} plays and the rewards {rewards}: use one that does.",
            "none",
        )
    return float(traces[0].reward)


def make_config(name: str, options: Mapping[str, Any], max_turns: int) -> Any:
    """Return the config of an environment.

    Args:
        name: of the package with its taskset.
        options: verifiers' own, those under ``[env]`` in its files: ``taskset``, seats, such as
            ``agent``, and others.
        max_turns: most requests of the policy in an episode, unless the options say how many.

    Raises:
        ValueError: the library is not installed, there is no such environment, it refuses the
            options, or the policy would not play exactly one of its seats.
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
        own = loaders.default_harness_id(name)
        seats = {
            seat: _with_defaults(item.default, options.get(seat) or {}, own, max_turns)
            for seat, item in kind.model_fields.items()
            if hasattr(item.default, "harness")
        }
        config = loaders.resolve_env_config(
            {**options, **seats, "taskset": {**taskset, "id": name}}
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
            f"takes ({error}): correct them."
        ) from error
    _seat(config)
    return config


def _with_defaults(
    seat: Any, options: Mapping[str, Any], own: str, max_turns: int
) -> dict[str, Any]:
    """Return the options of a seat: it plays on this machine and, where nothing else is asked for,
    in this process.
    """
    out = {"max_turns": max_turns if seat.max_turns is None else seat.max_turns, **options}
    if "runtime" not in seat.model_fields_set:
        out.setdefault("runtime", {"type": "subprocess"})
    if (seat.harness.id if seat.harness is not None else own) in _REPLACED:
        out.setdefault("harness", {"id": verifiers_harness.NAME})
    return out


def _seat(config: Any) -> str:
    """Return the name of the seat that the policy plays: the one without a client of its own."""
    seats = [name for name, seat in config if hasattr(seat, "harness") and seat.client is None]
    if len(seats) != 1:
        raise ValueError(
            f"env.task=verifiers:{config.taskset.id} must have one seat that the policy plays, it "
            f"has {seats}: give the others a client, such as "
            "env.dataset_options.judge.client.base_url, or use another environment."
        )
    return seats[0]


def _library() -> Any:
    """Import verifiers; return its loaders, which know our harness."""
    verifiers_harness.register()
    return import_module("verifiers.v1.utils.loaders")
