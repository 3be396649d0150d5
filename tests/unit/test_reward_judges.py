"""The reward ``judge``, behind a real HTTP server."""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import cloudpickle
import pytest

from tests.support.judges import serving
from tests.support.waiting import until
from torchrl_grpo.integrations.graders.judge import TEMPLATE, read_rating
from torchrl_grpo.tasks.base import Dialog, Problem
from torchrl_grpo.tasks.with_rewards import Rewards, make_rewards

pytest.importorskip("httpx2")

Answer = tuple[int, str]
"""A status, and the judge's text or the error."""


class Judge:
    """An OpenAI-compatible endpoint that replies by a rule, and records requests and their
    concurrency.
    """

    def __init__(self, rule: Callable[[str, int], Answer]) -> None:
        self.rule, self.requests, self.keys, self.busy, self.most = rule, [], [], 0, 0  # type: ignore[var-annotated]
        self.cuts = False  # whether replies end at max_tokens
        lock = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(handler) -> None:
                body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
                with lock:
                    self.requests.append((handler.path, body))
                    self.keys.append(handler.headers.get("Authorization"))
                    number, self.busy = len(self.requests), self.busy + 1
                    self.most = max(self.most, self.busy)
                status, text = self.rule(body["messages"][0]["content"], number)
                with lock:
                    self.busy -= 1
                reason = "length" if self.cuts else "stop"
                message = {
                    "choices": [
                        {"message": {"role": "assistant", "content": text}, "finish_reason": reason}
                    ]
                }
                sent = json.dumps(message if status == 200 else {"error": text}).encode()
                handler.send_response(status)
                handler.send_header("Content-Length", str(len(sent)))
                handler.end_headers()
                handler.wfile.write(sent)

            def log_message(handler, *args: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def serve() -> Iterator[Callable[[Callable[[str, int], Answer]], Judge]]:
    yield from serving(Judge)


def dialog(response: str = "It is 42.") -> Dialog:
    return Dialog(Problem("6*7=?", "42"), [response])


def rewards_of(judge: Judge, **options: Any) -> Rewards:
    return make_rewards({"fn": "judge", "url": judge.url, "model": "judge-7b", **options})


def test_a_judge_rates_on_its_scale(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = serve(lambda question, number: (200, "It is right.\nScore: 7/12"))
    monkeypatch.setenv("MY_KEY", "secret")
    assert (
        rewards_of(judge, scale=[2, 12], api_key_env="MY_KEY", max_tokens=99)(dialog()).reward
        == 0.5
    )
    ((path, body),) = judge.requests
    assert (path, body["model"], body["max_tokens"], body["temperature"]) == (
        "/v1/chat/completions", "judge-7b", 99, 0.0,
    )  # fmt: skip
    prompt = body["messages"][0]["content"]
    assert "from 2 (worst) to 12 (best)" in prompt and "6*7=?" in prompt and "It is 42." in prompt
    assert judge.keys == ["Bearer secret"]


def test_a_custom_template_is_filled_in_once(serve: Any) -> None:
    judge = serve(lambda question, number: (200, "10"))
    template = 'Right is {answer}, this says {response}. Answer as {"score": n}.'
    assert rewards_of(judge, template=template)(dialog("{answer} {prompt}")).reward == 1.0
    prompt = judge.requests[0][1]["messages"][0]["content"]
    assert prompt == 'Right is 42, this says {answer} {prompt}. Answer as {"score": n}.'
    assert "{response}" in TEMPLATE and judge.keys == [None]


@pytest.mark.parametrize(
    "reply", ["Score: 11", "Score: -1", "no idea", "", None, "Score: 1234567890123"]
)
def test_a_reply_without_a_rating_on_the_scale_is_an_error(serve: Any, reply: str) -> None:
    judge = serve(lambda question, number: (200, reply))
    with pytest.raises(ValueError, match=r"judge judge-7b .*0 to 10"):
        rewards_of(judge)(dialog())
    assert len(judge.requests) == 1


@pytest.mark.parametrize(
    ("reply", "rating"),
    [
        ("Score (0-10): 7", 7),
        ("**Score (1-5):** 4", 4),
        ("Score [0-10]: 7", 7),
        ("score = **7**/10", 7),
        ("Score: 7 out of 10, because of 3 errors", 7),
        ('{"score": 7, "max": 10}', 7),
        ("Score: 7\nThe score 0-10 measures correctness.", 7),
        ("Score: 7\n2. The next", 7),
        ("Score: 7\nFinal score: see above", 7),
        ("Score: .5", 0.5),
        ("Score: -.5", -0.5),
        ("Score: \u22123", -3),
        ("Score: 1e-1", 0.1),
        ("Score: 7,5", 7.5),
        ("7,5", 7.5),
        ("Score 1: 8\nScore 2: 6", None),
        ("Score: 2\nScore: 7 or 8", None),
        *((f"Score: {text}", None) for text in ("7-8", "7 to 8", "7–8", "7½", "3 1/2", "7,500")),
        *((f"Score: {text}", None) for text in ("4/5", "85%", "7x", "<7>", "- 7", "7.5e", "7 8")),
        ("7/10", None),
        ("I give 7", None),
    ],
)
def test_the_last_complete_number_after_score_is_the_rating(
    reply: str, rating: float | None
) -> None:
    assert read_rating(reply) == rating


@pytest.mark.slow
def test_a_reply_that_was_cut_off_is_no_rating(serve: Any) -> None:
    """``Score: 1`` may have been the start of ``Score: 10``."""
    judge = serve(lambda question, number: (200, "Score: 1"))
    judge.cuts = True
    with pytest.raises(ValueError, match=r"judge judge-7b .*max_tokens=512"):
        rewards_of(judge)(dialog())


@pytest.mark.parametrize("reply", [7, ["Score: 7"], {"text": "Score: 7"}, True])
def test_a_reply_that_is_no_text_is_an_error(serve: Any, reply: Any) -> None:
    judge = serve(lambda question, number: (200, reply))
    with pytest.raises(RuntimeError, match="must answer as OpenAI's API does"):
        rewards_of(judge)(dialog())


@pytest.mark.slow
def test_an_overloaded_judge_is_asked_again(serve: Any) -> None:
    judge = serve(lambda question, number: (503, "busy") if number < 3 else (200, "Score: 5"))
    assert rewards_of(judge, retries=2)(dialog()).reward == 0.5
    assert len(judge.requests) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "options", "requests", "message"),
    [
        (
            (500, "broken"),
            {"retries": 1},
            2,
            "2 attempts: status 500, .*broken.*: start it, or fix",
        ),
        ((404, "no such model"), {}, 1, "1 attempts: status 404, .*no such model"),
        ((200, "Score: 1"), {"retries": 1, "timeout_s": 1}, 2, "no answer within 1 s"),
    ],
)
def test_a_judge_that_does_not_answer_is_an_error(
    serve: Any, answer: Answer, options: dict[str, Any], requests: int, message: str
) -> None:
    over = threading.Event()

    def rule(question: str, number: int) -> Answer:
        if "timeout_s" in options:
            over.wait()
        return answer

    judge = serve(rule)
    with pytest.raises(RuntimeError, match=message):
        rewards_of(judge, **options)(dialog())
    over.set()
    assert len(judge.requests) == requests


class Flood(BaseHTTPRequestHandler):
    """Send the letter x without end, or a small body that decompresses to a large one."""

    sent = 0

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        packed = self.path.startswith("/gzip")
        self.send_response(200)
        if packed:
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        part = gzip.compress(bytes(10_000_000)) if packed else b"x" * 1_000_000
        Flood.sent = 0
        with suppress(OSError):
            for _ in range(1 if packed else 300):
                self.wfile.write(part)
                Flood.sent += len(part)

    def log_message(self, *args: Any) -> None: ...


@pytest.mark.parametrize(
    ("path", "message"),
    [("plain", "must be under 4 MiB"), ("gzip", "must not be compressed, .* got 'gzip'")],
)
def test_a_judges_answer_is_read_up_to_a_limit(path: str, message: str) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Flood) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/{path}"
        with pytest.raises(RuntimeError, match=message):
            make_rewards({"fn": "judge", "url": url, "model": "m"})(dialog())
        server.shutdown()
    assert Flood.sent < 30_000_000  # including buffers on the way


def test_an_unreachable_judge_is_an_error() -> None:
    rewards = make_rewards(
        {"fn": "judge", "url": "http://127.0.0.1:9/v1", "model": "m", "retries": 0}
    )
    with pytest.raises(RuntimeError, match=r"http://127\.0\.0\.1:9/v1 .* ConnectError"):
        rewards(dialog())


def test_a_judge_rates_many_at_a_time_up_to_its_concurrency(serve: Any) -> None:
    def rule(question: str, number: int) -> Answer:
        until(lambda: judge.most >= 4)
        time.sleep(0.05)  # a fifth request would come
        return 200, f"Score: {question.count('x')}"

    judge = serve(rule)
    rewards = make_rewards(
        {"fn": "judge", "url": judge.url, "model": "m", "template": "{response}", "concurrency": 4}
    )
    rewards = cloudpickle.loads(cloudpickle.dumps(rewards))
    scores = rewards.score_all([dialog("x" * (i % 11)) for i in range(24)])
    assert [score.reward for score in scores] == [i % 11 / 10 for i in range(24)]  # type: ignore[union-attr]
    assert judge.most == 4


def test_options_that_a_judge_needs_are_asked_for_before_a_run() -> None:
    with pytest.raises(
        ValueError,
        match=r"needs model and url, .*\{fn: \.\.\., model: \.\.\.\}",
    ):
        make_rewards("judge").check(Problem("", "", {"question": ""}))
    with pytest.raises(ValueError, match=r"scale=\[3, 3\] .*\[low, high\]"):
        make_rewards({"fn": "judge", "url": "http://127.0.0.1:9", "model": "m", "scale": [3, 3]})(
            dialog()
        )
