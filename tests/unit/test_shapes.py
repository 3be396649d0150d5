"""The task of shapes: pictures match their problems, splits share no problem, and the scorer is
exact.
"""

from __future__ import annotations

import numpy as np
import pytest

from torchrl_grpo.tasks.base import Problem, Score
from torchrl_grpo.tasks.shapes import COLORS, SIZE, ShapesTask


@pytest.fixture(scope="module")
def task() -> ShapesTask:
    return ShapesTask()


def blobs(problem: Problem) -> list[int]:
    """Return the number of connected areas of the question's color in each quarter, counted in
    pixels.
    """
    [image] = problem.images
    color = COLORS[problem.query.removesuffix("=?")]
    mask = (np.asarray(image.open()) == color).all(-1)
    counts = []
    for rows in (slice(0, SIZE // 2), slice(SIZE // 2, SIZE)):
        for columns in (slice(0, SIZE // 2), slice(SIZE // 2, SIZE)):
            left = {tuple(place) for place in np.argwhere(mask[rows, columns])}
            counts.append(0)
            while left:
                counts[-1] += 1
                area = [left.pop()]
                while area:
                    y, x = area.pop()
                    near = {(y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)} & left
                    left -= near
                    area += near
    return counts


def test_pictures_have_as_many_shapes_as_the_answer_says(task: ShapesTask) -> None:
    apart = 0
    for problem in task.problems("test")[:100]:
        counts = blobs(problem)
        quadrants = list(problem.extra["quadrants"])
        assert problem.answer == str(sum(quadrants))
        assert [bool(n) for n in counts] == [bool(n) for n in quadrants]
        assert all(seen <= n for seen, n in zip(counts, quadrants, strict=True))
        apart += counts == quadrants  # shapes of neighboring cells may touch
    assert apart > 80


@pytest.mark.slow
def test_splits_share_no_picture(task: ShapesTask) -> None:
    tasks = [task, ShapesTask(seed=1), ShapesTask(difficulty=1)]
    train, test = (
        {problem.images[0].hash for task in tasks for problem in task.problems(split)}
        for split in ("train", "test")
    )
    assert (len(task.problems("train")), len(task.problems("test"))) == (4096, 512)
    assert len(test) > 1000
    # Without shapes all pictures are the same, whatever the question is.
    assert len(train & test) <= 1


@pytest.mark.parametrize("difficulty", [1, 2, 3])
def test_difficulty_is_a_third_of_the_largest_count(difficulty: int) -> None:
    answers = {int(problem.answer) for problem in ShapesTask(difficulty).problems("test")}
    assert answers == set(range(3 * difficulty + 1))


def test_message_has_the_answer_format_and_then_the_picture(task: ShapesTask) -> None:
    problem = task.problems("test")[0]
    [message] = task.messages(problem)
    text, image = message["content"]
    assert text == {"type": "text", "text": problem.query + " #### n"}
    assert image == {"type": "image", "image": problem.images[0]}


def test_scores_are_exact() -> None:
    task = ShapesTask()
    problem = Problem("red=?", "4")
    assert task.score(problem, ["1+0+2+1=4 #### 4"]) == Score(1.0, True)
    assert task.score(problem, ["1+0+2=3 #### 3"]) == Score(0.0, False)
    assert task.score(problem, ["4"]) == Score(0.0, False)


@pytest.mark.parametrize("difficulty", [0, 4])
def test_difficulty_out_of_range_is_an_error(difficulty: int) -> None:
    with pytest.raises(ValueError, match=f"difficulty must be from 1 to 3, got {difficulty}"):
        ShapesTask(difficulty)
