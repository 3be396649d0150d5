"""Receipts of weights: digests, their comparison, and faults of a sync in this process."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.models import make_lora, make_tiny_model
from tests.support.training import make_batch, make_trainer
from tests.support.weights import Trained
from torchrl_grpo.collectors.sampler import Sampler
from torchrl_grpo.errors import ReceiptError
from torchrl_grpo.generation.transformers import TransformersEngine
from torchrl_grpo.learner.learner import Learner
from torchrl_grpo.weights import DirectHandle, DirectSender, ObjectSender, named_weights
from torchrl_grpo.weights.adapters import AdapterHandle, AdapterSender
from torchrl_grpo.weights.handle import tensor_bytes
from torchrl_grpo.weights.object_store import PackedWeights
from torchrl_grpo.weights.receipts import compare, digest

MODULUS = 2**64
FACTOR = 0x9E3779B97F4A7C15


def by_hand(tensor: Tensor, chunk: int = 2**18) -> int:
    """Return the digest in Python's integers."""
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    data += bytes(-len(data) % 8)
    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]
    total = 0
    for start in range(0, len(words), chunk):
        part = words[start : start + chunk]
        own = sum(word * (2 * place + 1) * FACTOR for place, word in enumerate(part))
        total = (total * FACTOR + own) % MODULUS
    return total - MODULUS if total >= MODULUS // 2 else total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_a_digest_is_the_weighted_sum_of_the_words(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(7, 13, generator=generator) * 100).to(dtype)
    for view in (weight, weight.T, weight[1:, 1:], weight.reshape(-1)[3:], weight[:0]):
        assert digest(view).item() == by_hand(view) == digest(view.clone()).item()


def test_a_changed_moved_or_missing_byte_changes_the_digest() -> None:
    weight = torch.arange(2**21 + 100).remainder(251).to(torch.uint8)
    same = digest(weight).item()
    assert same == by_hand(weight)
    for place in (0, 2**21 - 1, 2**21, 2**21 + 99):
        other = weight.clone()
        other[place] += 1
        assert digest(other).item() != same
    for places in ([5, 9], [8, 80], [8, 2**21 + 8]):  # in a word, of words, of chunks
        moved = weight.clone()
        moved[places] = moved[places[::-1]]
        assert digest(moved).item() != same
    rows = torch.randn(64, 1024)
    assert digest(rows).item() != digest(rows[[1, 0, *range(2, 64)]]).item()
    signs = torch.ones(2**12, dtype=torch.float64)
    signs[6] = -1  # the highest bit of a word
    assert digest(signs).item() != digest(signs.abs()).item()


def test_a_comparison_names_each_tensor_that_did_not_arrive() -> None:
    expected = {"q": 1, "k": 2, "v": 3, "norm": 4}
    compare(expected, expected | {"more": 5}, "an engine")
    with pytest.raises(ReceiptError) as raised:
        compare(expected, {"q": 2, "k": 1, "v": 9}, "an engine")
    for part in (
        "q has the weights of k",
        "k has the weights of q",
        "v differs",
        "norm is missing",
    ):
        assert part in str(raised.value)


def handle_of(model: Any, **faults: Tensor) -> Any:
    """Return an object of the store, in which some tensors are others than those that were sent."""
    handle = ObjectSender(None).pack(named_weights(model), 0)
    tensors = tuple(
        (name, dtype, shape, tensor_bytes(faults[name]) if name in faults else data)
        for name, dtype, shape, data in handle.tensors
    )
    other = PackedWeights(tensors)
    other.note(receipt=handle.receipt)
    return other


Q, K = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "qk")


def faults_of(old: Any, new: Any) -> dict[str, tuple[dict[str, Tensor], str]]:
    """Return the tensors of each fault, and a part of its error."""
    before, after = (dict(named_weights(model)) for model in (old, new))
    return {
        "stale": ({Q: before[Q]}, rf"1 of them .*: {Q} differs"),
        "swapped": ({Q: after[K], K: after[Q]}, rf"{Q} has the weights of {K}"),
        "old file": (before, "of them did not arrive: .* differs"),
    }


@pytest.mark.parametrize("fault", ["stale", "swapped", "old file"])
def test_an_engine_refuses_weights_that_are_not_those_that_were_sent(fault: str) -> None:
    shape = {"num_key_value_heads": 4}  # q and k have the same shape
    old, new = make_tiny_model(1, **shape), make_tiny_model(2, **shape)
    engine = TransformersEngine(make_tiny_model(0, **shape))
    engine.load(handle_of(old), 1)
    faults, message = faults_of(old, new)[fault]
    with pytest.raises(ReceiptError, match=message):
        engine.load(handle_of(new, **faults), 2)
    engine.load(handle_of(new), 2)


def test_an_engine_refuses_adapters_that_are_not_those_that_were_sent() -> None:
    handle = AdapterSender(None).send(Trained(make_lora(make_tiny_model())), 1)
    assert isinstance(handle, AdapterHandle) and isinstance(handle.matrices, PackedWeights)
    engine = TransformersEngine(make_tiny_model())
    engine.load(handle, 1)
    (name, dtype, shape, data), *rest = handle.matrices.tensors
    other = replace(handle, matrices=PackedWeights(((name, dtype, shape, data * 0), *rest)))
    other.note(receipt=handle.receipt)
    with pytest.raises(ReceiptError, match=f"1 of them .*: {name} differs"):
        engine.load(other, 2)


def test_an_engine_that_keeps_a_tensor_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TransformersEngine(make_tiny_model(0))
    model = make_tiny_model(1)
    engine.load(DirectHandle(lambda: named_weights(model)), 1)
    kept = engine.model.model.norm.weight
    kept.data = kept.data.clone()
    copy = Tensor.copy_
    monkeypatch.setattr(
        Tensor, "copy_", lambda own, new, *rest: own if own is kept else copy(own, new, *rest)
    )
    with torch.no_grad():
        model.model.norm.weight += 1
    with pytest.raises(ReceiptError, match=r"1 of them .*: model.norm.weight "):
        engine.load(DirectHandle(lambda: named_weights(model)), 2)


def test_trained_weights_that_are_not_sent_are_an_error() -> None:
    """The adapters are missing in what is sent."""
    trainer = make_trainer()
    sent = make_tiny_model(0)
    sender = DirectSender()
    learner = Learner(trainer, [], sender)
    engine = TransformersEngine(make_tiny_model(3))
    sampler: Any = SimpleNamespace(engine=engine, _empty_cache=lambda: None)

    def publish(expected: bool) -> None:
        handle = learner.weights()
        assert handle.changes is expected
        if expected:
            handle = replace(handle, read=lambda: named_weights(sent))
            handle.note(changes=True)
        Sampler.update(sampler, handle, trainer.version)

    batch = make_batch()
    publish(False)
    trainer.optimizer.param_groups[0]["lr"] = 0.0
    trainer.train_batch(batch)
    publish(False)
    trainer.optimizer.param_groups[0]["lr"] = 1e-3
    trainer.train_batch(batch)
    with pytest.raises(ReceiptError, match="the optimizer changed the weights of version 2"):
        publish(True)


def test_an_engine_that_did_nothing_is_named() -> None:
    """One replica of two does not load its weights."""
    engine = TransformersEngine(make_tiny_model(0))
    engine.load = lambda handle, version: None  # type: ignore[method-assign]
    sampler: Any = SimpleNamespace(engine=engine, _empty_cache=lambda: None)
    with pytest.raises(ReceiptError, match="version 0 after the update to version 1"):
        Sampler.update(sampler, DirectHandle(list), 1)
