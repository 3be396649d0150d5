"""Checks of vLLM's weight transfer with real workers: a fast path beside the host's that works,
fails, hangs or corrupts weights, and adapters.

The engine's workers have the extension of ``tests.support.transfers``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import torchrl_grpo.generation.vllm as vllm_module
from tests.support.models import response_log_probs
from tests.support.prompts import LONG_PROMPTS
from tests.support.weights import mismatch
from torchrl_grpo.errors import ReceiptError, TransferRefusedError
from torchrl_grpo.generation.base import SamplingParams
from torchrl_grpo.generation.vllm import VLLMBase, VLLMEngine
from torchrl_grpo.weights import DirectHandle, ObjectSender, TransferHandle, named_weights


@dataclass
class Receiver:
    """An engine that receives weights.

    Attributes:
        engine: the engine.
        make_model: function that makes another model of its architecture from a seed.
        folder: folder for the files of the fast path.
        patch: pytest's monkeypatch.
        rounding: how far its log-probs may be off.
    """

    engine: VLLMBase
    make_model: Callable[[int], torch.nn.Module]
    folder: Path
    patch: pytest.MonkeyPatch
    rounding: float

    def has(self, model: torch.nn.Module, version: int) -> bool:
        """Return whether the engine samples with a model's weights and names this version."""
        params = SamplingParams(max_new_tokens=8)
        gap = mismatch(self.engine, response_log_probs(model), LONG_PROMPTS, params)[1]
        return gap < self.rounding and self.engine.policy_version == version

    def fast(self, model: torch.nn.Module, wrong: str = "") -> TransferHandle:
        from tests.support.transfers import FileWeights  # imports vLLM

        return FileWeights(lambda: named_weights(model), self.folder, wrong)

    def forget(self) -> None:
        """Make the engine look as if it had received no weights yet."""
        self.patch.setattr(vllm_module, "TRIAL_S", 60.0)
        self.engine.receipt = None


def a_fast_way_that_works_is_the_only_one(to: Receiver) -> None:
    received: list[str] = []
    receive = to.engine._receive

    def spy(handle: Any, *rest: Any) -> None:
        received.append(handle.backend)
        receive(handle, *rest)

    to.patch.setattr(to.engine, "_receive", spy)
    for version in (1, 2, 3):
        model = to.make_model(version)
        to.engine.load(to.fast(model), version)
        assert to.has(model, version)
    assert received == ["from_file", "from_file", "from_file"]


def a_fast_way_that_goes_wrong_is_left(wrong: str, why: str, to: Receiver) -> None:
    if wrong == "hang":
        to.patch.setattr(vllm_module, "TRIAL_S", 1.0)
    if wrong == "nothing":  # the weights that don't arrive are already there
        to.engine.update_weights(named_weights(to.make_model(4)), 3)
    model = to.make_model(4)
    with pytest.raises(TransferRefusedError, match=rf"from_file: {why}"):
        to.engine.load(to.fast(model, wrong), 4)
    to.engine.load(DirectHandle(lambda: named_weights(model)), 4)
    assert to.has(model, 4)


def a_fast_way_that_goes_wrong_later_is_left(wrong: str, to: Receiver) -> None:
    to.engine.load(to.fast(to.make_model(6)), 6)
    if wrong == "hang":
        to.patch.setattr(vllm_module, "TRIAL_S", 1.0)
    model = to.make_model(7)
    with pytest.raises(TransferRefusedError, match="from_file"):
        to.engine.load(to.fast(model, wrong), 7)
    to.engine.load(DirectHandle(lambda: named_weights(model)), 7)
    assert to.has(model, 7)


def faults_are_found_at_their_sync(to: Receiver) -> None:
    old, new = (dict(named_weights(to.make_model(seed))) for seed in (1, 2))
    q, k, v = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv")
    engine, sender = to.engine, ObjectSender(torch.float32)

    def load(weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Load what arrives of the new weights."""
        handle = sender.pack(weights.items(), version)
        handle.note(receipt=sender.pack(new.items(), version).receipt, changes=True)
        engine.load(handle, version)

    engine.load(sender.pack(old.items(), 1), 1)
    faults = [
        ({q: old[q]}, f"1 of them did not arrive: {q} differs"),
        ({k: new[v], v: new[k]}, f"{k} has the weights of {v}"),
        (old, f"of them did not arrive: .*{q} differs"),
    ]
    for fault, message in faults:
        with pytest.raises(ReceiptError, match=message):
            load(new | fault, 2)
    load(new, 3)
    assert to.has(to.make_model(2), 3)
    with pytest.raises(ReceiptError, match="the optimizer changed the weights of version 4"):
        load(new, 4)
    engine._rpc("keep", "model.norm.weight")
    for name in new:
        new[name] = new[name] + 0.01
    with pytest.raises(ReceiptError, match=r"after an update, 1 .*: model.norm.weight"):
        load(new, 5)
    load(new, 6)
    engine._rpc("lose", "model.norm.weight")
    if isinstance(engine, VLLMEngine):
        engine._latest, engine._asleep = None, ["weights"]
        with to.patch.context() as patched:
            patched.setattr(engine, "_bring_back", engine._asleep.remove)
            with pytest.raises(ReceiptError, match=r"after waking, 1 .*: model.norm.weight"):
                engine.wake()
    assert engine._rpc("damaged") == [["model.norm.weight"]]


REASONS = {
    "raise": "RuntimeError: no such link",
    "hang": "nothing arrived in 1 s",
    "corrupt": "vLLM's worker 0 .* 5 of them did not arrive: .*norm.weight differs",
    "nothing": "vLLM's worker 0 .* did not arrive: .* is missing",
}
TRANSFERS: dict[str, Callable[[Receiver], None]] = {
    "a fast way": a_fast_way_that_works_is_the_only_one,
    **{
        f"a fast way: {wrong}": partial(a_fast_way_that_goes_wrong_is_left, wrong, why)
        for wrong, why in REASONS.items()
    },
    **{
        f"a fast way, later: {wrong}": partial(a_fast_way_that_goes_wrong_later_is_left, wrong)
        for wrong in ("raise", "hang")
    },
    "faults": faults_are_found_at_their_sync,
}
"""Each takes an engine that receives weights; in any order."""
