"""Log-probs and entropy of given tokens under a model: one scorer for trainer, reference and proximal policy.

The LM head runs over the scored tokens only, in chunks of the vocabulary, and is computed again in backward, so the
logits of a batch never exist at once: the peak is one chunk (``MAX_CHUNK_ELEMENTS``) instead of [B, T, V].

Shape suffixes: B sequences, T tokens, N scored tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import functools
import math
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torchrl._utils import logger as torchrl_logger

from torchrl_grpo import keys
from torchrl_grpo.checks import MIN_TEMPERATURE
from torchrl_grpo.models.loading import base_model_of
from torchrl_grpo.models.packing import pad, sequences_of
from torchrl_grpo.models.prefix import Layout, packed, padded
from torchrl_grpo.models.sharding import call_gathered, compute_device, mesh_of

if TYPE_CHECKING:
    from torchrl.modules.llm import LLMWrapperBase

MAX_CHUNK_ELEMENTS = {"cpu": 2**21, "other": 2**25}
"""Logits held at once: in float32 8 MiB, what a CPU's caches hold, and 128 MiB to keep an accelerator busy."""


WINDOWS = ("sliding_window", "attention_chunk_size", "attention_window_size", "local_attention")
"""Fields of a config that say how many tokens some of its layers look at."""


def _chunk_logits(hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, scale: float) -> Tensor:
    """Logits of a part of the vocabulary in float32 (or wider), divided by the temperature."""
    logits = nn.functional.linear(hidden_ND, weight_VD, bias_V)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if scale == 1.0 else logits.mul_(scale)


class _ChunkedLogProb(torch.autograd.Function):
    """``log_softmax(hidden @ weight.T / temperature)`` at the targets, and its entropy.

    It goes through the vocabulary in chunks, so that each part of the head and of its gradient is touched once. The
    normaliser is that of the chunks so far.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        scale: float,
        width: int,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden_ND.dtype, torch.float32)
        most_N = torch.full(targets_N.shape, -math.inf, dtype=dtype, device=hidden_ND.device)
        total_N, weighted_N, logit_N = (torch.zeros_like(most_N) for _ in range(3))
        for start in range(0, len(weight_VD), width):
            part = slice(start, start + width)
            logits = _chunk_logits(hidden_ND, weight_VD[part], None if bias_V is None else bias_V[part], scale)
            index, inside = _place(targets_N, start, logits.shape[1])
            logit_N += logits.gather(-1, index).squeeze(-1) * inside
            new_N = torch.maximum(most_N, logits.amax(-1))
            exps, shrink_N = (logits - new_N[:, None]).exp_(), (most_N - new_N).exp_()
            total_N = total_N * shrink_N + exps.sum(-1)
            weighted_N = weighted_N * shrink_N + exps.mul_(logits).sum(-1)
            most_N = new_N
        lse_N = most_N + total_N.log()
        log_prob_N, entropy_N = logit_N - lse_N, lse_N - weighted_N / total_N
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, targets_N, lse_N, entropy_N)
        ctx.scale, ctx.width = scale, width
        ctx.set_materialize_grads(False)
        return log_prob_N, entropy_N

    @staticmethod
    def backward(ctx: Any, grad_log_prob_N: Tensor | None, grad_entropy_N: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, bias_V, targets_N, lse_N, entropy_N = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        if grad_log_prob_N is None:
            if grad_entropy_N is None:
                return (None,) * 6
            grad_log_prob_N = torch.zeros_like(grad_entropy_N)
        grad_hidden = torch.zeros_like(hidden_ND, dtype=lse_N.dtype) if needs_hidden else None
        grad_weight = torch.empty_like(weight_VD) if needs_weight else None
        grad_bias = torch.empty_like(bias_V) if needs_bias else None
        slope = grad_log_prob_N[:, None] * -ctx.scale
        for start in range(0, len(weight_VD), ctx.width):
            part = slice(start, start + ctx.width)
            bias = None if bias_V is None else bias_V[part]
            log_p = _chunk_logits(hidden_ND, weight_VD[part], bias, ctx.scale).sub_(lse_N[:, None])
            # Times the temperature: dlogp(y)/dlogit = onehot(y) - p;  dH/dlogit = -p (log p + H)
            if grad_entropy_N is None:
                grad = log_p.exp_().mul_(slope)
            else:
                prob = log_p.exp()
                log_p.add_(entropy_N[:, None]).mul_(grad_entropy_N[:, None] * -ctx.scale).add_(slope)
                grad = prob.mul_(log_p)
            index, inside = _place(targets_N, start, grad.shape[1])
            grad = grad.scatter_add_(-1, index, -slope * inside[:, None])
            if grad_bias is not None:
                grad_bias[part] = grad.sum(0)
            grad = grad.to(hidden_ND.dtype)
            if grad_weight is not None:
                torch.mm(grad.T, hidden_ND, out=grad_weight[part])
            if grad_hidden is not None and grad_hidden.dtype == grad.dtype:
                grad_hidden.addmm_(grad, weight_VD[part])
            elif grad_hidden is not None:
                grad_hidden += grad @ weight_VD[part]
        if grad_hidden is not None:
            grad_hidden = grad_hidden.to(hidden_ND.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None


def _place(targets_N: Tensor, start: int, width: int) -> tuple[Tensor, Tensor]:
    """Where the targets are in a chunk of the vocabulary, [N, 1], and which of them are there, [N] bool."""
    place = targets_N - start
    return place.clamp(0, width - 1)[:, None], (place >= 0) & (place < width)


def chunked_log_probs(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    *,
    bias_V: Tensor | None = None,
    temperature: float = 1.0,
    max_chunk_elements: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs of the targets and entropy of their distributions, from hidden states and the LM head.

    Args:
        hidden_ND: [N, D], the state from which each target is predicted.
        weight_VD: [V, D], the LM head; under autocast both are cast to its dtype.
        targets_N: [N] int64.
        bias_V: [V] or None.
        temperature: the logits are divided by it; more than 0.
        max_chunk_elements: bound on the logits held at once; by default ``MAX_CHUNK_ELEMENTS`` of the device.

    Returns:
        log-probs [N] and entropies [N] in nats, float32 (float64 for float64 input), differentiable.
    """
    device_type = hidden_ND.device.type
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        hidden_ND, weight_VD = hidden_ND.to(dtype), weight_VD.to(dtype)
        bias_V = None if bias_V is None else bias_V.to(dtype)
    limit = max_chunk_elements or MAX_CHUNK_ELEMENTS.get(device_type, MAX_CHUNK_ELEMENTS["other"])
    chunks = -(-weight_VD.shape[0] // max(1, limit // max(1, len(targets_N))))
    width = -(-weight_VD.shape[0] // chunks)  # chunks of equal size
    with torch.autocast(device_type, enabled=False):
        return _ChunkedLogProb.apply(hidden_ND, weight_VD, bias_V, targets_N, 1.0 / temperature, width)


def autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Mixed precision with that type on that device; None is none."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


class TokenScorer(TensorDictModuleBase):
    """Scores the sampled tokens of a batch under a Hugging Face causal LM, as a TensorDict module.

    Reads ``("tokens", "full")`` and ``("masks", "all_assistant_mask")`` (``mask_key``), ragged or padded; writes padded
    ``("cur_log_probs", "full")`` and ``("entropy", "full")``, [B, T] float32, 0 on tokens outside the mask.

    Args:
        model: a Hugging Face causal LM, or a peft model around one.
        temperature: the one that the tokens were sampled with, so that the scores are of the same distribution.
        max_chunk_elements: bound on the logits held at once; by default ``MAX_CHUNK_ELEMENTS`` of the device.

    Raises:
        ValueError: the head is no plain linear layer (a LoRA adapter on it), or the scores are not those of the model's
            own logits (see ``check_scorer``).

    Example:
        >>> scorer = TokenScorer(AutoModelForCausalLM.from_pretrained(path))  # doctest: +SKIP
        >>> log_probs, entropy = scorer.score(tokens_BT, mask_BT)  # doctest: +SKIP
    """

    in_keys: list[NestedKey] = [keys.FULL, keys.ASSISTANT_MASK]  # noqa: RUF012
    out_keys: list[NestedKey] = [keys.CUR_LOG_PROBS, keys.ENTROPY]  # noqa: RUF012

    def __init__(self, model: nn.Module, *, temperature: float = 1.0, max_chunk_elements: int | None = None) -> None:
        super().__init__()
        base: Any = base_model_of(model)
        if not isinstance(base.get_output_embeddings(), nn.Linear):
            raise ValueError(
                f"the LM head must be torch's own Linear, got {type(base.get_output_embeddings())}: leave it out of "
                "train_model.lora.target_modules."
            )
        if not MIN_TEMPERATURE <= temperature < math.inf:
            raise ValueError(f"temperature must be at least {MIN_TEMPERATURE}, got {temperature}: use 1.0.")
        self.model: Any = model
        self.mask_key: NestedKey = keys.ASSISTANT_MASK
        self.temperature = temperature
        self.max_chunk_elements = max_chunk_elements
        if base.device.type != "meta" and mesh_of(base) is None:
            check_scorer(self)

    @property
    def base(self) -> Any:
        """The Hugging Face model itself, without peft's wrapper."""
        return base_model_of(self.model)

    def packs(self, longest: int) -> bool:
        """Whether sequences of at most so many tokens are packed: without padding, and each prompt computed once.

        Where not, a warning says why, once.
        """
        base, config = self.base, self.base.config.get_text_config()
        why = getattr(base, "unpacked_because", None)
        why = "it was sharded before a TokenScorer could check it" if why is None else why
        if config._attn_implementation != "sdpa":
            why = f"its attention is {config._attn_implementation}, not sdpa"
        for name in WINDOWS:
            if (getattr(config, name, None) or math.inf) < longest:
                why = f"some are longer than {name}={getattr(config, name)}"
        if why and why != "it is being checked":
            _warn_once(f"The sequences of {type(base).__name__} are padded, and each has its prompt computed: {why}.")
        return not why

    def score(self, tokens_BT: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Scores right-padded sequences.

        Args:
            tokens_BT: [B, T] int64, padding on the right (any valid id).
            mask_BT: [B, T] bool, the tokens to score; the first token of a sequence has no prediction and scores 0.

        Returns:
            log-probs and entropies, both [B, T] float32, 0 outside the mask.
        """
        layout = packed(tokens_BT, mask_BT) if self.packs(tokens_BT.shape[1]) else padded(tokens_BT, mask_BT)
        log_prob, entropy = call_gathered(self.base, self._score, layout, tokens_BT.numel())
        return log_prob.view(tokens_BT.shape), entropy.view(tokens_BT.shape)

    def _score(self, layout: Layout, numel: int) -> tuple[Tensor, Tensor]:
        """As ``score``, but [B * T], and with the LM head gathered: FSDP2 wants no views from what it calls."""
        base = self.base
        body = (
            base.base_model if base.base_model is not base else base.model
        )  # Llama 4 has the prefix of a larger model
        hidden = body(**layout.model_inputs()).last_hidden_state
        head = base.get_output_embeddings()
        log_prob_N, entropy_N = chunked_log_probs(
            hidden.flatten(0, 1).index_select(0, layout.predictors),
            head.weight,
            layout.targets,
            bias_V=head.bias,
            temperature=self.temperature,
            max_chunk_elements=self.max_chunk_elements,
        )
        zeros = torch.zeros(numel, dtype=log_prob_N.dtype, device=hidden.device)
        return zeros.index_put((layout.places,), log_prob_N), zeros.index_put((layout.places,), entropy_N)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Writes the log-probs and entropies of the sampled tokens; see the class."""
        device = compute_device(self.model)
        tokens = pad(tensordict, keys.FULL).to(device)
        mask = pad(tensordict, self.mask_key, False).to(device)
        log_probs, entropy = self.score(tokens, mask)
        tensordict.set(keys.CUR_LOG_PROBS, log_probs)
        tensordict.set(keys.ENTROPY, entropy)
        return tensordict


@torch.no_grad()
def check_scorer(scorer: TokenScorer) -> None:
    """Compares a scorer with its model's own logits on a few tokens, and itself with and without packing.

    They differ where a model does more to its logits than its LM head does (soft-capping, a scale, one more layer), and
    where it looks at later tokens. A model that mixes tokens by other ways than Hugging Face's attention interface
    cannot be packed: its sequences are padded from here on. ``TokenScorer`` checks itself when it is made, unless its
    model is sharded: make it before ``shard_model``.

    Raises:
        ValueError: they differ by more than rounding.
    """
    base, head = scorer.base, scorer.base.get_output_embeddings().weight
    base.unpacked_because = "it is being checked"
    tokens = torch.randint(len(head), (1, 12), generator=torch.Generator().manual_seed(0))
    tokens = tokens.to(compute_device(scorer.model))
    training = [(module, module.training) for module in scorer.model.modules()]
    scorer.model.eval()
    try:
        with torch.autocast(tokens.device.type, enabled=False):
            scores, _ = TokenScorer.score(scorer, tokens, torch.ones_like(tokens, dtype=torch.bool))
            # The model is given the last token too, which the scorer leaves out: nothing may depend on it.
            logits = base(input_ids=tokens, use_cache=False).logits[0, :-1].float() / scorer.temperature
            rounding = max(1e-4, 2 * torch.finfo(head.dtype).eps) * max(1.0, logits.abs().max().item())
            base.unpacked_because = _check_packing(scorer, tokens, rounding)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        problem = f"cannot be had ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
    else:
        expected = logits.log_softmax(-1).gather(-1, tokens[0, 1:, None]).squeeze(-1)
        difference = (scores[0, 1:] - expected).abs().mean().item()
        problem = "" if difference <= rounding else f"are off by {difference:.2g} nats on average"
    finally:
        for module, mode in training:
            module.training = mode
    # Rounding in bfloat16 may be larger than what a soft cap does to a few tokens.
    config = base.config.get_text_config()
    for name in ("final_logit_softcapping", "logits_soft_cap", "logit_scale", "logits_scaling", "lm_head_multiplier"):
        if getattr(config, name, None) not in (None, 1):
            problem = f"{problem or 'are off'} (its config has {name}={getattr(config, name)})"
    if problem:
        raise ValueError(
            f"{type(base).__name__} must have logits that are its LM head's output and depend on no later token, as "
            f"log-probs are computed from the head in chunks: those {problem}; use another model (docs/models.md has a "
            "table)."
        )


def _check_packing(scorer: TokenScorer, tokens: Tensor, rounding: float) -> str:
    """Why a model cannot be packed: its log-probs of two groups of two would differ by more than rounding; or ""."""
    tokens = tokens.view(2, 6)[[0, 0, 1, 1]]
    tokens[1::2, 3:] = tokens[0::2, 2:5]  # the same prompt of three tokens, another response
    mask = torch.arange(6, device=tokens.device) >= torch.tensor([[3], [3], [2], [3]], device=tokens.device)
    expected, _ = TokenScorer.score(scorer, tokens, mask)
    scorer.base.unpacked_because = ""
    try:
        scores, _ = TokenScorer.score(scorer, tokens, mask)
    except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    difference = (scores - expected)[mask].abs().mean().item()
    return "" if difference <= rounding else f"their log-probs would be off by {difference:.2g} nats on average"


@functools.cache
def _warn_once(message: str) -> None:
    torchrl_logger.warning(message)


class AdapterOffScorer(TokenScorer):
    """Scores with a peft model's adapters switched off: the reference policy of a LoRA run, without a second model."""

    def score(self, tokens_BT: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
        """As ``TokenScorer.score``, by the base model alone."""
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        with self.model.disable_adapter():
            # peft turns this off meanwhile. If this is the first forward, FSDP2 would then believe
            # that nothing is trained, and not cast the gradients.
            for parameter in trained:
                parameter.requires_grad_(True)
            return super().score(tokens_BT, mask_BT)


class WrapperScorer(TokenScorer):
    """Scores, with the model of a TorchRL LLM wrapper, the batches that such wrappers write.

    The wrapper lends its model and nothing else: not its distribution, which holds the logits of all tokens, pads on
    the left and gives no mask that both sides understand. ``packing.sequences_of`` says what becomes of the batch.

    Reads ``("tokens", "full")`` and what else ``packing.sequences_of`` needs; writes what ``TokenScorer`` writes, the
    mask and the behaviour log-probs.

    Args:
        wrapper: a ``TransformersWrapper``. Its log-probs are those of temperature 1, whatever it samples with.

    Raises:
        ValueError: the wrapper's model is no Hugging Face model (vLLM), so it has no gradients.
    """

    in_keys: list[NestedKey] = [keys.FULL]  # noqa: RUF012
    out_keys: list[NestedKey] = [keys.CUR_LOG_PROBS, keys.ENTROPY, keys.ASSISTANT_MASK, keys.LOG_PROBS]  # noqa: RUF012

    def __init__(self, wrapper: LLMWrapperBase) -> None:
        model = getattr(wrapper, "model", None)
        if not isinstance(model, nn.Module):
            raise ValueError(
                f"actor_network={type(wrapper).__name__} must hold a Hugging Face model to be trained, it holds "
                f"{type(model).__name__}: use TransformersWrapper, or TokenScorer(model)."
            )
        super().__init__(model)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """A ragged batch [B] made of the wrapper's batch, with log-probs and entropies; see the class."""
        return super().forward(sequences_of(tensordict))
