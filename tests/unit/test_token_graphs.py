"""Token steps of the fused decoder as CUDA graphs, on a CPU: operations are recorded and replayed."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchrl import torchrl_logger
from transformers import (
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.support.models import make_llama, make_lora, make_tiny_model
from tests.support.weights import Trained
from torchrl_grpo.generation import Completion, SamplingParams, TransformersEngine
from torchrl_grpo.generation.fused_decoder import FusedDecoder, _StaticBatch
from torchrl_grpo.generation.stops import StopStrings
from torchrl_grpo.weights.adapters import AdapterSender

SIZES: dict[str, Any] = {
    "vocab_size": 261,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def make_model(name: str) -> PreTrainedModel:
    if name == "qwen2":
        return make_tiny_model()
    if name == "llama":
        return make_llama(1)
    torch.manual_seed(1)
    if name == "mistral":
        return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=None)).eval()
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16)).eval()


class RecordedGraph(TorchDispatchMode):
    """Stands in for ``torch.cuda.CUDAGraph``: its operations are replayed on the same memory."""

    made: list[RecordedGraph]

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []
        self.written: list[tuple[Tensor, Tensor]] = []
        self.replays = 0
        self.made.append(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.is_write:
                self.written.append((value, value.clone()))
        out = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, out))
        return out

    def undo(self) -> None:
        """Leave memory as it was, because a capture computes nothing."""
        for memory, before in reversed(self.written):
            memory.copy_(before)

    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, out in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    def pool(self) -> RecordedGraph:
        return self.made[0]


@contextmanager
def record(graph: RecordedGraph, pool: Any, capture_error_mode: str) -> Iterator[None]:
    assert pool in (None, *graph.made)
    with graph:
        yield
    graph.undo()


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[RecordedGraph]:
    monkeypatch.setattr(RecordedGraph, "made", [], raising=False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", RecordedGraph)
    monkeypatch.setattr(torch.cuda, "graph", record)
    return RecordedGraph.made


def make_engine(model: PreTrainedModel, static: bool) -> TransformersEngine:
    engine = TransformersEngine(model)
    assert isinstance(engine.decoder, FusedDecoder)
    engine.decoder.static = static
    engine.seed(3)
    return engine


def make_prompts(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(5, 261, (length,), generator=generator) for length in lengths]


def show_uninitialized_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill it with NaN, which no result may have."""
    new_empty = Tensor.new_empty

    def spoiled(like: Tensor, *shape: Any, **options: Any) -> Tensor:
        tensor = new_empty(like, *shape, **options)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(Tensor, "new_empty", spoiled)


def assert_same(left: list[list[Completion]], right: list[list[Completion]]) -> None:
    for one, other in zip(chain(*left), chain(*right), strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.finish_reason == other.finish_reason
        torch.testing.assert_close(one.log_probs, other.log_probs, rtol=0, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "waits"), [("qwen2", True), ("llama", False), ("mistral", True), ("qwen3", False)]
)
def test_graphs_sample_the_same_tokens_as_growing_caches(
    name: str, waits: bool, graphs: list[RecordedGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with adapters, and with groups that wait for places."""
    base, prompts = make_model(name), make_prompts(3, 33, 12, 7)
    engines = [make_engine(base, static) for static in (False, True)]
    if waits:
        for engine in engines:
            engine._kv_cache_bytes = 3 * engine.decoder.cache_bytes(33, 2, 50)
    show_uninitialized_memory(monkeypatch)
    params = SamplingParams(50, stop_token_ids=tuple(range(5, 12)))
    for version in (0, 1):
        if version:
            sender = AdapterSender(None)
            handle = sender.send(Trained(make_lora(deepcopy(base))), version)
            for engine in engines:
                engine.load(handle, version)
        assert_same(*(engine.generate(prompts, 2, params) for engine in engines))
        assert sum(graph.replays for graph in graphs) > 3 * len(graphs) > 6
        graphs.clear()


def test_a_step_has_few_shapes(
    graphs: list[RecordedGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are powers of 2, and columns multiples of 64."""
    shapes: list[tuple[int, int]] = []
    advance = _StaticBatch._advance
    monkeypatch.setattr(
        _StaticBatch, "_advance", lambda self, *shape: shapes.append(shape) or advance(self, *shape)
    )
    engine = make_engine(make_tiny_model(), static=True)
    engine.generate(make_prompts(30, 9), 16, SamplingParams(99, stop_token_ids=tuple(range(9))))
    assert {rows for rows, _ in shapes} <= {1, 2, 4, 8, 16, 32}
    assert {columns for _, columns in shapes} == {64, 128}
    assert len(shapes) == 2 * len(graphs) == 2 * len(set(shapes))


def test_a_stop_string_ends_a_response(
    graphs: list[RecordedGraph], tokenizer: PreTrainedTokenizerBase
) -> None:
    params = SamplingParams(40, stop=StopStrings(list("abcd"), tokenizer))
    engines = [make_engine(make_tiny_model(), static) for static in (False, True)]
    groups = [engine.generate(make_prompts(9, 4), 4, params) for engine in engines]
    assert_same(*groups)
    assert {each.finish_reason for each in chain(*groups[1])} == {"stop", "length"}


def test_without_graphs_sampling_continues_with_one_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As here, where PyTorch has no CUDA."""
    messages: list[str] = []
    monkeypatch.setattr(torchrl_logger, "warning", messages.append)
    engines = [make_engine(make_tiny_model(), static) for static in (False, True)]
    for _ in range(2):
        groups = [engine.generate(make_prompts(9, 4), 4, SamplingParams(70)) for engine in engines]
        assert_same(*groups)
    assert len(messages) == 1
    assert "CUDA graphs" in messages[0]
    assert not engines[1].decoder.static
    assert engines[1].decoder.kept is None


@pytest.mark.slow
def test_later_calls_replay_graphs_with_new_weights(graphs: list[RecordedGraph]) -> None:
    """Not with adapters, nor after them: they are in other memory each time."""
    base, other = make_tiny_model(), make_tiny_model(seed=1)
    engines = [make_engine(base, static) for static in (False, True)]

    def same_answers(*lengths: int, n: int = 4) -> int:
        """Compare the engines' answers; return how many graphs were captured for them."""
        before = len(graphs)
        prompts = make_prompts(*lengths)
        groups = [engine.generate(prompts, n, SamplingParams(6)) for engine in engines]
        assert_same(*groups)
        return len(graphs) - before

    assert same_answers(9, 4) == 1
    assert same_answers(30, 4) == 0
    for engine in engines:
        engine.update_weights(other.state_dict().items(), 1)
    assert same_answers(9, 4) == 0
    assert same_answers(5, n=3) == 1  # 4 rows
    handle = AdapterSender(None).send(Trained(make_lora(deepcopy(base))), 2)
    for engine in engines:
        engine.load(handle, 2)
    assert [same_answers(9, 4), same_answers(9, 4)] == [1, 1]
    for engine in engines:
        engine.update_weights(base.state_dict().items(), 3)
    assert [same_answers(9, 4), same_answers(9, 4)] == [1, 0]


@pytest.mark.slow
def test_kept_memory_is_released_before_more_is_allocated(
    graphs: list[RecordedGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And while the engine sleeps."""
    engine, was_free = make_engine(make_tiny_model(), static=True), []
    engine.generate(make_prompts(9, 4), 4, SamplingParams(6))
    memory, new_empty = weakref.ref(engine.decoder.kept[0]), Tensor.new_empty

    def noted(like: Tensor, *shape: Any, **options: Any) -> Tensor:
        if len(torch.Size(shape[0] if isinstance(shape[0], tuple) else shape)) == 5:
            was_free.append(memory() is None)
        return new_empty(like, *shape, **options)

    monkeypatch.setattr(Tensor, "new_empty", noted)
    engine.generate(make_prompts(3), 2, SamplingParams(2))
    assert engine.decoder.kept[0] is memory()
    assert was_free == []
    graphs.clear()
    engine.generate(make_prompts(9, 40), 4, SamplingParams(70))
    assert was_free == [True]
    assert engine.decoder.kept[0].shape[3] == 128
    engine.sleep()
    assert engine.decoder.kept is None
    engine.generate(make_prompts(3), 2, SamplingParams(2))
    assert engine.decoder.kept[0].shape[3] == 64


def test_spare_rows_stay_within_the_cache() -> None:
    """The fourth row, which is longer than the others, is dropped, and its place is computed."""
    decoder, batches = make_engine(make_tiny_model(), static=True).decoder, []
    with torch.inference_mode():
        for static in (True, False):
            decoder.static = static
            batches.append(decoder.start(20))
            batches[-1].add(make_prompts(3, 3, 3, 60), 1)
            batches[-1].keep(torch.arange(3))
        for token in range(5, 15):
            some, others = (batch.step(torch.full((3,), token)) for batch in batches)
            torch.testing.assert_close(some, others, rtol=0, atol=2e-5)
