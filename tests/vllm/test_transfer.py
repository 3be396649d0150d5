"""vLLM's weight transfer with real workers: a fast path beside the host's that works, fails, hangs
or corrupts weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import torchrl_grpo.generation.vllm as vllm_module
from tests.support.models import make_lora, make_tiny_model, response_log_probs
from tests.support.prompts import LONG_PROMPTS
from tests.support.weights import Trained, mismatch
from torchrl_grpo.errors import TransferRefusedError
from torchrl_grpo.generation.base import SamplingParams
from torchrl_grpo.generation.vllm import VLLMBase, VLLMEngine
from torchrl_grpo.generation.vllm_async import AsyncVLLMEngine
from torchrl_grpo.models.loading import CheckpointModel
from torchrl_grpo.weights import EitherHandle, Transfer, make_sender, named_weights
from torchrl_grpo.weights.adapters import AdapterHandle
from torchrl_grpo.weights.handle import DirectHandle
from torchrl_grpo.weights.shared import SharedWeights

PARAMS = SamplingParams(max_new_tokens=8)
CONTEXT, ROUNDING = 256, 1e-4


def make_model(seed: int = 0) -> torch.nn.Module:
    """Return a model with head size 32, the smallest that vLLM runs on a CPU."""
    return make_tiny_model(seed, hidden_size=128, initializer_range=0.1)


ASYNC = pytest.param(AsyncVLLMEngine, marks=pytest.mark.nightly)


@pytest.fixture(scope="module", params=[VLLMEngine, ASYNC])
def engine(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMBase]:
    folder = tmp_path_factory.mktemp("model")
    make_model().save_pretrained(folder)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(vllm_module, "WORKER_EXTENSION", "tests.support.transfers.Extension")
        engine = request.param(
            str(folder), max_model_len=CONTEXT, enforce_eager=True, kv_cache_gib=0.25
        )
    yield engine
    engine.close()


@pytest.fixture
def fresh(engine: VLLMBase, monkeypatch: pytest.MonkeyPatch) -> VLLMBase:
    """Make the engine look as if it had received no weights yet."""
    monkeypatch.setattr(vllm_module, "TRIAL_S", 60.0)
    engine._fast_works = engine._fast_failed = False
    return engine


def off(engine: VLLMBase, model: torch.nn.Module) -> float:
    """Return the largest difference from a model's log-probs."""
    return mismatch(engine, response_log_probs(model), LONG_PROMPTS, PARAMS)[1]


def either(model: torch.nn.Module, folder: Path, wrong: str = "") -> EitherHandle:
    def read() -> Any:
        return named_weights(model)

    from tests.support.transfers import FileWeights  # imports vLLM

    return EitherHandle(DirectHandle(read), FileWeights(folder, read, wrong))


def test_a_fast_way_that_works_is_compared_once_and_then_taken_alone(
    fresh: VLLMBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[str] = []
    receive = fresh._receive

    def spy(handle: Any, *rest: Any) -> None:
        received.append(handle.backend)
        receive(handle, *rest)

    monkeypatch.setattr(fresh, "_receive", spy)
    for version in (1, 2, 3):
        model = make_model(version)
        fresh.load(either(model, tmp_path), version)
        assert off(fresh, model) < ROUNDING
        assert fresh.policy_version == version
    assert received == ["object_store", "from_file", "from_file", "from_file"]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("raise", r"from_file: RuntimeError: no such link"),
        ("hang", r"from_file: nothing arrived in 1 s"),
        ("corrupt", r"from_file: .* bytes that arrived differ"),
        ("nothing", r"from_file: .* bytes that arrived differ"),
    ],
)
def test_a_fast_way_that_goes_wrong_is_left_and_nothing_is_lost(
    wrong: str, why: str, fresh: VLLMBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if wrong == "hang":
        monkeypatch.setattr(vllm_module, "TRIAL_S", 1.0)
    if wrong == "nothing":  # the weights that don't arrive are already there
        fresh.update_weights(named_weights(make_model(4)), 3)
    model = make_model(4)
    with pytest.raises(TransferRefusedError, match=why):
        fresh.load(either(model, tmp_path, wrong), 4)
    assert (off(fresh, model) < ROUNDING, fresh.policy_version) == (True, 4)
    model = make_model(5)
    fresh.load(either(model, tmp_path, wrong), 5)  # it is not tried again
    assert (off(fresh, model) < ROUNDING, fresh.policy_version) == (True, 5)


@pytest.mark.parametrize("wrong", ["raise", "hang"])
def test_a_fast_way_that_goes_wrong_later_is_left_and_nothing_is_lost(
    wrong: str, fresh: VLLMBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh.load(either(make_model(6), tmp_path), 6)
    assert fresh._fast_works
    if wrong == "hang":
        monkeypatch.setattr(vllm_module, "TRIAL_S", 1.0)
    model = make_model(7)
    with pytest.raises(TransferRefusedError, match="from_file"):
        fresh.load(either(model, tmp_path, wrong), 7)
    assert (off(fresh, model) < ROUNDING, fresh.policy_version) == (True, 7)


@pytest.mark.parametrize("base_dtype", [torch.float32, torch.bfloat16])
def test_workers_add_adapters_to_the_bit_as_the_host_does(
    base_dtype: torch.dtype, engine: VLLMBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    greedy = SamplingParams(max_new_tokens=8, temperature=0)
    base = CheckpointModel(engine._hf_config._name_or_path, base_dtype)
    sender = make_sender(Transfer("object_store"), dtype=None, lora_base=base)
    for version in (1, 2):
        torch.manual_seed(version)
        lora = make_lora(base=base())
        sent = sender.send(Trained(lora), version)
        assert isinstance(sent, AdapterHandle)
        engine.update_weights(sent.weights(), version)  # merged on the host
        expected = engine.generate(LONG_PROMPTS, 1, greedy)
        engine.update_weights(named_weights(make_model(9)), 0)
        with monkeypatch.context() as patched:
            patched.setattr(engine, "update_weights", None)
            engine.load(sent, version)
        got = engine.generate(LONG_PROMPTS, 1, greedy)
        for [one], [other] in zip(got, expected, strict=True):
            assert torch.equal(one.tokens, other.tokens) and torch.equal(
                one.log_probs, other.log_probs
            )
        if base_dtype == torch.float32:
            assert off(engine, lora) < ROUNDING


def test_adapters_of_unknown_names_are_added_on_the_host(engine: VLLMBase) -> None:
    base = CheckpointModel(engine._hf_config._name_or_path, torch.float32)
    lora = make_lora(base=base())
    sent = make_sender(Transfer("object_store"), dtype=None, lora_base=base).send(Trained(lora), 1)
    assert isinstance(sent, AdapterHandle) and engine._merges(sent)
    assert not engine._merges(
        replace(sent, layers=(("model.experts.gate_up_proj", 1.0), *sent.layers))
    )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_block_is_pinned_while_a_card_loads_it_without_mtp_layers(
    device: str, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The registration itself needs a card, so vLLM's function for it is replaced."""
    from vllm.model_executor.model_loader.mtp_validation import is_mtp_completeness_check_enabled

    from torchrl_grpo.weights import transfer_engine

    calls: list[Any] = []

    def load_weights(weights: Any) -> None:
        checks_mtp = is_mtp_completeness_check_enabled()
        calls.append(({name: value.sum().item() for name, value in weights}, checks_mtp))
        if fails:
            raise ValueError("no such weight")

    def register(place: int, size: int) -> bool:
        calls.append(("pinned", size))
        return True

    host = SimpleNamespace(host_register=register, host_unregister=lambda _: calls.append("freed"))
    monkeypatch.setattr(transfer_engine, "_host", host)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: calls.append("synchronized"))
    engine: Any = object.__new__(transfer_engine.ObjectStoreEngine)
    engine.device, engine.model = torch.device(device), SimpleNamespace(load_weights=load_weights)
    shared = SharedWeights([("norm", torch.ones(3)), ("embed", torch.ones(4, 2))], torch.float32)
    with pytest.raises(ValueError, match="no such weight") if fails else nullcontext():
        engine.receive_weights(transfer_engine.UpdateInfo(**next(shared.block.updates())))
    shared.close()
    loaded = ({"norm": 3.0, "embed": 8.0}, False)
    on_card = [("pinned", 44), loaded, "synchronized", "freed"]
    assert calls == ([loaded] if device == "cpu" else on_card)
    assert is_mtp_completeness_check_enabled()
