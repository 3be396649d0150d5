"""One CPU thread for a small model and for one on an accelerator, in a handwritten loop as in a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from tests.support.models import make_tiny_model
from torchrl_grpo.generation import TransformersEngine
from torchrl_grpo.host.threads import limit_threads
from torchrl_grpo.models import TokenScorer


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("part", [TransformersEngine, TokenScorer])
def test_an_engine_or_scorer_of_a_small_model_computes_on_one_thread(
    part: Callable[[PreTrainedModel], object],
) -> None:
    part(make_tiny_model())
    assert torch.get_num_threads() == 1


@pytest.mark.slow
@pytest.mark.parametrize("part", [TransformersEngine, TokenScorer])
def test_a_model_of_a_million_parameters_keeps_the_threads(
    part: Callable[[PreTrainedModel], object],
) -> None:
    model = make_tiny_model(vocab_size=40_000)
    assert model.num_parameters() > 1_000_000
    part(model)
    assert torch.get_num_threads() == 2


@pytest.mark.slow
def test_omp_num_threads_decides_where_it_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    TokenScorer(make_tiny_model())
    assert torch.get_num_threads() == 2


def test_a_model_without_weights_keeps_the_threads() -> None:
    TokenScorer(make_tiny_model().to("meta"))
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(
    ("devices", "threads"),
    [(["cuda"], 1), (["cpu"], 2), (["cuda", "cpu"], 2)],  # the last two: on a CPU, and offloaded
)
def test_a_large_model_leaves_one_thread_only_on_an_accelerator(
    devices: list[str], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Module()
    parameters = [SimpleNamespace(device=torch.device(device)) for device in devices]
    monkeypatch.setattr(torch, "numel", lambda parameter: 2_000_000)
    monkeypatch.setattr(model, "parameters", lambda: iter(parameters))
    limit_threads(model)
    assert torch.get_num_threads() == threads
