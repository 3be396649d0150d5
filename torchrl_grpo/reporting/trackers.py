"""Further loggers: TensorBoard, and services, which are extras.

They show what the run's own files contain.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torchrl import torchrl_logger
from torchrl.record.loggers.tensorboard import TensorboardLogger

from torchrl_grpo.compat.torch import open_event_file
from torchrl_grpo.host.extras import load_extra
from torchrl_grpo.host.files import is_full

Row = Mapping[str, Any]


class Tracker:
    """A destination of a run's metrics and samples, which it keeps after it is closed."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics of a step by name; some may not be finite."""
        raise NotImplementedError

    def log_samples(self, step: int, rows: Sequence[Row]) -> None:
        """Log rows of ``samples.jsonl``, all of one split."""

    def truncate(self, step: int) -> None:
        """Drop, if possible, that step and later ones, because they will be repeated."""

    def close(self) -> None:
        """Flush and close."""


class TensorBoard(Tracker):
    """TensorBoard's files in ``folder/tensorboard``."""

    def __init__(self, folder: Path, config: str) -> None:
        self._folder = folder
        hook = self._hook = threading.excepthook
        # A full disk ends TensorBoard's thread; ``log`` reports it without a traceback.
        threading.excepthook = lambda e: (e.exc_value and is_full(e.exc_value)) or hook(e)
        self._logger: TensorboardLogger | None = TensorboardLogger(
            exp_name="tensorboard", log_dir=str(folder)
        )
        self._logger.experiment.add_text("config", f"```\n{config}\n```")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self._logger is None:
            return
        try:
            self._logger.log_metrics(dict(values), step=step)
        except OSError as error:
            if not is_full(error):
                raise
            torchrl_logger.warning(
                f"The disk has no room for TensorBoard's files in {self._folder}: they end here."
            )
            self._logger = None

    def truncate(self, step: int) -> None:
        if self._logger is not None:
            # A new event file that begins with a session start makes TensorBoard hide the later
            # steps of older files.
            writer = self._logger.experiment
            writer.close()
            writer.purge_step = step
            open_event_file(writer)

    def close(self) -> None:
        if self._logger is not None:
            self._logger.experiment.close()
        threading.excepthook = self._hook


def check_logging(services: Mapping[str, Mapping[str, Any]], *, page: bool = False) -> None:
    """Check quickly, and without a network, that the requested loggers can start.

    Args:
        services: settings of the enabled services by name: ``mode`` and so on.
        page: whether the dashboard is served during the run.

    Raises:
        ValueError: a package, a key or an address is missing.
    """
    if page and not (find_spec("starlette") and find_spec("uvicorn")):
        raise ValueError(
            "logging.page=true needs the extra view, which is not installed: "
            '`pip install "torchrl_grpo[view]"`, or set logging.page=false.'
        )
    for name, settings in services.items():
        load_extra("check_service")(name, settings)


def start_trackers(
    folders: Sequence[Path],
    *,
    tensorboard: bool,
    services: Mapping[str, Mapping[str, Any]],
    config: str,
) -> list[Tracker]:
    """Start the requested loggers.

    Args:
        folders: the run's folder, and the folder of the run that it resumes.
        tensorboard: whether TensorBoard's files are wanted; without the package there are none.
        services: as in ``check_logging``.
        config: config of the run, as JSON.

    Raises:
        ValueError: a logger cannot start.
    """
    trackers: list[Tracker] = []
    if tensorboard and find_spec("tensorboard"):
        trackers.append(TensorBoard(folders[0], config))
    elif tensorboard:
        torchrl_logger.info(
            "logging.tensorboard writes nothing, because the package tensorboard is not installed: "
            "`pip install 'torchrl_grpo[report]'`."
        )
    try:
        for name, settings in services.items():
            trackers.append(load_extra("start_service")(name, folders, settings, config))
    except BaseException:
        for tracker in trackers:
            tracker.close()
        raise
    return trackers
