"""Settings of the models: which one, and how each role holds it and where."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torchrl_grpo import checks
from torchrl_grpo.config.devices import DevicesConfig
from torchrl_grpo.config.fields import choice, limited


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
