"""Judges that rank the responses to a problem, or check them against criteria, behind a real HTTP
server.
"""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.judges import Judge, by_length, serving, shown
from torchrl_grpo.tasks.base import Dialog, Problem, Score
from torchrl_grpo.tasks.with_rewards import make_rewards

pytest.importorskip("httpx2")


@pytest.fixture
def serve() -> Iterator[Callable[[Callable[[str], str]], Judge]]:
    yield from serving(Judge)


def by_place(question: str) -> str:
    return "Ranking: " + ", ".join(str(i + 1) for i in range(len(shown(question))))


def ranked(judge: Judge, responses: list[str], prompt: str = "1+1=?", **options: Any) -> Score:
    rewards = make_rewards({"fn": "judge_ranking", "judge": judge.options, **options})
    dialogs = [Dialog(Problem(prompt, "2"), [text]) for text in responses]
    return rewards(Dialog(Problem(prompt, "2"), ["-"], group=dialogs))


def test_a_ranking_is_a_reward_from_1_to_0_with_equal_responses_alike(serve: Any) -> None:
    judge = serve(by_length)
    parts = ranked(judge, ["aa", "a", "aaa", "aa"]).parts
    assert [parts[f"{i}/judge_ranking"] for i in range(4)] == [0.5, 0.0, 1.0, 0.5]
    assert [parts[f"{i}/judge_ranking/tokens"] for i in range(4)] == [3.0] * 4
    assert [parts[f"{i}/"] for i in range(4)] == [0.5, 0.0, 1.0, 0.5]
    again = ranked(judge, ["aa", "a", "aaa", "aa"]).parts
    assert again["0/judge_ranking"] == 0.5 and again["0/judge_ranking/tokens"] == 0
    assert len(judge.questions) == 1  # its answer is kept
    assert ranked(judge, ["b", "b"]).parts["1/judge_ranking"] == 0.5 and len(judge.questions) == 1


def test_the_oldest_answers_are_forgotten(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchrl_grpo.integrations.graders.judge._MAX_ANSWERS", 1)
    judge = serve(by_length)
    for responses in (["c", "cc"], ["c", "ccc"], ["c", "ccc"], ["c", "cc"]):
        ranked(judge, responses)
    assert len(judge.questions) == 3


def test_shuffling_removes_the_preference_for_a_place(serve: Any) -> None:
    judge = serve(by_place)
    sums = [0.0] * 4
    for number in range(200):
        parts = ranked(judge, ["a", "b", "c", "d"], f"{number}+1=?").parts
        sums = [total + parts[f"{i}/judge_ranking"] for i, total in enumerate(sums)]
    assert max(sums) - min(sums) < 200 * 0.15  # 1 x 200 if the order were always the same
    parts = ranked(judge, ["a", "b", "c", "d"], orders=2).parts
    assert [parts[f"{i}/judge_ranking"] for i in range(4)] == pytest.approx([0.5] * 4)
    assert parts["0/judge_ranking/agreement"] == 0
    honest = ranked(serve(by_length), ["a", "bb", "ccc"], orders=2).parts
    assert [honest[f"{i}/judge_ranking"] for i in range(3)] == [0.0, 0.5, 1.0]
    assert honest["2/judge_ranking/agreement"] == 1


@pytest.mark.parametrize(
    "reply",
    [
        "Ranking: 1 > 1 > 2",
        "Ranking: 1 > 2",
        "Ranking: 1 > 2 > 3 > 4",
        "3 2 1",
        "Ranking: 0 > 1 > 2",
    ],
)
def test_a_malformed_ranking_is_an_error(serve: Any, reply: str) -> None:
    with pytest.raises(ValueError, match="rank 3 responses"):
        ranked(serve(lambda question: reply), ["a", "b", "c"])


@pytest.mark.slow
def test_a_slow_or_dead_judge_is_an_error_and_is_asked_again_later(serve: Any) -> None:
    problems, over = iter(["slow", "dead"]), threading.Event()

    def rule(question: str) -> str:
        match next(problems, ""):
            case "slow":
                over.wait()
            case "dead":
                raise ValueError("dead")
        return by_length(question)

    judge = serve(rule)
    judge.options["timeout_s"] = 2
    for _ in range(2):
        with pytest.raises(RuntimeError, match="must answer"):
            ranked(judge, ["a", "bb"])
    over.set()
    judge.options["timeout_s"] = 60
    assert ranked(judge, ["a", "bb"]).parts["1/judge_ranking"] == 1


def test_a_judge_that_dies_between_two_orders_ranks_nothing(serve: Any) -> None:
    replies = iter([by_length])

    def rule(question: str) -> str:
        for reply in replies:
            return reply(question)
        raise ValueError("dead")

    with pytest.raises(RuntimeError, match="dead"):
        ranked(serve(rule), ["a", "bb"], orders=2)


CRITERIA = ["Says 2", {"criterion": "Is polite", "weight": 3, "name": "polite"},
            {"criterion": "Swears", "weight": -2, "name": "swears"}]  # fmt: skip


def checked(judge: Judge, response: str, criteria: Any = CRITERIA, **options: Any) -> Any:
    spec = {"fn": "rubric", "judge": judge.options, **options}
    return make_rewards(spec)(Dialog(Problem("1+1=?", "2", {"criteria": criteria}), [response]))


def verdicts(question: str) -> str:
    response = question.split("<response>")[1].split("</response>")[0]
    criteria = re.findall(
        r"^(\d+): (.*)$", question.split("<criteria>")[1].split("</criteria>")[0], re.M
    )
    words = {"Says 2": "2", "Is polite": "please", "Swears": "damn"}
    return "\n".join(
        f"{number}: {'yes' if words[text] in response else 'no'}" for number, text in criteria
    )


@pytest.mark.parametrize("together", [True, False])
def test_a_rubric_is_the_weighted_share_of_what_is_met(serve: Any, together: bool) -> None:
    judge = serve(verdicts)
    score = checked(judge, "2, please", together=together)
    requests = 1 if together else 3
    assert (score.reward, score.correct, len(judge.questions)) == (1.0, True, requests)
    assert score.parts == {
        "rubric": 1.0, "rubric/1": 1.0, "rubric/polite": 1.0, "rubric/swears": 0.0,
        "rubric/tokens": 12.0 * requests,
    }  # fmt: skip
    score = checked(judge, "please, damn", together=together)
    assert (score.reward, score.correct) == (0.25, False)  # (3 - 2) / (1 + 3)
    assert checked(judge, "damn").reward == 0
    option = make_rewards({"fn": "rubric", "judge": judge.options, "criteria": ["Says 2"]})
    assert option(Dialog(Problem("1+1=?", "2"), ["2"])).parts["rubric/1"] == 1


def test_repeated_judgments_are_averaged_and_their_agreement_is_a_part(serve: Any) -> None:
    rng = random.Random(0)
    replies = iter(["1: yes", "1: no", "1: yes", "1: yes"])
    lock = threading.Lock()

    def rule(question: str) -> str:
        with lock:
            return next(replies) if rng else ""

    score = checked(serve(rule), "2", ["Says 2"], judgments=4)
    assert score.parts["rubric"] == score.parts["rubric/agreement"] == 0.75


@pytest.mark.parametrize(
    "reply", ["1: yes", "1: yes\n2: yes\n2: no\n3: no", "1: yes\n2: maybe\n3: no", "yes no yes", ""]
)
def test_a_missing_or_contradictory_verdict_is_an_error(serve: Any, reply: str) -> None:
    with pytest.raises(ValueError, match="verdict on each of 3"):
        checked(serve(lambda question: reply), "2")


@pytest.mark.parametrize(
    "criteria", [[], [{"criterion": "a", "weight": -1}], [{"criterion": "a", "name": "tokens"}]]
)
def test_criteria_that_cannot_be_weighed_are_refused(serve: Any, criteria: Any) -> None:
    with pytest.raises(ValueError, match="criteria"):
        checked(serve(verdicts), "2", criteria)


def test_each_judgment_has_its_own_seed_after_that_of_the_judge(serve: Any) -> None:
    judge = serve(verdicts)
    judge.options["seed"] = 7
    assert checked(judge, "2", ["Says 2"], judgments=2, together=False).reward == 1
    ranked(judge_by_length := serve(by_length), ["a", "bb"])
    judge_by_length.options["seed"] = 5
    assert ranked(judge_by_length, ["a", "bb"]).parts["1/judge_ranking"] == 1
    assert sorted(body["seed"] for body in judge.bodies) == [7, 8]  # asked at the same time
    assert [body.get("seed") for body in judge_by_length.bodies] == [None, 5]


@pytest.mark.parametrize("reward", ["judge_ranking", "rubric"])
@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"seed": "a"}, "judge.seed='a'"),
        ({"messages": []}, "judge.messages"),
        ({"question": "?"}, "judge.question"),
        ({"stream": True}, "judge.stream"),
        ({"template": "?"}, "judge.template"),
        ({"concurrency": 0}, "judge.concurrency=0"),
        ({"retries": 1.5}, "judge.retries=1.5"),
        ({"timeout_s": 0}, "judge.timeout_s=0"),
        ({"max_tokens": "many"}, "judge.max_tokens='many'"),
        ({"temperature": -1}, "judge.temperature=-1"),
        ({"url": 5}, "judge.url=5"),
    ],
)
def test_wrong_options_of_a_judge_are_refused_first(
    reward: str, changes: dict[str, Any], key: str
) -> None:
    judge = {"url": "http://127.0.0.1:9/v1", "model": "judge", "temperature": 1, "top_p": 0.5}
    make_rewards({"fn": reward, "judge": judge})
    with pytest.raises(ValueError, match=rf"{re.escape(key)} of the reward {reward} must .*: "):
        make_rewards({"fn": reward, "judge": {**judge, **changes}})


@pytest.mark.parametrize(
    ("spec", "key"),
    [
        ({"fn": "judge_ranking", "judge": {"url": "http://127.0.0.1:9"}}, "judge="),
        ({"fn": "rubric", "judge": "http://127.0.0.1:9"}, "judge="),
        ({"fn": "judge_ranking", "orders": 3}, "orders=3"),
        ({"fn": "rubric", "judgments": 0}, "judgments=0"),
        ({"fn": "rubric", "criteria": [5]}, "criteria"),
        ({"fn": "judge", "scale": [10, 0]}, "scale="),
        ({"fn": "judge", "scale": 10}, "scale=10"),
        ({"fn": "judge", "retries": -1}, "retries=-1"),
    ],
)
def test_wrong_options_of_rewards_with_a_judge_are_refused_first(
    spec: dict[str, Any], key: str
) -> None:
    with pytest.raises(ValueError, match=rf"{re.escape(key)}.* must "):
        make_rewards(spec)
