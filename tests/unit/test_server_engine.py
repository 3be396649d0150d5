"""The engine of servers, with stand-ins for SGLang's and vLLM's; tests/vllm/test_server.py runs
vLLM's own.
"""

from __future__ import annotations

import copy
import json
import pickle
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.configs import SMALL, compose_config
from tests.support.models import make_lora, response_log_probs
from tests.support.ports import free_port
from tests.support.prompts import PROMPTS
from tests.support.sglang_stub import SGLangStub
from tests.support.weights import Trained
from torchrl_grpo.assembly.prepare import prepare
from torchrl_grpo.assembly.roles import make_engine
from torchrl_grpo.assembly.run import build
from torchrl_grpo.assembly.shares import shares
from torchrl_grpo.config import ConfigError
from torchrl_grpo.errors import ReceiptError
from torchrl_grpo.extras.doctor.doctor import memory_rows
from torchrl_grpo.generation.base import EngineDeadError, SamplingParams
from torchrl_grpo.generation.stops import StopStrings
from torchrl_grpo.generation.transformers import TransformersEngine
from torchrl_grpo.integrations.server_answers import SampleRequest
from torchrl_grpo.integrations.server_engine import ServerEngine
from torchrl_grpo.integrations.servers import WrongAnswerError
from torchrl_grpo.models import loading
from torchrl_grpo.starter import starter_path
from torchrl_grpo.weights import ObjectSender, named_weights
from torchrl_grpo.weights.adapters import AdapterSender

pytest.importorskip("httpx2")
PARAMS = SamplingParams(max_new_tokens=12, temperature=0.7)
TIED = {"lm_head.weight": "model.embed_tokens.weight"}
CPU = torch.device("cpu")


@pytest.fixture
def stub() -> Iterator[SGLangStub]:
    server = SGLangStub(str(starter_path()))
    yield server
    server.stop()


@pytest.fixture
def engine(stub: SGLangStub, tmp_path: Path) -> Iterator[ServerEngine]:
    with ServerEngine(
        stub.address, folder=tmp_path / "weights", tied=TIED, starts_within_s=1
    ) as engine:
        yield engine


def moved() -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(starter_path()).float().eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.3 * weight.std() * torch.randn_like(weight) if weight.dim() > 1 else 0)
    return model


@pytest.mark.slow
def test_greedy_tokens_are_those_of_the_engine_behind_the_server(engine: ServerEngine) -> None:
    local = TransformersEngine(AutoModelForCausalLM.from_pretrained(starter_path()).float().eval())
    params = SamplingParams(max_new_tokens=12, temperature=0)
    for there, here in zip(
        engine.generate(PROMPTS, 2, params), local.generate(PROMPTS, 2, params), strict=True
    ):
        assert [one.tokens.tolist() for one in there] == [one.tokens.tolist() for one in here]
        torch.testing.assert_close(there[0].log_probs, here[0].log_probs, rtol=0, atol=1e-5)
        assert there[0].finish_reason == here[0].finish_reason and there[0].versions is None


@pytest.mark.slow
def test_new_weights_come_through_the_folder_with_their_version(
    engine: ServerEngine, tmp_path: Path
) -> None:
    model = moved()
    engine.update_weights(named_weights(model), 3)
    assert list((tmp_path / "weights").iterdir()) == []
    for prompt, completions in zip(PROMPTS, engine.generate(PROMPTS, 2, PARAMS), strict=True):
        for done in completions:
            assert done.versions is not None and done.versions.unique().tolist() == [3]
            full = torch.cat([prompt, done.tokens])
            expected = response_log_probs(model, temperature=0.7)([full], [len(prompt)])[0].detach()
            torch.testing.assert_close(done.log_probs, expected, rtol=0, atol=1e-4)


def test_a_file_of_weights_is_never_seen_half_written(
    engine: ServerEngine, stub: SGLangStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = []

    def respond(route: str, body: dict) -> tuple[int, dict]:
        if route == "/update_weights_from_disk":
            reads.extend(path.name for path in Path(body["model_path"]).iterdir())
        return old(route, body)

    old = stub.respond
    monkeypatch.setattr(stub, "respond", respond)
    engine.update_weights(named_weights(moved()), 1)
    assert reads == ["model.safetensors"]
    routes = [route for route, _ in stub.seen]
    assert routes[-3:] == ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]


@pytest.mark.slow
def test_what_an_update_aborted_is_asked_for_again(engine: ServerEngine, stub: SGLangStub) -> None:
    engine.update_weights(named_weights(moved()), 1)
    stub.aborts = 2
    [[done]] = engine.generate(PROMPTS[:1], 1, PARAMS)
    assert done.finish_reason in ("stop", "length")
    assert [route for route, _ in stub.seen].count("/generate") == 3


@pytest.mark.parametrize("label", ["default", "0badcafe-1"])
def test_weights_that_were_not_given_by_this_engine_are_the_end_of_it(
    label: str, engine: ServerEngine, stub: SGLangStub
) -> None:
    engine.update_weights(named_weights(moved()), 1)
    stub.label = label
    with pytest.raises(EngineDeadError, match=f"version 1 or newer, got '{label}'"):
        engine.generate(PROMPTS[:1], 1, PARAMS)


def test_a_server_that_is_gone_is_the_end_of_its_engine(
    engine: ServerEngine, stub: SGLangStub
) -> None:
    stub.stop()
    with pytest.raises(EngineDeadError, match=r"did not sample: \w+Error"):
        engine.generate(PROMPTS[:1], 1, PARAMS)
    with pytest.raises(EngineDeadError, match=r"did not pause: \w+Error"):
        engine.update_weights(named_weights(moved()), 1)
    stub.start(stub.port)


def test_an_engine_waits_for_a_server_that_starts(stub: SGLangStub) -> None:
    stub.stop()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ServerEngine, stub.address, starts_within_s=300)
        time.sleep(0.3)
        assert not waiting.done()
        stub.start(stub.port)
        waiting.result().close()


def test_a_stop_string_ends_a_response_with_the_token_that_completes_it(
    engine: ServerEngine,
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(starter_path())
    [[whole]] = engine.generate(PROMPTS[:1], 1, SamplingParams(max_new_tokens=12, temperature=0))
    text = tokenizer.decode(whole.tokens[:3])
    stop = StopStrings([text[-1]], tokenizer)
    [[cut]] = engine.generate(
        PROMPTS[:1], 1, SamplingParams(max_new_tokens=12, temperature=0, stop=stop)
    )
    length = next(i for i in range(1, 13) if text[-1] in tokenizer.decode(whole.tokens[:i]))
    assert cut.tokens.tolist() == whole.tokens[:length].tolist() and cut.finish_reason == "stop"
    assert len(cut.log_probs) == length


@pytest.mark.slow
def test_each_response_is_told_when_its_prompt_is_done(engine: ServerEngine) -> None:
    reports = []
    completions = engine.generate(
        PROMPTS, 2, PARAMS, on_finished=lambda *what: reports.append(what)
    )
    assert sorted((request, number) for request, number, _ in reports) == [
        (i, j) for i in range(len(PROMPTS)) for j in (0, 1)
    ]
    assert all(done is completions[request][number] for request, number, done in reports)


def test_without_a_folder_the_server_keeps_its_weights(stub: SGLangStub) -> None:
    with ServerEngine(stub.address) as engine:
        engine.update_weights(named_weights(moved()), 0)
        engine.generate(PROMPTS[:1], 1, PARAMS)
    assert "/update_weights_from_disk" not in [route for route, _ in stub.seen]


# From a config


def served(*addresses: str) -> list[str]:
    return [
        *SMALL,
        "inference_model.backend=server",
        f"inference_model.address=[{','.join(addresses)}]",
    ]


@pytest.mark.slow
def test_each_address_is_a_sampler_that_takes_no_device(stub: SGLangStub, tmp_path: Path) -> None:
    other = SGLangStub(str(starter_path()))
    context = prepare(compose_config(*served(stub.address, other.address), "env.num_envs=32"), [])
    assert context.plan.inference == ((CPU,), (CPU,)) and context.plan.distributed
    assert shares(context)["inference"].row()["devices"] == f"{stub.address}, {other.address}"
    context.folder = tmp_path
    engines = [make_engine(context, CPU, concurrent=True, number=number) for number in (0, 1)]
    assert [engine.address for engine in engines] == [stub.address, other.address]  # type: ignore[attr-defined]
    for engine in engines:
        engine.update_weights(named_weights(moved()), 1)
        engine.close()
    folders = [Path(server.seen[-2][1]["model_path"]) for server in (stub, other)]
    assert [folder.parent for folder in folders] == [tmp_path] * 2
    assert [folder.name[:16] for folder in folders] == ["served_weights_0", "served_weights_1"]
    assert list(tmp_path.iterdir()) == []
    other.stop()


def test_on_a_machine_with_accelerators_servers_take_none() -> None:
    from torchrl_grpo.runtime.placement import RoleRequest, plan_devices

    cards = [torch.device("cuda", index) for index in range(2)]
    nothing = dict.fromkeys(("train", "inference", "reference"), RoleRequest())
    plan = plan_devices(nothing | {"inference": RoleRequest(servers=3)}, cards)
    assert (plan.train, plan.inference, plan.reference) == ((cards[0],), ((CPU,),) * 3, (cards[1],))
    assert not plan.colocated


@pytest.mark.slow
def test_an_evaluation_alone_loads_no_model_and_leaves_the_served_one(
    stub: SGLangStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "load_model", None)
    evaluates = ("train.total_dialog_turns=0", "evaluation.num_prompts=4", "policy.kl_coef=0.1")
    run = build(compose_config(*served(stub.address), *evaluates), tmp_path)
    assert [share.label for share in shares(run.context).values()] == ["inference (server)"]
    assert memory_rows(run.context) == []
    run.rollouts.publish(run.learner.weights(), 0)
    metrics, rows = run.rollouts.evaluate(sampled=False)
    run.close()
    assert 0 <= metrics["eval/pass@1"] <= 1 and len(rows) == 4
    routes = [route for route, _ in stub.seen]
    assert "/generate" in routes and "/update_weights_from_disk" not in routes


def test_a_server_that_does_not_answer_is_refused_before_weights_load() -> None:
    address = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ConfigError, match=f"address={address} must be a server.* Start it"):
        prepare(compose_config(*served(address)), [])


def test_a_server_has_no_say_in_the_distribution() -> None:
    request = SampleRequest([1], 1, 2, 3, SamplingParams(4), 9, None, 0).sampling()
    neutral = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}
    assert neutral.items() <= request.items()
    assert (request["temperature"], request["top_p"], request["min_p"]) == (1, 1, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("server", "overrides", "message"),
    [
        ({"raw": True}, (), "log-probs of the distribution"),
        ({"context": 20}, (), "context of 20 tokens"),
        ({"vocabulary": 300}, (), "261 tokens, .*larger"),
        ({"vocabulary": 200}, (), "261 tokens, .*smaller"),
        ({}, ("inference_model.in_flight=keep",), r"in_flight=keep .*SGLang"),
    ],
)
def test_a_server_that_cannot_be_the_engine_is_refused(
    server: dict[str, Any], overrides: tuple[str, ...], message: str, stub: SGLangStub
) -> None:
    vars(stub).update(server)
    with pytest.raises(ConfigError, match=message):
        prepare(compose_config(*served(stub.address), *overrides), [])


def test_a_server_whose_rope_depends_on_its_context_is_refused(stub: SGLangStub) -> None:
    factors = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 300}
    model = str({"rope_parameters": {**rope, **factors}}).replace("'", "")
    config = compose_config(*served(stub.address), f"train_model.model_kwargs={model}")
    stub.context = 301
    with pytest.raises(ConfigError, match=r"inference_model\.address.* at most 300 tokens"):
        prepare(config, [])
    stub.context = 300
    prepare(config, [])


def test_the_key_goes_with_each_request(stub: SGLangStub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret\n")
    with ServerEngine(stub.address) as engine:
        engine.generate(PROMPTS[:1], 1, PARAMS)
    assert len(stub.keys) == 5 and set(stub.keys) == {"Bearer secret"}


@pytest.mark.parametrize("key", ["secret\nsecret", "s\u00e9cret"])
def test_a_key_that_cannot_be_sent_is_not_shown(
    key: str, stub: SGLangStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", key)
    with pytest.raises(ValueError, match=r"VLLM_API_KEY must .*ASCII"):
        ServerEngine(stub.address)
    assert stub.keys == []


@pytest.mark.slow
def test_two_runs_that_share_a_folder_of_weights_do_not_meet_in_it(
    stub: SGLangStub, tmp_path: Path
) -> None:
    context = prepare(
        compose_config(*served(stub.address), f"inference_model.weights_folder={tmp_path}"), []
    )
    for _ in range(2):
        with make_engine(context, CPU, concurrent=True, number=0) as engine:
            engine.update_weights(named_weights(moved()), 1)
    paths = [
        body["model_path"] for route, body in stub.seen if route == "/update_weights_from_disk"
    ]
    assert len(set(paths)) == 2 and list(tmp_path.iterdir()) == []


# Impossible replies

STOP, LIMIT, VOCABULARY = 1, 4, 261
STRICT = SamplingParams(LIMIT, stop_token_ids=(STOP,))
HEAD = {"lm_head.weight": torch.zeros(VOCABULARY, 2)}


class VLLMStub:
    """vLLM's routes instead of SGLang's; ``change`` is applied to each reply with samples before it
    is sent.
    """

    def __init__(self) -> None:
        self.label, self.asked = "", 0
        self.change: Callable[[dict], Any] = lambda answer: None

    def respond(self, route: str, body: Any) -> tuple[int, Any]:
        route = route.partition("?")[0]
        if route == "/v1/models":
            return 200, {"data": [{"id": "m", "max_model_len": 2048}]}
        if route == "/update_weight_version":
            self.label = body["new_version"]
        if route != "/inference/v1/generate":
            return (404 if route == "/get_model_info" else 200), {}
        self.asked += 1
        choices = [
            {
                "index": index,
                "token_ids": [5, 6, STOP],
                "finish_reason": "stop",
                "logprobs": {"content": [{"logprob": -1.0}, {"logprob": 0.0}, {"logprob": -20.5}]},
                "weight_versions": [{"version": self.label, "start": 0, "end": 3}],
            }
            for index in range(body["sampling_params"]["n"])
        ]
        answer: Any = {"choices": choices}
        replaced = self.change(answer)
        return 200, answer if replaced is None else replaced


@pytest.fixture(scope="module")
def http() -> Iterator[SGLangStub]:
    server = SGLangStub(str(starter_path()))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def engine_of_vllm(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[VLLMStub, ServerEngine]]:
    http = SGLangStub(str(starter_path()))
    stub = VLLMStub()
    http.respond = stub.respond  # type: ignore[method-assign]
    with ServerEngine(
        http.address, folder=tmp_path_factory.mktemp("weights"), starts_within_s=1
    ) as engine:
        yield stub, engine
    http.stop()


@pytest.fixture
def vllm(engine_of_vllm: tuple[VLLMStub, ServerEngine]) -> SimpleNamespace:
    """Yield the stub, and an engine whose server received versions 1 and 2."""
    stub, engine = engine_of_vllm
    stub.asked, stub.change = 0, lambda answer: None
    engine.load_state_dict({"policy_version": 0})
    engine.update_weights(HEAD.items(), 1)
    engine.update_weights(HEAD.items(), 2)
    return SimpleNamespace(stub=stub, engine=engine)


def put(*path: str | int, value: Any) -> Callable[[dict], None]:
    """Return a function that changes the second response."""

    def change(answer: dict) -> None:
        place = answer["choices"][1]
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value

    return change


def log_probs(*values: Any) -> Callable[[dict], None]:
    return put("logprobs", "content", value=[{"logprob": value} for value in values])


def spans(*stated: tuple[Any, Any, Any]) -> Callable[[dict], None]:
    """Return spans of weight versions; a number stands for this engine's label of that version."""

    def change(answer: dict) -> None:
        choice = answer["choices"][1]
        own = choice["weight_versions"][0]["version"].rpartition("-")[0]
        choice["weight_versions"] = [
            {
                "version": f"{own}-{label}" if isinstance(label, int) else label,
                "start": start,
                "end": end,
            }
            for label, start, end in stated
        ]

    return change


def ends(tokens: list[Any], reason: Any, scores: int | None = None) -> Callable[[dict], None]:
    def change(answer: dict) -> None:
        length = len(tokens) if scores is None else scores
        log_probs(*[-1.0] * length)(answer)
        answer["choices"][1] |= {"token_ids": tokens, "finish_reason": reason}
        spans((2, 0, len(tokens)))(answer)

    return change


LIES: dict[str, Callable[[dict], Any]] = {
    "one log-prob for all": log_probs(-0.5),
    "one log-prob fewer": log_probs(-1.0, -1.0),
    "one log-prob more": log_probs(-1.0, -1.0, -1.0, -1.0),
    "no log-probs": put("logprobs", value=None),
    "log-probs without an object": put("logprobs", "content", value=[-1.0, -1.0, -1.0]),
    "NaN": log_probs(-1.0, float("nan"), -1.0),
    "-Infinity": log_probs(-1.0, float("-inf"), -1.0),
    "null": log_probs(-1.0, None, -1.0),
    "text": log_probs(-1.0, "-1.0", -1.0),
    "a truth value as log-prob": log_probs(-1.0, False, -1.0),
    "positive": log_probs(-1.0, 5.0, -1.0),
    "vLLM's stand-in for -inf": log_probs(-1.0, -9999.0, -1.0),
    "an integer of 1,000 digits as log-prob": log_probs(-1.0, -(10**1000), -1.0),
    "beyond the vocabulary": put("token_ids", 0, value=VOCABULARY),
    "negative": put("token_ids", 0, value=-7),
    "a float as token": put("token_ids", 0, value=5.0),
    "a truth value as token": put("token_ids", 2, value=True),
    "an integer of 64 bits as token": put("token_ids", 0, value=2**63),
    "tokens as text": put("token_ids", value="abc"),
    "no tokens": ends([], "stop"),
    "too many tokens": ends([5] * (LIMIT + 1), "length"),
    "a stop without its token": ends([5, 6, 9], "stop"),
    "tokens after the stop": ends([STOP, 6, STOP], "stop"),
    "a length that is too short": ends([5, 6, 7], "length"),
    "a length that is too short, with a stop": ends([5, 6, STOP], "length"),
    "an error as reason": put("finish_reason", value="error"),
    "no reason": put("finish_reason", value=None),
    "a list as reason": put("finish_reason", value=["stop"]),
    "no versions": put("weight_versions", value=None),
    "versions that are no list": put("weight_versions", value={"version": 1}),
    "a version that was not given": spans((0, 0, 3)),
    "a version from before the request": spans((1, 0, 3)),
    "a version of the future": spans((999, 0, 3)),
    "a version that is no number": spans(("x", 0, 3)),
    "spans that overlap": spans((2, 0, 2), (2, 0, 3)),
    "a span that is missing": spans((2, 0, 1), (2, 2, 3)),
    "spans that end early": spans((2, 0, 2)),
    "a span that is too long": spans((2, 0, 10**12)),
    "a span that goes back": spans((2, 0, 3), (2, 3, 0), (2, 0, 3)),
    "a span with a float": spans((2, 0, 3.0)),
    "the same index twice": put("index", value=0),
    "an index that is a truth value": put("index", value=True),
    "a response too few": lambda answer: answer["choices"].pop(),
    "a response too many": lambda answer: answer["choices"].append(
        copy.deepcopy(answer["choices"][0]) | {"index": 2}
    ),
    "no responses": lambda answer: {"choices": []},
    "responses that are no objects": lambda answer: {"choices": [1, 2]},
    "no object": lambda answer: [answer],
    "HTML": lambda answer: b"<html>",
    "nothing": lambda answer: b"",
    "bytes of no text": lambda answer: b"\xff\xfe\xff",
    "nested without end": lambda answer: b'{"choices":' + b"[" * 100_000,
    "nested up to the limit": lambda answer: b'{"choices":' + b"[" * 900 + b"]" * 900 + b"}",
    "an integer of 5,000 digits": lambda answer: b'{"choices":' + b"1" * 5_000 + b"}",
    "larger than the request can need": lambda answer: json.dumps(answer).encode() + b" " * 2**21,
}


@pytest.mark.parametrize("lie", LIES)
def test_a_server_whose_answer_cannot_be_true_is_lost(lie: str, vllm: SimpleNamespace) -> None:
    vllm.stub.change = LIES[lie]
    with pytest.raises(
        EngineDeadError, match=r"^inference_model\.address: .* must answer as vLLM does"
    ) as error:
        vllm.engine.generate([torch.tensor([3, 4])], 2, STRICT)
    assert vllm.stub.asked == 1 and len(str(error.value)) < 1000
    assert str(error.value).isascii() and str(error.value).isprintable()
    assert type(pickle.loads(pickle.dumps(error.value))) is WrongAnswerError


@pytest.mark.parametrize(
    ("change", "tokens", "reason", "versions"),
    [
        (lambda answer: answer["choices"].reverse(), [5, 6, STOP], "stop", [2, 2, 2]),
        (ends([5, 6, 7, 8], "length"), [5, 6, 7, 8], "length", [2, 2, 2, 2]),
        (
            ends([5, 6, 7, STOP], "length"),
            [5, 6, 7, STOP],
            "stop",
            [2, 2, 2, 2],
        ),  # SGLang checks the length first
        (ends([STOP], "stop"), [STOP], "stop", [2]),
        (spans((2, 0, 1), (2, 1, 1), (2, 1, 3)), [5, 6, STOP], "stop", [2, 2, 2]),
        (log_probs(-1, 1e-6, -700.0), [5, 6, STOP], "stop", [2, 2, 2]),
    ],
)
def test_answers_that_can_be_true_are_read_in_full(
    change: Callable[[dict], Any],
    tokens: list[int],
    reason: str,
    versions: list[int],
    vllm: SimpleNamespace,
) -> None:
    vllm.stub.change = change
    [[first, second]] = vllm.engine.generate([torch.tensor([3, 4])], 2, STRICT)
    assert first.tokens.tolist() == [5, 6, STOP] and first.log_probs.tolist() == [-1.0, 0.0, -20.5]
    assert (second.tokens.tolist(), second.finish_reason) == (tokens, reason)
    assert second.versions is not None and second.versions.tolist() == versions
    assert len(second.log_probs) == len(tokens)


def test_a_response_that_runs_through_an_update_may_be_newer(vllm: SimpleNamespace) -> None:
    def change(answer: dict) -> None:
        if vllm.engine.policy_version == 2:
            vllm.engine.update_weights(HEAD.items(), 3)
        spans((2, 0, 1), (3, 1, 3))(answer)

    vllm.stub.change = change
    [[_, done]] = vllm.engine.generate([torch.tensor([3, 4])], 2, STRICT)
    assert done.versions.tolist() == [2, 3, 3]


def test_a_response_that_fills_the_context_may_be_short_of_the_limit(vllm: SimpleNamespace) -> None:
    vllm.stub.change = ends([5, 6, 7], "length")
    prompt = torch.full((2048 - LIMIT,), 3)
    [[_, done]] = vllm.engine.generate([prompt], 2, SamplingParams(100, stop_token_ids=(STOP,)))
    assert (done.tokens.tolist(), done.finish_reason) == ([5, 6, 7], "length")


def test_a_stop_string_may_end_a_response_without_a_stop_token(vllm: SimpleNamespace) -> None:
    vllm.stub.change = ends([5, 6, 9], "stop")
    stop = StopStrings(["no such text"], AutoTokenizer.from_pretrained(starter_path()))
    [[_, done]] = vllm.engine.generate([torch.tensor([3, 4])], 2, SamplingParams(LIMIT, stop=stop))
    assert (done.tokens.tolist(), done.finish_reason) == ([5, 6, 9], "stop")


def test_a_server_that_aborts_without_an_update_is_lost(vllm: SimpleNamespace) -> None:
    vllm.stub.change = ends([], "abort")
    with pytest.raises(EngineDeadError, match=r"inference_model\.address: .*abort"):
        vllm.engine.generate([torch.tensor([3, 4])], 2, STRICT)
    assert vllm.stub.asked == 5


@pytest.mark.slow
def test_updates_may_abort_a_response_as_often_as_they_come(vllm: SimpleNamespace) -> None:
    def change(answer: dict) -> None:
        if vllm.engine.policy_version < 12:
            vllm.engine.update_weights(HEAD.items(), vllm.engine.policy_version + 1)
            ends([], "abort")(answer)

    vllm.stub.change = change
    [[_, done]] = vllm.engine.generate([torch.tensor([3, 4])], 2, STRICT)
    assert done.versions.tolist() == [12, 12, 12] and vllm.stub.asked == 11


SGLANG_LIES: dict[str, Callable[[dict], Any]] = {
    "no log-prob": lambda info: info["output_token_logprobs"].__setitem__(0, [None, 5, None]),
    "a pair that is too short": lambda info: info["output_token_logprobs"].__setitem__(0, [-1.0]),
    "a float as token": lambda info: info["output_token_logprobs"].__setitem__(
        0, [-1.0, 5.0, None]
    ),
    "beyond the vocabulary": lambda info: info["output_token_logprobs"].__setitem__(
        0, [-1.0, VOCABULARY, None]
    ),
    "no tokens": lambda info: info["output_token_logprobs"].clear(),
    "no reason": lambda info: info.update(finish_reason=None),
    "an error as reason": lambda info: info["finish_reason"].update(type="error"),
    "no label": lambda info: info.pop("weight_version"),
    "a number as label": lambda info: info.update(weight_version=1),
}


@pytest.fixture
def sglang(
    http: SGLangStub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[SimpleNamespace]:
    """Return the replies of SGLang's routes, and an engine."""
    first = [[-1.0, 5, None], [-1.0, STOP, None]]
    info = {
        "output_token_logprobs": first,
        "finish_reason": {"type": "stop", "matched": STOP},
        "weight_version": "",
    }
    answers: dict[str, Any] = {
        "/get_model_info": {},
        "/get_server_info": {"context_length": None, "max_total_num_tokens": 2048},
        "/update_weights_from_disk": {"success": True},
        "/pause_generation": {},
        "/continue_generation": {},
        "/generate": {"meta_info": info},
    }

    def respond(route: str, body: Any) -> tuple[int, Any]:
        if "weight_version" in body:
            info["weight_version"] = body["weight_version"]
        return 200, answers[route]

    monkeypatch.setattr(http, "respond", respond)
    with ServerEngine(http.address, folder=tmp_path, starts_within_s=1) as engine:
        yield SimpleNamespace(answers=answers, info=info, engine=engine)


def test_an_answer_of_sglang_that_can_be_true_is_read_in_full(sglang: SimpleNamespace) -> None:
    sglang.engine.update_weights(HEAD.items(), 1)
    [[done]] = sglang.engine.generate([torch.tensor([3, 4])], 1, STRICT)
    assert (done.tokens.tolist(), done.versions.tolist(), done.finish_reason) == (
        [5, STOP],
        [1, 1],
        "stop",
    )


@pytest.mark.parametrize("lie", SGLANG_LIES)
def test_an_answer_of_sglang_that_cannot_be_true_is_lost(lie: str, sglang: SimpleNamespace) -> None:
    sglang.engine.update_weights(HEAD.items(), 1)
    SGLANG_LIES[lie](sglang.info)
    with pytest.raises(
        EngineDeadError, match=r"^inference_model\.address: .* must answer as SGLang does"
    ):
        sglang.engine.generate([torch.tensor([3, 4])], 1, STRICT)


@pytest.mark.parametrize(
    "answer", [[], {"success": "true"}, {}, None, {"success": False, "message": "no \x1b[2J"}]
)
def test_weights_that_a_server_does_not_say_to_have_are_not_there(
    answer: Any, sglang: SimpleNamespace
) -> None:
    sglang.answers["/update_weights_from_disk"] = answer
    with pytest.raises(EngineDeadError, match="did not load the weights") as error:
        sglang.engine.update_weights(HEAD.items(), 1)
    assert str(error.value).isprintable() and sglang.engine.policy_version == 0


@pytest.mark.parametrize("size", [None, "2048", 2048.0, True])
def test_a_context_that_is_no_number_is_refused_before_weights_load(
    size: Any, http: SGLangStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {"/v1/models": (200, {"data": [{"max_model_len": size}]})}
    monkeypatch.setattr(http, "respond", lambda route, body: answers.get(route, (404, {})))
    with pytest.raises(ConfigError, match=r"inference_model\.address: .*max_model_len"):
        prepare(compose_config(*served(http.address)), [])


def load(engine: ServerEngine, model: torch.nn.Module, version: int, changes: bool) -> None:
    handle = ObjectSender(torch.float32).pack(named_weights(model), version)
    handle.note(changes=changes)
    engine.load(handle, version)


@pytest.mark.slow
def test_a_server_that_only_claims_to_have_loaded_weights_is_an_error(
    engine: ServerEngine, stub: SGLangStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def respond(route: str, body: dict) -> tuple[int, dict]:
        if route != "/update_weights_from_disk":
            return old(route, body)
        stub.label = body["weight_version"]
        return 200, {"success": True}

    base, old = AutoModelForCausalLM.from_pretrained(starter_path()), stub.respond
    load(engine, base, 0, False)
    load(engine, moved(), 1, True)
    monkeypatch.setattr(stub, "respond", respond)
    with pytest.raises(ReceiptError, match="trained weights of version 2"):
        load(engine, base, 2, True)
    load(engine, moved(), 3, False)  # a step with a learning rate of 0
    assert engine.receipt_s > 0


@pytest.mark.slow
def test_a_sampler_may_find_the_weights_of_the_one_that_it_replaces(
    engine: ServerEngine, stub: SGLangStub, tmp_path: Path
) -> None:
    load(engine, moved(), 6, True)
    with ServerEngine(
        stub.address, folder=tmp_path / "second", tied=TIED, starts_within_s=1
    ) as second:
        load(second, moved(), 6, True)
        assert second.policy_version == 6


# Adapters


LORA = ("train_model.lora.enabled=true", "train_model.lora.r=4")


def send_adapters(engine: Any, model: torch.nn.Module, version: int) -> None:
    handle = AdapterSender(None).send(Trained(model), version)
    handle.note(changes=True)
    engine.load(handle, version)


@pytest.fixture
def adapted(stub: SGLangStub, tmp_path: Path) -> Iterator[ServerEngine]:
    """Return an engine of a server that has the weights of another run."""
    stub.adapters = {}
    stub.engine.update_weights(named_weights(moved()), 1)
    context = prepare(compose_config(*served(stub.address), *LORA), [])
    assert context.adapter_slots is not None and not stub.adapters
    context.folder = tmp_path
    with make_engine(context, CPU, concurrent=True) as engine:
        yield engine  # type: ignore[misc]


def test_requests_end_with_the_adapters_that_they_began_with(
    adapted: ServerEngine, stub: SGLangStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = AutoModelForCausalLM.from_pretrained(starter_path()).float()
    models = {version: make_lora(copy.deepcopy(base)).eval() for version in (1, 2)}
    send_adapters(adapted, models[1], 1)
    changed, old = [], stub._generate

    def generate(body: dict, engine: Any) -> Any:
        if not changed:
            changed.append(True)
            send_adapters(adapted, models[2], 2)
            assert len(stub.adapters or ()) == len(list(tmp_path.glob("served*/*"))) == 2
        return old(body, engine)

    monkeypatch.setattr(stub, "_generate", generate)
    for version in (1, 2):
        [[done]] = adapted.generate(PROMPTS[:1], 1, PARAMS)
        assert done.versions is not None and done.versions.unique().tolist() == [version]
        full = torch.cat([PROMPTS[0], done.tokens])
        score = response_log_probs(models[version], temperature=0.7)
        [expected] = score([full], [len(PROMPTS[0])])
        torch.testing.assert_close(done.log_probs, expected, rtol=0, atol=1e-4)
        assert len(stub.adapters or ()) == len(list(tmp_path.glob("served*/*"))) == 1


def test_a_server_that_only_claims_to_have_adapters_is_an_error(
    adapted: ServerEngine, stub: SGLangStub
) -> None:
    stub.idle = True
    with pytest.raises(ReceiptError, match="trained weights of version 1"):
        send_adapters(adapted, make_lora(AutoModelForCausalLM.from_pretrained(starter_path())), 1)


def test_a_server_that_has_lost_its_adapters_is_the_end_of_its_engine(
    adapted: ServerEngine, stub: SGLangStub
) -> None:
    send_adapters(adapted, make_lora(AutoModelForCausalLM.from_pretrained(starter_path())), 1)
    stub.adapters = {}
    with pytest.raises(EngineDeadError, match="was not loaded"):
        adapted.generate(PROMPTS[:1], 1, PARAMS)


def test_a_server_without_routes_for_adapters_gets_whole_weights(stub: SGLangStub) -> None:
    assert prepare(compose_config(*served(stub.address), *LORA), []).adapter_slots is None
