"""The job of both scripts, from its config to its outcome, and the report of a sweep."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

from hydra.conf import HydraConf
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, read_write

from torchrl_grpo.config import (
    ConfigError,
    check_command_line,
    from_hydra,
    orderly_exit,
    register,
    split_command_line,
    starting,
)
from torchrl_grpo.host import interrupts, startup
from torchrl_grpo.host.checkpoint_files import saved_config
from torchrl_grpo.host.folders import FolderLock, absent, check_own_files, claim

_log = logging.getLogger(__name__)


class Sweep(Callback):
    """Gives each start its own folder, and knows that of a multirun.

    Attributes:
        folder: of the one that this process started; None in a single run, and in a process that a
            launcher made.
        made: folders that were not there before this start: of a single run and around it, the
            innermost first.
    """

    folder: Path | None = None
    made: Sequence[Path] = ()

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        with _refusing():
            wanted = Path(config.hydra.run.dir).absolute()
            made = absent(wanted)
            folder = _own_folder(config.hydra, "run").absolute()
            Sweep.made = made if folder == wanted else [folder]
            if config.dry_run:
                check_own_files(folder)
            else:
                FolderLock(
                    folder
                ).close()  # refuses before Hydra writes into the folder of a run; build takes it again

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        with _refusing():
            Sweep.folder = _own_folder(config.hydra, "sweep")
            check_own_files(Sweep.folder)


@contextmanager
def _refusing() -> Iterator[None]:
    """End the process with the error: Hydra turns an error in a callback into a warning."""
    try:
        yield
    except ConfigError as error:
        sys.stderr.write(f"\nerror: {error}\n")
        sys.exit(2)


def _own_folder(hydra: DictConfig, kind: str) -> Path:
    """Return the ``dir`` of ``hydra.run`` or ``hydra.sweep``; one named after the time gets a free
    name.
    """
    node = hydra[kind]
    if "${now:" not in str(OmegaConf.to_container(node, resolve=False)["dir"]):  # type: ignore[call-overload, index]
        return Path(node.dir)
    try:
        folder = claim(Path(node.dir))
    except OSError as error:
        raise ConfigError(
            f"hydra.{kind}.dir={node.dir} must be a folder that can be made, but it cannot "
            f"({error.strerror}): use another."
        ) from error
    with read_write(hydra):
        node.dir = str(folder)
        hydra.overrides.hydra.append(
            f"hydra.{kind}.dir='{folder}'"
        )  # from which the jobs of a sweep are composed
    return folder


register()
# In every config, those of the user included, without a word on the command line.
ConfigStore.instance().store(
    group="hydra",
    name="config",
    node=HydraConf(callbacks={"sweep": {"_target_": f"{__name__}.{Sweep.__name__}"}}),
)


def command(main: Callable[[], object]) -> None:
    """Let ``main`` handle the command line, and write the report of a sweep."""
    Sweep.folder, Sweep.made = None, ()
    with orderly_exit():
        _check_working_directory()
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
            "the working directory must exist, and this one was removed: change to another one "
            "(cd)."
        ) from None


def train(cfg: DictConfig, *, asynchronous: bool) -> float | None:
    """Run the job that a config describes.

    Returns:
        what a sweep is to raise (``reporting.report.objective``); None of a dry run.
    """
    hydra_config = HydraConfig.get()
    if hydra_config.mode == RunMode.MULTIRUN:
        return _train_in_sweep(cfg, hydra_config, asynchronous)
    with orderly_exit(), _removing_empty_run_folder(hydra_config):
        return _train(cfg, hydra_config, asynchronous)


@contextmanager
def _removing_empty_run_folder(hydra_config: HydraConf) -> Iterator[None]:
    """Context that removes the folder of a refused run, if this start made it and only Hydra has
    written to it.
    """
    try:
        yield
    except ConfigError:
        if Sweep.made:
            folder, *around = Sweep.made
            log = folder / f"{hydra_config.job.name}.log"
            others = set(folder.iterdir()) - {folder / str(hydra_config.output_subdir), log}
            if not others and not (log.exists() and log.stat().st_size):
                shutil.rmtree(folder)
                with suppress(OSError):  # another start has made a folder beside it
                    for parent in around:
                        parent.rmdir()
        raise


def _train_in_sweep(cfg: DictConfig, hydra_config: HydraConf, asynchronous: bool) -> float | None:
    """Run a job of a sweep: Hydra raises its error when the other jobs have ended."""
    directory = Path(hydra_config.runtime.output_dir)
    beside_others = Sweep.folder is None
    try:
        with (
            interrupts.watched(),
            _printing_to(directory / "output.txt") if beside_others else nullcontext(),
        ):
            outcome = _train(cfg, hydra_config, asynchronous)
    except Exception as error:
        _log.error(f"{directory} failed: {error}")
        raise
    finally:
        startup.end()
    if beside_others:
        _log.info(f"{directory} ended" + ("" if outcome is None else f" with {outcome:.3g}"))
    return outcome


def _train(cfg: DictConfig, hydra_config: HydraConf, asynchronous: bool) -> float | None:
    """Build the run that the config describes, train, and close it in any case."""
    directory = Path(hydra_config.runtime.output_dir)
    config = from_hydra(
        cfg, hydra_config.overrides.task, partial(saved_config, directory=directory)
    )
    with starting(
        config, asynchronous=asynchronous
    ):  # takes seconds; --help and mistakes are answered before
        from torchrl_grpo.assembly.doctor import examine
        from torchrl_grpo.assembly.run import build

    if config.dry_run:
        if not examine(config, directory, asynchronous=asynchronous):
            sys.exit(1)
        return None
    with _writing_log(), closing(build(config, directory, asynchronous=asynchronous)) as run:
        summary = run.fit()
    from torchrl_grpo.reporting.report import (
        objective,
    )  # imports matplotlib, which a run needs at its end only

    return objective(summary)


@contextmanager
def _writing_log() -> Iterator[None]:
    """Write TorchRL's log lines to Hydra's log file too: its logger does not propagate them."""
    from torchrl import torchrl_logger

    files = [
        handler
        for handler in logging.getLogger().handlers
        if isinstance(handler, logging.FileHandler)
    ]
    for file in files:
        file.handleError = _say_nothing  # type: ignore[method-assign]
        torchrl_logger.addHandler(file)
    try:
        yield
    finally:
        for file in files:
            torchrl_logger.removeHandler(file)


def _say_nothing(record: logging.LogRecord) -> None:
    """Ignore a log line that does not fit on a full disk: it is on the terminal."""


@contextmanager
def _printing_to(path: Path) -> Iterator[None]:
    """Context that redirects all output of this process to a file, because parallel jobs share one
    terminal.
    """
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
    from torchrl_grpo.reporting.sweep_report import write_sweep

    try:
        sys.stdout.write(f"Sweep page: {write_sweep(folder)}\n")
    except ValueError:
        return  # no job came to a step
    except Exception as error:  # how the jobs ended is what counts
        sys.stderr.write(
            f"warning: the sweep page could not be written: {type(error).__name__}: {error}\n"
        )
