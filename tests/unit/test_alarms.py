"""Alarms: each is raised once by rows with its symptom, and by no healthy row; and the text that
the user sees.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.configs import ROOT
from tests.support.runs import run, steps
from torchrl_grpo.errors import NoSignalError
from torchrl_grpo.extras.report.alarms import Alarm, Alarms, alarms_of
from torchrl_grpo.extras.report.ending import print_summary
from torchrl_grpo.extras.report.report import write_report
from torchrl_grpo.host.files import read_jsonl
from torchrl_grpo.reporting.console import Console
from torchrl_grpo.reporting.metrics import MetricsLogger
from torchrl_grpo.reporting.signal import Signal

HEALTHY = {
    "rollout/sequences": 64.0,
    "rollout/reward_mean": 0.4,
    "rollout/reward_std": 0.5,
    "rollout/accuracy": 0.4,
    "rollout/zero_variance_groups": 0.25,
    "rollout/truncated": 0.05,
    "rollout/response_length": 100.0,
    "rollout/repeated": 0.1,
    "rollout/invalid": 0.0,
    "rollout/length_correlation": 0.3,
    "reward/answer/mean": 0.4,
    "reward/answer/std": 0.5,
    "reward/format/mean": 0.1,
    "reward/format/std": 0.3,
    "reward/format/none": 0.0,
    "train/entropy": 0.5,
    "train/ESS": 0.98,
    "train/ratio_mean": 1.0,
    "train/clip_fraction_low": 0.01,
    "train/clip_fraction_high": 0.02,
    "train/kl_k3_to_inference": 0.001,
    "train/kl_k3_to_ref": 0.05,
    "staleness/mean": 1.0,
    "staleness/max": 1.0,
    "workers/restarts_rollout": 1.0,
}
EQUAL = {"rollout/zero_variance_groups": 1.0, "rollout/reward_std": 0.0}


def rows(count: int, bad: dict[str, Any], start: int = 6) -> list[dict[str, Any]]:
    """Return healthy rows with overrides from step ``start`` on; an override may be a function of
    the step.
    """
    result = []
    for step in range(1, count + 1):
        changed = {name: value(step) if callable(value) else value for name, value in bad.items()}
        result.append({"step": step} | HEALTHY | (changed if step >= start else {}))
    return result


PROVOKED: dict[str, tuple[dict[str, float | Callable[[int], float] | None], int, str]] = {
    "zero_rewards": (
        EQUAL | {"rollout/reward_mean": 0.0, "rollout/accuracy": 0.0},
        10,
        "samples DIR",
    ),
    "no_signal": (
        EQUAL | {"rollout/reward_mean": 0.5},
        10,
        "larger env.repeats or inference_model.temperature",
    ),
    "zero_variance": (
        {"rollout/zero_variance_groups": 0.95},
        15,
        "95% of the groups .* policy.dynamic_sampling=true",
    ),
    "invalid_rewards": (
        {"rollout/invalid": 16.0, "rewards/invalid_timeout": 9.0},
        7,
        r"invalid \(timed out\)",
    ),
    "reward_part/format": (
        {"reward/format/mean": 0.0, "reward/format/std": 0.0},
        25,
        "'format' was 0 for every",
    ),
    "mismatch": (
        {"train/kl_k3_to_inference": 0.2, "train/ratio_mean": 1.3},
        7,
        "inference_model.dtype=float32",
    ),
    "ess": ({"train/ESS": 0.2}, 9, "36% .* policy.behaviour_weight=truncate"),
    "clip_fraction": (
        {"train/clip_fraction_low": 0.3, "train/clip_fraction_high": 0.4},
        8,
        "policy.clip_epsilon",
    ),
    "entropy": ({"train/entropy": 0.01}, 15, "0.01 nats per token, 2% of what it was"),
    "truncated": ({"rollout/truncated": 0.9}, 8, "raise inference_model.max_new_tokens"),
    "truncation_pays": (
        {"rollout/truncated": 0.45, "rollout/reward_mean": 0.5},
        9,
        "5% to 37% .* step.response, truncated.",
    ),
    "part_pays/format": (
        {
            "reward/format/mean": lambda step: 0.1 + 0.02 * step,
            "reward/answer/mean": 0.2,
            "rollout/accuracy": 0.2,
        },
        15,
        "'format' rose .* while 'answer' fell",
    ),
    "length_pays": (
        {
            "rollout/length_correlation": 0.9,
            "rollout/response_length": 180.0,
            "rollout/reward_mean": 0.6,
        },
        12,
        "52% of the variance .* 100 to 156 tokens",
    ),
    "length": (
        {"rollout/response_length": 300.0, "rollout/reward_mean": 0.3},
        11,
        "from 100 to 220 tokens",
    ),
    "kl": ({"train/kl_k3_to_ref": 3.0}, 7, "raise policy.kl_coef"),
    "repeated": ({"rollout/repeated": 0.95}, 10, "raise inference_model.temperature"),
    "staleness": (
        {"staleness/mean": 4.0, "staleness/max": 4.0},
        25,
        "4 steps old .* train.max_staleness",
    ),
    "restarts/rollout": (
        {"workers/restarts_rollout": lambda step: step - 4},
        7,
        "restarted 3 times within 7 steps",
    ),
    "restarts/reward": (
        {"workers/restarts_reward": lambda step: step - 4},
        8,
        "a response crashes its scorer",
    ),
}


@pytest.mark.parametrize("name", PROVOKED)
def test_an_alarm_comes_once_when_its_sign_has_lasted_long_enough(name: str) -> None:
    bad, first, text = PROVOKED[name]
    alarms = alarms_of(rows(40, bad))
    assert [(alarm.name, alarm.first, alarm.last) for alarm in alarms] == [(name, first, 40)]
    assert re.search(text, alarms[0].text), alarms[0].text
    assert "\n" not in alarms[0].text and len(alarms[0].text) < 340


TESTED = {"eval/pass@1": 0.5, "eval/ci_low_pass@1": 0.43, "eval/ci_high_pass@1": 0.57}
FELL = {"eval/pass@1": 0.3, "eval/ci_low_pass@1": 0.24, "eval/ci_high_pass@1": 0.37}


@pytest.mark.parametrize(
    ("reward", "latest", "expected"),
    [(0.6, FELL, [("test_falls", 24)]), (0.4, FELL, []), (0.6, TESTED, [])],
)
def test_a_reward_that_rises_while_the_test_accuracy_falls_is_an_alarm(
    reward: float, latest: dict[str, float], expected: list[tuple[str, int]]
) -> None:
    series = [{"step": 0, **TESTED}, *rows(24, {"rollout/reward_mean": reward})]
    series[10] |= TESTED
    series[20] |= latest
    assert alarms_of(series[:21]) == []  # one evaluation may be chance
    series[24] |= latest
    assert [(alarm.name, alarm.first) for alarm in alarms_of(series)] == expected


def test_parts_that_trade_while_more_problems_are_solved_are_no_alarm() -> None:
    better = PROVOKED["part_pays/format"][0] | {"rollout/accuracy": 0.6}
    assert alarms_of(rows(40, better)) == []


def test_every_rule_has_its_section_on_the_page() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    assert [
        name for name in [*PROVOKED, "test_falls"] if f"| `{name.partition('/')[0]}` |" not in page
    ] == []


def test_healthy_rows_and_rows_of_evaluations_raise_none() -> None:
    solved = EQUAL | {"rollout/reward_mean": 1.0, "rollout/accuracy": 1.0, "train/entropy": 0.01}
    assert alarms_of([{"step": 0, "eval/pass@1": 0.0}, *rows(60, {})]) == []
    assert alarms_of(rows(9, solved)) == []
    assert [alarm.name for alarm in alarms_of(rows(60, solved))] == ["no_signal"]
    assert "the problems are solved" in alarms_of(rows(60, solved))[0].text


def test_demonstrations_raise_no_alarm_about_sampling_or_entropy() -> None:
    learned = {"train/loss": 0.1, "rollout/sequences": 64.0, "train/kl_k3_to_inference": 5.0}
    learned |= {"train/ESS": 0.01, "train/ratio_mean": 9.0, "train/clip_fraction_high": 0.9}
    series = [
        learned | {"step": step, "train/entropy": 2.0 / step, "rollout/response_length": step}
        for step in range(1, 61)
    ]
    assert alarms_of(series) == []
    [alarm] = alarms_of([row | {"rollout/truncated": 0.9} for row in series])
    assert alarm.name == "truncated" and "overlong" not in alarm.text
    assert "inference_model.max_model_len" in alarm.text


def test_numbers_that_are_not_finite_are_no_sign() -> None:
    for value in (None, float("nan")):
        assert alarms_of(rows(40, dict.fromkeys(set(HEALTHY) - {"rollout/sequences"}, value))) == []


def test_truncated_dialogs_with_tools_may_need_more_turns() -> None:
    [alarm] = alarms_of(rows(20, {"rollout/truncated": 0.9, "tools/calls": 30.0}))
    assert (
        alarm.name == "truncated"
        and "new_tokens, env.max_turns if dialogs end with a call, or check" in alarm.text
    )


def test_an_alarm_comes_again_only_after_it_had_gone() -> None:
    cut = [0.9] * 10 + [0.0] * 10 + [0.9] * 10 + [0.0] * 30 + [0.9] * 10
    series = [
        {"step": i + 1} | HEALTHY | {"rollout/truncated": share} for i, share in enumerate(cut)
    ]
    assert [(alarm.first, alarm.last) for alarm in alarms_of(series)] == [(5, 32), (63, 70)]
    alarms = Alarms()
    assert [row["step"] for row in series if alarms.take(row)] == [5, 63]


def test_a_run_that_never_had_a_signal_says_so_at_its_end() -> None:
    bad = {"rollout/reward_mean": 0.0, "rollout/truncated": 0.9} | EQUAL
    assert alarms_of(rows(2, bad, start=1), ended=False) == []
    [alarm] = alarms_of(rows(2, bad, start=1))
    assert (
        alarm.name == "zero_rewards"
        and "over 2 steps" in alarm.text
        and "90% were truncated" in alarm.text
    )


def test_a_run_with_invalid_rewards_is_not_called_solved() -> None:
    right_or_none = EQUAL | {"rollout/accuracy": 1.0, "rollout/reward_mean": 1.0}
    for invalid in (1.0, 28.0):
        alarms = alarms_of(rows(20, right_or_none | {"rollout/invalid": invalid}, start=1))
        assert "no_signal" in {alarm.name for alarm in alarms}
        assert not any("solved" in alarm.text for alarm in alarms)


def test_rewards_of_none_are_an_alarm_at_once() -> None:
    some = {"rollout/invalid": 28.0, "rewards/invalid_none": 28.0}
    [alarm] = alarms_of(rows(2, some, start=1))
    assert (alarm.name, alarm.first) == ("invalid_rewards", 1) and "return 0.0" in alarm.text
    some["rewards/invalid_none"] = 0.0
    assert alarms_of(rows(2, some, start=1)) == []


def test_a_step_whose_responses_are_all_cut_off_is_an_alarm() -> None:
    [alarm] = alarms_of(rows(1, {"rollout/truncated": 1.0}, start=1))
    assert (alarm.name, alarm.first) == ("truncated", 1)
    assert "inference_model.max_new_tokens" in alarm.text


@pytest.mark.parametrize("count", [1, 5, 20])
def test_mostly_invalid_rewards_are_called_that_not_solved_problems(count: int) -> None:
    few = EQUAL | {"rollout/sequences": 160.0, "rollout/invalid": 155.0, "rollout/accuracy": 1.0}
    alarms = alarms_of(rows(count, few | {"rollout/reward_mean": 1.0}, start=1))
    assert [alarm.name for alarm in alarms] == ["invalid_rewards"]
    assert alarms[0].text.startswith("97% of the rewards are invalid")


def test_console_and_report_show_alarms_and_that_there_are_none(tmp_path: Path) -> None:
    bad = {"rollout/truncated": 0.9, "reward/<b>/none": 1.0}
    for name, changed, count in (
        ("bad", bad, 30),
        ("good", {}, 30),
        ("once", {"rollout/truncated": 1.0}, 1),
    ):
        with MetricsLogger(tmp_path / name, tensorboard=False, config={}) as logger:
            for row in rows(count, changed, start=1):
                logger.log(row.pop("step"), row)
    page = write_report(tmp_path / "bad").read_text(encoding="utf-8")
    assert '<td class="number">5 to 30</td>' in page and "truncated: 90% of the responses" in page
    assert (
        "the reward component &#39;&lt;b&gt;&#39; applied to no response" in page
        and "No alarms." not in page
    )
    assert "No alarms." in write_report(tmp_path / "good").read_text(encoding="utf-8")
    once = write_report(tmp_path / "once").read_text(encoding="utf-8")
    assert '<td class="number">1</td>' in once
    file = io.StringIO()
    with Console(file=file) as console:
        console.alarm(5, "kl", "look \x1b[2J")
        alarms = [Alarm("kl", "a", 3, 9), Alarm("ess", "b", 5, 30), Alarm("length", "c", 7, 7)]
        print_summary(console, {"steps": 30, "alarms": alarms}, {})
    lines = file.getvalue().splitlines()
    assert lines[0] == "alarm kl at step 5: look \\x1b[2J"
    assert lines[-3:] == [
        "alarm kl, steps 3 to 9: a",
        "alarm ess, from step 5 to the end: b",
        "alarm length, step 7: c",
    ]


@pytest.mark.parametrize("mean", [0.0, 0.5])
def test_an_alarm_names_the_penalties_that_train_without_rewards(mean: float) -> None:
    no_rewards = EQUAL | {"rollout/reward_mean": mean, "rollout/accuracy": 0.0}
    penalties = {"train/loss_entropy": 0.1, "train/loss_kl_to_ref": 0.1}
    for more, learned in (
        (penalties, "train/loss_kl_to_ref and train/loss_entropy"),
        ({}, "nothing is learned"),
    ):
        [alarm] = alarms_of(rows(10, no_rewards | more))
        assert learned in alarm.text


@pytest.mark.slow
def test_a_run_without_rewards_says_so_and_ends_if_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without this it looked like any other run: reward 0, and exit status 0."""
    (tmp_path / "nothing.py").write_text("def score(response):\n    return 0.0\n")
    reward = f"env.reward={tmp_path}/nothing.py:score"
    run(tmp_path / "all", reward, steps(6))
    printed = capsys.readouterr().out
    assert printed.count("alarm zero_rewards at step 5: all rewards were 0 over 5 steps") == 1
    assert "alarm zero_rewards, from step 5 to the end: all rewards were 0" in printed
    with pytest.raises(NoSignalError, match="3 steps in a row had no learning signal"):
        run(tmp_path / "ends", reward, steps(6), "train.max_steps_without_signal=3")
    assert [row["step"] for row in read_jsonl(tmp_path / "ends" / "metrics.jsonl")] == [0, 1, 2, 3]
    assert "checkpoint_000003" in {
        path.name for path in (tmp_path / "ends" / "checkpoints").iterdir()
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "planned", "step_count", "message"),
    [
        ("raise KeyError('no such column')", 3, 1, "up to step 1.* first error: KeyError: 'no such col"),
        ("return None", 3, 1, "up to step 1.* return 0.0"),
        ("return [None, 'text'][next(calls) % 2]", 2, 2, "up to step 2"),
        ("return [None, 'text'][next(calls) % 2]", 9, 4, None),
    ],
)  # fmt: skip
def test_a_run_whose_rewards_are_never_valid_ends_with_an_error(
    body: str, planned: int, step_count: int, message: str | None, tmp_path: Path
) -> None:
    """At the first step, if all fail alike."""
    (tmp_path / "broken.py").write_text(
        f"import itertools\ncalls = itertools.count()\ndef score(response):\n    {body}\n"
    )
    expected = f"env.reward must return valid rewards.*{message}"
    if message is None:
        expected = "5 optimizer steps in a row changed nothing, .* all rewards are invalid"
    with pytest.raises(NoSignalError, match=expected):
        run(tmp_path / "run", f"env.reward={tmp_path}/broken.py:score", steps(planned))
    written = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in written] == list(range(step_count + 1))
    assert all(row["rollout/invalid"] == row["rollout/sequences"] for row in written[1:])


def test_one_valid_reward_keeps_a_run_from_counting_as_one_without() -> None:
    invalid = {"rollout/invalid": 64.0}
    signal = Signal()
    for row in rows(4, invalid, start=1):
        signal.take(row)
    assert signal.steps_without_reward == 4
    for row in [*rows(1, {"rollout/invalid": 63.0}, start=1), *rows(9, invalid, start=1)]:
        signal.take(row)
        assert signal.steps_without_reward == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        pytest.param(("inference_model.max_new_tokens=4",), "truncated", marks=pytest.mark.nightly),
        (("optimizer.lr=1e-2", "train.optim_batch_size=4", "optimizer.clip_grad_norm=100"), "kl"),
        pytest.param(("inference_model.temperature=0.01",), "repeated", marks=pytest.mark.nightly),
    ],
)
def test_a_short_run_that_goes_wrong_raises_its_alarm(
    overrides: tuple[str, ...], name: str, tmp_path: Path
) -> None:
    rows = run(tmp_path, steps(7), "policy.kl_coef=0.001", *overrides)
    assert name in {alarm.name for alarm in alarms_of(rows)}


@pytest.mark.slow
def test_responses_that_a_group_has_twice_are_counted(tmp_path: Path) -> None:
    [*_, row] = run(tmp_path, steps(1), "inference_model.temperature=0.01")
    assert row["rollout/repeated"] == 1  # the rewards of each group are all equal
