"""The engine in vLLM's workers that loads blocks of shared memory. ``tests.support.transferring`` has
the checks with real workers.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchrl_grpo.weights.shared import SharedWeights


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
