"""The table of engines: what each value of ``inference_model.backend`` can do, and the location of
its class.

The rules of the config read it, so nothing heavy is imported here. An engine is one entry in
``ENGINES`` and one file: a subclass of ``Engine`` that overrides ``make`` and, if it refuses
something before a run, ``require`` and ``check``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from torchrl_grpo.checks import WeightTransfer


@dataclass(frozen=True)
class EngineKind:
    """Capabilities of an engine.

    Attributes:
        implementation: its class, as ``module:name``; ``engine_class`` imports it.
        concurrent: whether it can sample for several callers at a time; rollout tasks are then
            single groups.
        updates_in_flight: whether it can take new weights while it samples (``in_flight`` other
            than ``wait``).
        tensor_parallel: whether several devices can share its weights (``tensor_parallel_size``
            above 1).
        exact: whether its log-probs can be the trainer's to the last bit (``exact``). It has the
            PyTorch model that it samples with as ``model``.
        kept_tokens: whether it says which tokens each token was drawn from (``top_k``).
        stop_strings: whether it ends responses at strings (``stop``).
        own_arguments: whether it takes further arguments of its library (``engine_kwargs``).
        weight_transfers: values of ``weight_transfer`` that it takes.
        weights_on_device: whether it takes weights from GPU memory, its own or another one (a
            ``TransferHandle``).
        elsewhere: whether it runs on servers that others started, at ``address``; it then takes no
            device of the run.
        step_overhead_s: seconds of each decoding step beside the accelerator's work, as
            ``torchrl_grpo.plan`` assumes.
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
    elsewhere: bool = False
    weight_transfers: tuple[str, ...] = get_args(WeightTransfer)


ENGINES: dict[str, EngineKind] = {
    "transformers": EngineKind(
        "torchrl_grpo.generation.transformers:TransformersEngine",
        step_overhead_s=0.02,
        exact=True,
        kept_tokens=True,
    ),
    "vllm": EngineKind(
        "torchrl_grpo.generation.vllm:VLLMEngine",
        step_overhead_s=0.002,
        concurrent=True,
        updates_in_flight=True,
        tensor_parallel=True,
        own_arguments=True,
        weights_on_device=True,
    ),
    "server": EngineKind(
        "torchrl_grpo.generation.server:ServerEngine",
        step_overhead_s=0.002,
        concurrent=True,
        updates_in_flight=True,
        elsewhere=True,
        weight_transfers=("auto", "object_store"),
    ),
}
"""Engines by name; the names are the choices of ``inference_model.backend``."""


def engines_with(capability: str) -> list[str]:
    """Names of the engines for which an attribute of ``EngineKind`` is true."""
    return [name for name, kind in ENGINES.items() if getattr(kind, capability)]
