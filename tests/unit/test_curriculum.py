"""``env.curriculum``: problems of one level at a time, from the lowest up."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.configs import compose_config
from tests.support.scripts import SMALL, SYNC, rows_of
from torchrl_grpo.assembly.prepare import prepare
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.tasks.base import Problem, Score, Split, Task
from torchrl_grpo.tasks.curriculum import WINDOW, Curriculum
from torchrl_grpo.tasks.drawing import Drawing


class Leveled(Task):
    """Problems with levels, which are in their names."""

    name = "leveled"

    def __init__(self, levels: Sequence[Any], dataset: str = "") -> None:
        self.all = [
            Problem(f"{i}?", str(i), {"level": level}, dataset) for i, level in enumerate(levels)
        ]

    def problems(self, split: Split) -> Sequence[Problem]:
        return self.all

    def score(self, problem: Problem, responses: Sequence[str]) -> Score:
        return Score(1.0, True)


def drawing_of(*levels: Any, target: float = 0.5) -> Drawing:
    task = Leveled(levels)
    drawing = Drawing(task, task.all, range(len(levels)))
    drawing.follow(target)
    return drawing


def test_a_level_is_drawn_alone_until_enough_responses_are_correct() -> None:
    drawing = drawing_of(3, 1, 1, 2, 3)
    assert {drawing.draw().index for _ in range(4)} == {1, 2}
    drawing.record([(1, False)] * (WINDOW // 2 + 1) + [(2, True)] * (WINDOW // 2 - 1))
    assert drawing.metrics() == {"rollout/level": 1.0}  # one short of half
    drawing.record(
        [(0, True)] * WINDOW
    )  # of a level that is not drawn: a straggler decides nothing
    assert drawing.metrics() == {"rollout/level": 1.0}
    drawing.record([(1, True)])  # the oldest, a false one, leaves the window
    assert drawing.metrics() == {"rollout/level": 2.0}
    assert [drawing.draw().index for _ in range(3)] == [3, 3, 3]
    drawing.record([(3, True)] * (WINDOW - 1))
    assert drawing.metrics() == {"rollout/level": 2.0}  # outcomes of the level before do not count
    drawing.record([(3, True)])
    assert {drawing.draw().index for _ in range(4)} == {0, 4}
    drawing.record([(0, True)] * WINDOW)
    assert drawing.metrics() == {"rollout/level": 3.0}  # there is no next one


def test_a_level_in_text_is_its_number_and_none_is_the_highest() -> None:
    drawing = drawing_of("Level 10", "Level 2", "Level ?", None, 2)
    assert {drawing.draw().index for _ in range(4)} == {1, 4}
    drawing.record([(1, True)] * WINDOW)
    assert {drawing.draw().index for _ in range(6)} == {0, 2, 3}


def test_each_data_set_has_its_level_and_one_without_is_drawn_whole() -> None:
    problems = [
        Problem(f"{i}?", None, extra, dataset)
        for i, (extra, dataset) in enumerate(
            [
                ({"level": 0}, "a"),
                ({"level": 1}, "a"),
                ({"level": 4}, "b"),
                ({"level": 6}, "b"),
                ({}, "c"),
            ]
        )
    ]
    curriculum = Curriculum(problems, range(5), 1.0)
    assert curriculum.usable == [0, 2, 4] and curriculum.level == 2.0
    assert not curriculum.record([(4, True)] * WINDOW)
    assert curriculum.record([(2, True)] * WINDOW)
    assert curriculum.usable == [0, 3, 4] and curriculum.level == 3.0


@pytest.mark.parametrize("seed", range(5))
def test_a_restored_drawing_draws_what_would_have_been_drawn(seed: int) -> None:
    rng = random.Random(seed)
    levels = [rng.randrange(4) for _ in range(30)]
    whole = drawing_of(*levels)
    for _ in range(rng.randrange(20, 80)):
        whole.record([(whole.draw().index, rng.random() < 0.8) for _ in range(8)])
    restored = drawing_of(*levels)
    restored.load_state_dict(whole.state_dict())
    for _ in range(100):
        outcomes = [(whole.draw().index, rng.random() < 0.8) for _ in range(8)]
        assert [restored.draw().index for _ in range(8)] == [index for index, _ in outcomes]
        whole.record(outcomes)
        restored.record(outcomes)
    assert restored.state_dict() == whole.state_dict()
    assert whole.metrics()["rollout/level"] == 3.0  # it moved


def test_problems_without_levels_are_refused() -> None:
    with pytest.raises(ValueError, match=r"env\.curriculum=0\.5\) .* column level"):
        drawing_of(None, "hard")


@pytest.mark.slow
def test_a_run_climbs_and_goes_on_from_a_checkpoint_at_its_level(
    run_here: Callable[..., int], tmp_path: Path
) -> None:
    data, reward = tmp_path / "data.jsonl", tmp_path / "all_right.py"
    rows = [f'{{"prompt": "{i}+1=?", "answer": "{i + 1}", "level": {i % 3}}}\n' for i in range(24)]
    data.write_text("".join(rows))
    reward.write_text("def score(response):\n    return 1.0\n")
    common = [
        "--config-name", "grpo_arithmetic", *SMALL, f"env.dataset={data}", f"env.reward={reward}:score",
        "env.curriculum=0.9", "env.test_fraction=0.2", "evaluation.num_prompts=0", "inference_model.max_new_tokens=4",
        "train.checkpoint_frequency=9", "env.num_envs=32", "env.repeats=8",
    ]  # fmt: skip
    assert (
        run_here(
            SYNC, *common, "train.total_dialog_turns=384", f"hydra.run.dir={tmp_path / 'whole'}"
        )
        == 0
    )
    assert (
        run_here(
            SYNC, *common, "train.total_dialog_turns=288", f"hydra.run.dir={tmp_path / 'half'}"
        )
        == 0
    )
    resume = (f"train.resume={tmp_path / 'half' / 'checkpoints'}", "train.total_dialog_turns=384")
    assert run_here(SYNC, *common, *resume, f"hydra.run.dir={tmp_path / 'rest'}") == 0
    whole = rows_of(tmp_path / "whole")[1:]
    rest = rows_of(tmp_path / "rest")
    assert [row["rollout/level"] for row in whole] == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2]
    for name in ("rollout/level", "rollout/response_length", "rollout/prompt_length"):
        assert [row.get(name) for row in rest if row["step"] > 9] == [
            row.get(name) for row in whole[9:]
        ], name


def pass_rate_drawing(size: int = 1000, target: float = 0.5, floor: float = 0.1) -> Drawing:
    task = Leveled([None] * size)
    drawing = Drawing(task, task.all, range(size))
    drawing.pass_rate = (target, floor)
    return drawing


@pytest.mark.parametrize(
    ("target", "right", "share"),
    # max(floor, 1 - |p - target| / max(target, 1 - target)) with p = right / 4
    [
        (0.5, 0, 0.1),
        (0.5, 1, 0.5),
        (0.5, 2, 1.0),
        (0.5, 4, 0.1),
        (0.75, 0, 0.1),
        (0.75, 2, 2 / 3),
        (0.25, 3, 1 / 3),
    ],
)
def test_an_epoch_draws_a_problem_as_often_as_its_pass_rate_says(
    target: float, right: int, share: float
) -> None:
    drawing = pass_rate_drawing(4000, target)
    assert (
        len({drawing.draw().index for _ in range(4000)}) == 4000
    )  # problems without outcomes are always drawn
    drawing.record((index, number < right) for index in range(4000) for number in range(4))
    drawn = []
    while drawing.epoch < 2:
        drawn.append(drawing.draw().index)
    assert len(drawn) - 1 == len(set(drawn[:-1])) == pytest.approx(4000 * share, abs=100)


def test_drawing_by_pass_rate_goes_on_after_a_restart_as_it_would_have() -> None:
    drawing, again = pass_rate_drawing(50), pass_rate_drawing(50)
    for drawn in [drawing.draw() for _ in range(60)]:
        drawing.record([(drawn.index, drawn.index % 3 == 0)] * 2)
    again.load_state_dict(drawing.state_dict())
    expected = [drawing.draw() for _ in range(100)]
    assert [again.draw() for _ in range(100)] == expected
    assert len({group.index for group in expected}) < 50 and drawing.epoch > 3


def test_pass_rate_and_difficulty_filter_work_together() -> None:
    drawing = pass_rate_drawing(40, floor=1.0)
    drawing.difficulty_filter = (0.2, 0.8)
    for _ in range(40):
        index = drawing.draw().index
        drawing.record([(index, True), (index, index % 2 == 0)])
    assert {drawing.draw().index for _ in range(20)} == set(range(1, 40, 2))


@pytest.mark.slow
def test_settings_of_the_pass_rate_are_read_with_it_alone() -> None:
    with pytest.raises(ConfigError, match=r"env\.sampling_floor=0\.2 .* env\.sampling=uniform"):
        compose_config("env.sampling_floor=0.2")
    config = compose_config(
        *SMALL, "env.sampling=pass_rate", "env.sampling_target=0.6", "evaluation.num_prompts=0"
    )
    assert prepare(config).train_env.drawing.pass_rate == (0.6, 0.1)
