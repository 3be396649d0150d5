"""The job of both scripts, from config to outcome, and the report of a sweep."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from hydra.conf import HelpConf, HydraConf
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, read_write

from torchrl_grpo.assembly.launch import launch
from torchrl_grpo.config import (
    ConfigError,
    check_command_line,
    from_hydra,
    orderly_exit,
    register,
    split_command_line,
)
from torchrl_grpo.config.help import HELP
from torchrl_grpo.host import interrupts, startup
from torchrl_grpo.host.checkpoint_files import check_unused, saved_config
from torchrl_grpo.host.extras import load_extra
from torchrl_grpo.host.folders import FolderLock, absent, check_own_files, claim, remove_unused

_log = logging.getLogger(__name__)


class Sweep(Callback):
    """Hydra callback that gives each start its own folder, and keeps the folder of a multirun.

    Attributes:
        folder: folder of the multirun that this process started; None in a single run, and in a
            launcher's process.
        new_folders: folders that this start creates for a single run: the run's and missing
            parents, innermost first.
    """

    folder: Path | None = None
    new_folders: Sequence[Path] = ()

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        with _exit_on_error():
            configured = Path(config.hydra.run.dir).absolute()
            new_folders = absent(configured)
            folder = _own_folder(config.hydra, "run").absolute()
            Sweep.new_folders = new_folders if folder == configured else [folder]
            if config.dry_run:
                check_own_files(folder)
            else:
                # Both fail before Hydra writes into the folder of a run; ``build`` does both again.
                FolderLock(folder).close()
                if config.train.resume is None:
                    check_unused(folder)

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        with _exit_on_error():
            Sweep.folder = _own_folder(config.hydra, "sweep")
            check_own_files(Sweep.folder)


@contextmanager
def _exit_on_error() -> Iterator[None]:
    """End the process with the error: Hydra turns an error in a callback into a warning."""
    try:
        yield
    except ConfigError as error:
        sys.stderr.write(f"\nerror: {error}\n")
        sys.exit(2)


def _own_folder(hydra: DictConfig, kind: str) -> Path:
    """Return the ``dir`` of ``hydra.run`` or ``hydra.sweep``; if it is named after the time, claim
    an unused name.
    """
    node = hydra[kind]
    if "${now:" not in str(OmegaConf.to_container(node, resolve=False)["dir"]):  # type: ignore[call-overload, index]
        return Path(node.dir)
    try:
        folder = claim(Path(node.dir))
    except OSError as error:
        raise ConfigError(
            f"hydra.{kind}.dir={node.dir} must be a folder that can be created, but it cannot "
            f"({error.strerror}): use another folder."
        ) from error
    with read_write(hydra):
        node.dir = str(folder)
        # The jobs of a sweep are composed from these overrides.
        hydra.overrides.hydra.append(f"hydra.{kind}.dir='{folder}'")
    return folder


register()
# Add the callback to every config, including the user's, without an override on the command line.
ConfigStore.instance().store(
    group="hydra",
    name="config",
    node=HydraConf(
        callbacks={"sweep": {"_target_": f"{__name__}.{Sweep.__name__}"}},
        help=HelpConf(app_name="grpo", header="", footer="", template=HELP),
    ),
)


def start(main: Callable[[], object]) -> None:
    """Run a command, and end this process with its status."""
    status = 0
    try:
        command(main)
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        status = end.code or 0
    if sys.orig_argv[1:2] == sys.argv[:1]:  # not run by a test, debugger or profiler
        startup.leave(status)
    sys.exit(status)


def command(main: Callable[[], object]) -> None:
    """Let ``main`` handle the command line, and write the report of a sweep."""
    Sweep.folder = None
    Sweep.new_folders = ()
    with orderly_exit():
        _check_working_directory()
        load_extra("check_launcher")()
        options, overrides = split_command_line(sys.argv[1:])
        sys.argv[1:] = [*overrides, *check_command_line(overrides), *options]
        try:
            main()
        finally:
            if Sweep.folder is not None:
                _report(Sweep.folder)


def _check_working_directory() -> None:
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ConfigError(
            "the working directory must exist, but it was removed: change to another one (cd)."
        ) from None


def train(cfg: DictConfig, *, asynchronous: bool) -> float | None:
    """Run the job that a config describes.

    Returns:
        the objective that a sweep maximizes (``extras.report.summary.objective``); None for a dry run.
    """
    hydra_config = HydraConfig.get()
    _remove_empty_log()
    if hydra_config.mode == RunMode.MULTIRUN:
        return _train_in_sweep(cfg, hydra_config, asynchronous)
    with orderly_exit(), _removing_empty_run_folder(hydra_config):
        return _train(cfg, hydra_config, asynchronous)


def _remove_empty_log() -> None:
    """Remove the log file that Hydra created, until there is something to log."""
    for handler in logging.root.handlers:
        if isinstance(handler, logging.FileHandler):
            handler.close()  # the next record opens the file again
            file = Path(handler.baseFilename)
            if file.is_file() and not file.stat().st_size:
                file.unlink()


@contextmanager
def _removing_empty_run_folder(hydra_config: HydraConf) -> Iterator[None]:
    """Remove the folder of a refused run, if this start created it and only Hydra has written to
    it.
    """
    try:
        yield
    except ConfigError:
        if Sweep.new_folders:
            remove_unused(Sweep.new_folders, [str(hydra_config.output_subdir)])
        raise


def _train_in_sweep(cfg: DictConfig, hydra_config: HydraConf, asynchronous: bool) -> float | None:
    """Run a job of a sweep; Hydra raises its error after the other jobs have ended."""
    directory = Path(hydra_config.runtime.output_dir)
    is_parallel = Sweep.folder is None
    try:
        output = _printing_to(directory / "output.txt") if is_parallel else nullcontext()
        with interrupts.watched(), output:
            outcome = _train(cfg, hydra_config, asynchronous)
    except Exception as error:
        _log.error(f"{directory} failed: {error}")
        raise
    finally:
        startup.end()
    if is_parallel:
        _log.info(f"{directory} ended" + ("" if outcome is None else f" with {outcome:.3g}"))
    return outcome


def _train(cfg: DictConfig, hydra_config: HydraConf, asynchronous: bool) -> float | None:
    """Build the run that the config describes, train, and close it in any case."""
    directory = Path(hydra_config.runtime.output_dir)
    config = from_hydra(
        cfg, hydra_config.overrides.task, partial(saved_config, directory=directory)
    )
    summary = launch(config, directory, asynchronous=asynchronous)
    return None if summary is None else load_extra("objective")(summary)


@contextmanager
def _printing_to(path: Path) -> Iterator[None]:
    """Redirect all output of this process to a file, because parallel jobs share one terminal."""
    sys.stdout.flush()
    terminal = os.dup(1)
    with path.open("a") as file:
        os.dup2(file.fileno(), 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(terminal, 1)
        os.close(terminal)


def _report(folder: Path) -> None:
    write_sweep = load_extra("sweep_report")
    try:
        sys.stdout.write(f"Sweep page: {write_sweep(folder)}\n")
    except ValueError:
        return  # no job reached a step
    except Exception as error:  # the outcomes of the jobs matter more
        sys.stderr.write(
            f"warning: the sweep page could not be written: {type(error).__name__}: {error}\n"
        )
