"""Compiled parts of a training step against the plain ones. CPUs compile nothing: here they do, with
a backend that runs the graphs as they are.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from tests.support.families import make_family
from tests.support.models import make_tiny_model
from torchrl_grpo.models import compiled, head, loading
from torchrl_grpo.models.scoring import AdapterOffScorer, TokenScorer


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Compile on the CPU, and count the graphs by their number of operations."""
    counts: Counter[int] = Counter()

    def count(graph: Any, example_inputs: Any) -> Any:
        counts[len(graph.graph.nodes)] += 1
        return graph.forward

    torch.compiler.reset()
    monkeypatch.setattr(compiled, "DEVICES", ("cpu",))
    monkeypatch.setattr(compiled, "MIN_ELEMENTS", 0)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=count))
    for function in (head._add_chunk, head._chunk_gradient):
        monkeypatch.setattr(function, "_compiled", None)
    return counts


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the warnings of the compiled functions."""
    messages: list[str] = []
    monkeypatch.setattr(compiled.torchrl_logger, "warning", messages.append)
    return messages


@pytest.mark.parametrize("entropy", [False, True])
def test_head_has_the_same_scores_and_gradients(
    graphs: Counter[int], monkeypatch: pytest.MonkeyPatch, entropy: bool
) -> None:
    def run() -> list[Tensor]:
        torch.manual_seed(0)
        inputs = [torch.randn(*size, requires_grad=True) for size in ((30, 8), (203, 8), (203,))]
        scores = head.chunked_log_probs(
            *inputs[:2],
            torch.randint(203, (30,)),
            bias_V=inputs[2],
            temperature=0.7,
            max_chunk_elements=600,
        )
        (scores[0].square().sum() + entropy * scores[1].square().sum()).backward()
        return [*scores, *(x.grad for x in inputs if x.grad is not None)]

    results = run()
    assert graphs.total() == 2  # one each for all chunks, of which the last is narrower
    monkeypatch.setattr(compiled, "DEVICES", ())
    for result, expected in zip(results, run(), strict=True):
        torch.testing.assert_close(result, expected)
    assert len(results) == 5


@pytest.mark.parametrize("fails", [False, True])
def test_function_stays_plain_if_compiling_fails_or_changes_its_results(
    graphs: Counter[int], warnings: list[str], monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    def negate(x: Tensor) -> tuple[Tensor]:
        return (x * 2 if torch.compiler.is_compiling() else -x,)

    def without_kernel(graph: Any, example_inputs: Any) -> Any:
        raise ValueError("no kernel")

    if fails:
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=without_kernel))
    part = compiled.Compiled(negate)
    assert [part(torch.ones(2))[0].tolist() for _ in range(2)] == [[-1.0, -1.0]] * 2
    (warning,) = warnings
    assert "negate" in warning
    assert ("no kernel" in warning) == fails


def test_only_large_tensors_on_cuda_are_compiled() -> None:
    assert compiled.DEVICES == ("cuda",)
    part = compiled.Compiled(lambda x: (x + torch.compiler.is_compiling(),))
    assert part(torch.ones(compiled.MIN_ELEMENTS))[0].sum() == compiled.MIN_ELEMENTS


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("entropy", [False, True])
def test_head_is_compiled_for_a_card(
    monkeypatch: pytest.MonkeyPatch, warnings: list[str], entropy: bool
) -> None:
    monkeypatch.setattr(compiled, "MIN_ELEMENTS", 0)

    def run() -> list[Tensor]:
        torch.manual_seed(0)
        hidden = torch.randn(300, 64, device="cuda").bfloat16().requires_grad_()
        weight = torch.randn(2003, 64, device="cuda").bfloat16().requires_grad_()
        targets = torch.randint(2003, (300,), device="cuda")
        scores = head.chunked_log_probs(hidden, weight, targets, max_chunk_elements=2**17)
        (scores[0].sum() + entropy * scores[1].sum()).backward()
        return [*scores, *(x.grad for x in (hidden, weight) if x.grad is not None)]

    results = run()
    assert not warnings
    monkeypatch.setattr(compiled, "DEVICES", ())
    for result, expected in zip(results, run(), strict=True):
        assert torch.dist(result.float(), expected.float()) < 1e-2 * expected.float().norm()


@pytest.mark.slow
@pytest.mark.parametrize("lora", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_layers_have_the_same_scores_and_gradients(
    graphs: Counter[int], warnings: list[str], monkeypatch: pytest.MonkeyPatch, lora: bool
) -> None:
    """With checkpoints, a window, in bfloat16, with and without gradients, which with LoRA is with
    the adapters off; all batches share graphs.
    """
    torch.manual_seed(0)
    model: Any = make_tiny_model(use_sliding_window=True, sliding_window=6, max_window_layers=1)
    if lora:
        model = loading.add_lora(model, r=2, alpha=4, target_modules="all-linear")
    loading.enable_gradient_checkpointing(model)
    scorer = TokenScorer(model)
    reference = AdapterOffScorer(model) if lora else scorer

    def run(batch: int) -> list[Tensor]:
        torch.manual_seed(batch)
        tokens, lengths = torch.randint(2, 30, (4, 14)), torch.randint(4, 14, (4,))
        tokens[:2, :3] = tokens[0, :3]
        positions = torch.arange(14)
        mask = (positions >= 3) & (positions <= lengths[:, None])
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad(), reference.for_passes():
                scores = [*reference.score(tokens, mask)]
            scores += scorer.score(tokens, mask)
        (scores[2].sum() + scores[3].sum()).backward()
        return [
            *(score.detach() for score in scores),
            *(p.grad for p in model.parameters() if p.grad is not None),
        ]

    expected = [run(batch) for batch in range(3)]
    monkeypatch.setattr(compiled, "DEVICES", ())  # of the head
    compiled.compile_layers(scorer.base)
    results = [run(0)]
    compiled_graphs = graphs.total()
    results += [run(1), run(2)]
    assert not warnings
    assert graphs.total() == compiled_graphs >= 4
    for compiled_batch, plain_batch in zip(results, expected, strict=True):
        for result, plain in zip(compiled_batch, plain_batch, strict=True):
            torch.testing.assert_close(result, plain, rtol=2e-2, atol=1e-4)


@pytest.mark.slow
def test_recurrent_layers_leave_the_graphs_of_all_lengths_the_same(
    graphs: Counter[int],
    warnings: list[str],
    monkeypatch: pytest.MonkeyPatch,
    recwarn: pytest.WarningsRecorder,
) -> None:
    scorer = TokenScorer(make_family("lfm2"))

    def gradient(batch: int) -> Tensor:
        torch.manual_seed(batch)
        tokens, lengths = torch.randint(2, 30, (4, 40)), torch.randint(22, 40, (4,))
        tokens[:batch, : 8 * batch] = tokens[0, : 8 * batch].clone()
        mask = (torch.arange(40) >= 20) & (torch.arange(40) <= lengths[:, None])
        scorer.zero_grad()
        scorer.score(tokens, mask)[0].sum().backward()
        return torch.cat([p.grad.flatten() for p in scorer.parameters() if p.grad is not None])

    expected = [gradient(batch) for batch in range(4)]
    monkeypatch.setattr(compiled, "DEVICES", ())  # of the head
    compiled.compile_layers(scorer.base)
    results, counts = [], []
    for batch in range(4):
        results.append(gradient(batch))
        counts.append(graphs.total())
    assert not warnings
    assert not [entry for entry in recwarn if "Dynamo" in str(entry.message)]
    assert counts[0] == counts[-1] > 0
    for result, plain in zip(results, expected, strict=True):
        assert torch.dist(result, plain) < 1e-4 * plain.norm()


def test_layers_stay_plain_if_one_has_another_gradient(
    graphs: Counter[int], warnings: list[str]
) -> None:
    class Wrong(torch.autograd.Function):
        """The identity, with twice the gradient."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return 2 * grads[0]

    class Layer(GradientCheckpointingLayer):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.linear(x)
            return Wrong.apply(out) if torch.compiler.is_compiling() else out  # type: ignore[no-any-return]

    model = make_tiny_model()
    model.model.layers = torch.nn.ModuleList([Layer(), Layer()])
    compiled.compile_layers(model)
    for layer in model.model.layers:
        x = torch.ones(2, 3)
        layer(x).sum().backward()
        assert layer.linear.bias.grad.tolist() == [2.0, 2.0, 2.0]
    (warning,) = warnings
    assert "Layer.forward" in warning
    assert "differ" in warning
