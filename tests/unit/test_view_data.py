"""What the page reads of a run's files, while they grow and are written anew."""

from __future__ import annotations

import json
import math
import os
import threading
from pathlib import Path

import pytest

from tests.support.hostile import HOSTILE, SHOWN
from tests.support.view_runs import append, group, make_run, metrics
from torchrl_grpo.view.files import open_inside
from torchrl_grpo.view.index import Samples, Wanted
from torchrl_grpo.view.runs import RunView
from torchrl_grpo.view.strip import strip_of
from torchrl_grpo.view.timeline import Timeline


@pytest.mark.parametrize("link", ["outside", "folder", "itself"])
def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path, link: str) -> None:
    run = make_run(tmp_path / "run")
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "config.yaml").write_text("key: secret")
    if link == "folder":
        (run / ".hydra").rename(tmp_path / "moved")
        (run / ".hydra").symlink_to(tmp_path / "private")
    else:
        (run / ".hydra" / "config.yaml").unlink()
        target = tmp_path / "private" / "config.yaml" if link == "outside" else run / ".hydra" / "config.yaml"
        (run / ".hydra" / "config.yaml").symlink_to(target)
    assert list(RunView(run, "run").config()) == ["environment.python", "environment.packages.torch"]


def test_a_link_to_the_run_and_links_within_it_are_followed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "samples.jsonl").rename(run / "kept.jsonl")
    (run / "samples.jsonl").symlink_to("kept.jsonl")
    (tmp_path / "latest").symlink_to(run)
    file = open_inside(tmp_path / "latest", "samples.jsonl")
    assert file is not None
    file.close()


def test_a_pipe_is_no_file_of_a_run(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    assert open_inside(tmp_path, "metrics.jsonl") is None


def test_alarms_are_those_of_the_report(tmp_path: Path) -> None:
    run = RunView(make_run(tmp_path / "run"), "run")
    append(run.folder, "metrics.jsonl", [metrics(step) | {"rollout/truncated": 0.75} for step in range(4, 9)])
    run.refresh()
    assert [(alarm.name, alarm.first) for alarm in run.alarms(ended=False)] == [("truncated", 8)]
    assert run.status()["alarms"] == 1


def test_numbers_of_tokens_by_hand() -> None:
    text, given = ["a", "[", "]", "b"], None
    tokens = {"text": text, "log_prob": [-1.0, given, given, -2.0], "trainer": [-0.5, given, given, -2.0]}
    tokens |= {"reference": [-0.5, given, given, -1.0], "entropy": [0.1, given, given, 0.2]}
    strip = strip_of({"tokens": tokens, "advantage": -0.5})
    assert strip is not None
    assert strip["sampled"] == [True, False, False, True]
    assert strip["values"]["ratio"] == [pytest.approx(math.exp(0.5)), None, None, 1.0]
    assert strip["values"]["kl"] == [0.0, None, None, pytest.approx(math.e - 2)]  # exp(1) - 1 - 1
    assert strip["values"]["advantage"] == [-0.5, None, None, -0.5]
    assert [(turn["start"], turn["end"], turn["sampled"]) for turn in strip["turns"]] == [
        (0, 1, True),
        (1, 3, False),
        (3, 4, True),
    ]


def test_a_turn_names_the_tools_that_it_calls() -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    strip = strip_of({"tokens": {"text": [call, "2", "so 2"], "log_prob": [-1.0, None, -1.0]}})
    assert strip is not None
    assert [turn["label"] for turn in strip["turns"]] == [
        "turn 1, 1 token, calls add",
        "not sampled (a tool's answer, another's turn or the template), 1 token",
        "turn 2, 1 token",
    ]


def test_what_a_model_wrote_is_shown_as_text(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    append(run, "samples.jsonl", group(9, HOSTILE, [HOSTILE]))
    view = RunView(run, "run")
    view.refresh()
    found = view.response(7)
    assert found is not None
    assert found["query"] == found["response"] == SHOWN


def test_rows_of_older_runs_have_groups_of_equal_prompts(tmp_path: Path) -> None:
    row = {"step": 1, "split": "train", "response": "", "reward": None, "valid": False}
    append(tmp_path, "samples.jsonl", [row | {"query": query} for query in ("a", "b", "a")])
    samples = Samples(tmp_path)
    samples.refresh()
    assert samples.index.groups == [[0, 2], [1]]
    assert samples.index.search(Wanted(min_reward=0.0)) == {}


def test_a_line_that_is_being_written_waits_for_its_end(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    view = RunView(run, "run")
    view.samples.refresh()
    [row] = group(4, "4+4=", ["8"])
    line = json.dumps(row)
    with (run / "samples.jsonl").open("a") as file:
        file.write("no json\n" + line[:50])
        file.flush()
        view.samples.refresh()
        assert view.samples.index.count == 7
        file.write(line[50:] + "\n")
    view.samples.refresh()
    assert view.samples.index.row(7)["response"] == "8"


def test_a_resumed_run_is_read_again(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    view = RunView(run, "run")
    view.samples.refresh()
    view.metrics.refresh()
    before = view.samples.index
    for name in ("samples.jsonl", "metrics.jsonl"):
        kept = [line for line in (run / name).read_text().splitlines() if json.loads(line)["step"] < 2]
        (run / "new").write_text("".join(f"{line}\n" for line in kept))
        (run / "new").replace(run / name)
    view.samples.refresh()
    view.metrics.refresh()
    assert (view.samples.index.count, before.row(6)["response"]) == (3, "#### 6")
    assert [record["step"] for record in view.metrics.records] == [0, 1]


def test_spans_that_overlap_share_a_lane(tmp_path: Path) -> None:
    rows = [
        {"actor": "a", "kind": kind, "start": 100.0 + at, "seconds": 2.0} for kind, at in (("x", 0), ("y", 1), ("x", 3))
    ]
    append(tmp_path, "timeline.jsonl", rows)
    timeline = Timeline(tmp_path)
    timeline.refresh()
    window = timeline.window()
    [actor] = window["actors"]
    assert (window["end"], actor["seconds"]) == (5.0, {"x": 4.0, "y": 2.0})
    assert actor["spans"] == [
        ["x", 0.0, 2.0, None, 0.0, 0.5],
        ["y", 1.0, 3.0, None, 0.5, 1.0],
        ["x", 3.0, 5.0, None, 0.0, 0.5],
    ]
    assert timeline.window(1.5, 2.5)["actors"][0]["seconds"] == {"x": 0.5, "y": 1.0}


def test_many_spans_become_shares_of_columns(tmp_path: Path) -> None:
    rows = [
        {"actor": "a", "kind": kind, "start": at + part, "seconds": 0.5}
        for at in range(2000)
        for kind, part in (("x", 0), ("y", 0.5))
    ]
    append(tmp_path, "timeline.jsonl", rows)
    timeline = Timeline(tmp_path)
    timeline.refresh()
    [actor] = timeline.window()["actors"]
    assert len(actor["spans"]) == 400
    assert actor["spans"][0] == ["x", 0.0, 10.0, None, 0.0, pytest.approx(0.5)]
    assert actor["spans"][1] == ["y", 0.0, 10.0, None, pytest.approx(0.5), pytest.approx(1.0)]


def test_threads_that_ask_while_samples_are_read_see_whole_rows(tmp_path: Path) -> None:
    view = RunView(make_run(tmp_path / "run"), "run")
    append(view.folder, "samples.jsonl", [row for step in range(4, 1500) for row in group(step, f"{step}", ["a", "b"])])
    reader = threading.Thread(target=view.refresh)
    reader.start()
    while reader.is_alive():
        for rows in view.groups(Wanted(split="train"), 0, 10)["groups"]:
            assert rows[0]["response"]
    assert view.groups(Wanted(split="train"), 0, 10)["found"] == 1499
