"""The table of engines: an engine is one file and one entry, and no other code compares its name."""

from __future__ import annotations

import ast
import typing
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.support.configs import ROOT, SMALL, compose_config
from torchrl_grpo import checks
from torchrl_grpo.assembly.geometry import Geometry
from torchrl_grpo.assembly.prepare import prepare
from torchrl_grpo.assembly.roles import make_engine, make_sampler
from torchrl_grpo.assembly.run import build
from torchrl_grpo.collectors.sampler import RolloutTask
from torchrl_grpo.config import ConfigError
from torchrl_grpo.engines import ENGINES, EngineKind, engines_with
from torchrl_grpo.generation.base import (
    Completion,
    Engine,
    EngineRequest,
    OnFinished,
    SamplingParams,
    engine_class,
)
from torchrl_grpo.generation.transformers import TransformersEngine
from torchrl_grpo.reporting.metrics import read_jsonl

CPU = torch.device("cpu")


class Server(Engine):
    """A third engine, which delegates to another one and supports concurrent calls."""

    concurrent = True
    refuses = ""

    def __init__(self, inner: Engine, request: EngineRequest) -> None:
        self.inner = inner
        self.request = request

    @classmethod
    def require(cls, *, on_cpu: bool) -> None:
        if cls.refuses == "machine":
            raise ValueError(f"server: no machine, on_cpu={on_cpu}.")

    @classmethod
    def check(cls, request: EngineRequest) -> None:
        if cls.refuses == "model":
            raise ValueError(
                f"server: no {request.model_config.model_type} in {request.options.dtype}."
            )

    @classmethod
    def make(
        cls,
        request: EngineRequest,
        device: torch.device,
        load_model: Callable[[], PreTrainedModel],
        *,
        concurrent: bool = False,
    ) -> Engine:
        return cls(TransformersEngine.make(request, device, load_model), request)

    def generate(
        self,
        prompts: Sequence[Tensor],
        n: int,
        params: SamplingParams,
        on_finished: OnFinished | None = None,
    ) -> list[list[Completion]]:
        return self.inner.generate(prompts, n, params, on_finished)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.inner.update_weights(weights, version)
        self.policy_version = version

    def seed(self, seed: int) -> None:
        self.inner.seed(seed)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.inner.load_state_dict(state)

    def close(self) -> None:
        self.inner.close()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> str:
    """Register the third engine by an entry in the table."""
    kind = EngineKind(
        f"{__name__}:Server",
        concurrent=True,
        stop_strings=False,
        weight_transfers=("auto", "object_store"),
        step_overhead_s=0.01,
    )
    monkeypatch.setitem(ENGINES, "third", kind)
    return "inference_model.backend=third"


def compared(tree: ast.AST) -> set[str]:
    """Return the strings that a file compares with."""
    comparisons = [node for node in ast.walk(tree) if isinstance(node, ast.Compare)]
    sides = [side for node in comparisons for side in (node.left, *node.comparators)]
    sides += [
        part
        for side in sides
        if isinstance(side, ast.Tuple | ast.List | ast.Set)
        for part in side.elts
    ]
    return {side.value for side in sides if isinstance(side, ast.Constant)}


@pytest.mark.slow
def test_nothing_compares_the_names_of_engines() -> None:
    paths = list((ROOT / "torchrl_grpo").rglob("*.py"))
    assert [
        path
        for path in paths
        if compared(ast.parse(path.read_text(encoding="utf-8"))) & set(ENGINES)
    ] == []


@pytest.mark.parametrize("name", ENGINES)
def test_each_entry_leads_to_an_engine_that_a_run_can_make(name: str) -> None:
    engine_type = engine_class(name)
    assert issubclass(engine_type, Engine)
    assert engine_type.make.__func__ is not Engine.make.__func__  # type: ignore[attr-defined]
    assert set(ENGINES[name].weight_transfers) <= set(typing.get_args(checks.WeightTransfer))


def test_capabilities_are_those_of_the_engines() -> None:
    assert engines_with("exact") == ["transformers"]
    assert engines_with("tensor_parallel") == ["vllm"]
    assert engines_with("elsewhere") == ["server"]
    for capability in ("concurrent", "updates_in_flight"):
        assert engines_with(capability) == ["vllm", "server"]
    assert engines_with("stop_strings") == ["transformers", "vllm", "server"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "stop=[x]",
            "stop=[x] must be [] with inference_model.backend=third: use [], or inference_model.backend=",
        ),
        (
            "weight_transfer=broadcast",
            "broadcast must be one of auto, object_store with inference_model.backend=thir",
        ),
    ],
)
def test_the_config_refuses_what_an_engine_cannot_do(
    server: str, override: str, message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        compose_config(server, f"inference_model.{override}")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("refuses", "message"),
    [("machine", "server: no machine, on_cpu=True"), ("model", "server: no .* in float32")],
)
def test_an_engine_refuses_settings_before_weights_load(
    server: str, refuses: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Server, "refuses", refuses)
    with pytest.raises(ConfigError, match=message):
        prepare(compose_config(*SMALL, server), [])


@pytest.mark.slow
def test_a_third_engine_is_made_and_plays(server: str) -> None:
    context = prepare(compose_config(*SMALL, server, "seed=3"), [])
    # single groups, because concurrent calls are supported
    two = replace(context.plan, inference=((CPU,), (CPU,)))
    apart = replace(context, plan=two, distributed=True)
    assert apart.geometry == Geometry(2, 2, 1, 2, waits=True)
    engine = make_engine(context, CPU)
    assert isinstance(engine, Server)
    assert (engine.request.seed, engine.request.on_cpu, engine.request.colocated) == (
        3,
        True,
        False,
    )
    assert engine.request.options.max_new_tokens == context.config.inference_model.max_new_tokens
    sampler = make_sampler(context, device=CPU)
    drawing = context.train_env.drawing
    report, groups = sampler.play(RolloutTask(tuple(drawing.draw() for _ in range(4))))
    sampler.close()
    assert [group.group for group in report.groups] == [0, 1, 2, 3]
    assert [group.batch_size for group in groups] == [torch.Size([4])] * 4


@pytest.mark.slow
def test_a_run_of_a_third_engine_equals_that_of_the_one_behind_it(
    server: str, tmp_path: Path
) -> None:
    rows = []
    for backend in ("inference_model.backend=transformers", server):
        with closing(
            build(compose_config(*SMALL, backend), tmp_path / backend.rpartition("=")[2])
        ) as run:
            run.fit()
        rows.append(read_jsonl(run.directory / "metrics.jsonl"))
    for name in (
        "train/loss",
        "train/grad_norm",
        "train/kl_k3_to_inference",
        "rollout/reward_mean",
    ):
        expected, actual = ([row[name] for row in run_rows if name in row] for run_rows in rows)
        assert len(expected) == 2 and actual == expected, name


def test_an_engine_without_make_says_what_to_override(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Server, "make")
    with pytest.raises(NotImplementedError, match=r"Server .*: override Engine\.make"):
        make_engine(prepare(compose_config(*SMALL, server), []), CPU)
