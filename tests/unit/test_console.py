"""The terminal output: plain lines into a pipe, a bar on a terminal, and model text that is never
interpreted.
"""

from __future__ import annotations

import io
import logging
import re

import pytest
from torchrl import torchrl_logger

from tests.support.hostile import HOSTILE, SHOWN
from torchrl_grpo.extras.report.ending import print_summary
from torchrl_grpo.host import startup
from torchrl_grpo.host.text import clip, duration, printable
from torchrl_grpo.reporting.console import Console

METRICS = {
    "rollout/reward_mean": 0.5,
    "rollout/accuracy": 0.25,
    "train/kl_k3_to_ref": 0.0123,
    "throughput/trained_tokens_per_s": 12345.6,
}
TESTED = {
    "accuracy_before": 0.33828125,
    "before_text": "33.8%",
    "accuracy_after": 0.9825,
    "after_text": "98.3%",
    "after_step": 200,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def file() -> io.StringIO:
    return io.StringIO()


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def run(console: Console, steps: int) -> None:
    console.start(0, 8 * steps)
    for step in range(1, steps + 1):
        console.step(step, METRICS, 8 * step, 8 * steps)


def test_pipe_gets_one_line_at_the_first_step_every_tenth_and_the_last(file: io.StringIO) -> None:
    with Console(file=file, every=10) as console:
        run(console, 23)
    lines = file.getvalue().splitlines()
    assert [line.partition(":")[0] for line in lines] == ["step 1", "step 10", "step 20", "step 23"]
    numbers = "reward 0.5, accuracy 25.0%, KL to reference 0.0123, trained tokens/s 12,346"
    assert lines[1].startswith(f"step 10: 80/184 sequences, {numbers}, ")


def test_a_step_shows_the_share_of_invalid_rewards_beside_the_accuracy(file: io.StringIO) -> None:
    few = {
        "rollout/accuracy": 1.0,
        "rollout/invalid": 15.0,
        "rollout/sequences": 16.0,
        "train/entropy": 0.5,
    }
    with Console(file=file, every=1) as console:
        console.step(1, few, 16, 32)
        console.step(2, few | {"rollout/accuracy": float("nan"), "rollout/invalid": 16.0}, 32, 32)
    assert "accuracy 100.0% (93.8% invalid), entropy 0.5, " in file.getvalue()
    assert "accuracy - (100.0% invalid), entropy 0.5, " in file.getvalue()


def test_a_step_of_distillation_shows_how_far_the_teacher_is(file: io.StringIO) -> None:
    with Console(file=file, every=1) as console:
        console.step(1, METRICS | {"train/kl_k1_to_teacher": 0.25}, 8, 16)
        console.step(2, METRICS | {"train/divergence_to_teacher": 0.5}, 16, 16)
    first, second = file.getvalue().splitlines()
    assert ", KL to teacher 0.25, " in first and ", divergence to teacher 0.5, " in second


def test_an_evaluation_alone_ends_with_its_accuracy(file: io.StringIO) -> None:
    alone = {"accuracy_before": 0.3, "before_text": "30.0%", "after_step": None, "after_text": None}
    print_summary(Console(file=file), alone | {"steps": 0, "wall_s": 75.0}, {})
    assert file.getvalue().splitlines() == ["", "test accuracy (greedy) 30.0%", "1:15 wall time"]


@pytest.mark.parametrize(
    ("done", "total", "tests", "evaluates", "message"),
    [
        (0, 8, 400, True, "evaluating 400 problems before the first step"),
        (0, 8, 0, True, "running the first rollout"),
        (0, 8, 400, False, "running the first rollout"),
        (4, 8, 400, False, "running the next rollout"),
        (0, 0, 400, True, "evaluating 400 problems"),
    ],
)
def test_slow_work_before_the_first_step_is_announced(
    done: int,
    total: int,
    tests: int,
    evaluates: bool,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(startup, "say", lines.append)
    console = Console(file=io.StringIO())
    console.problems(8, tests, "1+1=")
    console.start(done, total, evaluates=evaluates)
    assert lines == [message]


def test_a_resumed_run_whose_last_step_is_done_says_so(file: io.StringIO) -> None:
    Console(file=file, width=200).resume(20, "old/checkpoint_000020", finished=True)
    assert file.getvalue().endswith(
        "000020, the last step: raise train.total_dialog_turns to train longer\n"
    )


def test_a_step_of_demonstrations_shows_the_loss_and_no_reward(file: io.StringIO) -> None:
    with Console(file=file) as console:
        console.step(1, {"train/loss": 0.25}, 8, 8)
    assert file.getvalue().startswith("step 1: 8/8 sequences, loss 0.25, ")


def test_pipe_gets_log_lines_without_colors(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = logging.StreamHandler(io.StringIO())
    handler.setFormatter(logging.Formatter("\x1b[92m%(message)s"))
    monkeypatch.setattr(torchrl_logger, "handlers", [handler])
    Console(file=io.StringIO())
    torchrl_logger.warning("look")
    assert (
        handler.stream.getvalue().endswith(" WARNING: look\n")
        and "\x1b" not in handler.stream.getvalue()
    )


def test_pipe_gets_no_control_characters(file: io.StringIO) -> None:
    with Console(file=file) as console:
        console.table(
            "Device plan",
            [
                {
                    "role": "train",
                    "devices": ["cpu"],
                    "dtype": "float32",
                    "parameters": 912_345,
                    "memory": 2**24,
                }
            ],
        )
        run(console, 3)
        console.samples(
            3, [{"query": "a\x1b[31mb", "response": "\r\x07\u202e", "reward": 1.0, "correct": True}]
        )
        console.samples(
            3, [{"query": "q", "response": "r", "reward": 0.0, "correct": False, "valid": False}]
        )
        print_summary(console, TESTED, {"report": "report.html"})
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\u202e]", file.getvalue())
    assert ["q", "r", "invalid"] in [line.split() for line in file.getvalue().splitlines()]
    assert "a\\x1b[31mb" in file.getvalue() and "\\r\\x07\\u202e" in file.getvalue()


def test_markup_in_model_text_and_paths_is_shown_as_it_is(file: io.StringIO) -> None:
    with Console(file=file, width=120) as console:
        console.samples(
            1,
            [
                {
                    "query": "[red]x[/red]",
                    "response": "[/bold] :smile:",
                    "reward": None,
                    "correct": False,
                }
            ],
        )
        print_summary(console, {}, {"report": "out[bold]/report.html"})
    assert "[red]x[/red]" in file.getvalue() and "[/bold] :smile:" in file.getvalue()
    assert "out[bold]/report.html" in file.getvalue()


def test_turns_of_a_dialog_stand_on_lines_of_their_own(file: io.StringIO) -> None:
    dialog = "#### 5\n[user] That is wrong.\n\n \n#### 6\x1b[2J"
    with Console(file=file, width=120) as console:
        console.samples(1, [{"query": "1+5=?", "response": dialog, "reward": 1.0, "correct": True}])
    lines = [line.strip() for line in file.getvalue().splitlines()]
    assert [line.split() for line in lines[-4:-1]] == [
        ["1+5=?", "####", "5", "1"],
        ["[user]", "That", "is", "wrong."],
        ["####", "6\\x1b[2J"],
    ]


def test_ascii_stream_gets_escapes_instead_of_an_error() -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    with Console(file=file) as console:
        console.table("Device plan", [{"role": "train", "note": "é"}])
        console.samples(1, [{"query": "计", "response": "七", "reward": 1.0, "correct": True}])
    file.flush()
    assert (
        b"\\u8ba1" in raw.getvalue() and b"\\u4e03" in raw.getvalue() and b"\\xe9" in raw.getvalue()
    )


def test_plan_gives_counts_and_bytes_their_units(file: io.StringIO) -> None:
    rows = [
        {
            "role": "train",
            "devices": ["cuda:0", "cuda:1"],
            "parameters": 7_241_732_096,
            "memory": 15 * 2**30,
        },
        {"role": "inference", "devices": ["cpu"], "parameters": 912_345, "memory": None},
    ]
    Console(file=file).table("Device plan", rows)
    words = [line.split() for line in file.getvalue().splitlines()]
    assert ["train", "cuda:0,", "cuda:1", "7.24", "B", "16.1", "GB"] in words
    assert ["inference", "cpu", "912", "k", "-"] in words


def test_geometry_prints_counts_in_full(file: io.StringIO) -> None:
    Console(file=file).table(
        "Batch geometry", [{"what": "sequences", "per step": 64, "whole run": 12800}]
    )
    assert ["sequences", "64", "12,800"] in [line.split() for line in file.getvalue().splitlines()]


def test_evaluation_prints_numbers_with_units_and_a_dash_for_none(file: io.StringIO) -> None:
    metrics = {
        "pass@1": 0.8125,
        "invalid_fraction": 0.125,
        "response_length": 8.13,
        "truncated": 0.0,
    }
    metrics |= {
        "pass@8": float("nan"),
        "invalid_fraction@8": 1.0,
        "pass@1/sums": 0.0,
        "reward_mean/sums": 0.43,
    }
    Console(file=file).evaluation(
        40, {f"eval/{name}": value for name, value in metrics.items()} | {"time/eval_s": 1.0}
    )
    shares = "pass@1 81.3% greedy (12.5% invalid), pass@8 no valid reward"
    numbers = "pass@1/sums 0.0% greedy (mean reward 0.43), 8.13 tokens, 0.0% truncated"
    assert file.getvalue() == f"test after step 40: {shares}, {numbers}\n"


def test_an_evaluation_without_invalid_rewards_fits_into_100_columns(file: io.StringIO) -> None:
    metrics = {
        "pass@1": 1.0,
        "invalid_fraction": 0.0,
        "reward_mean": 1.0,
        "response_length": 1e4,
        "truncated": 1.0,
    }
    metrics |= {"pass@16": 1.0, "invalid_fraction@16": 0.0}
    Console(file=file).evaluation(1000, {f"eval/{name}": value for name, value in metrics.items()})
    assert len(file.getvalue().rstrip("\n")) <= 100 and "invalid" not in file.getvalue()


def test_finish_prints_before_and_after_and_every_path_in_one_piece(file: io.StringIO) -> None:
    summary = TESTED | {"steps": 200, "sequences": 12800, "wall_s": 147.3}
    path = "outputs/" + "x" * 100 + "/report.html"
    summary |= {"restarts": 2, "groups_resampled": 5, "tokens": 0, "trained_tokens_per_s": 1234.4}
    print_summary(Console(file=file), summary, {"report": path, "model": "m"})
    assert file.getvalue().splitlines() == [
        "",
        "test accuracy (greedy) 33.8% -> 98.3% (+64.5 points)",
        "200 steps, 12,800 sequences, 2:27 wall time, 1,234 trained tokens/s excluding evaluation",
        "2 actor restarts, 5 groups resampled",
        f"  report  {path}",
        "  model   m",
    ]


def test_finish_counts_from_where_a_run_in_a_new_folder_went_on(file: io.StringIO) -> None:
    print_summary(Console(file=file), {"steps": 90, "first_step": 81, "sequences": 1280}, {})
    assert file.getvalue().splitlines()[-1] == "steps 81 to 90, 1,280 sequences"


def test_terminal_gets_a_bar_and_log_lines_scroll_above_it() -> None:
    file, log = Terminal(), Terminal()
    handler = logging.StreamHandler(log)
    torchrl_logger.addHandler(handler)
    try:
        with Console(file=file, width=100) as console:
            run(console, 3)
            torchrl_logger.info("a log line")
        torchrl_logger.info("a later line")
    finally:
        torchrl_logger.removeHandler(handler)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())
    assert "step 3" in text and "24/24" in text and "reward 0.5 accuracy 25.0%" in text
    assert "a log line\n" in text
    assert log.getvalue() == "a later line\n"


@pytest.mark.parametrize("width", [40, 60, 79, 80, 100])
def test_the_bar_is_one_line_at_any_width(width: int) -> None:
    file = Terminal()
    with Console(file=file, width=width) as console:
        console.start(0, 128_000)
        for step in range(980, 984):
            console.step(step, METRICS, 128 * step, 128_000)
    bar = re.split("[\r\n]", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue()).rstrip())[-1]
    assert "\x1b[1A" not in file.getvalue()  # the way up to the first of several lines
    assert 0 < len(bar) <= width
    if width >= 60:
        assert "step 983 " in bar and "reward 0.5 accuracy 25.0%" in bar
        assert ("125,824/128,000" if width >= 80 else "(98%)") in bar


def test_hostile_text_does_nothing_to_a_terminal() -> None:
    file = Terminal()
    with Console(file=file, width=400) as console:
        console.start(0, 10)
        console.samples(
            1, [{"query": HOSTILE, "response": HOSTILE, "reward": 1.0, "correct": True}]
        )
        console.resume(1, HOSTILE)
    assert not re.search("\x1b\\]|[\x07\x9b\u202e]", file.getvalue())
    assert re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue()).count(SHOWN) == 3


def test_close_after_a_failure_gives_the_terminal_its_cursor_back() -> None:
    file = Terminal()
    with pytest.raises(KeyError), Console(file=file) as console:
        console.start(0, 10)
        raise KeyError
    console.close()
    assert file.getvalue().rindex("\x1b[?25h") > file.getvalue().rindex("\x1b[?25l")


def test_clip_leaves_out_the_middle_and_keeps_the_length() -> None:
    assert clip("abcdefghij", 10) == "abcdefghij"
    assert clip("abcdefghijk", 10) == "abc ... jk"


def test_printable_escapes_what_has_no_picture() -> None:
    assert printable("a\n\t\x1b\u202e\ud83dé计") == "a\\n\\t\\x1b\\u202e\\ud83dé计"


def test_duration_counts_hours_only_when_there_are_any() -> None:
    assert [duration(s) for s in (0.4, 59.6, 3599, 3600, 90061)] == [
        "0:00",
        "1:00",
        "59:59",
        "1:00:00",
        "25:01:01",
    ]


def test_a_prompt_is_shown_as_the_model_gets_it_with_counts(file: io.StringIO) -> None:
    Console(file=file, width=40).problems(4096, 14, f"<|user|>[b]1+1?[/b]\x1b[2J<|end|>{'x' * 900}")
    first, second = file.getvalue().splitlines()
    assert (
        first == "4,096 training problems, 14 test problems; the first prompt as the model sees it:"
    )
    Console(file=file, width=40).problems(7, 0, "<|user|>", is_stateful=True)
    assert file.getvalue().endswith(
        "problems; the first prompt before its environment or agent speaks:\n<|user|>\n"
    )
    assert second.startswith("<|user|>[b]1+1?[/b]\\x1b[2J<|end|>xxx") and 600 < len(second) < 700
