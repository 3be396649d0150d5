"""A teacher on a server: its scores compared with those of the same model here, refusals, and
failures.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from transformers import AutoModelForCausalLM

from tests.support.configs import SMALL, compose_config
from tests.support.sglang_stub import SGLangStub
from torchrl_grpo import keys
from torchrl_grpo.assembly.prepare import prepare
from torchrl_grpo.assembly.roles import make_teacher
from torchrl_grpo.assembly.shares import shares
from torchrl_grpo.config import ConfigError
from torchrl_grpo.generation.base import EngineDeadError
from torchrl_grpo.integrations import http_client, servers
from torchrl_grpo.integrations import server_answers as answers
from torchrl_grpo.integrations.served_teacher import ServedTeacher
from torchrl_grpo.models.scoring import TokenScorer
from torchrl_grpo.starter import starter_path
from torchrl_grpo.transforms.kl_scoring import KLScoring
from torchrl_grpo.transforms.teacher import TeacherStates

pytest.importorskip("httpx2")
CPU = torch.device("cpu")


@pytest.fixture
def stub() -> Iterator[SGLangStub]:
    server = SGLangStub(str(starter_path()))
    yield server
    server.hangs.set()
    server.stop()


def batch() -> TensorDictBase:
    """Return sequences of different lengths; one has two turns, and one has no sampled token."""
    rows = []
    for length, sampled in ((9, range(4, 9)), (14, [*range(5, 8), *range(10, 14)]), (6, ())):
        tokens = torch.randint(20, 90, (length,), generator=torch.Generator().manual_seed(length))
        mask = torch.zeros(length, dtype=torch.bool)
        mask[list(sampled)] = True
        rows.append(TensorDict({keys.FULL: tokens, keys.ASSISTANT_MASK: mask}))
    return lazy_stack(rows)


def scorer() -> TokenScorer:
    return TokenScorer(AutoModelForCausalLM.from_pretrained(starter_path()).float().eval())


def test_log_probs_are_those_of_the_teacher_in_this_process(stub: SGLangStub) -> None:
    here = KLScoring(scorer(), out_key=keys.TEACHER_LOG_PROBS)(batch())
    there = ServedTeacher(stub.address)(batch())
    for mine, served in zip(here.unbind(0), there.unbind(0), strict=True):
        torch.testing.assert_close(
            served[keys.TEACHER_LOG_PROBS], mine[keys.TEACHER_LOG_PROBS], rtol=0, atol=1e-5
        )
    bodies = [body for route, body in stub.seen if route == "/generate"]
    assert sorted((len(body["input_ids"]), body["logprob_start_len"]) for body in bodies) == [
        (9, 3),
        (14, 4),
    ]


def test_likely_tokens_are_those_of_the_teacher_in_this_process(stub: SGLangStub) -> None:
    here = TeacherStates(scorer(), top_k=3)(batch())
    there = ServedTeacher(stub.address, top_k=3)(batch())
    assert [tuple(row[keys.TEACHER_STATES].shape) for row in there.unbind(0)] == [
        (5, 6),
        (7, 6),
        (0, 6),
    ]
    for mine, served in zip(here.unbind(0), there.unbind(0), strict=True):
        torch.testing.assert_close(
            served[keys.TEACHER_STATES], mine[keys.TEACHER_STATES][:, :6], rtol=0, atol=1e-5
        )


def test_a_batch_that_is_scored_is_not_scored_again(stub: SGLangStub) -> None:
    teacher = ServedTeacher(stub.address)
    scored = teacher(batch())
    requests = len(stub.seen)
    assert teacher(scored) is scored and len(stub.seen) == requests


def test_an_overloaded_server_is_asked_again(
    stub: SGLangStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_client, "_MAX_PAUSE_S", 0)
    teacher = ServedTeacher(stub.address)
    one = batch()[:1]
    stub.busy = 1
    assert bool(teacher(one)[0][keys.TEACHER_LOG_PROBS][4:].lt(0).all())
    assert [route for route, _ in stub.seen].count("/generate") == 2


def test_a_server_that_stays_overloaded_hangs_or_is_gone_is_lost(
    stub: SGLangStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "_SCORE_RETRIES", 0)
    teacher = ServedTeacher(stub.address)
    stub.busy = 1
    with pytest.raises(EngineDeadError, match="did not score token ids: status 429"):
        teacher(batch()[:1])
    stub.hangs.clear()
    with (
        monkeypatch.context() as short,
        pytest.raises(EngineDeadError, match=r"not score .*: no answer within 0.05 s"),
    ):
        short.setattr(servers, "_ANSWER_S", 0.05)
        teacher(batch())
    stub.hangs.set()
    stub.stop()
    with pytest.raises(EngineDeadError, match=r"did not score token ids: \w+Error"):
        teacher(batch())
    stub.start(stub.port)


LIES: dict[str, Any] = {
    "of other tokens": lambda info: info["input_token_logprobs"][-1].__setitem__(1, 0),
    "no log-prob": lambda info: info["input_token_logprobs"][-1].__setitem__(0, None),
    "positive": lambda info: info["input_token_logprobs"][-1].__setitem__(0, 0.5),
    "NaN": lambda info: info["input_token_logprobs"][-1].__setitem__(0, float("nan")),
    "a stand-in for -inf": lambda info: info["input_token_logprobs"][-1].__setitem__(0, -9999.0),
    "too few": lambda info: info.update(input_token_logprobs=info["input_token_logprobs"][2:]),
    "too many": lambda info: info["input_token_logprobs"].append(info["input_token_logprobs"][-1]),
    "no likely ones": lambda info: info.pop("input_top_logprobs"),
    "too few likely ones": lambda info: info["input_top_logprobs"][-1].pop(),
    "a likely one twice": lambda info: info["input_top_logprobs"][-1].__setitem__(
        slice(None), info["input_top_logprobs"][-1][:1] * 2
    ),
    "probabilities over 1": lambda info: info["input_top_logprobs"][-1].__setitem__(
        slice(None), [[-0.1, 7, None], [-0.1, 8, None]]
    ),
    "beyond the vocabulary": lambda info: info["input_top_logprobs"][-1][0].__setitem__(1, 261),
    "a likely one with a float": lambda info: info["input_top_logprobs"][-1][0].__setitem__(1, 7.0),
}


@pytest.mark.parametrize("lie", LIES)
def test_scores_that_cannot_be_true_are_refused(
    lie: str, served: ServedTeacher, stub: SGLangStub
) -> None:
    def respond(route: str, body: Any) -> tuple[int, Any]:
        status, answer = right(route, body)
        LIES[lie](answer["meta_info"])
        return status, answer

    right = stub.respond
    stub.respond = respond  # type: ignore[method-assign]
    with pytest.raises(EngineDeadError, match=r"^teacher\.address: .* must answer as SGLang does"):
        served(batch())


@pytest.fixture
def served(stub: SGLangStub) -> ServedTeacher:
    return ServedTeacher(stub.address, top_k=2, vocabulary=261)


VLLM_LIES: dict[str, Any] = {
    "a key that is no number": {"x": {"logprob": -1.0}},
    "a key with a sign": {"+7": {"logprob": -1.0}},
    "a key in other digits": {"\u0667": {"logprob": -1.0}},
    "of another token": {"8": {"logprob": -1.0}},
    "beyond the vocabulary": {"7": {"logprob": -1.0}, "261": {"logprob": -1.0}},
    "more than were asked for": {"7": {"logprob": -1.0}, "8": {"logprob": -1.0}},
    "no log-prob": {"7": {"rank": 1}},
    "a number": {"7": -1.0},
    "nothing": None,
}


@pytest.mark.parametrize("lie", VLLM_LIES)
def test_scores_of_vllm_that_cannot_be_true_are_refused(lie: str) -> None:
    def read(last: Any) -> list[dict[int, float]]:
        answer = {
            "choices": [{"prompt_logprobs": [None, {"6": {"logprob": -2.0, "rank": 3}}, last]}]
        }
        return answers.read_vllm_scores(answer, [5, 6, 7], 1, 0, 261)

    assert read({"7": {"logprob": -1.0}}) == [{6: -2.0}, {7: -1.0}]
    with pytest.raises(ValueError, match=r"prompt_logprobs\[2\]"):
        read(VLLM_LIES[lie])


# From a config


def distilled(*addresses: str) -> list[str]:
    return [
        *SMALL,
        "algo=distill",
        "teacher.model=starter",
        f"teacher.address=[{','.join(addresses)}]",
    ]


@pytest.mark.slow
def test_each_address_is_a_teacher_that_takes_no_device(stub: SGLangStub) -> None:
    context = prepare(
        compose_config(*distilled(stub.address)), [torch.device("cuda", 0), torch.device("cuda", 1)]
    )
    assert context.plan.teacher == (CPU,) and context.plan.inference == (
        (torch.device("cuda", 1),),
    )
    assert context.prompt_tokens[0] + context.params.max_new_tokens + 1 == stub.context == 2048
    row = shares(context)["teacher"].row()
    assert (row["devices"], row["memory per device"]) == (stub.address, 0)
    _, [group] = make_teacher(context, number=0).score(batch())
    expected = KLScoring(scorer(), out_key=keys.TEACHER_LOG_PROBS)(batch())
    for mine, served in zip(expected.unbind(0), group.unbind(0), strict=True):
        torch.testing.assert_close(
            served[keys.TEACHER_LOG_PROBS], mine[keys.TEACHER_LOG_PROBS], rtol=0, atol=1e-5
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context": 20}, r"teacher\.address: .* context of 20 tokens, .* may take 101: "),
        ({"vocabulary": 300}, r"teacher\.model, .* 261 tokens, .* larger"),
        ({"vocabulary": 200}, r"teacher\.model, .* 261 tokens, .* smaller"),
        ({"raw": True}, r"must have log-probs from -1000 to 0, got \d"),
    ],
)
def test_a_server_that_cannot_be_the_teacher_is_refused(
    change: dict, message: str, stub: SGLangStub
) -> None:
    vars(stub).update(change)
    with pytest.raises(ValueError, match=message):
        ServedTeacher.check(stub.address, vocabulary=261, longest=100)


OF_VLLM: dict[str, Any] = {"/get_model_info": None}
NO_SCORES = {
    "/v1/models": {"data": [{"max_model_len": 2048}]},
    "/v1/completions": {"choices": [{"prompt_logprobs": None}]},
}


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({}, r"asked to name its model; .* must be JSON, got '<html>'"),
        ({"/get_model_info": {}, "/get_server_info": {}}, "as SGLang does .* max_total_num_tokens"),
        (OF_VLLM | {"/v1/models": {"data": []}}, r"as vLLM does .* data\[0\] is missing"),
        (OF_VLLM | {"/v1/models": {"data": [{"id": "a"}]}}, r"data\[0\].max_model_len is missing"),
        (OF_VLLM | NO_SCORES, r"^teacher\.address: .* as vLLM does .*prompt_logprobs"),
    ],
)
def test_a_server_of_another_kind_is_refused(answers: dict, message: str, stub: SGLangStub) -> None:
    def respond(route: str, body: object) -> tuple[int, object]:
        reply = answers.get(route, b"<html>")
        return (404, {}) if reply is None else (200, reply)

    stub.respond = respond
    with pytest.raises(ValueError, match=message):
        ServedTeacher.check(stub.address, vocabulary=261, longest=100)


@pytest.mark.slow
def test_a_teachers_server_must_answer(stub: SGLangStub) -> None:
    stub.stop()
    with pytest.raises(
        ConfigError,
        match=f"teacher.address={stub.address} must be a server.* Start it",
    ):
        prepare(compose_config(*distilled(stub.address)), [])
    stub.start(stub.port)


@pytest.mark.parametrize("address", ["a:8000", "http://a:99999", "'http://[::1'"])
def test_an_address_that_is_no_url_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"must have URLs of servers: use teacher\.address="):
        compose_config(*distilled("http://a"), f"teacher.address=[{address}]")
