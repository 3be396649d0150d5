"""Weights & Biases, MLflow, Trackio, Prometheus: the real ones, and one clear line if one of them
cannot start.
"""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from torchrl import torchrl_logger

from tests.support.configs import compose_config
from tests.support.ports import free_port
from torchrl_grpo.config import GRPOConfig
from torchrl_grpo.extras.trackers import services as extra
from torchrl_grpo.reporting import trackers
from torchrl_grpo.reporting.metrics import MetricsLogger
from torchrl_grpo.reporting.trackers import check_logging

SAMPLE = {
    "split": "train",
    "query": "1+1=",
    "response": "2",
    "reward": 1.0,
    "group": 7,
    "correct": True,
    "length": 2,
}


def services(*overrides: str) -> dict[str, dict[str, Any]]:
    config: GRPOConfig = compose_config(*overrides)
    return config.logging.services


def run(
    folder: Path,
    settings: dict[str, dict[str, Any]],
    steps: Sequence[int],
    before: Path | None = None,
) -> None:
    config = {"optimizer": {"lr": 0.5 / len(steps)}}
    with MetricsLogger(
        folder, tensorboard=False, services=settings, config=config, resumed_from=before
    ) as logger:
        for step in steps:
            logger.log(
                step, {"train/loss": 1 / step, "eval/pass@1": 0.5, "train/kl_k3": float("nan")}
            )
            logger.log_samples(
                step, [SAMPLE, SAMPLE | {"response": "3", "reward": 0.0, "correct": False}]
            )
            logger.log_samples(step, [])


@pytest.fixture
def no_wandb_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Remove the key from the environment; return the path of a netrc file that does not exist yet."""
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    return tmp_path / "netrc"


def test_none_of_them_is_on_unless_it_is_asked_for() -> None:
    assert services() == {}
    configured = services(
        "logging.mlflow.mode=offline", "logging.wandb.mode=online", "logging.wandb.tags=[a,b]"
    )
    assert {name: settings["mode"] for name, settings in configured.items()} == {
        "wandb": "online",
        "mlflow": "offline",
    }
    assert configured["wandb"]["tags"] == ["a", "b"]


def test_online_without_a_key_fails_before_anything_is_written(
    tmp_path: Path, no_wandb_key: Path
) -> None:
    with pytest.raises(ValueError) as error:
        run(tmp_path / "run", services("logging.wandb.mode=online"), [1])
    message = str(error.value)
    assert message.startswith("logging.wandb.mode=online needs a Weights & Biases key")
    assert "WANDB_API_KEY" in message and "wandb login" in message and "\n" not in message
    assert not (tmp_path / "run").exists()


def test_key_is_found_in_the_environment_and_in_netrc(
    monkeypatch: pytest.MonkeyPatch, no_wandb_key: Path
) -> None:
    online = services("logging.wandb.mode=online")
    no_wandb_key.write_text("machine example.org login user password nothing\n")
    with pytest.raises(ValueError, match="needs a Weights & Biases key"):
        check_logging(online)
    no_wandb_key.write_text("machine api.wandb.ai login user password nothing\n")
    check_logging(online)
    no_wandb_key.write_text("this is not a netrc file")
    monkeypatch.setenv("WANDB_API_KEY", "nothing")
    check_logging(online)


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_a_missing_package_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(extra, "_is_installed", lambda package: False)
    message = rf"logging\.{name}\.mode=offline .* {name}, .*torchrl_grpo\[{name}\].*=disabled"
    with pytest.raises(ValueError, match=message):
        check_logging(services(f"logging.{name}.mode=offline"))


def test_without_tensorboard_a_run_says_so_and_logs_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda package: None)
    monkeypatch.setattr(torchrl_logger, "propagate", True)
    with caplog.at_level("INFO"), MetricsLogger(tmp_path, config={}) as logger:
        logger.log(1, {"train/loss": 0.5})
    [line] = {record.message for record in caplog.records}
    assert "logging.tensorboard" in line and "torchrl_grpo[report]" in line
    assert not (tmp_path / "tensorboard").exists()
    assert "0.5" in (tmp_path / "metrics.jsonl").read_text()


def test_mlflow_online_needs_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extra, "_is_installed", lambda package: True)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(ValueError, match=r"logging\.mlflow\.mode=online .*MLFLOW_TRACKING_URI"):
        check_logging(services("logging.mlflow.mode=online"))


@pytest.mark.slow
def test_an_mlflow_server_that_does_not_answer_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setattr(extra, "_MLFLOW_WAITS", {})
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # a port without a listener
    message = (
        r"logging\.mlflow\.mode=online must be able to start a run, but mlflow reports .* "
        r"or set logging\.mlflow\.mode"
    )
    with pytest.raises(ValueError, match=message):
        run(tmp_path, services("logging.mlflow.mode=online"), [1])


@pytest.mark.slow
def test_a_wandb_server_that_does_not_answer_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_wandb_key: Path
) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setattr(extra, "_WANDB_TIMEOUT_S", 3.0)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        start = time.monotonic()
        with pytest.raises(
            ValueError,
            match=r"^logging\.wandb\.mode=online .*wandb",
        ):
            run(tmp_path, services("logging.wandb.mode=online"), [1])
    assert time.monotonic() - start < 60  # wandb's own limit is 90
    wandb.teardown()  # its process, which other tests of this process would reuse


@pytest.mark.slow
def test_wandb_gets_numbers_tables_and_names_and_goes_on_with_its_id(
    tmp_path: Path, no_wandb_key: Path
) -> None:
    pytest.importorskip("wandb")
    settings = services(
        "logging.wandb.mode=offline",
        "logging.wandb.entity=us",
        "logging.wandb.group=seeds",
        "logging.wandb.tags=[x1]",
    )
    run(tmp_path, settings, [1])
    run_id = (tmp_path / "wandb" / "run_id").read_text().strip()
    run(tmp_path, settings, [2])
    run(tmp_path / "elsewhere", settings, [3], before=tmp_path)
    folders = sorted(tmp_path.rglob("wandb/offline-run-*"))
    assert {folder.parents[1] for folder in folders} == {tmp_path, tmp_path / "elsewhere"}
    assert all(
        run_id in folder.name for folder in folders
    )  # "-1" follows it: both began in the same second
    logged = b"".join(file.read_bytes() for file in tmp_path.rglob("*.wandb"))
    assert all(word in logged for word in (b"train/loss", b"seeds", b"x1", b"torchrl-grpo"))
    tables = [json.loads(path.read_text()) for path in tmp_path.rglob("samples/*.table.json")]
    columns = ["group", "query", "response", "reward", "correct", "length"]
    rows = [[7, "1+1=", "2", 1.0, True, 2], [7, "1+1=", "3", 0.0, False, 2]]
    assert [(table["columns"], table["data"]) for table in tables] == [(columns, rows)] * 3
    assert "WANDB_MODE" not in os.environ


@pytest.mark.slow
def test_mlflow_gets_numbers_tables_and_names_and_goes_on_in_its_run(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    settings = services(
        "logging.mlflow.mode=offline", "logging.mlflow.name=mine", "logging.mlflow.group=seeds"
    )
    run(tmp_path / "a", settings, [1])
    run(tmp_path / "b", settings, [2], before=tmp_path / "a")
    run(tmp_path / "c", settings, [3, 4], before=tmp_path / "b")
    assert (
        not (tmp_path / "c" / "mlflow" / "mlflow.db").exists() and "MLFLOW_RUN_ID" not in os.environ
    )
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/a/mlflow/mlflow.db")
    [stored] = client.search_runs([client.get_experiment_by_name("torchrl-grpo").experiment_id])
    assert (
        stored.info.run_name == "mine"
        and stored.info.status == "FINISHED"
        and stored.data.tags["group"] == "seeds"
    )
    assert stored.data.params == {"optimizer.lr": "0.5"}
    history = client.get_metric_history(stored.info.run_id, "train/loss")
    assert [(point.step, point.value) for point in history] == [
        (step, 1 / step) for step in (1, 2, 3, 4)
    ]
    assert stored.data.metrics.keys() == {"train/loss", "eval/pass_at_1"}
    tables = sorted((tmp_path / "a" / "mlflow" / "artifacts").rglob("samples/*.json"))
    assert [path.name for path in tables] == [f"train_{step:06d}.json" for step in (1, 2, 3, 4)]
    assert json.loads(tables[0].read_text())["data"][1] == [7, "1+1=", "3", 0.0, False, 2]


@pytest.mark.slow
def test_trackio_gets_numbers_and_tables_and_goes_on_in_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "TRACKIO_DIR", str(tmp_path / "trackio")
    )  # read at import, which only this test does
    pytest.importorskip("trackio")
    settings = services(
        "logging.trackio.mode=offline", "logging.trackio.name=mine", "logging.trackio.project=ours"
    )
    run(tmp_path / "a", settings, [1])
    run(tmp_path / "b", settings, [2], before=tmp_path / "a")
    run(tmp_path / "c", settings, [1])  # another run of the same name
    names = [(tmp_path / name / "trackio" / "run_id").read_text().strip() for name in "abc"]
    assert names[0] == names[1] != names[2] and all(name.startswith("mine-") for name in names)
    with closing(sqlite3.connect(tmp_path / "trackio" / "ours.db")) as database:
        logged = database.execute(
            "select run_name, step, metrics from metrics order by id"
        ).fetchall()
        [config] = database.execute(
            "select config from configs where run_name = ?", names[2:]
        ).fetchone()
    values = [(name, step, json.loads(metrics)) for name, step, metrics in logged]
    losses = [
        (name, step, found["train/loss"]) for name, step, found in values if "train/loss" in found
    ]
    assert losses == [(names[0], 1, 1.0), (names[0], 2, 0.5), (names[2], 1, 1.0)]
    tables = [
        found["samples/train"]["_value"] for _, _, found in values if "samples/train" in found
    ]
    assert [[row["response"] for row in table] for table in tables] == [["2", "3"]] * 3
    assert json.loads(config)["optimizer"] == {"lr": 0.5}


def test_prometheus_reads_the_latest_metrics_until_the_run_ends(tmp_path: Path) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    port = free_port()
    settings = services(f"logging.prometheus.port={port}")
    folder = tmp_path / "my run"
    url = f"http://127.0.0.1:{port}/metrics"
    for _ in range(2):  # the second run finds the port free again
        with MetricsLogger(folder, tensorboard=False, services=settings, config={}) as logger:
            logger.log(1, {"train/loss": 0.5, "eval/pass@1": 0.25, "eval/pass_1": 0.5})
            logger.log(2, {"train/loss": float("nan")})
            with urllib.request.urlopen(url, timeout=300) as answer:
                text = answer.read().decode()
        [*families] = parser.text_string_to_metric_families(text)
        values = {family.name: family.samples[0].value for family in families}
        assert values.pop("grpo_train_loss") != 0.5
        assert values == {"grpo_eval_pass_1": 0.25, "grpo_eval_pass_1_": 0.5, "grpo_step": 2}
        assert {metric.labels["run"] for family in families for metric in family.samples} == {
            "my run"
        }
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=300)


@pytest.mark.slow
def test_idle_connections_use_up_no_files_and_prometheus_still_reads(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    port = free_port()
    settings = services(f"logging.prometheus.port={port}")
    with (
        MetricsLogger(tmp_path, tensorboard=False, services=settings, config={}) as logger,
        ExitStack() as stack,
    ):
        logger.log(1, {"train/loss": 0.5})
        place = ("127.0.0.1", port)
        strangers = [
            stack.enter_context(socket.create_connection(place, timeout=300)) for _ in range(100)
        ]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=300) as answer:
            assert b"grpo_train_loss" in answer.read()
        assert [stranger.recv(1) for stranger in strangers[:84]] == [b""] * 84


def test_a_request_in_drops_ends_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("prometheus_client")
    monkeypatch.setattr(extra, "_REQUEST_S", 0.5)
    port = free_port()
    settings = services(f"logging.prometheus.port={port}")
    with (
        MetricsLogger(tmp_path, tensorboard=False, services=settings, config={}),
        socket.create_connection(("127.0.0.1", port), timeout=300) as stranger,
    ):
        deadline = time.monotonic() + 300
        with pytest.raises(OSError):
            stranger.sendall(b"GET /metrics HTTP/1.0\r\n")
            while time.monotonic() < deadline:
                stranger.sendall(b"x")
                time.sleep(0.1)


def test_a_port_that_is_in_use_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
        settings = services(f"logging.prometheus.port={port}")
        with pytest.raises(ValueError, match=rf"logging\.prometheus\.port={port} must be free"):
            MetricsLogger(tmp_path, tensorboard=False, services=settings, config={})


def test_prometheus_without_its_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extra, "_is_installed", lambda package: False)
    with pytest.raises(ValueError, match=r"port=9100 .*prometheus_client.*port=null"):
        check_logging(services("logging.prometheus.port=9100"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_ends_tensorboard_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracebacks: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", tracebacks.append)
    board = trackers.TensorBoard(tmp_path, "{}")
    board.log(0, {"train/loss": 0.5})
    [file] = (tmp_path / "tensorboard").iterdir()
    file.unlink()
    file.symlink_to("/dev/full")
    deadline = time.monotonic() + 300
    while board._logger is not None and time.monotonic() < deadline:
        for step in range(1000):
            board.log(step, {"train/loss": 0.5})
        time.sleep(0.1)
    board.close()
    assert board._logger is None
    assert tracebacks == []
