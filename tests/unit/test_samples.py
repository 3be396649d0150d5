"""``python -m torchrl_grpo samples``: a run's samples, filtered, sorted and compared in the terminal."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.hostile import HOSTILE, SHOWN
from torchrl_grpo.extras.report.samples import main


def sample(
    step: int, query: str, response: str, reward: float | None, **others: Any
) -> dict[str, Any]:
    row = {"step": step, "split": "test", "query": query, "response": response, "reward": reward}
    return row | {"correct": reward == 1, "valid": reward is not None} | others


ROWS = [
    sample(0, "1+1=", "three!", 0.0, dataset="sums"),
    sample(0, "2+2=", "4", 1.0, dataset="sums"),
    sample(0, "say", "no", None, dataset="words"),
    sample(
        1,
        "1+1=",
        "THREE\nor two",
        0.5,
        split="train",
        advantage=-0.25,
        parts={"number": 1.0, "short": None},
        group=7,
    ),
    sample(9, "1+1=", "two", 1.0, dataset="sums"),
    sample(9, "2+2=", "5", 0.5, dataset="sums"),
    sample(9, "say", "yes", 1.0, dataset="words"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path


def printed(folder: Path, *arguments: str, width: int = 100) -> str:
    file = io.StringIO()
    main([str(folder), *arguments], file, width)
    return file.getvalue()


def titles(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip() in ("1+1=", "2+2=", "say")]


def heads(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("step ")]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], range(7)),
        (["--step", "0", "1"], range(4)),
        (["--split", "train"], [3]),
        (["--dataset", "words"], [2, 6]),
        (["--group", "7"], [3]),
        (["--min-reward", "0.5"], [1, 3, 4, 5, 6]),
        (["--max-reward", "0.5"], [0, 3, 5]),  # an invalid reward is neither high nor low
        (["--min-reward", "0.5", "--max-reward", "0.5", "--split", "test"], [5]),
        (["--text", "Three"], [0, 3]),
        (["--text", "2+2"], [1, 5]),
        (["--sort", "reward", "--dataset", "sums"], [0, 5, 4, 1]),
        (["--sort", "reward", "--dataset", "sums", "--reverse"], [4, 1, 5, 0]),
        (["--sort", "length", "--reverse", "--limit", "2"], [3, 0]),
        (["--sort", "step", "--reverse", "--limit", "1"], [6]),
    ],
)
def test_filters_sorting_and_limit(arguments: list[str], expected: list[int], folder: Path) -> None:
    text = printed(folder, *arguments)
    responses = [ROWS[i]["response"].split("\n")[0] for i in expected]
    lines = [line.strip() for line in text.splitlines()]
    assert [
        line for line in lines if line in {row["response"].split("\n")[0] for row in ROWS}
    ] == responses
    assert len(heads(text)) == len(list(expected))


def test_a_sample_is_shown_with_what_it_earned(folder: Path) -> None:
    text = printed(folder, "--split", "train")
    assert heads(text) == [
        "step 1 | train | group 7 | reward 0.5 (number 1, short -) | advantage -0.25"
    ]
    assert "  THREE\n  or two" in "\n".join(line.rstrip() for line in text.splitlines())
    assert "1 of 1 matching samples, 7 in total" in text
    assert heads(printed(folder, "--text", "no")) == ["step 0 | test | words | reward invalid"]


def test_files_of_pictures_are_named(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    path = tmp_path / "images" / f"{16 * 'a'}.png"
    path.write_bytes(b"a picture")
    images = [64 * "a", 64 * "b", "../" + 61 * "c"]  # the others have no thumbnail
    rows = [sample(step, "<image>?", "1", 1.0, images=images) for step in (0, 9)]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for arguments in ((), ("--compare",)):
        text = printed(tmp_path, *arguments, "--limit", "1", width=300)
        assert [line.strip() for line in text.splitlines() if "images" in line] == [str(path)]


def test_before_stands_against_after(folder: Path) -> None:
    by_change = ("--compare", "--split", "test", "--sort", "change")
    text = printed(folder, *by_change, "--reverse")
    assert titles(text) == ["1+1=", "2+2=", "say"]  # an invalid reward has no change
    assert titles(printed(folder, *by_change)) == ["2+2=", "1+1=", "say"]
    row = next(line for line in text.splitlines() if "three!" in line)
    assert row.split() == ["three!", "two"]
    assert (
        "3 problems: 1 better, 1 worse, 0 the same; reward 0.5 -> 0.75; correct 50.0% -> 50.0%"
        in text
    )
    worse = printed(folder, "--compare", "--max-reward", "0.5")
    assert "1 problems: 0 better, 1 worse" in worse and "three!" not in worse
    assert (
        printed(folder, "--compare", "--step", "0").strip().splitlines()[-1]
        == "0 problems: 0 better, 0 worse, 0 the same"
    )


def test_problems_with_one_text_are_compared_one_by_one(tmp_path: Path) -> None:
    rows = [
        sample(step, "Play.", "x", float(step > n), problem=n) for step in (0, 5) for n in range(4)
    ]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "4 problems: 4 better, 0 worse" in printed(tmp_path, "--compare")


@pytest.mark.parametrize("arguments", [[], ["--compare"]])
def test_what_a_model_wrote_does_nothing_to_the_terminal(
    arguments: list[str], tmp_path: Path
) -> None:
    rows = [sample(step, HOSTILE, HOSTILE, 1.0) for step in (0, 1)]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = printed(tmp_path, *arguments, width=1000)
    assert SHOWN in text
    assert all(c.isprintable() or c == "\n" for c in text)


def test_where_nothing_matches_it_says_what_there_is(folder: Path) -> None:
    text = printed(folder, "--dataset", "nothing")
    assert "0 of 0 matching samples, 7 in total" in text
    assert "available: steps [0, 1, 9] and data sets ['sums', 'words']" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["/nowhere"],
            "RUN=/nowhere must be a run's folder, or its samples.jsonl, but it does not exist: use outputs/",
        ),
        (
            ["/"],
            "RUN=/ must be a run's folder, or its samples.jsonl, but it has no samples.jsonl: use outputs/",
        ),
        ([".", "--limit", "0"], "0 must be an integer of at least 1"),
        ([__file__, "--sort", "change"], "add --compare"),
        (["--compare", ".", ".", "."], "--compare A B"),
        ([".", "--compare", "."], "--compare A B"),
        ([], "give either RUN"),
    ],
)
def test_a_mistake_ends_with_what_to_do(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err


def test_two_runs_are_compared_over_the_problems_that_both_tested(tmp_path: Path) -> None:
    """8 problems are worse and 1 is better: McNemar's exact p is 2 * 10 / 512 = 0.039."""
    for name, solved in (("a", range(8)), ("b", range(8, 9))):
        folder = tmp_path / name
        (folder / "checkpoints" / "checkpoint_000005").mkdir(parents=True)
        rows = [
            sample(step, f"q{n}", name, float(n in solved and step == 5), problem=n)
            for step in (0, 5, 9)
            for n in range(20 if name == "a" else 12)
        ]
        (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    runs = [str(tmp_path / name) for name in "ab"]
    points = [f"{run}/checkpoints/checkpoint_000005" for run in runs]
    file = io.StringIO()
    main(["--compare", *points], file, 200)
    assert "of the 20 and 12 test problems, 12 are in both" in file.getvalue()
    assert "12 problems: 1 better, 8 worse, 3 the same" in file.getvalue()
    [line] = [line for line in file.getvalue().splitlines() if "greedy" in line]
    assert "-58.4 points" in line and line.endswith("12 problems): worse")
    assert 0.034 < float(line.partition("p = ")[2].partition(",")[0]) < 0.045
    file = io.StringIO()
    main(["--compare", *runs], file, 200)  # the last evaluations are equal
    assert "p = 1, 12 problems): no difference shown" in file.getvalue()


def test_two_runs_without_a_common_problem_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        row = json.dumps(sample(1, f"of {name}", "", 1.0))
        (tmp_path / name / "samples.jsonl").write_text(row + "\n")
    with pytest.raises(SystemExit):
        main(["--compare", *(str(tmp_path / name) for name in "ab")])
    assert "--compare" in (error := capsys.readouterr().err) and "0 are in both" in error
