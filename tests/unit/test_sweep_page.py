"""The page of a sweep: its numbers by hand, its failed jobs, its safety."""

from __future__ import annotations

import json
import re
import tracemalloc
from html import escape
from pathlib import Path

import pytest
import yaml

from tests.support.hostile import HOSTILE, SHOWN
from torchrl_grpo.extras.report import comparison
from torchrl_grpo.extras.report.records import read_samples
from torchrl_grpo.extras.report.summary import objective, summarize
from torchrl_grpo.extras.report.sweep import main
from torchrl_grpo.extras.report.sweep_report import influence, read_jobs, varying_keys, write_sweep


def log_job(
    folder: Path, overrides: list[str], accuracy: float | None, rewards: tuple[float, ...] = (0.5,)
) -> None:
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(overrides), encoding="utf-8")
    rows = [
        {"step": step, "rollout/reward_mean": reward, "rollout/sequences": 8, "time/step_s": 30.0}
        for step, reward in enumerate(rewards, start=1)
    ]
    if accuracy is not None:
        rows = [
            {"step": 0, "eval/pass@1": 0.25},
            *rows,
            {"step": len(rewards), "eval/pass@1": accuracy},
        ]
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
    )


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Write 2 learning rates with 2 seeds each; the last job failed before its first step."""
    for number, (lr, seed, accuracy) in enumerate(
        [("1e-4", 0, 0.8), ("1e-4", 1, 0.9), ("1e-5", 0, 0.3)]
    ):
        log_job(
            tmp_path / str(number),
            ["env.repeats=8", f"optimizer.lr={lr}", f"seed={seed}"],
            accuracy,
        )
    (tmp_path / "3" / ".hydra").mkdir(parents=True)
    (tmp_path / "3" / ".hydra" / "overrides.yaml").write_text(
        "[env.repeats=8, optimizer.lr=1e-5, seed=1]"
    )
    (tmp_path / "0" / "report.html").touch()
    return tmp_path


def text_of(page: Path) -> str:
    html = page.read_text(encoding="utf-8")
    body = re.sub(r"<(style|svg|script)\b.*?</\1>", "", html, flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", body))


def test_what_a_key_explains_equals_the_variances_by_hand(sweep: Path) -> None:
    jobs = read_jobs(sweep)
    assert varying_keys(jobs) == ["optimizer.lr", "seed"]
    lr, seed = (influence(jobs, key) for key in ("optimizer.lr", "seed"))
    mean = (0.8 + 0.9 + 0.3) / 3
    whole = (0.8 - mean) ** 2 + (0.9 - mean) ** 2 + (0.3 - mean) ** 2
    assert lr.share == pytest.approx((2 * (0.85 - mean) ** 2 + (0.3 - mean) ** 2) / whole)
    assert seed.share == pytest.approx((2 * (0.55 - mean) ** 2 + (0.9 - mean) ** 2) / whole)
    assert (lr.by_chance, lr.levels) == (0.5, [("1e-5", 1, 0.3), ("1e-4", 2, pytest.approx(0.85))])


def test_many_numbers_are_compared_in_three_ranges(tmp_path: Path) -> None:
    for number in range(6):
        log_job(
            tmp_path / str(number),
            [f"optimizer.lr=0.0001000{number}"],
            [0.1, 0.1, 0.1, 0.1, 0.7, 0.7][number],
        )
    ranges = influence(read_jobs(tmp_path), "optimizer.lr")
    assert ranges.share == pytest.approx(1.0) and ranges.by_chance == pytest.approx(0.4)
    assert [(count, mean) for _, count, mean in ranges.levels] == [
        (2, 0.1),
        (2, 0.1),
        (2, pytest.approx(0.7)),
    ]


def test_a_key_whose_values_have_one_run_each_explains_nothing(tmp_path: Path) -> None:
    for number, algo in enumerate(("grpo", "dapo")):
        log_job(tmp_path / str(number), [f"algo={algo}"], 0.1 * number)
    assert influence(read_jobs(tmp_path), "algo").share is None


def test_runs_that_differ_in_their_seed_alone_are_one_setting(tmp_path: Path) -> None:
    for seed in (0, 1):
        log_job(tmp_path / str(seed), [f"seed={seed}"], 0.5)
    assert re.search(r"Runs 2 1 setting\b", text_of(write_sweep(tmp_path)))


def test_the_page_has_the_best_setting_and_each_run(sweep: Path) -> None:
    text = text_of(write_sweep(sweep))
    assert "Best greedy test accuracy 85.0% optimizer.lr=1e-4" in text
    assert "Runs 4 2 settings Total run time 1:30" in text
    assert "optimizer.lr=1e-4 85.0% 80.0% to 90.0% in 2 runs" in text
    assert "optimizer.lr 97.6% 50.0% 1e-5: 30.0% 1 run 1e-4: 85.0% 2 runs" in text
    assert re.findall(r" (\d) (1e-\d) (\d) (25.0%) (\S+) (0.5) (\d) (\S+) none", text) == [
        ("1", "1e-4", "1", "25.0%", "90.0%", "0.5", "1", "0:30"),
        ("0", "1e-4", "0", "25.0%", "80.0%", "0.5", "1", "0:30"),
        ("2", "1e-5", "0", "25.0%", "30.0%", "0.5", "1", "0:30"),
    ]
    assert "3 1e-5 1 - - - 0 0:00 no step" in text
    assert re.findall('<a href="([^"]*)"', (sweep / "sweep.html").read_text(encoding="utf-8")) == [
        "0/report.html"
    ]


def test_seeds_make_one_curve_with_a_band(sweep: Path) -> None:
    [accuracy, *_] = re.findall(
        "<svg.*?</svg>", write_sweep(sweep).read_text(encoding="utf-8"), re.DOTALL
    )
    bands = re.findall(r'id="FillBetween.*?fill: (#\w+)', accuracy, re.DOTALL)
    assert (bands, "#f59e0b" in accuracy) == (
        ["#3b82f6"],
        True,
    )  # of the best setting; the other one has one run


def test_without_evaluations_the_reward_decides(tmp_path: Path) -> None:
    for number, last in enumerate((0.2, 0.6)):
        log_job(tmp_path / str(number), [f"seed={number}"], None, (0.1,) * 18 + (last, last + 0.2))
    assert objective(summarize(tmp_path / "1")) == pytest.approx(0.7)
    assert "Best reward 0.5 all runs" in text_of(write_sweep(tmp_path))


def test_a_job_whose_rewards_were_mostly_invalid_is_not_the_best(sweep: Path) -> None:
    with (sweep / "2" / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 1, "eval/pass@1": 1.0, "eval/invalid_fraction": 0.9975}\n')
    text = text_of(write_sweep(sweep))
    assert "Best greedy test accuracy 85.0% optimizer.lr=1e-4" in text
    assert "2 1e-5 0 25.0% 100.0% (99.8% invalid) 0.5 1 0:30" in text


def test_hostile_overrides_are_shown_as_text(tmp_path: Path) -> None:
    for number in range(2):
        log_job(tmp_path / str(number), [f"env.system_prompt={HOSTILE}{number}"], 0.5)
    html = write_sweep(tmp_path).read_text(encoding="utf-8")
    assert html.count("<script>") == 1 and escape(SHOWN) in html


def test_a_folder_without_jobs_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main([str(tmp_path)])
    assert end.value.code == 2
    assert f"error: {tmp_path} must be the folder of a multirun" in capsys.readouterr().err


def test_samples_are_read_one_by_one_and_only_the_last_tests_are_kept(tmp_path: Path) -> None:
    def line(step: int, split: str, number: int) -> str:
        text = '"test"' + "x" * 1000
        row = {"step": step, "split": split, "query": f"q{number}", "problem": number}
        return json.dumps(row | {"response": text}) + "\n"

    path = tmp_path / "samples.jsonl"
    with path.open("w") as file:
        for step in range(100):
            file.writelines(line(step, "train", number) for number in range(20))
            file.writelines(line(step, "test", number) for number in range(3))
        file.write(line(100, "test", 0)[:-1])  # a crash cut it off
    tracemalloc.start()
    rows = comparison.tests_of(read_samples(path))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [(row["step"], row["query"]) for row in rows.values()] == [
        (99, "q0"), (99, "q1"), (99, "q2"),
    ]  # fmt: skip
    assert peak < path.stat().st_size / 10
    assert comparison.tests_of(read_samples(tmp_path / "none")) == {}


def test_runs_are_compared_with_the_best_one_and_corrected(sweep: Path) -> None:
    """Job 1 solves all of 20 problems, the others all but 6: p = 2/64, for two tests 4/64."""
    for job, solved in ((1, 20), (0, 14), (2, 14)):
        rows = [
            {"step": 1, "split": "test", "query": f"q{n}", "problem": n, "valid": True, "correct": n < solved}
            for n in range(20)
        ]  # fmt: skip
        (sweep / str(job) / "samples.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    found = re.findall(
        r"-30.0 points \([^)]*p = (\S+), 20 problems\): no difference shown",
        text_of(write_sweep(sweep)),
    )
    assert len(found) == 2 and all(0.055 < float(p) < 0.071 for p in found)
