"""The table of engines: the capabilities of each ``inference_model.backend``, and the location of
its class.

The config's rules read the table, so nothing heavy is imported here. An engine is one entry in
``ENGINES`` and one file with a subclass of ``Engine``, which overrides ``make`` and, if it refuses
anything before a run, ``require`` and ``check``. Another package registers an ``EngineKind`` as an
entry point of the group ``torchrl_grpo.engines``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from torchrl_grpo.checks import Dtype, WeightTransfer
from torchrl_grpo.host.objects import load_object

KEY = "inference_model.backend"


@dataclass(frozen=True)
class EngineKind:
    """Capabilities of an engine.

    Attributes:
        implementation: its class, as ``module:name``; ``engine_class`` imports it.
        concurrent: whether it can sample for several callers at once; rollout tasks are then
            single groups.
        updates_in_flight: whether it can take new weights while it samples (``in_flight`` other
            than ``wait``).
        tensor_parallel: whether several devices can share its weights (``tensor_parallel_size``
            above 1).
        exact: whether its log-probs can equal the trainer's to the last bit (``exact``). Its
            attribute ``model`` is then the PyTorch model that it samples with.
        kept_tokens: whether it reports the tokens that each token was drawn from (``top_k``).
        stop_strings: whether it ends responses at strings (``stop``).
        own_arguments: whether it takes further arguments of its library (``engine_kwargs``).
        weight_transfers: values of ``weight_transfer`` that it supports.
        weights_on_device: whether it can read weights from the memory of its own GPU or another
            one (a ``TransferHandle``).
        adapters: dtypes in which the engine can keep LoRA adapters separate from its base weights on
            an accelerator. On a CPU any dtype works unless this is empty. If it is empty, the engine
            gets whole weights.
        elsewhere: whether it runs on servers that others started, at ``address``; it then needs no
            device of the run.
        images: whether prompts may have images.
        step_overhead_s: seconds that ``torchrl_grpo plan`` adds to the accelerator's work in each
            decoding step.
    """

    implementation: str
    step_overhead_s: float
    concurrent: bool = False
    updates_in_flight: bool = False
    tensor_parallel: bool = False
    exact: bool = False
    kept_tokens: bool = False
    stop_strings: bool = True
    own_arguments: bool = False
    weights_on_device: bool = False
    adapters: tuple[str, ...] = ()
    elsewhere: bool = False
    images: bool = False
    weight_transfers: tuple[str, ...] = get_args(WeightTransfer)


class _Engines(dict[str, EngineKind]):
    """The built-in engines; ``[]`` also knows those of other packages.

    Raises:
        ValueError: what another package registers is not an ``EngineKind``, or cannot be imported.
    """

    def __missing__(self, name: str) -> EngineKind:
        return load_object(
            name, KEY, "value of type EngineKind", lambda value: isinstance(value, EngineKind)
        )


ENGINES = _Engines(
    transformers=EngineKind(
        "torchrl_grpo.generation.transformers:TransformersEngine",
        step_overhead_s=0.02,
        exact=True,
        kept_tokens=True,
        adapters=get_args(Dtype),
        images=True,
    ),
    vllm=EngineKind(
        "torchrl_grpo.generation.vllm_async:AsyncVLLMEngine",
        step_overhead_s=0.002,
        concurrent=True,
        updates_in_flight=True,
        tensor_parallel=True,
        kept_tokens=True,
        own_arguments=True,
        adapters=("bfloat16", "float16"),
        weights_on_device=True,
        images=True,
    ),
    server=EngineKind(
        "torchrl_grpo.integrations.server_engine:ServerEngine",
        step_overhead_s=0.002,
        concurrent=True,
        updates_in_flight=True,
        adapters=get_args(Dtype),
        elsewhere=True,
        weight_transfers=("auto", "object_store"),
    ),
)
"""Engines by name; the names are the choices of ``inference_model.backend``."""


def engines_with(capability: str) -> list[str]:
    """Names of the engines for which an attribute of ``EngineKind`` is true."""
    return [name for name, kind in ENGINES.items() if getattr(kind, capability)]
