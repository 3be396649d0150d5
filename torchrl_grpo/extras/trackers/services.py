"""Services that get a run's metrics, through TorchRL's loggers: Weights & Biases, MLflow, Trackio. And
Prometheus, which reads the latest metrics.

A resumed run continues the same run of a service, whose id is in the run's folder.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import secrets
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

from torchrl.record.loggers.mlflow import MLFlowLogger
from torchrl.record.loggers.trackio import TrackioLogger
from torchrl.record.loggers.wandb import WandbLogger

from torchrl_grpo.assembly.components import make_component
from torchrl_grpo.extras.run_files import read_inside
from torchrl_grpo.host.objects import load_class
from torchrl_grpo.host.trees import dotted
from torchrl_grpo.reporting.trackers import Row, Tracker

# A run must end even if the server does not answer: timeout for the start and for the last upload.
_WANDB_TIMEOUT_S = 60.0
_SERVER = "MLFLOW_TRACKING_URI"
_MLFLOW_WAITS = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "20", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "5"}
"""Seconds per request, and number of retries, a minute apart. MLflow's defaults wait 20 minutes."""
_COLUMNS = (
    "dataset",
    "group",
    "query",
    "response",
    "reward",
    "advantage",
    "correct",
    "valid",
    "length",
)
"""Columns of the tables of samples."""
_MAX_CONNECTIONS = 16
"""Maximum number of connections to the port that Prometheus reads; it uses one."""
_REQUEST_S = 5.0
"""Longest time, in seconds, that such a connection is open."""


class Wandb(Tracker):
    """Weights & Biases; offline into ``folder/wandb``, for ``wandb sync``.

    Raises:
        ValueError: wandb cannot start.
    """

    def __init__(
        self, folders: Sequence[Path], settings: Mapping[str, Any], name: str, config: str
    ) -> None:
        import wandb

        # Not TorchRL's `offline=True`, which sets an environment variable that outlives the run.
        # And no console capture, which would record every redraw of the progress bar.
        timeouts = dict.fromkeys(
            ("init_timeout", "login_timeout", "finish_timeout"), _WANDB_TIMEOUT_S
        )
        options = {
            key: settings[key] or None for key in ("mode", "project", "entity", "group", "tags")
        }
        try:
            self._logger = WandbLogger(
                name,
                save_dir=folders[0],
                id=recorded_run(folders, "wandb"),
                settings={"console": "off", **timeouts},
                **options,
            )
        except (wandb.Error, ValueError) as error:
            raise ValueError(
                f"logging.wandb.mode={settings['mode']} must be able to start a run, but wandb "
                f"reports {' '.join(str(error).split())!r}: check WANDB_API_KEY and the network, "
                "or set logging.wandb.mode=offline."
            ) from error
        _save_run_id(folders[0], "wandb", self._logger.experiment.id)
        self._logger.log_hparams(json.loads(config))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._logger.log_metrics(dict(values), step=step)

    def log_samples(self, step: int, rows: Sequence[Row]) -> None:
        import wandb

        columns = _columns(rows)
        table = wandb.Table(
            list(columns), [list(row) for row in zip(*columns.values(), strict=True)]
        )
        self._logger.log_metrics({f"samples/{rows[0]['split']}": table}, step=step)

    def close(self) -> None:
        self._logger.experiment.finish()


class MLflow(Tracker):
    """MLflow; offline into a database in the folder where the run began, online at
    ``MLFLOW_TRACKING_URI``.

    Raises:
        ValueError: MLflow cannot start.
    """

    def __init__(
        self, folders: Sequence[Path], settings: Mapping[str, Any], name: str, config: str
    ) -> None:
        import mlflow

        online = settings["mode"] == "online"
        home = folders[0].resolve() / "mlflow"
        run_id, _, store = (recorded_run(folders, "mlflow") or "").partition("\n")
        # Start a new run if the folder where it began is gone, or if it moves between a server and
        # this machine.
        ours = Path(store).parts[-2:] == ("mlflow", "mlflow.db") and Path(store).exists()
        if bool(store) == online or (store and not ours):
            run_id = ""
            store = ""
        home.mkdir(parents=True, exist_ok=True)
        store = "" if online else store or str(home / "mlflow.db")
        address = os.environ[_SERVER] if online else f"sqlite:///{store}"
        artifacts = None if online else (Path(store).parent / "artifacts").as_uri()
        if run_id:
            os.environ["MLFLOW_RUN_ID"] = run_id  # starting a run removes it from the environment
        for variable, value in _MLFLOW_WAITS.items():
            os.environ.setdefault(variable, value)
        try:
            self._logger = MLFlowLogger(settings["project"], address, artifact_location=artifacts)
        except mlflow.MlflowException as error:
            raise ValueError(
                f"logging.mlflow.mode={settings['mode']} must be able to start a run, but mlflow "
                f"reports {' '.join(str(error).split())!r:.500}: check {_SERVER} and the network, "
                "or set logging.mlflow.mode=offline."
            ) from error
        _save_run_id(folders[0], "mlflow", f"{self._logger.experiment.info.run_id}\n{store}")
        if not run_id:  # parameters of a run cannot be changed
            self._logger.log_hparams(dict(dotted(json.loads(config))))
            group = {"group": settings["group"]} if settings["group"] else {}
            mlflow.set_tags({"mlflow.runName": name} | group)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        finite = {
            _mlflow_name(name): value for name, value in values.items() if math.isfinite(value)
        }
        self._logger.log_metrics(finite, step=step)

    def log_samples(self, step: int, rows: Sequence[Row]) -> None:
        import mlflow

        # The same as log_table, except for a tag in which it keeps all names, which is truncated to
        # 8,000 characters.
        columns = _columns(rows)
        table = {
            "columns": list(columns),
            "data": [list(row) for row in zip(*columns.values(), strict=True)],
        }
        mlflow.log_dict(table, f"samples/{rows[0]['split']}_{step:06d}.json")

    def close(self) -> None:
        import mlflow

        mlflow.end_run()


class Trackio(Tracker):
    """Trackio on this machine, in the folder that ``trackio show`` reads (``TRACKIO_DIR``)."""

    def __init__(
        self, folders: Sequence[Path], settings: Mapping[str, Any], name: str, config: str
    ) -> None:
        run_name = recorded_run(folders, "trackio")
        # Trackio distinguishes runs only by name.
        name = run_name or f"{name}-{secrets.token_hex(2)}"
        self._logger = TrackioLogger(
            name,
            settings["project"],
            group=settings["group"],
            config=json.loads(config),
            resume="must" if run_name else "never",
            embed=False,
        )
        _save_run_id(folders[0], "trackio", name)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._logger.experiment.log(dict(values), step=step)

    def log_samples(self, step: int, rows: Sequence[Row]) -> None:
        import trackio

        columns = _columns(rows)
        table = [
            dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)
        ]
        self._logger.experiment.log(
            {f"samples/{rows[0]['split']}": trackio.Table(data=table)}, step=step
        )

    def close(self) -> None:
        self._logger.experiment.finish()


class _LimitedServer(ThreadingHTTPServer):
    """Server with few connections, which others may open and leave idle or use slowly: each is
    closed after a while, and of too many the oldest, so that they use up neither the run's file
    descriptors nor its threads.
    """

    request_queue_size = 4 * _MAX_CONNECTIONS

    def __init__(self, address: tuple[str, int], handler: Any) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        self._open: dict[Any, threading.Timer] = {}
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in its own thread."""
        self._open[request] = timer = threading.Timer(_REQUEST_S, _end, (request,))
        timer.daemon = True
        timer.start()
        if len(self._open) > _MAX_CONNECTIONS:
            oldest = next(iter(self._open))
            self._forget(oldest)
            _end(oldest)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        self._forget(request)
        super().shutdown_request(request)

    def _forget(self, request: Any) -> None:
        timer = self._open.pop(request, None)
        if timer is not None:
            timer.cancel()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of a connection, such as a client that leaves before its answer."""


def _end(connection: Any) -> None:
    with suppress(OSError):  # its thread may just have closed it
        connection.shutdown(socket.SHUT_RDWR)


class Prometheus(Tracker):
    """Server of the latest value of each metric, as ``grpo_train_loss{run="..."}``.

    Raises:
        ValueError: it cannot listen.
    """

    def __init__(
        self, folders: Sequence[Path], settings: Mapping[str, Any], name: str, config: str
    ) -> None:
        from prometheus_client import CollectorRegistry, MetricsHandler

        self._run = name
        self._latest: dict[str, float] = {}
        registry = CollectorRegistry()
        registry.register(self)
        handler: Any = MetricsHandler.factory(registry)
        port, host = settings["port"], settings["host"]
        try:
            self._server = _LimitedServer((host, port), handler)
        except OSError as error:
            raise ValueError(
                f"logging.prometheus.port={port} must be free on logging.prometheus.host={host}, "
                f"and it is not ({error.strerror}): use another one."
            ) from error
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._latest = {**self._latest, **values, "step": step}

    def collect(self) -> Iterator[Any]:
        """Yield the metrics, in the server's threads."""
        from prometheus_client.core import GaugeMetricFamily

        names_in_use: set[str] = set()
        for name, value in self._latest.items():
            allowed = re.sub(r"\W", "_", name)
            while allowed in names_in_use:  # pass@1 and pass_1
                allowed += "_"
            names_in_use.add(allowed)
            metric = GaugeMetricFamily(f"grpo_{allowed}", name, labels=["run"])
            metric.add_metric([self._run], value)
            yield metric

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


_SERVICES = {"wandb": Wandb, "mlflow": MLflow, "trackio": Trackio, "prometheus": Prometheus}
_PACKAGES = {"prometheus": "prometheus_client"}
"""Packages whose names differ from their service's."""


def check_service(name: str, settings: Mapping[str, Any]) -> None:
    """Check quickly, and without a network, that a service can start.

    Raises:
        ValueError: its package, a key or an address is missing.
    """
    if name not in _SERVICES:
        field = f"logging.{name}._target_"
        target = str(settings.get("_target_"))
        kind = load_class(target, field)
        if not issubclass(getattr(kind, "__wrapped__", kind), Tracker):
            raise ValueError(
                f"{field}={target} must be a subclass of Tracker: derive it from {Tracker.__module__}."
            )
        return
    key, off = ("port", "null") if name == "prometheus" else ("mode", "disabled")
    field, package = f"logging.{name}.{key}", _PACKAGES.get(name, name)
    if not _is_installed(package):
        raise ValueError(
            f"{field}={settings[key]} needs the package {package}, which is not installed: "
            f"`pip install 'torchrl_grpo[{name}]'`, or set {field}={off}."
        )
    if name == "wandb" and settings["mode"] == "online" and not _has_wandb_key():
        raise ValueError(
            "logging.wandb.mode=online needs a Weights & Biases key, but neither WANDB_API_KEY "
            "nor the netrc file has one: run `wandb login`, or set logging.wandb.mode=offline."
        )
    if name == "mlflow" and settings["mode"] == "online" and not os.environ.get(_SERVER):
        raise ValueError(
            "logging.mlflow.mode=online needs the address of a server in the environment "
            f"variable {_SERVER}, which is not set: set it, or set logging.mlflow.mode=offline."
        )


def start_service(
    name: str, folders: Sequence[Path], settings: Mapping[str, Any], config: str
) -> Tracker:
    """Start a service; see ``start_trackers`` for the arguments."""
    if name not in _SERVICES:
        return make_component(f"logging.{name}", dict(settings), Tracker, folders, config)
    run = settings["name"] or folders[0].resolve().name
    return _SERVICES[name](folders, settings, run, config)


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _has_wandb_key() -> bool:
    """Return whether wandb would find a credential in one of its documented places."""
    from requests.utils import get_netrc_auth  # wandb needs it too

    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    return get_netrc_auth(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")) is not None


def recorded_run(folders: Sequence[Path], service: str) -> str | None:
    """Return the id of the service's run that one of the folders belongs to."""
    texts = (read_inside(folder, f"{service}/run_id").strip() for folder in folders)
    return next(filter(None, texts), None)


def _save_run_id(folder: Path, service: str, run: str) -> None:
    path = folder / service / "run_id"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{run}\n", encoding="utf-8")


def _columns(rows: Sequence[Row]) -> dict[str, list[Any]]:
    """Return a table of samples by column."""
    return {
        name: [row.get(name) for row in rows]
        for name in _COLUMNS
        if any(name in row for row in rows)
    }


def _mlflow_name(name: str) -> str:
    """Return a metric's name in characters that MLflow accepts: ``eval/pass_at_1``."""
    return re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"))
