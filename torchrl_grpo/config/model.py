"""The trained model."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchrl_grpo import checks
from torchrl_grpo.config.devices import DevicesConfig
from torchrl_grpo.config.fields import choice, limited
from torchrl_grpo.config.rule import Rule, arguments, exclusive, read_with


@dataclass
class ModelConfig:
    """The model that is trained."""

    name: str = "starter"
    """A folder, a name on the Hugging Face hub, or ``starter``, ``tool_starter`` or
    ``vision_starter``: the small models included in the package.
    """
    revision: str | None = None
    """On the hub: branch, tag or commit, for trainer, reference, tokenizer and engine."""
    chat_template: str | None = None
    """A Jinja chat template, or a file with one, to use instead of the tokenizer's own."""
    trust_remote_code: bool = False
    """Allow code from the model's repository to run."""
    attn_implementation: str = "sdpa"
    """Attention of the training and reference models: sdpa, eager, flash_attention_2, FA3 or FA4.
    The last two are sdpa with kernels that PyTorch takes from the modules flash_attn_interface (FA3,
    compute capability 9) or flash_attn.cute (FA4, 9 and 10). They have not run on a GPU yet.
    """

    @property
    def source(self) -> str:
        """``name@revision``, as passed to everything that loads a part of the model."""
        return self.name if self.revision is None else f"{self.name}@{self.revision}"

    @property
    def tokenizer_arguments(self) -> dict[str, Any]:
        """Arguments of ``loading.load_tokenizer``."""
        return {
            "name": self.source,
            "chat_template": self.chat_template,
            "trust_remote_code": self.trust_remote_code,
        }


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
    [q_proj,v_proj]; none that shares its weight with the LM head, such as a tied embedding.
    """
    path: str | None = None
    """Folder of adapters for model.name, in peft's format, to continue training. It also sets their
    rank, alpha and modules. The reference model does not use them.
    """
    settings: Any = None
    """Only in checkpoints: peft's settings of the adapters that path named, which resuming and export
    then do not need."""

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of ``loading.add_lora``; none without adapters."""
        if not self.enabled:
            return {}
        if self.settings:
            known = {k: value for k, value in self.settings.items() if k in checks.OF_ADAPTERS}
            return {"r": known.get("r", 8), "settings": known}
        if self.path is not None:
            return {"r": checks.adapter_settings(self.path)["r"], "path": self.path}
        names = self.target_modules
        targets = names[0] if names == ["all-linear"] else names
        return {"r": self.r, "alpha": self.alpha, "target_modules": targets}


@dataclass
class TrainModelConfig(DevicesConfig):
    """The trained model's devices and memory."""

    dtype: str = choice(checks.Dtype, "float32")
    """Type of the master weights and of the optimizer state. Without LoRA bfloat16 needs
    optimizer.name=adamw_8bit, which rounds weights at random."""
    quantization: str | None = choice(checks.Quantization, None)
    """nf4 stores the frozen weights of all linear layers except the LM head in 4 bits, for the trainer
    and the reference model (QLoRA, arXiv 2305.14314). Needs train_model.lora.enabled=true and one
    device. The engine and exports get the dequantized weights that the trainer computes with."""
    gradient_checkpointing: bool = False
    """Recompute layers in the backward pass to save memory."""
    compile: Any = "auto"
    """Whether the first step compiles the decoder layers: true, false, or auto, which compiles on CUDA
    if a pass is large enough for a gain. If a layer's results or gradients differ, no layer is
    compiled."""
    tensor_parallel_size: int = limited(1, ge=1)
    """Devices that compute each layer together, at least 1; must divide the number of devices, over
    which the model is otherwise sharded."""
    replicas: int = limited(1, ge=1)
    """Copies of the model, each sharded over as many of its devices, at least 1. With as many as
    machines, layers are gathered within a machine, and only gradients travel between machines
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


def _loses_small_steps(config: Any) -> bool:
    dtype = config.train_model.dtype
    rounds_at_random = dtype == "bfloat16" and config.optimizer.name == "adamw_8bit"
    return dtype != "float32" and not (config.train_model.lora.enabled or rounds_at_random)


RULES = (
    Rule(
        "train_model.dtype",
        "must be float32 for an average of the trained weights (ref_model.decay, "
        "teacher.weights=ema) without LoRA, because its small steps are lost in 16 bits",
        "use train.mixed_precision=bf16",
        lambda c: (
            c.averages and c.train_model.dtype != "float32" and not c.train_model.lora.enabled
        ),
    ),
    Rule(
        "train_model.dtype",
        "must be float32 without LoRA, because the optimizer's small steps are lost in 16 bits",
        "use train.mixed_precision=bf16, train_model.lora.enabled=true, or bfloat16 with "
        "optimizer.name=adamw_8bit, which rounds at random",
        _loses_small_steps,
    ),
    Rule(
        "model.revision",
        "is for a model on the hub, but {model.name=} is on this machine",
        "leave model.revision out",
        lambda c: (
            c.model.revision is not None
            and (c.model.name in checks.STARTERS or Path(c.model.name).exists())
        ),
    ),
    Rule(
        "train_model.train_vision",
        "must be false with {train_model.lora.enabled=}, which adapts only the language model",
        "use train_model.lora.enabled=false, or leave train_model.train_vision out",
        "train_model.lora.enabled",
    ),
    Rule(
        "train_model.lora.settings",
        "is written by a checkpoint, from train_model.lora.path",
        "leave it out",
        lambda c: c.train_model.lora.settings and not c.train.resume,
    ),
    Rule(
        "train_model.quantization",
        "needs train_model.lora.enabled=true, because 4-bit weights cannot be trained",
        "use train_model.lora.enabled=true, or leave train_model.quantization out",
        lambda c: c.train_model.quantization and not c.train_model.lora.enabled,
    ),
    exclusive("train_model.quantization", "train_model.cpu_offload"),
    Rule(
        "train_model.compile",
        "must be true, false or auto",
        "use train_model.compile=auto",
        bad=lambda value: value not in (True, False, "auto"),
    ),
    arguments("train_model.model_kwargs", "experts_implementation: grouped_mm"),
)
UNREAD = (
    *read_with(
        "train_model.lora.enabled",
        (True,),
        "true",
        "train_model.lora.r",
        "train_model.lora.alpha",
        "train_model.lora.target_modules",
        "train_model.lora.path",
    ),
    *read_with(
        "train_model.lora.path",
        (None,),
        "null",
        "train_model.lora.r",
        "train_model.lora.alpha",
        "train_model.lora.target_modules",
    ),
)
