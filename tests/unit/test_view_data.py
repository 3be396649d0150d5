"""The page's view of a run's files, while they grow and are rewritten."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.hostile import HOSTILE, SHOWN
from tests.support.view_runs import append, group, make_run, metrics
from torchrl_grpo.extras.run_files import open_inside
from torchrl_grpo.extras.view.files import Tail
from torchrl_grpo.extras.view.index import Criteria, Samples
from torchrl_grpo.extras.view.runs import Metrics, RunView, curves
from torchrl_grpo.extras.view.strip import strip_of
from torchrl_grpo.extras.view.timeline import Timeline


def view_of(folder: Path) -> RunView:
    view = RunView(folder, "run")
    view.refresh()
    return view


def timeline_of(folder: Path, rows: list[dict[str, Any]]) -> Timeline:
    append(folder, "timeline.jsonl", rows)
    timeline = Timeline(folder)
    timeline.refresh()
    return timeline


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
        target = (
            tmp_path / "private" / "config.yaml"
            if link == "outside"
            else run / ".hydra" / "config.yaml"
        )
        (run / ".hydra" / "config.yaml").symlink_to(target)
    assert list(RunView(run, "run").config()) == [
        "environment.python",
        "environment.packages.torch",
    ]


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
    append(
        run.folder,
        "metrics.jsonl",
        [metrics(step) | {"rollout/truncated": 0.75} for step in range(4, 9)],
    )
    run.refresh()
    assert [(alarm.name, alarm.first) for alarm in run.alarms(ended=False)] == [("truncated", 8)]
    assert run.status()["alarms"] == 1


def test_numbers_of_tokens_by_hand() -> None:
    text = ["a", "[", "]", "b"]
    log_prob = None
    tokens = {
        "text": text,
        "log_prob": [-1.0, log_prob, log_prob, -2.0],
        "trainer": [-0.5, log_prob, log_prob, -2.0],
    }
    tokens |= {
        "reference": [-0.5, log_prob, log_prob, -1.0],
        "entropy": [0.1, log_prob, log_prob, 0.2],
    }
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
    text = [f"{call}</think>{call}", "2<think>", f"{call}</think>so 2"]
    strip = strip_of(
        {"prompt": "<think>\n", "tokens": {"text": text, "log_prob": [-1.0, None, -1.0]}}
    )
    assert strip is not None
    assert [turn["label"] for turn in strip["turns"]] == [
        "turn 1, 1 token, calls add",
        "not sampled (a tool's answer, another's turn or the template), 1 token",
        "turn 2, 1 token",
    ]


def test_patterns_that_a_folder_brings_are_not_run(tmp_path: Path) -> None:
    """A response template has regular expressions, which may take years."""
    run = make_run(tmp_path / "run", steps=0)
    fields = {"thinking": {"open_pattern": "(a|a)+!", "close": "b"}, "content": {}}
    template = {"defaults": {"role": "assistant"}, "start_anchor": "x", "fields": fields}
    (run / "environment.json").write_text(json.dumps({"call_format": template}))
    append(run, "samples.jsonl", group(1, "?", ["a" * 32]))
    start = time.process_time()
    shown = view_of(run).response(1)
    assert shown is not None and len(shown["tokens"]["turns"]) == 1
    assert time.process_time() - start < 10


def test_what_a_model_wrote_is_shown_as_text(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    append(run, "samples.jsonl", group(9, HOSTILE, [HOSTILE]))
    view = view_of(run)
    response = view.response(7)
    assert response is not None
    assert response["query"] == response["response"] == SHOWN


def test_rows_of_older_runs_have_groups_of_equal_prompts(tmp_path: Path) -> None:
    row = {"step": 1, "split": "train", "response": "", "reward": None, "valid": False}
    append(tmp_path, "samples.jsonl", [row | {"query": query} for query in ("a", "b", "a")])
    samples = Samples(tmp_path)
    samples.refresh()
    assert samples.index.groups == [[0, 2], [1]]
    assert samples.index.search(Criteria(min_reward=0.0)) == {}


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
        rows = [
            line for line in (run / name).read_text().splitlines() if json.loads(line)["step"] < 2
        ]
        (run / "new").write_text("".join(f"{line}\n" for line in rows))
        (run / "new").replace(run / name)
    view.samples.refresh()
    view.metrics.refresh()
    assert (view.samples.index.count, before.row(6)["response"]) == (3, "#### 6")
    assert [record["step"] for record in view.metrics.records] == [0, 1]


def test_spans_that_overlap_share_a_lane(tmp_path: Path) -> None:
    rows = [
        {"actor": "a", "kind": kind, "start": 100.0 + at, "seconds": 2.0}
        for kind, at in (("x", 0), ("y", 1), ("x", 3))
    ]
    timeline = timeline_of(tmp_path, rows)
    window = timeline.window()
    [actor] = window["actors"]
    assert (window["end"], actor["seconds"]) == (5.0, {"x": 4.0, "y": 2.0})
    assert actor["spans"] == [
        ["x", 0.0, 2.0, None, 0.0, 0.5],
        ["y", 1.0, 3.0, None, 0.5, 1.0],
        ["x", 3.0, 5.0, None, 0.0, 0.5],
    ]
    assert timeline.window(1.5, 2.5)["actors"][0]["seconds"] == {"x": 0.5, "y": 1.0}


def test_the_time_until_a_run_is_resumed_is_called_that(tmp_path: Path) -> None:
    rows = [
        {"actor": "learner", "kind": kind, "start": 100.0 + at, "seconds": 1.0}
        for kind, at in (("wait", 0), ("train", 1), ("wait", 62))
    ]
    rows.append({"actor": "sampler 0", "kind": "start", "start": 160.0, "seconds": 2.0})
    timeline = timeline_of(tmp_path, rows)
    learner, sampler = timeline.window()["actors"]
    assert ["stopped", 2.0, 62.0, None, 0.0, 1.0] in learner["spans"]
    assert learner["seconds"] == {"wait": 2.0, "train": 1.0, "stopped": 60.0}
    assert sampler["seconds"] == {"start": 2.0}


def test_times_that_were_rounded_do_not_make_spans_overlap(tmp_path: Path) -> None:
    rows = [
        {"actor": "a", "kind": "wait", "start": 100.0, "seconds": 1.0001},
        {"actor": "a", "kind": "train", "start": 101.0, "seconds": 1.0},
    ]
    timeline = timeline_of(tmp_path, rows)
    assert [span[4:] for span in timeline.window()["actors"][0]["spans"]] == [
        [0.0, 1.0],
        [0.0, 1.0],
    ]


def test_many_spans_become_shares_of_columns(tmp_path: Path) -> None:
    rows = [
        {"actor": "a", "kind": kind, "start": at + part, "seconds": 0.5}
        for at in range(2000)
        for kind, part in (("x", 0), ("y", 0.5))
    ]
    timeline = timeline_of(tmp_path, rows)
    [actor] = timeline.window()["actors"]
    assert len(actor["spans"]) == 400
    assert actor["spans"][0] == ["x", 0.0, 10.0, None, 0.0, pytest.approx(0.5)]
    assert actor["spans"][1] == ["y", 0.0, 10.0, None, pytest.approx(0.5), pytest.approx(1.0)]


def test_threads_that_ask_while_samples_are_read_see_whole_rows(tmp_path: Path) -> None:
    view = RunView(make_run(tmp_path / "run"), "run")
    append(
        view.folder,
        "samples.jsonl",
        [row for step in range(4, 1500) for row in group(step, f"{step}", ["a", "b"])],
    )
    reader = threading.Thread(target=view.refresh)
    reader.start()
    while reader.is_alive():
        for rows in view.groups(Criteria(split="train"), 0, 10)["groups"]:
            assert rows[0]["response"]
    assert view.groups(Criteria(split="train"), 0, 10)["found"] == 1499


def test_a_file_that_is_written_anew_empties_no_curve_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Metrics(make_run(tmp_path / "run"))
    read.refresh()
    (tmp_path / "run" / "metrics.jsonl").rename(tmp_path / "before")  # the inode stays the same
    append(tmp_path / "run", "metrics.jsonl", [{"step": 0, "rollout/reward_mean": 0.5}])
    seen: list[int] = []
    lines = Tail.lines

    def watched(tail: Tail) -> Iterator[tuple[int, bytes]]:
        seen.append(len(read.records))
        return lines(tail)

    monkeypatch.setattr(Tail, "lines", watched)
    read.refresh()
    assert (seen, len(read.records)) == ([4], 1)


BOMB = "a0: &a0 [x, x]\n" + "".join(
    f"a{at}: &a{at} [{9 * f'*a{at - 1}, '}*a{at - 1}]\n" for at in range(1, 30)
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (BOMB, "not shown: it has aliases"),
        (BOMB + "model: {name: *a29}\nenv: {dataset: x}\n", "not shown: it has aliases"),
        ("a: " + 5000 * "[", "not shown: it is nested too deeply"),
        ("a: 2020-99-99", "not shown: month must be in 1..12"),
        ("a: " + 400_000 * "x", "not shown: it has more than 300,000 characters"),
        ("- a\n- b\n", "not shown: it is not a mapping"),
    ],
)
def test_a_config_that_cannot_be_read_is_named_and_hangs_nothing(
    tmp_path: Path, text: str, expected: str
) -> None:
    run = make_run(tmp_path / "run")
    (run / ".hydra" / "config.yaml").write_text(text)
    start = time.monotonic()
    view = RunView(run, "run")
    assert view.title() == "GRPO run"
    config = view.config()
    assert config.pop("config").startswith(expected)
    assert set(config) == {"environment.python", "environment.packages.torch"}
    assert time.monotonic() - start < 60  # its expansion would have 9**29 words


NOT_SHOWN = {
    "metrics.jsonl": [
        '{"step": 4, "rollout/reward_mean": NaN}',
        '{"step": 4, "rollout/reward_mean": -Infinity}',
        '{"step": 4, "rollout/reward_mean": 1e999}',
        '{"step": 4, "rollout/reward_mean": 1' + 400 * "0" + "}",
        '{"step": 4, "rollout/reward_mean": "high"}',
        '{"step": 4, "rollout/sequences": "many"}',
        '{"step": 4, "rollout/reward_mean": {"a": 1}}',
        '{"step": 1' + 30 * "0" + ', "rollout/reward_mean": 1.0}',
        '{"step": NaN, "rollout/reward_mean": 1.0}',
        '{"step": 4, "x": ' + 100_000 * "[",
        '{"step": 4, "x": ' + 100_000 * "[" + 100_000 * "]" + "}",
        '{"step": 4, "x": ' + 900 * "[" + 900 * "]" + "}",
    ],
    "samples.jsonl": [
        '{"step": 1' + 30 * "0" + ', "split": "train"}',
        '{"step": 4, "split": "train", "reward": NaN}',
        '{"step": 4, "split": "train", "reward": 1' + 400 * "0" + "}",
        '{"step": 4, "split": "train", "reward": "high"}',
        '{"step": 4, "split": "train", "advantage": Infinity}',
        '{"step": 4, "split": "train", "parts": {"right": NaN}}',
        '{"step": 4, "split": "train", "parts": "all"}',
        '{"step": 4, "split": "train", "group": [1]}',
        '{"step": 4, "split": "train", "images": "all"}',
        '{"step": 4, "split": "train", "images": [1]}',
        '{"step": 4, "split": {"a": 1}}',
        '{"step": 4, "split": "train", "query": ' + 900 * "[" + 900 * "]" + "}",
        '{"step": 4, "split": "train", "length": ' + 100_000 * "[" + 100_000 * "]" + "}",
    ],
    "timeline.jsonl": [
        '{"actor": "a", "kind": "x", "start": NaN, "seconds": 1}',
        '{"actor": "a", "kind": "x", "start": 1e9, "seconds": Infinity}',
        '{"actor": "a", "kind": "x", "start": 1e300, "seconds": 1}',
        '{"actor": "a", "kind": "x", "start": 1e9, "seconds": -1}',
        '{"actor": "a", "kind": "x", "start": "soon", "seconds": 1}',
        '{"actor": "a", "kind": "x", "start": true, "seconds": 1' + 400 * "0" + "}",
        '{"actor": "a", "kind": "x", "start": 1e9, "seconds": 1, "step": NaN}',
        '{"actor": "a", "kind": ' + 900 * "[" + 900 * "]" + ', "start": 1e9, "seconds": 1}',
        100_000 * "[" + 100_000 * "]",
    ],
}


def shown_of(view: RunView) -> str:
    """Return everything that the page requests, as the server would send it."""
    view.refresh()
    status = view.status()
    del status["age"]
    parts = [status, view.alarms(True), curves({0: view}), view.groups(Criteria(), 0, 10)]
    parts += [view.response(7), view.timeline.window(), view.config()]
    return json.dumps(
        [list(map(vars, part)) if part and part is parts[1] else part for part in parts],
        allow_nan=False,
    )


@pytest.mark.parametrize(
    ("name", "line"), [(name, line) for name, lines in NOT_SHOWN.items() for line in lines]
)
def test_a_line_that_no_run_writes_is_left_out(tmp_path: Path, name: str, line: str) -> None:
    clean, run = make_run(tmp_path / "clean" / "run"), make_run(tmp_path / "run")
    with (run / name).open("a") as file:
        file.write(f"{line}\n")
    for folder in (clean, run):
        append(folder, "metrics.jsonl", [metrics(5)])
        append(folder, "samples.jsonl", group(5, "5+5=", ["9", "10"]))
        append(
            folder,
            "timeline.jsonl",
            [{"actor": "a", "kind": "x", "start": 1e9 + 20, "seconds": 1, "step": 5}],
        )
    view = RunView(run, "run")
    assert shown_of(view) == shown_of(RunView(clean, "run"))
    response = view.response(8)
    assert response is not None and (response["response"], response["step"]) == ("10", 5)


@pytest.mark.parametrize(
    "tokens",
    [
        {"text": ["1"], "log_prob": [math.nan], "trainer": [-0.5]},
        {"text": ["1"], "log_prob": ["low"], "trainer": [math.inf]},
        {"text": ["1"], "log_prob": 3, "trainer": {"a": 1}, "entropy": [[]]},
        {"text": ["1"], "log_prob": [-1.0, -2.0]},
    ],
)
def test_numbers_of_tokens_that_no_run_writes_are_left_out(
    tmp_path: Path, tokens: dict[str, object]
) -> None:
    run = make_run(tmp_path / "run")
    append(run, "samples.jsonl", [row | {"tokens": tokens} for row in group(4, "4+4=", ["8"])])
    view = view_of(run)
    response = json.loads(json.dumps(view.response(7), allow_nan=False))
    assert (response["response"], response["tokens"]["text"]) == ("8", ["1"])
    assert set(response["tokens"]["values"]) <= {"advantage", "ratio"}


@pytest.mark.parametrize(
    "text", ['"tokens": {"text": ["8"], "x": NOTHING}', '"tokens": {"text": "8"}']
)
def test_a_response_whose_tokens_cannot_be_read_is_shown_without_them(
    tmp_path: Path, text: str
) -> None:
    run = make_run(tmp_path / "run")
    [row] = group(4, "4+4=", ["8"])
    with (run / "samples.jsonl").open("a") as file:
        file.write(
            json.dumps({name: value for name, value in row.items() if name != "tokens"})[:-1]
            + f", {text}}}\n"
        )
    view = view_of(run)
    response = view.response(7)
    assert response is not None
    assert (response["step"], response["response"], response["tokens"]) == (4, "8", None)


@pytest.mark.slow
def test_more_data_sets_than_a_small_number_counts_shift_no_row(tmp_path: Path) -> None:
    row = {"step": 1, "split": "train", "query": "", "reward": 1.0}
    append(
        tmp_path,
        "samples.jsonl",
        [row | {"response": f"{at}", "dataset": f"{at}"} for at in range(33_000)],
    )
    samples = Samples(tmp_path)
    samples.refresh()
    assert (samples.index.count, samples.index.row(32_999)["response"]) == (33_000, "32999")
