"""The memory of a pass that ran out of it, by content, and what each option would save."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from tensordict import NestedKey
from transformers import PreTrainedModel

from torchrl_grpo import keys
from torchrl_grpo.errors import MemoryShortError
from torchrl_grpo.generation.base import SamplingParams
from torchrl_grpo.generation.decoder import Decoder
from torchrl_grpo.host.out_of_memory import memory_short
from torchrl_grpo.learner.step import PolicyTrainer
from torchrl_grpo.models.loading import shape_of
from torchrl_grpo.models.memory import Shape, StepSetup, step_memory
from torchrl_grpo.models.passes import Pass
from torchrl_grpo.transforms.kl_scoring import KLScoring

_LORA_RANK = 16
"""Rank of adapters if ``train_model.lora.r`` is not set."""
_PURPOSES: dict[NestedKey, str] = {
    keys.REF_LOG_PROBS: "Scoring with the reference model",
    keys.TEACHER_LOG_PROBS: "Scoring with the teacher",
    keys.TEACHER_STATES: "Scoring with the teacher",
    keys.PROX_LOG_PROBS: "Scoring with the policy as it is before the step (policy.proximal=recomputed)",
    keys.STATE_VALUE: "Scoring with the critic (policy.value_coef)",
    keys.LOG_PROBS: "Rescoring the sampled responses (inference_model.exact=true)",
}
"""Purpose of log-probs by the key they are written to."""


def explain_step_memory(trainer: PolicyTrainer, error: BaseException) -> MemoryShortError:
    """Return the error of a training step that ran out of memory."""
    shape, setup = shape_of(trainer.model), trainer.setup()
    holds = step_memory(shape, setup).parts()
    return memory_short(error, "The training step", holds, savings(shape, setup))


def explain_scoring_memory(
    scoring: KLScoring, each: Pass, error: BaseException
) -> MemoryShortError:
    """Return the error of a scoring pass that ran out of memory."""
    model, tokens = scoring.scorer.model, each.tokens
    of_weights = next(model.parameters()).element_size()
    of_pass = of_weights if scoring.autocast_dtype is None else 2
    weights = sum(parameter.nbytes for parameter in model.parameters())
    shape = shape_of(model)
    # Three times a layer's gates, its input and its output.
    activations = tokens * of_pass * (3 * shape.inner + 2 * shape.hidden)
    half = len(each.rows.scored) // 2  # half of the sampled tokens
    knobs: dict[str, float] = {}
    if len(each.index) > 1:
        knobs[f"train.micro_batch_tokens={tokens // 2}"] = activations / 2
    elif half:
        knobs[f"inference_model.max_new_tokens={half}"] = activations * half / tokens
    if of_pass == 4:
        knobs["train.mixed_precision=bf16"] = activations / 2
    is_trained = hasattr(model, "peft_config")
    if scoring.out_key == keys.LOG_PROBS:
        knobs["inference_model.exact=false"] = activations
    elif scoring.out_key == keys.REF_LOG_PROBS and not is_trained:
        knobs["train_model.lora.enabled=true"] = weights
        knobs["ref_model.dtype=bfloat16"] = weights // 2 if of_weights == 4 else 0
    what = _PURPOSES.get(scoring.out_key, "Scoring sequences")
    return memory_short(error, what, {"weights": weights, "activations": activations}, knobs)


def explain_sampling_memory(
    model: PreTrainedModel,
    decoder: Decoder,
    kv_cache_bytes: int,
    longest: int,
    prompts: int,
    n: int,
    params: SamplingParams,
    error: BaseException,
) -> MemoryShortError:
    """Return the error of the ``transformers`` engine that ran out of memory.

    Args:
        model: the engine's model.
        decoder: the engine's decoder.
        kv_cache_bytes: maximum memory for keys and values.
        longest: tokens of the longest prompt.
        prompts: number of prompts.
        n: responses to each prompt.
        params: parameters of sampling.
        error: the error that PyTorch raised.
    """
    weights = sum(parameter.nbytes for parameter in model.parameters())
    vocabulary = model.get_output_embeddings().weight.shape[0]

    def batch(prompts: int, max_new_tokens: int) -> int:
        cache = prompts * decoder.cache_bytes(longest, n, max_new_tokens)
        return min(cache, kv_cache_bytes) + prompts * n * vocabulary * 4

    whole, half = batch(prompts, params.max_new_tokens), -(-params.max_new_tokens // 2)
    knobs = {
        "half of env.num_envs": whole - batch(-(-prompts // 2), params.max_new_tokens),
        f"inference_model.max_new_tokens={half}": whole - batch(prompts, half),
    }
    if model.dtype == torch.float32:
        knobs["inference_model.dtype=bfloat16"] = weights // 2
    holds = {"weights": weights, f"keys, values and logits of {prompts * n} responses": whole}
    return memory_short(error, "Sampling", holds, knobs)


def savings(shape: Shape, setup: StepSetup) -> dict[str, int]:
    """Return the bytes that each unused setting would save at a rank's peak; negative if it would
    cost memory.

    Args:
        shape: as in ``step_memory``.
        setup: current setup of the step.
    """
    half, single, ranks = setup.tokens // 2, setup.passes == 1, 2 * setup.ranks
    knobs: dict[str, dict[str, Any]] = {}
    if setup.sequences > 1:
        knobs[f"train.micro_batch_tokens={half}"] = {"tokens": half, "passes": 2 * setup.passes}
    if not setup.checkpoints:
        knobs["train_model.gradient_checkpointing=true"] = {"checkpoints": True}
    if setup.number == 4:
        knobs["train.mixed_precision=bf16"] = {"number": 2}
    if not setup.adapters:
        lora = {"adapters": _LORA_RANK, "trains_vision": False}
        knobs["train_model.lora.enabled=true"] = lora
    elif not (setup.quantized or setup.offloads or setup.ranks > 1):
        knobs["train_model.quantization=nf4"] = {"quantized": True}
    if setup.trains_vision:  # on one device
        knobs["train_model.train_vision=false"] = {"trains_vision": False}
    elif not setup.quantized:  # which one device must hold
        tokens = half if single and setup.sequences > 1 else setup.tokens
        knobs[f"train_model.num_devices={ranks}"] = {"tokens": tokens, "ranks": ranks}
    if setup.replicas > 1:
        knobs["train_model.replicas=1"] = {"replicas": 1}
    if not (setup.small_states or setup.offloads):  # these exclude each other
        knobs["optimizer.name=adamw_8bit"] = {"small_states": True}
        if not (setup.images or setup.quantized):
            knobs["train_model.cpu_offload=true"] = {"offloads": True}
    now = step_memory(shape, setup).peak
    return {
        name: now - step_memory(shape, replace(setup, **changes)).peak
        for name, changes in knobs.items()
    }
