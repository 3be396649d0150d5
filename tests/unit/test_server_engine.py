"""The engine of servers, before a stand-in for SGLang's; tests/vllm/test_server.py has vLLM's own."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.configs import SMALL, compose_config
from tests.support.models import response_log_probs
from tests.support.prompts import PROMPTS
from tests.support.sglang_stub import SGLangStub
from torchrl_grpo.advice.doctor import _memory_rows
from torchrl_grpo.assembly.blueprint import plan_rows, prepare
from torchrl_grpo.assembly.parts import make_engine
from torchrl_grpo.assembly.run import build
from torchrl_grpo.config import ConfigError
from torchrl_grpo.generation.base import EngineDeadError, SamplingParams
from torchrl_grpo.generation.server import ServerEngine
from torchrl_grpo.generation.servers import Answer
from torchrl_grpo.generation.stops import StopStrings
from torchrl_grpo.generation.transformers import TransformersEngine
from torchrl_grpo.models import loading
from torchrl_grpo.starter import starter_path
from torchrl_grpo.weights import named_weights

pytest.importorskip("httpx")
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
    with ServerEngine(stub.address, folder=tmp_path / "weights", tied=TIED, starts_within_s=1) as engine:
        yield engine


def moved() -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(starter_path()).float().eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.3 * weight.std() * torch.randn_like(weight) if weight.dim() > 1 else 0)
    return model


def closed_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


def test_greedy_tokens_are_those_of_the_engine_behind_the_server(engine: ServerEngine) -> None:
    local = TransformersEngine(AutoModelForCausalLM.from_pretrained(starter_path()).float().eval())
    params = SamplingParams(max_new_tokens=12, temperature=0)
    for there, here in zip(engine.generate(PROMPTS, 2, params), local.generate(PROMPTS, 2, params), strict=True):
        assert [one.tokens.tolist() for one in there] == [one.tokens.tolist() for one in here]
        torch.testing.assert_close(there[0].log_probs, here[0].log_probs, rtol=0, atol=1e-5)
        assert there[0].finish_reason == here[0].finish_reason and there[0].versions is None


def test_new_weights_come_through_the_folder_with_their_version(engine: ServerEngine, tmp_path: Path) -> None:
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
    found = []

    def respond(route: str, body: dict) -> tuple[int, dict]:
        if route == "/update_weights_from_disk":
            found.extend(path.name for path in Path(body["model_path"]).iterdir())
        return old(route, body)

    old = stub.respond
    monkeypatch.setattr(stub, "respond", respond)
    engine.update_weights(named_weights(moved()), 1)
    assert found == ["model.safetensors"]
    routes = [route for route, _ in stub.seen]
    assert routes[-3:] == ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]


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
    with pytest.raises(EngineDeadError, match=f"answered with weights '{label}', not with those of version 1"):
        engine.generate(PROMPTS[:1], 1, PARAMS)


def test_a_server_that_is_gone_is_the_end_of_its_engine(engine: ServerEngine, stub: SGLangStub) -> None:
    stub.stop()
    with pytest.raises(EngineDeadError, match=r"did not sample: \w+Error"):
        engine.generate(PROMPTS[:1], 1, PARAMS)
    with pytest.raises(EngineDeadError, match=r"did not pause: \w+Error"):
        engine.update_weights(named_weights(moved()), 1)
    stub.start(stub.port)


def test_an_engine_waits_for_a_server_that_starts(stub: SGLangStub) -> None:
    stub.stop()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ServerEngine, stub.address, starts_within_s=30)
        time.sleep(0.3)
        assert not waiting.done()
        stub.start(stub.port)
        waiting.result().close()


def test_a_stop_string_ends_a_response_with_the_token_that_completes_it(engine: ServerEngine) -> None:
    tokenizer = AutoTokenizer.from_pretrained(starter_path())
    [[whole]] = engine.generate(PROMPTS[:1], 1, SamplingParams(max_new_tokens=12, temperature=0))
    text = tokenizer.decode(whole.tokens[:3])
    stop = StopStrings([text[-1]], tokenizer)
    [[cut]] = engine.generate(PROMPTS[:1], 1, SamplingParams(max_new_tokens=12, temperature=0, stop=stop))
    length = next(i for i in range(1, 13) if text[-1] in tokenizer.decode(whole.tokens[:i]))
    assert cut.tokens.tolist() == whole.tokens[:length].tolist() and cut.finish_reason == "stop"
    assert len(cut.log_probs) == length


def test_each_response_is_told_when_its_prompt_is_done(engine: ServerEngine) -> None:
    told = []
    made = engine.generate(PROMPTS, 2, PARAMS, on_finished=lambda *what: told.append(what))
    assert sorted((request, number) for request, number, _ in told) == [
        (i, j) for i in range(len(PROMPTS)) for j in (0, 1)
    ]
    assert all(done is made[request][number] for request, number, done in told)


def test_without_a_folder_the_server_keeps_its_weights(stub: SGLangStub) -> None:
    with ServerEngine(stub.address) as engine:
        engine.update_weights(named_weights(moved()), 0)
        engine.generate(PROMPTS[:1], 1, PARAMS)
    assert "/update_weights_from_disk" not in [route for route, _ in stub.seen]


# From a config


def served(*addresses: str) -> list[str]:
    return [*SMALL, "inference_model.backend=server", f"inference_model.address=[{','.join(addresses)}]"]


def test_each_address_is_a_sampler_that_takes_no_device(stub: SGLangStub, tmp_path: Path) -> None:
    other = SGLangStub(str(starter_path()))
    blueprint = prepare(compose_config(*served(stub.address, other.address), "env.num_envs=32"), [])
    assert blueprint.plan.inference == ((CPU,), (CPU,)) and blueprint.plan.distributed
    assert [row["devices"] for row in plan_rows(blueprint)][1] == f"{stub.address}, {other.address}"
    blueprint.folder = tmp_path
    engines = [make_engine(blueprint, CPU, concurrent=True, number=number) for number in (0, 1)]
    assert [engine.address for engine in engines] == [stub.address, other.address]  # type: ignore[attr-defined]
    for engine in engines:
        engine.update_weights(named_weights(moved()), 1)
        engine.close()
    assert [server.seen[-2][1]["model_path"] for server in (stub, other)] == [
        str(tmp_path / f"served_weights_{number}") for number in (0, 1)
    ]
    assert list(tmp_path.iterdir()) == []
    other.stop()


def test_on_a_machine_with_accelerators_servers_take_none() -> None:
    from torchrl_grpo.runtime.placement import RoleRequest, plan_devices

    cards = [torch.device("cuda", index) for index in range(2)]
    nothing = dict.fromkeys(("train", "inference", "reference"), RoleRequest())
    plan = plan_devices(nothing, cards, needs_reference=True, servers=3)
    assert (plan.train, plan.inference, plan.reference) == ((cards[0],), ((CPU,),) * 3, (cards[1],))
    assert not plan.colocated


def test_an_evaluation_alone_loads_no_model_and_leaves_the_served_one(
    stub: SGLangStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "load_model", None)
    evaluates = ("train.total_dialog_turns=0", "evaluation.num_prompts=4", "policy.kl_coef=0.1")
    run = build(compose_config(*served(stub.address), *evaluates), tmp_path)
    assert [row["role"] for row in plan_rows(run.blueprint)] == ["inference (server)"]
    assert _memory_rows(run.blueprint) == []
    run.source.publish(run.learner.weights(), 0)
    metrics, rows = run.source.evaluate(sampled=False)
    run.close()
    assert 0 <= metrics["eval/pass@1"] <= 1 and len(rows) == 4
    routes = [route for route, _ in stub.seen]
    assert "/generate" in routes and "/update_weights_from_disk" not in routes


def test_a_checkpoint_is_not_what_a_server_would_evaluate() -> None:
    with pytest.raises(ConfigError, match=r"train\.resume=here must be left out with train\.total_dialog_turns=0 and"):
        compose_config(
            *served("http://a"), "train.total_dialog_turns=0", "evaluation.num_prompts=4", "train.resume=here"
        )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((), "inference_model.backend=server needs inference_model.address: use inference_model.address="),
        (("inference_model.address=[localhost:8000]",), "must have URLs of servers, 'localhost:8000' is none"),
        (("inference_model.address=[http://a,http://a/]",), "must name each server once"),
        (
            ("inference_model.address=[http://a]", "inference_model.num_devices=2"),
            "inference_model.num_devices=2 must be left out with inference_model.backend=server",
        ),
        (
            ("inference_model.address=[http://a]", "inference_model.backend=vllm"),
            "inference_model.address=['http://a'] must be [] with inference_model.backend=vllm",
        ),
    ],
)
def test_the_config_refuses_addresses_that_cannot_be(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        compose_config("inference_model.backend=server", *overrides)
    assert message in str(error.value)


def test_a_server_that_does_not_answer_is_refused_before_weights_load() -> None:
    address = f"http://127.0.0.1:{closed_port()}"
    with pytest.raises(ConfigError, match=f"address={address} must be a server that answers: .* Start it first"):
        prepare(compose_config(*served(address)), [])


def test_log_probs_of_temperature_1_are_refused(stub: SGLangStub) -> None:
    stub.raw = True
    with pytest.raises(ConfigError, match="must state log-probs of the distribution that it samples from"):
        prepare(compose_config(*served(stub.address)), [])


def test_a_short_context_is_refused(stub: SGLangStub) -> None:
    stub.context = 20
    with pytest.raises(ConfigError, match="has a context of 20 tokens, and prompt and response may take"):
        prepare(compose_config(*served(stub.address)), [])


@pytest.mark.parametrize(("size", "difference"), [(300, "larger"), (200, "smaller")])
def test_another_vocabulary_is_refused(size: int, difference: str, stub: SGLangStub) -> None:
    stub.vocabulary = size
    with pytest.raises(ConfigError, match=f"whose vocabulary has 261 tokens, and its own is {difference}"):
        prepare(compose_config(*served(stub.address)), [])


def test_sglang_does_not_keep_responses_over_an_update(stub: SGLangStub) -> None:
    with pytest.raises(ConfigError, match="in_flight=keep must be another one with the SGLang server"):
        prepare(compose_config(*served(stub.address), "inference_model.in_flight=keep"), [])


def test_the_key_goes_with_each_request(stub: SGLangStub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret\n")
    with ServerEngine(stub.address) as engine:
        engine.generate(PROMPTS[:1], 1, PARAMS)
    assert len(stub.keys) == 5 and set(stub.keys) == {"Bearer secret"}


@pytest.mark.parametrize("key", ["secret\nsecret", "s\u00e9cret"])
def test_a_key_that_cannot_be_sent_is_not_shown(key: str, stub: SGLangStub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", key)
    with pytest.raises(ValueError, match="environment variable VLLM_API_KEY must be a key of printable ASCII"):
        ServerEngine(stub.address)
    assert stub.keys == []


def test_tokens_without_a_label_are_of_no_known_weights(engine: ServerEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.update_weights(named_weights(moved()), 1)
    monkeypatch.setattr(engine._server, "complete", lambda *_: [Answer([5, 6], [-1.0, -1.0], "stop", [])])
    with pytest.raises(EngineDeadError, match="answered with weights 'without a label'"):
        engine.generate(PROMPTS[:1], 1, PARAMS)


def test_a_response_that_ends_in_an_error_is_not_asked_for_again(
    engine: ServerEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine._server, "complete", lambda *_: [Answer([5], [-1.0], "error", [])])
    with pytest.raises(EngineDeadError, match=r"ended a response with \['error'\]"):
        engine.generate(PROMPTS[:1], 1, PARAMS)
