"""The report of a run: its numbers by hand, safety against text of models, and the report of a
crashed run.
"""

from __future__ import annotations

import base64
import io
import json
import math
import re
import sys
import tracemalloc
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from tests.support.hostile import HOSTILE, SHOWN
from torchrl_grpo.extras.report import panels
from torchrl_grpo.extras.report.curves import panel_figure, panel_svg
from torchrl_grpo.extras.report.ending import print_summary
from torchrl_grpo.extras.report.panels import (
    PANELS,
    Panel,
    heights_of,
    label_of,
    panels_of,
    series,
    smooth,
    thin,
)
from torchrl_grpo.extras.report.report import write_report
from torchrl_grpo.extras.report.summary import (
    STAGES,
    merge_steps,
    objective,
    stage_seconds,
    summarize,
)
from torchrl_grpo.images import ImageFile
from torchrl_grpo.reporting.console import Console
from torchrl_grpo.reporting.metrics import MetricsLogger

VOID = {"meta", "br", "img"}


class Page(HTMLParser):
    """Collect the text of each tag, the tags and the attributes; fail if a tag is not closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.texts: list[tuple[str, str]] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {f"{tag}.{name}" for name, _ in attrs}
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {f"{tag}.{name}" for name, _ in attrs}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and (data.strip() or "\n" not in data):  # otherwise it only separates the tags
            self.texts.append((self.open[-1], data))

    def text(self) -> str:
        return "".join(text for tag, text in self.texts if tag != "style")


def parse(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


def log(directory: Path, rows: dict[int, dict[str, float]]) -> None:
    with MetricsLogger(directory, tensorboard=False, config={}) as logger:
        for step, row in rows.items():
            logger.log(step, row)


def log_run(directory: Path, steps: int) -> None:
    """Log a run of 0.5 s a step and one evaluation of 2 s before it and one after it."""
    with MetricsLogger(directory, tensorboard=False, config={}) as logger:
        logger.log(0, {"eval/pass@1": 0.25, "time/eval_s": 2.0})
        logger.log_samples(
            0, [{"split": "test", "query": "1+1", "response": "3", "reward": 0.0, "correct": False}]
        )
        for step in range(1, steps + 1):
            logger.log(
                step,
                {
                    "train/kl_k3_to_ref": 0.01 * step,
                    "train/entropy": float("nan"),
                    "train/clip_fraction": 0.1,
                },
            )
            logger.log(
                step,
                {"rollout/reward_mean": 0.5, "rollout/sequences": 8.0, "rollout/tokens": 100.0},
            )
            logger.log(step, {"time/generate_s": 0.2, "time/train_s": 0.2, "time/step_s": 0.5})
        logger.log(steps, {"eval/pass@1": 0.75, "time/eval_s": 2.0})
        logger.log_samples(
            steps,
            [{"split": "test", "query": "1+1", "response": "2", "reward": 1.0, "correct": True}],
        )


def test_a_report_without_matplotlib_says_how_to_get_its_curves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_run(tmp_path, steps=2)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(panels, "find_spec", lambda package: None)
    page = write_report(tmp_path).read_text()
    assert "<svg" not in page and "torchrl_grpo[report]" in page and "Test accuracy" in page
    assert not (tmp_path / "curves.png").exists()


def test_summary_equals_the_sums_by_hand(tmp_path: Path) -> None:
    log_run(tmp_path, steps=10)
    summary = summarize(tmp_path)
    assert summary.pop("wall_s") == pytest.approx(10 * 0.5 + 2 * 2.0)
    assert summary.pop("trained_tokens_per_s") == pytest.approx(
        1000 / 5.0
    )  # 5 of the 9 s: the evaluations don't count
    assert isinstance(summary["sequences"], int) and isinstance(summary["tokens"], int)
    assert summary == {
        "steps": 10,
        "first_step": 1,
        "reward": 0.5,
        "sequences": 80,
        "tokens": 1000,
        "accuracy_before": 0.25,
        "before_text": "25.0%",
        "before_step": 0,
        "accuracy_after": 0.75,
        "after_text": "75.0%",
        "after_step": 10,
        "invalid_fraction": None,
        "never_correct": [],
        "restarts": 0,
        "groups_resampled": 0,
        "invalid": {},
        "alarms": [],
    }


def test_invalid_rewards_are_summed_up_by_cause(tmp_path: Path) -> None:
    crashes, infinite = "rewards/invalid_crash", "rewards/invalid_not_finite"
    log(
        tmp_path,
        {1: {crashes: 1.0}, 2: {crashes: 3.0, infinite: 2.0, "workers/restarts_reward": 6}},
    )
    summary = summarize(tmp_path)
    assert summary["invalid"] == {"crashed the worker": 3, "not finite": 2}
    assert summary["restarts"] == 0


@pytest.mark.parametrize(
    ("last", "text", "outcome"),
    [
        (
            {"eval/pass@1": None, "eval/invalid_fraction": 1.0},
            "25.0% → no valid rewardsteps 0 to 1",
            None,
        ),
        (
            {"eval/pass@1": 1.0, "eval/invalid_fraction": 0.9375},
            "25.0% → 100.0% (93.8% invalid)+75.0 points, steps 0 to 1",
            None,
        ),
        (
            {"eval/pass@1": 0.5, "eval/invalid_fraction": 0.125},
            "25.0% → 50.0% (12.5% invalid)+25.0 points, steps 0 to 1",
            0.5,
        ),
    ],
)
def test_an_accuracy_stands_beside_its_invalid_rewards(
    last: dict[str, float], text: str, outcome: float | None, tmp_path: Path
) -> None:
    """An accuracy of mostly invalid rewards must not rank a sweep's job."""
    with MetricsLogger(tmp_path, tensorboard=False, config={}) as logger:
        logger.log(0, {"eval/pass@1": 0.25, "eval/invalid_fraction": 0.0})
        logger.log(
            1,
            {"rollout/reward_mean": 0.5}
            | {name: value or math.nan for name, value in last.items()},
        )
    assert text in parse(write_report(tmp_path)).text().replace("\n", "")
    summary = summarize(tmp_path)
    assert objective(summary) == outcome
    file = io.StringIO()
    print_summary(Console(file=file), summary, {})
    assert (
        file.getvalue()
        .splitlines()[1]
        .startswith(f"test accuracy (greedy) {text[:14].replace('→', '->')}")
    )


def test_a_reward_that_never_reaches_1_is_named_where_the_accuracy_is(tmp_path: Path) -> None:
    """One data set's reward is a share of words and stays below 1; the other's reaches 1 in
    training.
    """
    tested = {"eval/pass@1": 0.0, "eval/pass@1/words": 0.0, "eval/pass@1/sums": 0.0}
    rewards = {
        "eval/reward_mean": 0.2,
        "eval/reward_mean/words": 0.43,
        "eval/reward_mean/sums": 0.1,
    }
    trained = {"rollout/accuracy": 0.1, "rollout/accuracy/words": 0.0, "rollout/accuracy/sums": 0.2}
    log(tmp_path, dict.fromkeys((0, 1), tested | rewards | trained))
    summary = summarize(tmp_path)
    [line] = summary["never_correct"]
    assert line.startswith(
        "no response to words was correct, although the mean reward is 0.43: a response is correct"
    )
    assert line in parse(write_report(tmp_path)).text()
    file = io.StringIO()
    print_summary(Console(file=file), summary, {})
    assert file.getvalue().splitlines()[1:3] == [
        "test accuracy (greedy) 0.0% (mean reward 0.2) -> 0.0% (mean reward 0.2) (+0.0 points)",
        line,
    ]


def test_test_problems_with_one_text_are_shown_one_by_one(tmp_path: Path) -> None:
    test = {"split": "test", "query": "Play.", "correct": False, "valid": True}
    with MetricsLogger(tmp_path, tensorboard=False, config={}) as logger:
        for step in (0, 5):
            logger.log(step, {"eval/pass@1": 0.0})
            rows = [
                test | {"problem": n, "reward": n / 8, "response": f"move {n} at {step}"}
                for n in range(3)
            ]
            logger.log_samples(step, rows)
    text = parse(write_report(tmp_path)).text()
    assert all(f"move {n} at {step}" in text for n in range(3) for step in (0, 5))


def test_restarts_of_actors_are_summed_over_their_kinds_and_shown(tmp_path: Path) -> None:
    names = ("restarts_rollout", "restarts_reference", "groups_resampled")
    names = [f"workers/{name}" for name in names]
    rows = [dict(zip(names, counts, strict=True)) for counts in ((0, 0, 0), (2, 1, 4))]
    log(tmp_path, {1: rows[0], 2: rows[1], 3: {"eval/pass@1": 0.5}})
    assert (summarize(tmp_path)["restarts"], summarize(tmp_path)["groups_resampled"]) == (3, 4)
    assert "Restarts34 groups resampled" in parse(write_report(tmp_path)).text().replace("\n", "")


def test_report_shows_accuracy_and_responses_before_and_after(tmp_path: Path) -> None:
    log_run(tmp_path, steps=10)
    text = parse(write_report(tmp_path)).text()
    assert "25.0% → 75.0%" in text and "+50.0 points, steps 0 to 10" in text
    assert "promptbefore trainingafter step 101+13reward 02reward 1" in text
    # 9 s in all: 2 s generating, 2 s training, 4 s evaluating, and 1 s that the steps spent elsewhere.
    assert (
        "generate 22.2% 0:02" in text and "eval 44.4% 0:04" in text and "other 11.1% 0:01" in text
    )


@pytest.fixture(scope="module")
def drawn(
    tmp_path_factory: pytest.TempPathFactory,
    no_curves: tuple[Callable[..., None], Callable[..., str]],
) -> Path:
    """Return the report of a run of 3 steps, with its curves."""
    folder = tmp_path_factory.mktemp("drawn")
    log_run(folder, steps=3)
    with MetricsLogger(folder, tensorboard=False, config={}) as logger:
        logger.log(3, {"throughput/trained_tokens_per_s": 200.0})
    with pytest.MonkeyPatch.context() as patch:
        for name, function in zip(("save_png", "panel_svg"), no_curves, strict=True):
            patch.setattr(f"torchrl_grpo.extras.report.curves.{name}", function)
        return write_report(folder)


@pytest.mark.slow
def test_curves_png_is_a_png_and_empty_panels_are_left_out_of_the_page(drawn: Path) -> None:
    page = parse(drawn)
    assert (drawn.parent / "curves.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    captions = [text for tag, text in page.texts if tag == "figcaption"]
    assert captions == [
        "Reward",
        "Accuracy",
        "KL (nats per token)",
        "Clip fraction",
        "Throughput (trained tokens/s)",
        "Time per step (s)",
    ]
    assert page.tags.count("svg") == len(captions)
    assert page.texts.count(("text", "step")) == len(captions)  # each x axis says what it counts


@pytest.mark.slow
def test_puzzling_figures_have_a_sentence_and_throughput_matches_the_card(drawn: Path) -> None:
    page = parse(drawn)
    notes = [text for tag, text in page.texts if tag == "p"]
    captions = [text for tag, text in page.texts if tag == "figcaption"]
    assert [panel.note for panel in PANELS if panel.note and panel.title in captions] == notes[
        1:
    ]  # the first is the run's name
    assert "Trained tokens/s200300 tokens, excluding evaluation" in page.text()
    assert "Throughput (trained tokens/s)" in page.text()


@pytest.mark.slow
def test_page_loads_nothing_and_runs_nothing(drawn: Path) -> None:
    page = parse(drawn)
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert not any(name.endswith((".src", ".onclick", ".onload")) for name in page.attributes)
    html = re.sub(r'xmlns(:\w+)?="[^"]*"', "", drawn.read_text(encoding="utf-8"))
    assert set(re.findall(r'href="([^"]{1})', html)) <= {"#"}
    assert set(re.findall(r"url\((.)", html)) <= {"#"}


def test_pictures_stand_beside_their_prompts(tmp_path: Path) -> None:
    files = [ImageFile.of(Image.new("RGB", (8, 8), color)) for color in ("red", "blue", "lime")]
    row = {"query": "?", "response": "1", "reward": 1.0, "correct": True}
    with MetricsLogger(tmp_path, tensorboard=False, config={}) as logger:
        for split, images in (("test", files[:1]), ("train", files[1:])):
            logger.log_samples(1, [row | {"split": split, "images": images, "group": 1}] * 2)
    (tmp_path / f"images/{files[2].hash[:16]}.png").unlink()  # like in a run without thumbnails
    html = write_report(tmp_path).read_text(encoding="utf-8")
    Page(html)
    images = re.findall(r'<img src="data:image/png;base64,([^"]*)" alt="([^"]*)">', html)
    assert len(images) == html.count("<img") == 2
    assert [alt for _, alt in images] == ["image 1 of 1", "image 1 of 2"]
    colors = [Image.open(io.BytesIO(base64.b64decode(data))).getpixel((0, 0)) for data, _ in images]
    assert colors == [(255, 0, 0), (0, 0, 255)]


@pytest.mark.slow
@pytest.mark.usefixtures("curves")
def test_text_of_the_model_and_of_the_config_is_shown_never_interpreted(tmp_path: Path) -> None:
    row = {
        "query": HOSTILE,
        "response": HOSTILE,
        "reward": None,
        "correct": False,
        "advantage": -1.0,
    }
    with MetricsLogger(tmp_path, tensorboard=False, config={}) as logger:
        logger.log(1, {"rollout/reward_mean": 0.0})
        logger.log_samples(1, [row | {"split": "test"}, row | {"split": "train"}])
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "config.yaml").write_text(f"name: {HOSTILE}\n", errors="replace")
    page = parse(write_report(tmp_path))
    assert "script" not in page.tags
    assert page.text().count(SHOWN) == 4
    assert "reward invalid" in page.text() and "-1.00" in page.text()
    assert "name: " + SHOWN.replace("\\ud83d", "?") in page.text()


def test_groups_of_samples_with_the_widest_rewards_come_first(tmp_path: Path) -> None:
    rewards = {3: [0.5, 0.5], 7: [0.0, 1.0], 8: [0.0, 0.2]}
    rows = [
        {"split": "train", "group": group, "query": f"q{group}", "prompt": f"<user>q{group}"}
        | {"response": f"{group}-{nth}", "reward": reward, "advantage": reward}
        for nth in range(2)
        for group, values in rewards.items()
        for reward in [values[nth]]
    ]
    with MetricsLogger(tmp_path, tensorboard=False, config={}) as logger:
        logger.log_samples(1, rows)
    text = parse(write_report(tmp_path)).text()
    places = [text.index(part) for part in ("<user>q7", "7-1", "7-0", "8-1", "8-0", "3-0", "3-1")]
    assert places == sorted(places) and text.count("<user>q7") == 1


def test_a_report_needs_little_memory_for_many_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are not read, and only the last step's training samples are kept."""
    monkeypatch.setattr("torchrl_grpo.extras.report.report.has_matplotlib", lambda: False)
    log_run(tmp_path, steps=1)
    write_report(tmp_path)  # loads the template
    tokens = {"text": ["x"] * 500, "log_prob": [-0.5] * 500}
    with (tmp_path / "samples.jsonl").open("w") as file:
        for step in range(100):
            for split, rows in (("train", 8), ("test", 2)):
                for row in range(rows):
                    sample = {"step": step, "split": split, "query": f"q{row}", "reward": 1.0}
                    texts = {"response": f"r{step}.{row}" + "x" * 1000, "tokens": tokens}
                    file.write(json.dumps(sample | texts) + "\n")
    tracemalloc.start()
    page = write_report(tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    text = parse(page).text()
    assert peak < (tmp_path / "samples.jsonl").stat().st_size / 2
    assert all(f"r{step}.{row}x" in text for step in (0, 99) for row in range(2))
    assert all(f"r99.{row}x" in text for row in range(8)) and "r98." not in text


def test_demonstrations_have_no_reward_in_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python", "grpo.py"])  # the report shows it
    with MetricsLogger(tmp_path, tensorboard=False, config={}) as logger:
        logger.log(1, {"train/loss": 2.0})
        logger.log_samples(1, [{"split": "train", "query": "q", "response": "r", "group": 0}])
    text = parse(write_report(tmp_path)).text()
    assert "Training samples" in text and "reward" not in text and "advantage" not in text


def test_the_title_names_model_data_and_algorithm(tmp_path: Path) -> None:
    log_run(tmp_path, steps=1)
    assert ("h1", "GRPO run") in parse(write_report(tmp_path)).texts
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "config.yaml").write_text(
        "model: {name: <b>m</b>/x}\nenv: {dataset: gsm8k}\n"
    )
    assert ("h1", "<b>m</b>/x on gsm8k") in parse(write_report(tmp_path)).texts
    (tmp_path / ".hydra" / "hydra.yaml").write_text(
        "hydra: {runtime: {choices: {algo: dapo, hydra/env: default}}}\n"
    )
    texts = parse(write_report(tmp_path)).texts
    title = "<b>m</b>/x on gsm8k with dapo"
    assert ("h1", title) in texts
    assert ("p", f"Run {'/'.join(tmp_path.parts[-2:])}") in texts
    assert [text.partition(": ")[0] for tag, text in texts if tag == "title"] == [title]
    for env, data in (
        ("{dataset: x, datasets: [{dataset: a.csv}, {dataset: gsm8k}]}", "a.csv and gsm8k"),
        ("{dataset: x, task: {_target_: my.Task}}", "my.Task"),
        ("{datasets: [{dataset: /home/me/runs/a.csv}, {dataset: b}]}", "me/runs/a.csv and b"),
    ):
        (tmp_path / ".hydra" / "config.yaml").write_text(f"model: {{name: m}}\nenv: {env}\n")
        assert ("h1", f"m on {data} with dapo") in parse(write_report(tmp_path)).texts


def test_pass_at_1_of_a_data_set_is_labeled_greedy() -> None:
    names = (
        "eval/pass@1",
        "eval/pass@1/gsm8k",
        "eval/pass@8/gsm8k",
        "eval/avg@8",
        "rollout/accuracy",
    )
    assert [label_of(name) for name in names] == [
        "test pass@1 (greedy)",
        "test pass@1 gsm8k (greedy)",
        "test pass@8 gsm8k (sampled)",
        "test avg@8 (sampled)",
        "train accuracy (sampled)",
    ]


@pytest.mark.slow
def test_a_legend_lies_above_the_curves() -> None:
    records = [
        {"step": s, "train/kl_k3_to_ref": s * s, "train/kl_k3_to_inference": -s / 9}
        for s in range(12)
    ]
    records += [
        {"step": s, "eval/pass@1": 1.0, "eval/pass@8": 1.0, "rollout/accuracy": 0.9}
        for s in range(12, 24)
    ]
    times = {f"time/{part}_s": 1.0 for part in STAGES}
    records += [
        {"step": s, "train/clip_fraction_low": 0.2, "train/clip_fraction_high": 0.1, **times}
        for s in (24, 25)
    ]
    for panel in PANELS:
        figure = panel_figure(panel, records)
        figure.draw_without_rendering()
        (axes,) = figure.axes
        if len(series(panel, records)) > 1:
            box = axes.get_legend().get_window_extent()
            assert box.x1 <= figure.bbox.x1, panel.title
            bottom = axes.transData.inverted().transform(box)[0, 1]
            assert bottom > axes.dataLim.y1, panel.title
            assert all(tick < bottom for tick in axes.get_yticks()), panel.title


def test_all_curves_of_three_data_sets_are_drawn_below_the_legend() -> None:
    names = [
        f"eval/{kind}{name}"
        for kind in ("pass@1", "pass@8", "avg@8")
        for name in ("", "/gsm8k", "/math", "/arithmetic")
    ]
    names.append("rollout/accuracy")
    records = [{"step": step} | dict.fromkeys(names, 1.0) for step in range(30)]
    accuracy = next(panel for panel in PANELS if panel.title == "Accuracy")
    figure = panel_figure(accuracy, records)
    figure.draw_without_rendering()
    (axes,) = figure.axes
    legend = axes.get_legend()
    assert {text.get_text() for text in legend.get_texts()} == set(map(label_of, names))
    assert len({(line.get_color(), line.get_linestyle()) for line in legend.get_lines()}) == 13
    box = legend.get_window_extent()
    assert axes.transData.inverted().transform(box)[0, 1] > 1.0
    assert axes.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1
    assert (
        axes.transData.transform((0, 1))[1] - axes.bbox.y0 > 70
    )  # of 100 points in an inch: the plot has enough room


def test_no_axis_zooms_into_rounding_noise() -> None:
    def height(name: str, *values: float) -> float:
        panel = Panel(name, (name,))
        records = [{"step": step, name: value} for step, value in enumerate(values)]
        low, high = heights_of(panel, [series(panel, records)])
        assert low <= min(values) and max(values) <= high
        return high - low

    assert height("train/kl_k3_to_inference", 1e-8, 3e-8) >= 0.1
    assert height("train/ratio_mean", 1.0, 1 + 1e-7) >= 0.1
    assert height("train/lr", 1e-7, 5e-7) < 1e-6
    assert height("train/kl_k3_to_ref", 1e-3, 2e-3) < 2e-3


def test_the_panels_are_those_that_tell_something_about_the_run() -> None:
    row = {"rollout/reward_mean": 0.0, "train/kl_k3_to_inference": 2e-8, "train/entropy": 1.0}
    row |= {"train/clip_fraction_low": 0.0, "staleness/mean": 0.0, "rollout/truncated": 0.0}

    def titles(**others: float) -> list[str]:
        return [panel.title.partition(" (")[0] for panel in panels_of([row | others | {"step": 1}])]

    assert titles() == ["Reward", "Entropy"]
    assert titles(**{"staleness/mean": 1.0, "rollout/truncated": 0.1}) == [
        "Reward",
        "Entropy",
        "Truncated responses",
        "Staleness",
    ]
    del row["rollout/reward_mean"]
    assert titles(**{"train/loss": 2.0}) == ["Loss", "Entropy"]


def test_a_series_with_few_values_is_drawn_as_markers() -> None:
    records: list[dict[str, float]] = [
        {"step": step, "rollout/accuracy": 0.5} for step in range(80)
    ]
    records[0]["eval/pass@8"] = records[-1]["eval/pass@8"] = 1.0
    accuracy = next(panel for panel in PANELS if panel.title == "Accuracy")
    (axes,) = panel_figure(accuracy, records).axes
    styles = {line.get_label(): (line.get_linestyle(), line.get_marker()) for line in axes.lines}
    assert styles["test pass@8 (sampled)"] == ("None", "o")
    assert styles["train accuracy (sampled)"] == ("-", "None")


def test_curves_png_names_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log_run(tmp_path / "12-00-00", steps=1)
    titles: list[str] = []
    monkeypatch.setattr(
        "torchrl_grpo.extras.report.curves.save_png",
        lambda records, path, title: titles.append(title),
    )
    write_report(tmp_path / "12-00-00")
    assert titles == [f"GRPO run: {tmp_path.name}/12-00-00"]


def test_the_report_of_a_job_of_a_sweep_is_named_by_its_overrides(tmp_path: Path) -> None:
    job = tmp_path / "12-00-00" / "3"
    (job / ".hydra").mkdir(parents=True)
    (job / ".hydra" / "overrides.yaml").write_text("[optimizer.lr=1e-4, seed=1]")
    assert '<p class="dim">Run lr=1e-4 seed=1</p>' in write_report(job).read_text()


def test_rounding_noise_is_drawn_as_0() -> None:
    kl = next(panel for panel in PANELS if panel.title.startswith("KL"))
    records = [
        {"step": step, "train/kl_k3_to_inference": value}
        for step, value in enumerate((-2.42e-10, 3e-7))
    ]
    assert series(kl, records) == {"train/kl_k3_to_inference": ([0, 1], [0.0, 3e-7])}


@pytest.mark.parametrize("scale", [2.5e-6, 5e-4, 0.75, 60, 99_000, 2_500_000])
def test_the_numbers_beside_a_curve_are_not_cut_off(scale: float) -> None:
    panel = next(panel for panel in PANELS if panel.title.startswith("Throughput"))
    figure = panel_figure(
        panel, [{"step": step, panel.metrics[0]: scale * step} for step in range(10)]
    )
    figure.draw_without_rendering()
    (axes,) = figure.axes
    labels = [
        label for label in axes.get_yticklabels() if label.get_position()[1] >= axes.get_ylim()[0]
    ]
    assert min(label.get_window_extent().x0 for label in labels) >= 0
    assert axes.xaxis.label.get_window_extent().y0 >= 0


def test_long_responses_keep_their_start_and_their_end(tmp_path: Path) -> None:
    row = {
        "split": "train",
        "query": "q",
        "response": f"START{'x' * 10_000}END",
        "reward": 1.0,
        "correct": True,
    }
    with MetricsLogger(tmp_path, tensorboard=False, config={}) as logger:
        logger.log_samples(1, [row])
    match = re.search("START.*END", parse(write_report(tmp_path)).text())
    assert match is not None and len(match.group()) == 2000


@pytest.mark.slow
@pytest.mark.usefixtures("curves")
@pytest.mark.parametrize("steps", [None, 0, 1, 2])
def test_run_that_crashed_early_has_a_report(tmp_path: Path, steps: int | None) -> None:
    row = {"train/kl_k3_to_ref": None, "rollout/reward_mean": 0.5, "time/train_s": 1.0}
    if steps is not None:
        lines = [json.dumps({"step": step, **row}) for step in range(1, steps + 1)]
        (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 9, "cut sh']))
    steps = steps or 0
    text = parse(write_report(tmp_path)).text()
    assert f"Steps{steps}" in text
    assert ("No metrics were logged." in text) == (steps == 0)
    assert summarize(tmp_path)["wall_s"] == (float(steps) or None)


def test_one_evaluation_is_not_shown_as_a_result_of_training(tmp_path: Path) -> None:
    log(tmp_path, {0: {"eval/pass@1": 0.25}})
    summary = summarize(tmp_path)
    assert (summary["accuracy_before"], summary["accuracy_after"]) == (0.25, None)
    assert "Test accuracy, greedy25.0%after step 0" in parse(write_report(tmp_path)).text()


def test_lines_of_a_step_are_merged_and_steps_are_in_order() -> None:
    rows = [{"step": 2, "a/b": 1.0}, {"step": 0, "a/b": 3.0}, {"step": 2, "a/b": 2.0, "a/c": 5.0}]
    assert merge_steps(rows) == [{"step": 0, "a/b": 3.0}, {"step": 2, "a/b": 2.0, "a/c": 5.0}]


def test_smooth_is_a_centered_mean_and_keeps_a_straight_line_straight() -> None:
    assert smooth([1.0, 5.0, 3.0]) == [1.0, 5.0, 3.0]
    values = [0.0] * 20 + [3.0] + [0.0] * 19  # 40 values: windows of 5
    assert smooth(values) == pytest.approx([0.0] * 18 + [0.6] * 5 + [0.0] * 17)
    line = [float(i) for i in range(100)]
    assert smooth(line)[5:-5] == pytest.approx(line[5:-5])


def test_thin_averages_neighbours_down_to_400_points() -> None:
    steps, values = thin(range(800), [float(i % 2) for i in range(800)])
    assert steps == [2 * i + 0.5 for i in range(400)] and values == [0.5] * 400
    assert thin([1, 2], [3.0, 4.0]) == ([1, 2], [3.0, 4.0])
    assert thin([], []) == ([], [])


def test_other_time_is_what_the_step_spent_outside_of_the_timed_parts() -> None:
    parts = stage_seconds(
        {
            "time/step_s": 3.0,
            "time/train_s": 2.0,
            "time/values_s": 0.25,
            "time/sync_s": 0.5,
            "time/eval_s": 7.0,
            "time/reward_s": None,
        }
    )
    assert {part: seconds for part, seconds in parts.items() if seconds} == {
        "train": 2.0,
        "values": 0.25,
        "sync": 0.5,
        "eval": 7.0,
        "other": 0.25,
    }


def test_what_a_critic_explains_has_a_panel_where_there_is_a_critic() -> None:
    records = [{"step": step, "rollout/reward_mean": 0.5} for step in (1, 2)]
    with_critic = [row | {"train/explained_variance": row["step"] - 1.5} for row in records]
    assert [panel.title for panel in panels_of(records)] == ["Reward"]
    _, panel = panels_of(with_critic)
    assert series(panel, with_critic) == {"train/explained_variance": ([1, 2], [-0.5, 0.5])}


def test_panel_leaves_out_steps_without_a_value() -> None:
    records = [
        {"step": 0, "eval/pass@1": 0.5},
        {"step": 1, "rollout/accuracy": None},
        {"step": 2, "eval/pass@8": 1.0},
    ]
    accuracy = next(panel for panel in PANELS if panel.title == "Accuracy")
    assert series(accuracy, records) == {"eval/pass@1": ([0], [0.5]), "eval/pass@8": ([2], [1.0])}


def test_panel_svg_takes_its_colors_from_the_page_and_is_reproducible() -> None:
    records = [{"step": step, "rollout/reward_mean": step / 50} for step in range(50)]
    svg = panel_svg(PANELS[0], records)
    assert svg.startswith("<svg") and "var(--ink)" in svg and "var(--line)" in svg
    assert svg == panel_svg(PANELS[0], records)


def test_each_evaluation_is_compared_with_the_first(tmp_path: Path) -> None:
    """Of 20 problems 8 more are solved: McNemar's exact p is 2 / 256 = 0.008."""
    rows = [
        {"step": step, "split": "test", "query": f"q{n}", "problem": n, "valid": True, "response": "",
         "reward": 1.0, "correct": n < solved, "correct_of": [n % 4, 4]}
        for step, solved in ((0, 4), (5, 12)) for n in range(20)
    ]  # fmt: skip
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert re.search(
        r"greedy</td><td class=.number.>60.0%</td>\s*<td class=.good.>\+40.0 points .*: better<",
        page,
    )
    assert re.search(
        r"sampled</td><td class=.number.>37.5%</td>\s*<td class=..>\+0.0 points .*p = 1, 20 problems\): no difference",
        page,
    )
