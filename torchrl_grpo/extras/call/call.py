"""``train`` and ``evaluate``: a run from Python, with objects wherever the config takes a name."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from torchrl_grpo.assembly.launch import launch
from torchrl_grpo.config import compose, plain
from torchrl_grpo.errors import ConfigError, RunLostError
from torchrl_grpo.extras.call.inputs import FOLDER, Inputs
from torchrl_grpo.extras.call.result import Result
from torchrl_grpo.host import interrupts, startup
from torchrl_grpo.host.checkpoint_files import saved_config
from torchrl_grpo.host.folders import FolderLock, absent, claim, remove_unused
from torchrl_grpo.host.objects import OBJECTS
from torchrl_grpo.loop import Observer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from torchrl_grpo.tasks.base import Task

Rows = Iterable[Mapping[str, Any]]
Data = str | os.PathLike[str] | Rows | Mapping[str, Rows]
"""A name as in the config; rows, such as a list of dicts, a ``datasets.Dataset`` or a pandas table;
or rows by split.
"""
Function = str | Callable[..., Any]
_DEFAULT_FOLDER = "outputs/%Y-%m-%d/%H-%M-%S"
_ARGUMENTS = {
    r"hydra\.run\.dir=": "folder=",
    r"another hydra\.run\.dir": "another folder",
    rf"env\.dataset=\S*/{FOLDER}/data(?!\S)": "dataset",
    r"set env\.test_split=NAME or env\.test_fraction=": "pass test_dataset, or set env.test_fraction=",
}
"""What an error calls the arguments: patterns of the config's words, and their replacements."""


def train(
    config: str = "grpo_gsm8k",
    *,
    dataset: Data | None = None,
    test_dataset: Data | None = None,
    reward: Function | Mapping[str, Any] | Sequence[Function | Mapping[str, Any]] | None = None,
    model: str | PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    tools: Sequence[Function] | None = None,
    environment: Function | Mapping[str, Function] | None = None,
    agent: Function | None = None,
    task: str | type[Task] | Task | None = None,
    loss: str | type[Any] | None = None,
    observers: Sequence[Observer | Callable[[int, Mapping[str, float]], object]] = (),
    overrides: Mapping[str, Any] | None = None,
    folder: str | os.PathLike[str] | None = None,
    resume: str | os.PathLike[str] | None = None,
    asynchronous: bool = False,
) -> Result:
    """Train, as the command ``grpo`` does: with its config, checks, messages and files.

    Args:
        config: name of a config, as in ``--config-name``.
        dataset: ``env.dataset``, or its rows.
        test_dataset: rows to test on, or an entry of ``evaluation.datasets``.
        reward: ``env.reward``; functions may replace names in it.
        model: ``model.name``, or a model object; a copy of it is trained.
        tokenizer: tokenizer (or processor) of a model object.
        tools: ``env.tools``, or functions.
        environment: ``env.environment``, or a class, or classes by name.
        agent: ``env.agent``, or an ``async`` function.
        task: ``env.task._target_``, or a task.
        loss: ``policy.loss._target_``, or a subclass of ``GRPOLoss`` or ``Surrogate``.
        observers: called after each step is recorded and saved; functions get the step and its
            metrics.
        overrides: values by config key; objects may replace names.
        folder: folder of the run; by default ``outputs/DATE/TIME``.
        resume: ``train.resume``: ``"auto"``, a checkpoint, or the folder of a run.
        asynchronous: whether to sample while training, as ``grpo-async`` does.

    Raises:
        ConfigError: a value breaks a rule; the message names key, rule, value and fix.
        KeyboardInterrupt: the run was interrupted and wrote a checkpoint.
        RunLostError: the run cannot continue.
    """
    _check_kinds(overrides, observers)
    values = {
        "env.dataset": dataset,
        "env.reward": reward,
        "model.name": model,
        "env.tools": tools,
        "env.environment": environment,
        "env.agent": agent,
        "env.task._target_": task,
        "policy.loss._target_": loss,
        "train.resume": None if resume is None else str(resume),
    }
    if test_dataset is not None:
        if _in_memory(dataset) and _in_memory(test_dataset):
            values["env.dataset"] = {"train": dataset, "test": test_dataset}
        else:
            values["evaluation.datasets"] = [{"dataset": test_dataset}]
    settings = {key: value for key, value in values.items() if value is not None}
    try:
        _check_keys(settings, overrides or {}, model, tokenizer)
        settings |= overrides or {}
        # The names of inputs are paths, which must be the same when the run continues.
        run_folder = Path(time.strftime(_DEFAULT_FOLDER) if folder is None else folder).resolve()
        new_folders = absent(run_folder)
        if folder is None:
            run_folder = claim(run_folder)
            new_folders = [run_folder, *new_folders[1:]]
        with _delay_interrupts(), _removing_unused(new_folders):
            return _run(
                config, settings, run_folder, tokenizer, observers, asynchronous=asynchronous
            )
    except (ConfigError, RunLostError, KeyboardInterrupt) as error:
        # The message is for the user; a traceback would only bury it.
        raise _name_arguments(error).with_traceback(None) from None


def evaluate(
    config: str = "grpo_gsm8k",
    *,
    dataset: Data | None = None,
    overrides: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> Result:
    """Evaluate a model without training it: ``metrics[0]`` has ``eval/pass@1``.

    Args:
        config: see ``train``.
        dataset: rows to evaluate, unless ``test_dataset`` or ``env.test_fraction`` chooses others;
            or a data set, whose test split is evaluated.
        overrides: see ``train``.
        **arguments: see ``train``.

    Raises:
        ConfigError: see ``train``.
    """
    _check_kinds(overrides)
    settings = {"train.total_dialog_turns": 0, **(overrides or {})}
    if (
        _in_memory(dataset)
        and not isinstance(dataset, Mapping)
        and not _in_memory(arguments.get("test_dataset"))
        and settings.get("env.test_fraction") is None
    ):
        settings.setdefault("env.test_split", "train")
    return train(config, dataset=dataset, overrides=settings, **arguments)


def _in_memory(data: Any) -> bool:
    """Return whether data is rows, not a name or None."""
    return not (data is None or isinstance(data, str | os.PathLike))


def _check_kinds(overrides: Any, observers: Any = ()) -> None:
    """Refuse arguments of another kind, which would fail only after a model has loaded.

    Raises:
        ConfigError: overrides are no dict, or observers are no list of functions and observers.
    """
    if not isinstance(overrides, Mapping | None):
        raise ConfigError(
            f"overrides={overrides!r:.80} must be a dict of values by key: for example, "
            '{"optimizer.lr": 1e-4}.'
        )
    is_list = isinstance(observers, Sequence) and not isinstance(observers, str)
    for observer in observers if is_list else [None]:
        if not (callable(observer) or isinstance(observer, Observer)):
            raise ConfigError(
                f"observers={observers!r:.80} must be a list of functions or instances of "
                "torchrl_grpo.loop.Observer: for example, [print]."
            )


def _check_keys(
    settings: Mapping[str, Any], overrides: Mapping[str, Any], model: Any, tokenizer: Any
) -> None:
    """Refuse keys and arguments that would be ignored.

    Raises:
        ConfigError: a key has two values or belongs to Hydra, or a tokenizer has no model object.
    """
    for key in overrides:
        if key in settings:
            raise ConfigError(
                f"{key} must have one value, but an argument and overrides both set it: leave one "
                "of them out."
            )
        if key.startswith("hydra"):
            raise ConfigError(f"{key} is for the command line only: leave it out, and use folder.")
    if tokenizer is not None and not hasattr(model, "save_pretrained"):
        raise ConfigError(
            f"tokenizer must come with a model object, but model={model!r:.80} has its own: leave "
            "tokenizer out, or give the model as an object."
        )


def _run(
    config: str,
    settings: Mapping[str, Any],
    folder: Path,
    tokenizer: Any,
    observers: Sequence[Any],
    *,
    asynchronous: bool,
) -> Result:
    startup.restart()
    saved = saved_config(settings.get("train.resume"), folder)
    # A run that continues in another folder keeps its first folder's inputs.
    inputs = Inputs(folder if saved is None else _folder_of(saved[0]), tokenizer)
    values = {key: inputs.to_config(key, value) for key, value in settings.items()}
    OBJECTS.clear()
    OBJECTS.update(inputs.objects)
    options = compose(config, values, lambda _: saved)
    with FolderLock(folder):
        inputs.save(resumes=saved is not None)
        if not options.dry_run:
            _write_config(folder, plain(options), values)
    launch(options, folder, asynchronous=asynchronous, observers=observers)
    return Result(folder)


@contextmanager
def _removing_unused(new_folders: Sequence[Path]) -> Iterator[None]:
    """Remove the folders that a refused start created."""
    try:
        yield
    except ConfigError:
        if new_folders and new_folders[0].exists():
            remove_unused(new_folders, [FOLDER, ".hydra"])
        raise


def _folder_of(checkpoint: Path) -> Path:
    return checkpoint.parent.parent


def _write_config(folder: Path, config: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Write the config files that Hydra would write, for reports and the dashboard."""
    hydra = folder / ".hydra"
    hydra.mkdir(exist_ok=True)
    overrides = [f"{key}={value}" for key, value in values.items()]
    for name, content in (("config", config), ("overrides", overrides)):
        text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
        (hydra / f"{name}.yaml").write_text(text, encoding="utf-8")


@contextmanager
def _delay_interrupts() -> Iterator[None]:
    """Delay interrupts until the end of a step, so that the run can save a checkpoint."""
    is_main = threading.current_thread() is threading.main_thread()
    try:
        with interrupts.watched(exits=False) if is_main else nullcontext():
            yield
    finally:
        startup.end()


def _name_arguments(error: BaseException) -> BaseException:
    """Return the error; a ``ConfigError`` then names the argument instead of Hydra's key."""
    if not isinstance(error, ConfigError):
        return error
    text = str(error)
    for key, argument in _ARGUMENTS.items():
        text = re.sub(key, argument, text)
    return ConfigError(text)
