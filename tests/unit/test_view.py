"""``python -m torchrl_grpo view``: its server's replies and refusals. test_view_page.py tests it in
a browser.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import re
import resource
import socket
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from tests.support.configs import ROOT
from tests.support.processes import command_line, has_ended
from tests.support.scripts import SYNC, Script
from tests.support.view_runs import append, group, make_run, metrics, served
from tests.support.waiting import until
from torchrl_grpo.extras.report.records import run_names
from torchrl_grpo.extras.view.command import main
from torchrl_grpo.extras.view.index import Criteria
from torchrl_grpo.extras.view.runs import RunView, curves
from torchrl_grpo.extras.view.server import title_of
from torchrl_grpo.extras.view.start import page_beside
from torchrl_grpo.host.children import start_python


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve the page on two ended runs, the second with another learning rate."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "secret.txt").write_text("secret")
    with served(
        make_run(folder / "one"), make_run(folder / "two", steps=2, rate="1e-3")
    ) as address:
        yield address


def ask(
    address: str, path: str = "", method: str = "GET", **headers: str
) -> tuple[int, str, dict[str, str]]:
    """Return status, text and headers; the path is sent unchanged."""
    parts = urlsplit(address)
    connection = http.client.HTTPConnection(parts.netloc, timeout=300)
    connection.request(method, path if path.startswith("/") else parts.path + path, headers=headers)
    response = connection.getresponse()
    return response.status, response.read().decode(), dict(response.getheaders())


def api(address: str, path: str) -> Any:
    status, text, _ = ask(address, f"api/{path}")
    assert status == 200, text
    return json.loads(text)


def responses(answer: Any) -> list[list[str]]:
    return [[row["response"] for row in rows] for rows in answer["groups"]]


def test_nothing_is_answered_without_the_token(address: str) -> None:
    token = urlsplit(address).path
    other = "/" + ("y" if token[1] == "x" else "x") + token[2:]
    for path in (
        "/",
        "/static/view.js",
        "/api/status",
        token[:-2] + "/",
        other,
        token[:-1],
        f"/{token}",
    ):
        assert ask(address, path)[0] == 404, path


def test_another_host_name_is_refused(address: str) -> None:
    assert [ask(address, Host=host)[0] for host in ("evil.example", "127.0.0.1.evil.example")] == [
        400,
        400,
    ]
    assert [ask(address, Host=host)[0] for host in ("localhost:8000", "127.0.0.1")] == [200, 200]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_the_page_only_reads(address: str, method: str) -> None:
    assert ask(address, "api/status", method)[0] == 405


def test_it_listens_on_loopback_alone(address: str) -> None:
    port = urlsplit(address).port
    addresses = [
        one.laddr.ip
        for child in psutil.Process().children()
        for one in child.net_connections("tcp")
        if one.laddr.port == port and one.status == "LISTEN"
    ]
    assert addresses == ["127.0.0.1"]


def test_a_page_runs_no_script_but_its_own(address: str) -> None:
    for path in ("", "static/view.js", "api/status", "nothing"):
        _, _, headers = ask(address, path)
        assert headers["content-security-policy"].startswith(
            "default-src 'none'; script-src 'self'; style-src 'self'"
        )
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["referrer-policy"] == "no-referrer"
    assert "<script>" not in ask(address)[1]


@pytest.mark.parametrize(
    "path",
    [
        "static/../secret.txt",
        "static/..%2fsecret.txt",
        "static/%2e%2e/%2e%2e/secret.txt",
        "static/..%2f..%2f..%2f..%2f..%2f..%2fetc%2fpasswd",
        "static/..%5csecret.txt",
        "static//etc/passwd",
        "static/%00",
        "metrics.jsonl",
        "trace/0/trace.json.gz",
        "trace/0/metrics.jsonl",
        "api/../secret.txt",
        "api/groups/../../secret.txt",
    ],
)
def test_no_path_leads_to_a_file(address: str, path: str) -> None:
    status, text, _ = ask(address, path)
    assert status == 404
    assert "secret" not in text and "root:" not in text


def test_a_trace_is_served_and_announced(tmp_path: Path) -> None:
    (make_run(tmp_path / "run") / "trace.json.gz").write_bytes(b"a trace")
    with served(tmp_path / "run") as address:
        assert api(address, "status")[0]["trace"]
        assert ask(address, "trace/0/trace.json.gz")[:2] == (200, "a trace")


def test_status_tells_where_each_run_is(address: str) -> None:
    one, two = api(address, "status")
    assert (one["title"], one["step"], two["step"], one["ended"]) == (
        "starter on sums with grpo",
        3,
        2,
        False,
    )
    assert (one["name"], two["name"]) == ("one", "two")
    assert (one["splits"], one["datasets"]) == (["test", "train"], ["sums"])
    assert one["versions"] == {"metrics": 1, "samples": 7, "timeline": 9}


def test_curves_of_several_runs_are_in_one_panel(address: str) -> None:
    panels = {panel["title"]: panel for panel in api(address, "curves")["panels"]}
    assert [
        (curve["run"], curve["steps"], curve["values"]) for curve in panels["Reward"]["curves"]
    ] == [
        (0, [1.0, 2.0, 3.0], [0.5, 0.5, 0.5]),
        (1, [1.0, 2.0], [0.5, 0.5]),
    ]
    labels = ["test pass@1 (greedy)", "train accuracy (sampled)"]
    assert [curve["label"] for curve in panels["Accuracy"]["curves"]] == 2 * labels
    assert [curve["label"] for curve in panels["Time per step (s)"]["curves"]] == 2 * ["full step"]


def test_curves_are_named_in_words(tmp_path: Path) -> None:
    names = ["kl_k3_to_inference", "kl_k3_to_ref", "clip_fraction_high", "clip_fraction_low"]
    values = {f"train/{name}": 0.1 for name in names} | {"throughput/trained_tokens_per_s": 9.0}
    append(tmp_path, "metrics.jsonl", [metrics(1) | {"rollout/response_length": 5.0} | values])
    view = RunView(tmp_path, "run")
    view.refresh()
    assert {
        panel["title"]: [curve["label"] for curve in panel["curves"]]
        for panel in curves({0: view})["panels"]
    } == {
        "Reward": ["mean reward"],
        "Accuracy": ["train accuracy (sampled)"],
        "KL (nats per token)": ["KL to the sampling policy", "KL to the reference"],
        "Entropy (nats per token)": ["entropy"],
        "Response length (tokens)": ["mean response length"],
        "Clip fraction": ["clipped at the upper bound", "clipped at the lower bound"],
        "Throughput (trained tokens/s)": ["trained tokens/s"],
        "Time per step (s)": ["generate", "train", "other"],
    }


def test_jobs_of_a_sweep_are_named_by_what_they_differ_in(tmp_path: Path) -> None:
    for name, lines in {
        "0": "[optimizer.lr=1e-4, seed=1, algo=dapo]",
        "1": "[optimizer.lr=0.00012345678, seed=1, algo=dapo]",
        "2": "a: 1",
    }.items():
        (make_run(tmp_path / name) / ".hydra" / "overrides.yaml").write_text(lines)
    folders = [tmp_path / name for name in "012"]
    names = [run["name"] for run in status_of(folders[:2])]
    assert names == ["lr=1e-4", "lr=0.000123"]
    assert [run["name"] for run in status_of(folders[2:])] == [f"{tmp_path.name}/2"]
    [alone] = status_of(folders[:1])
    assert alone["name"] == "lr=1e-4 seed=1 algo=dapo"


def status_of(folders: list[Path]) -> Any:
    with served(*folders) as address:
        return api(address, "status")


def test_the_title_names_all_runs(address: str, tmp_path: Path) -> None:
    assert "<h1>starter on sums with grpo (one, two)</h1>" in ask(address)[1]
    runs = [RunView(make_run(tmp_path / name), name) for name in ("a", "b", "c")]
    (runs[2].folder / ".hydra" / "hydra.yaml").write_text(
        "hydra: {runtime: {choices: {algo: dapo}}}\n"
    )
    assert title_of(runs) == "starter on sums with grpo (a, b); starter on sums with dapo (c)"
    assert title_of(runs[:1]) == "starter on sums with grpo"
    assert title_of(2 * runs[:2]) == "starter on sums with grpo (4 runs)"


def test_keys_that_end_alike_are_named_in_full(tmp_path: Path) -> None:
    for name in "01":
        overrides = f"[train_model.dtype=a{name}, ref_model.dtype=b{name}, optimizer.lr={name}]"
        (make_run(tmp_path / name) / ".hydra" / "overrides.yaml").write_text(overrides)
    assert run_names([tmp_path / "0", tmp_path / "1"]) == [
        "train_model.dtype=a0 ref_model.dtype=b0 lr=0",
        "train_model.dtype=a1 ref_model.dtype=b1 lr=1",
    ]


def test_the_times_of_one_run_are_stacked(address: str) -> None:
    [panel] = [panel for panel in api(address, "curves?hide=1")["panels"] if panel["stacked"]]
    assert {curve["label"]: curve["values"] for curve in panel["curves"]} == {
        "generate": [0.1] * 3,
        "train": [0.3] * 3,
        "other": [pytest.approx(0.1)] * 3,
    }


def test_curves_of_a_part_of_the_steps(address: str) -> None:
    [reward, *_] = api(address, "curves?from=2&to=2")["panels"]
    assert [curve["steps"] for curve in reward["curves"]] == [[2.0], [2.0]]


def test_a_group_has_its_responses_side_by_side(address: str) -> None:
    answer = api(address, "groups?split=train")
    assert (answer["found"], answer["all"], answer["rows"], answer["steps"]) == (3, 4, 7, [0, 3])
    assert responses(answer) == [["no 3", "#### 6"], ["no 2", "#### 4"], ["no 1", "#### 2"]]
    cell = answer["groups"][0][1]
    assert {
        key: cell[key]
        for key in ("query", "reward", "advantage", "parts", "length", "finish_reason")
    } == {
        "query": "3+3=",
        "reward": "1",
        "advantage": 1.0,
        "parts": {"right": 1.0},
        "length": 6,
        "finish_reason": "stop",
    }
    assert (cell["version"], cell["staleness"], cell["good"]) == (2, 0, True)


@pytest.mark.parametrize(
    ("query", "queries"),
    [
        ("split=test", ["1+1="]),
        ("from=2&to=2", ["2+2="]),
        ("least=0.5&to=1", ["1+1="]),
        ("most=0&from=3", ["3+3="]),
        ("text=%23%23%23%23%204", ["2+2="]),
        ("text=3%2B3", ["3+3="]),
        ("text=THREE", ["1+1="]),
        ("text=response", []),
        ("dataset=words", []),
        ("run=1&dataset=sums", ["2+2=", "1+1="]),
        ("page=9", []),
    ],
)
def test_groups_are_filtered(address: str, query: str, queries: list[str]) -> None:
    assert [rows[0]["query"] for rows in api(address, f"groups?{query}")["groups"]] == queries


def test_groups_are_ordered_by_the_spread_of_their_rewards(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=0)
    for step, rewards in enumerate([[0.0, 1.0], [0.5, 0.5], [0.2, 0.5], [0.9, None]], start=1):
        rows = group(step, f"{step}", ["a", "b"])
        append(
            run,
            "samples.jsonl",
            [
                row | {"reward": reward or 0.0, "valid": reward is not None}
                for row, reward in zip(rows, rewards, strict=True)
            ],
        )
    view = RunView(run, "run")
    view.refresh()
    page = view.groups(Criteria(split="train"), 0, 10, by_spread=True)
    assert [rows[0]["query"] for rows in page["groups"]] == ["1", "3", "4", "2"]
    newest = view.groups(Criteria(split="train"), 0, 10)
    assert [rows[0]["query"] for rows in newest["groups"]] == ["4", "3", "2", "1"]


def test_the_wanted_responses_of_a_group_are_marked(address: str) -> None:
    [rows] = api(address, "groups?least=1&from=3")["groups"]
    assert [row["wanted"] for row in rows] == [False, True]


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("groups?run=2", "run=2 must be one of the 2 runs, from 0 on."),
        ("groups?run=-1", "run=-1 must be one of the 2 runs, from 0 on."),
        ("groups?from=x", "from='x' must be a whole number: change it or leave it out."),
        ("groups?least=nan", "least='nan' must be a number: change it or leave it out."),
        (
            "response?row=99",
            "There is no such response: the run may have been resumed and rewritten it.",
        ),
    ],
)
def test_what_cannot_be_answered_is_told(address: str, path: str, error: str) -> None:
    status, text, _ = ask(address, f"api/{path}")
    assert (status, json.loads(text)) == (400, {"error": error})


def test_a_response_has_its_tokens_and_its_group(address: str) -> None:
    response = api(address, "response?row=2")
    assert (response["response"], response["group"]) == ("#### 2", [1, 2])
    assert response["tokens"]["values"]["ratio"] == [
        pytest.approx(math.exp(0.01 * at)) for at in range(6)
    ]
    assert response["tokens"]["values"]["advantage"] == [1.0] * 6
    assert api(address, "response?row=0")["tokens"] is None


def test_thumbnails_are_those_of_the_run_alone(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name) for name in ("one", "two")]
    (tmp_path / "secret").write_bytes(b"secret")
    for run in runs:
        (run / "images").mkdir()
        (run / "images" / f"{16 * 'e'}.png").symlink_to(tmp_path / "secret")
    (runs[0] / "images" / f"{16 * 'a'}.png").write_bytes(b"a picture")
    (runs[0] / "secret.png").write_bytes(b"secret")
    rows = group(4, "<image>?", ["1", "2"], images=[64 * "a"])
    append(runs[0], "samples.jsonl", rows)
    with served(*runs) as address:
        [first_group, *_] = api(address, "groups")["groups"]
        assert [row["images"] for row in first_group] == [[64 * "a"]] * 2
        assert api(address, "response?row=7")["images"] == [64 * "a"]
        status, text, headers = ask(address, f"image/0/{64 * 'a'}")
        assert (status, text, headers["content-type"]) == (200, "a picture", "image/png")
        assert "img-src 'self' data:;" in headers["content-security-policy"]
        for path in (
            f"image/1/{64 * 'a'}",  # of the other run
            f"image/0/{64 * 'b'}",  # no such thumbnail
            f"image/0/{64 * 'e'}",  # a link out of the folder
            f"image/0/{16 * 'a'}",
            f"image/0/{64 * 'A'}",
            f"image/0/{64 * 'a'}%0a",
            "image/0/..%2fsecret.png",
            "image/0/../secret.png",
            "image/0/" + 22 * "../",
            f"image/2/{64 * 'a'}",
            f"image/-1/{64 * 'a'}",
            f"image/{5000 * '1'}/{64 * 'a'}",
        ):
            status, text, _ = ask(address, path)
            assert status == 404 and "secret" not in text, path


def test_config_and_timeline_of_each_run(address: str) -> None:
    one, two = api(address, "config")
    assert {key for key in one if one[key] != two[key]} == {"optimizer.lr"}
    assert [actor["name"] for actor in api(address, "timeline?run=1")["actors"]] == [
        "sampler 0",
        "trainer",
    ]


def page_process() -> psutil.Process:
    [page] = [one for one in psutil.Process().children() if "serve_beside" in command_line(one)]
    return page


def hurry(page: psutil.Process) -> None:
    """Give the page, once it has lowest priority, normal priority: a busy machine would take
    minutes otherwise.
    """
    until(lambda: page.nice() == 19)
    if sys.platform == "linux":
        with suppress(PermissionError):
            os.sched_setscheduler(page.pid, os.SCHED_OTHER, os.sched_param(0))
            page.nice(0)


@pytest.mark.slow
def test_beside_a_run_it_has_lowest_priority_and_ends_with_it(tmp_path: Path) -> None:
    messages: list[str] = []
    warnings: list[str] = []
    with page_beside(make_run(tmp_path / "run"), messages.append, warnings.append):
        [address] = messages
        page = page_process()
        until(lambda: page.nice() == 19)
        if sys.platform == "linux":  # when memory runs out, the page is killed first
            assert os.sched_getscheduler(page.pid) == os.SCHED_IDLE
            assert Path(f"/proc/{page.pid}/oom_score_adj").read_text() == "1000\n"
        assert urlsplit(address).path.strip("/") not in " ".join(page.cmdline())
        hurry(page)
        assert api(address, "status")[0]["step"] == 3
    assert not page.is_running()
    assert warnings == []


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="sets another process' limits")
def test_strangers_use_up_no_connections_and_shut_no_reader_out(tmp_path: Path) -> None:
    messages: list[str] = []
    warnings: list[str] = []
    with (
        page_beside(make_run(tmp_path / "run"), messages.append, warnings.append),
        ExitStack() as strangers,
    ):
        [address] = messages
        page = page_process()
        hurry(page)
        assert api(address, "status")[0]["step"] == 3
        resource.prlimit(page.pid, resource.RLIMIT_NOFILE, (256, 256))
        place = ("127.0.0.1", urlsplit(address).port)
        for _ in range(400):
            strangers.enter_context(socket.create_connection(place, timeout=300))
        assert api(address, "status")[0]["step"] == 3
        until(lambda: sum(one.status == "ESTABLISHED" for one in page.net_connections("tcp")) <= 64)
    assert warnings == []


@pytest.mark.slow
def test_a_connection_has_seconds_to_ask(address: str) -> None:
    def is_closed(sent: bytes) -> bool:
        with socket.create_connection(
            ("127.0.0.1", urlsplit(address).port), timeout=0.5
        ) as stranger:
            stranger.sendall(sent)
            deadline = time.monotonic() + 300
            with suppress(ConnectionResetError, BrokenPipeError):
                while time.monotonic() < deadline:
                    stranger.sendall(
                        b"a" if sent else b""
                    )  # an occasional byte does not extend the limit
                    with suppress(TimeoutError):
                        if stranger.recv(4096) == b"":
                            return True
                return False
        return True

    connections = [
        b"",
        b"GET / HTTP/1.1\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 999\r\n\r\n",
    ]
    with ThreadPoolExecutor(len(connections)) as pool:
        assert list(pool.map(is_closed, connections)) == [True] * len(connections)


@pytest.mark.slow
def test_what_a_page_says_on_stderr_costs_the_run_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "torchrl_grpo.extras.view.start.start_python",
        lambda _, *arguments, **streams: start_python(
            "tests.support.view_runs:flood_stderr", *arguments, **streams
        ),
    )
    warnings: list[str] = []
    tracemalloc.start()
    try:
        with page_beside(tmp_path, lambda address: None, warnings.append):
            until(lambda: warnings)
        assert tracemalloc.get_traced_memory()[1] < 500_000  # of 4 MB
    finally:
        tracemalloc.stop()
    assert warnings == ["The run dashboard ended (the end); the run continues without it."]


def test_a_page_that_dies_is_a_warning(tmp_path: Path) -> None:
    warnings: list[str] = []
    with page_beside(make_run(tmp_path / "run"), lambda address: None, warnings.append):
        page_process().kill()
        until(lambda: warnings)
    assert warnings == ["The run dashboard ended (status -9); the run continues without it."]


def test_a_page_that_cannot_start_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    warnings: list[str] = []
    with page_beside(tmp_path, lambda address: None, warnings.append):
        pass
    assert len(warnings) == 1 and warnings[0].startswith("The run dashboard could not be started (")


@pytest.mark.slow
def test_a_page_ends_with_a_run_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from torchrl_grpo.extras.view.start import page_beside\n"
        f"with page_beside(Path({str(make_run(tmp_path / 'run'))!r}), print, print): "
        "sys.stdout.flush(); time.sleep(900)"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert run.stdout is not None
    address = run.stdout.readline().strip()
    [page] = psutil.Process(run.pid).children()
    hurry(page)
    assert api(address, "status")[0]["step"] == 3
    run.kill()
    run.wait()
    until(lambda: has_ended(page))


@pytest.mark.slow
def test_a_run_serves_its_page_until_it_ends(tmp_path: Path) -> None:
    with Script(SYNC, tmp_path, "logging.page=true", "train.total_dialog_turns=160") as script:
        script.wait(lambda: "Run dashboard: " in script.printed())
        [address] = re.findall(r"http://\S+", script.printed())
        assert api(address, "status")[0]["ended"] is False
        script.wait()
        assert script.process.returncode == 0
        assert script.left() == []
        assert address not in (tmp_path / "grpo.log").read_text()


@pytest.mark.parametrize(
    ("name", "why"), [("", "it has no metrics.jsonl"), ("none", "there is no such folder")]
)
def test_a_folder_that_is_no_run_is_refused(
    name: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path / name)])
    assert ended.value.code == 2
    error = f"RUN={tmp_path / name} must be a run's folder, but {why}: use outputs/DATE/TIME."
    assert error in capsys.readouterr().err
