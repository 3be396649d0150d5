"""Log-probs and entropy of given tokens under a model: one scorer for trainer, reference and
proximal policy.

The LM head runs over the scored tokens only, in chunks of the vocabulary (``head``), so that there
are never logits of [B, T, V].

Shape suffixes: B sequences, T tokens, N scored tokens.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchrl import torchrl_logger

import torchrl_grpo.models.attention  # noqa: F401  registers itself
from torchrl_grpo import keys
from torchrl_grpo.checks import MIN_TEMPERATURE, exact_context
from torchrl_grpo.compat.transformers import attention_of
from torchrl_grpo.host.threads import limit_threads
from torchrl_grpo.images import Prompt as ImagePrompt
from torchrl_grpo.images import Spans
from torchrl_grpo.images.families import family_of, language_model_of
from torchrl_grpo.images.features import (
    ImageFeatures,
    bidirectional_masks,
    grid_positions,
    has_grid,
    is_bidirectional,
    with_features,
)
from torchrl_grpo.models.divergence import Teacher, chunked_divergence, likely_tokens
from torchrl_grpo.models.entries import is_of_wrapper, sequences_of
from torchrl_grpo.models.head import Centering, chunked_log_probs, tied_embedding, tied_rows
from torchrl_grpo.models.layout import Layout, packed, padded, pick
from torchrl_grpo.models.loading import base_model_of, check_adapters
from torchrl_grpo.models.recurrent import pack_recurrent
from torchrl_grpo.models.rows import Rows
from torchrl_grpo.models.segments import send
from torchrl_grpo.models.sharding import call_gathered, compute_device, local_part, mesh_of
from torchrl_grpo.weights.named import CRITIC, is_critic

if TYPE_CHECKING:
    from torchrl.modules.llm import LLMWrapperBase

WINDOWS = ("attention_chunk_size", "attention_window_size", "local_attention")
"""Fields of a config that say how many tokens some of its layers look at, except for
``sliding_window``.
"""

_LENGTHS = ("sliding_window", "floor_scale")
"""Fields of a config, and of layers, that say from how many tokens on some of them attend to a
window, or scale their queries.
"""

_NO_VALUES: Mapping[NestedKey, Tensor] = MappingProxyType({})

_MODEL_ERRORS = (AttributeError, IndexError, RuntimeError, TypeError, ValueError)
"""Errors of a model that does not fit."""


def autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Mixed precision with that type on that device; None disables it."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


class TokenScorer(TensorDictModuleBase):
    """Scores the sampled tokens of a batch under a Hugging Face causal LM, as a TensorDict module.

    Reads ``("tokens", "full")`` and ``("masks", "all_assistant_mask")``, ragged or padded; writes
    padded ``("cur_log_probs", "full")`` and ``("entropy", "full")``, [B, T] float32, 0 on tokens
    outside the mask. A batch of TorchRL's wrappers, which have no such mask, is made one of ours
    first (``padding.sequences_of``). With a teacher (``distill_from``) it reads ``("next",
    "teacher_states")`` too and writes ``("divergence", "full")``. Where the batch has
    ``("kept_tokens", "sampled")``, the distributions are over these tokens only. ``score_rows`` is
    the same for flat sequences, and what a loss calls. A small model on a CPU is computed on one
    thread (``threads``).

    Args:
        model: a Hugging Face causal LM, or a peft model around one.
        temperature: the one that the tokens were sampled with, so that the scores are of the same
            distribution.
        max_chunk_elements: bound on the logits held at once; by default ``MAX_CHUNK_ELEMENTS`` of
            the device.

    Raises:
        ValueError: the head is no plain linear layer (a LoRA adapter on it), or the scores are not
            those of the model's own logits (see ``check_scorer``).

    Example:
        >>> scorer = TokenScorer(AutoModelForCausalLM.from_pretrained(path))  # doctest: +SKIP
        >>> log_probs, entropy = scorer.score(tokens_BT, mask_BT)  # doctest: +SKIP
    """

    in_keys: list[NestedKey] = [keys.FULL, keys.ASSISTANT_MASK]  # noqa: RUF012
    out_keys: list[NestedKey] = [keys.CUR_LOG_PROBS, keys.ENTROPY]  # noqa: RUF012
    optional_in_keys: tuple[NestedKey, ...] = (keys.ATTENTION_MASK, keys.KEPT, keys.IMAGES)
    """Further entries that ``forward`` reads if a batch has them."""

    def __init__(
        self, model: nn.Module, *, temperature: float = 1.0, max_chunk_elements: int | None = None
    ) -> None:
        super().__init__()
        base: Any = base_model_of(model)
        head = getattr(base, "get_output_embeddings", bool)()
        if not isinstance(head, nn.Linear):
            raise ValueError(
                f"model={type(base).__name__} must be a Hugging Face causal language model, whose LM "
                f"head is torch's own Linear, but is {type(head)}: use AutoModelForCausalLM, and "
                "leave the head out of train_model.lora.target_modules."
            )
        if not MIN_TEMPERATURE <= temperature < math.inf:
            raise ValueError(
                f"temperature must be at least {MIN_TEMPERATURE}, got {temperature}: use 1.0."
            )
        check_adapters(model)
        self.model: Any = model
        self.teacher: Teacher | None = None
        self.critic: nn.Linear | None = None
        self.temperature = temperature
        self.max_chunk_elements = max_chunk_elements
        self._image_features = None if family_of(base.config) is None else ImageFeatures(base)
        limit_threads(base)
        if base.device.type != "meta" and mesh_of(base) is None:
            check_scorer(self)

    @property
    def base(self) -> Any:
        """The Hugging Face model itself, without peft's wrapper."""
        return base_model_of(self.model)

    def distill_from(self, teacher: Teacher) -> None:
        """Write the divergence from a teacher too, in all later calls."""
        self.teacher = teacher
        self.in_keys = [*self.in_keys, keys.TEACHER_STATES]
        self.out_keys = [*self.out_keys, keys.DIVERGENCE]

    def add_critic(self) -> None:
        """Write the value of the state before each token too, in all later calls: a linear head,
        initialized to 0, on the model's last hidden states divided by their root mean square (arXiv
        1910.07467), so that one learning rate suits models whose states differ in scale. The bias
        is multiplied by the norm of such a state, so that at this rate it learns the mean return
        first.

        The head is a module ``critic`` of the model, so that it is trained, sharded and saved with
        the model; it is no part of ``named_weights``. Call this before ``shard_model``.
        """
        head = self.base.get_output_embeddings()
        trained = next(p for p in self.model.parameters() if p.requires_grad)
        self.critic = nn.Linear(head.in_features, 1, device=head.weight.device, dtype=trained.dtype)
        for parameter in self.critic.parameters():
            nn.init.zeros_(parameter)
        self.base.add_module(CRITIC, self.critic)
        self.out_keys = [*self.out_keys, keys.VALUE]

    def packs(self, longest: int, images: Sequence[Spans] | None = None) -> bool:
        """Whether sequences of at most ``longest`` tokens are packed: without padding, and each prefix
        computed once. ``images`` has the images of each sequence.

        Where not, a warning says why, once.
        """
        base, config = self.base, self.base.config.get_text_config()
        why = getattr(base, "unpacked_because", None)
        why = "it was sharded before a TokenScorer could check it" if why is None else why
        if is_bidirectional(base) and any(images or ()):
            why = "the tokens of an image attend to each other"
        for name in WINDOWS:
            if (getattr(config, name, None) or math.inf) < longest:
                why = f"some are longer than {name}={getattr(config, name)}"
        if why and why != "it is being checked":
            _warn_once(
                f"The sequences of {type(base).__name__} are padded, and each has its prompt "
                f"computed: {why}."
            )
        return not why

    def score(
        self, tokens_BT: Tensor, mask_BT: Tensor, images: Sequence[Spans] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Scores right-padded sequences.

        Args:
            tokens_BT: [B, T] int64, padding on the right (any valid id); best on the CPU, where
                their layout is made.
            mask_BT: [B, T] bool, the tokens to score; the first token of a sequence has no
                prediction and scores 0.
            images: the images of each sequence, with a vision-language model.

        Returns:
            log-probs and entropies, both [B, T] float32, 0 outside the mask, on the model's device.
        """
        rows = Rows.from_padded(tokens_BT, mask_BT, images)
        scores = self.score_rows(self.layout(rows))
        return rows.padded(scores["log_prob"]), rows.padded(scores["entropy"])

    def layout(self, rows: Rows, shared: Sequence[int] | None = None) -> Layout:
        """Return how a pass over sequences computes them, on the CPU.

        Args:
            rows: the sequences.
            shared: see ``packed``.

        Raises:
            ValueError: they are longer than the model's ``exact_context``.
        """
        limit = exact_context(self.base.config)
        longest = int(rows.lengths.max())
        if limit is not None and longest > limit:
            raise ValueError(
                f"sequences must have at most {limit} tokens with this model, whose log-probs depend "
                f"on the others of a pass beyond that, got {longest}: cut them, in a run by "
                f"inference_model.max_model_len={limit}."
            )
        grid = None
        if rows.images is not None and has_grid(self.base):
            each = zip(rows.tokens.split(rows.lengths.tolist()), rows.images, strict=True)
            grid = torch.cat([grid_positions(self.base, *row) for row in each], 1)
        packs = self.packs(longest, rows.images)
        layout = packed(rows, shared, grid) if packs else padded(rows, grid)
        return layout.with_unique_tokens() if tied_embedding(self.base) is not None else layout

    def for_passes(self) -> AbstractContextManager[None]:
        """Return a context for passes, which may enclose others; what each of several passes would
        do by itself is done once.
        """
        return nullcontext()

    def score_rows(
        self,
        layout: Layout,
        values: Mapping[NestedKey, Tensor] = _NO_VALUES,
        *,
        center: Centering | None = None,
        teacher: Teacher | None = None,
        value: bool = False,
    ) -> dict[str, Tensor]:
        """Score the S scored tokens of sequences.

        Args:
            layout: of the sequences, on any device.
            values: entries of ``Rows``. ``KEPT``, [S, K] int32, has the tokens that each token was
                drawn from, and then -1; without it, the distributions are over the whole
                vocabulary.
            center: computes ``"centering"``, see ``chunked_log_probs``; ``values`` then has
                ``KEPT`` and ``KEPT_LOG_PROBS``, [S, K].
            teacher: that ``"divergence"`` is from; ``values`` then has its ``TEACHER_STATES``,
                [S, E].
            value: computes ``"value"``, by the critic.

        Returns:
            ``"log_prob"`` and ``"entropy"``, and what is asked for, [S] float32 each, on the
            model's device; 0 at the first token of a sequence, which has no prediction.
        """
        layout = layout.to(compute_device(self.model))
        with self.for_passes():
            scores = call_gathered(self.model, self._score, layout, values, center, teacher, value)
        return {name: _without_first(layout, value) for name, value in scores.items()}

    def teacher_states(self, layout: Layout, top_k: int | None = None) -> Tensor:
        """Return this model's states for a divergence at the S scored tokens, see ``Teacher``.

        Args:
            layout: of the sequences.
            top_k: how many of the most likely tokens; None gives what goes into the LM head.

        Returns:
            [S, E] in the type of the model, or [S, 2 K + 1] float32.
        """
        layout = layout.to(compute_device(self.model))
        with self.for_passes():
            return _without_first(layout, call_gathered(self.model, self._states, layout, top_k))

    def _states(self, layout: Layout, top_k: int | None) -> Tensor:
        """Return ``teacher_states`` of only the scored tokens, [N, E] or [N, 2 K + 1]."""
        states, weight = self._hidden(layout)
        if top_k is None:
            return states
        bias = self.base.get_output_embeddings().bias
        return likely_tokens(states, weight, top_k, bias_V=bias, temperature=self.temperature)

    def _score(
        self,
        layout: Layout,
        values: Mapping[NestedKey, Tensor],
        center: Centering | None,
        teacher: Teacher | None,
        value: bool,
    ) -> dict[str, Tensor]:
        """Do ``score_rows`` with the LM head gathered."""
        hidden_ND, weight = self._hidden(layout)
        to_device = functools.partial(send, device=hidden_ND.device)
        bias = self.base.get_output_embeddings().bias
        options: dict[str, Any] = {
            "temperature": self.temperature,
            "max_chunk_elements": self.max_chunk_elements,
        }
        kept: Iterable[Tensor] = ()
        if keys.KEPT in values:  # on the CPU, while the device computes the states
            kept = map(to_device, values[keys.KEPT].cpu().unique(return_inverse=True))
        scores = chunked_log_probs(
            hidden_ND,
            weight,
            layout.targets,
            bias_V=bias,
            kept=[*kept],
            sample_NK=None if center is None else to_device(values[keys.KEPT_LOG_PROBS]),
            centering=center,
            **options,
        )
        out = dict(zip(("log_prob", "entropy", "centering"), scores, strict=False))
        if teacher is not None:
            states = to_device(values[keys.TEACHER_STATES])
            out["divergence"] = chunked_divergence(
                hidden_ND, weight, states, teacher, bias_V=bias, **options
            )
        if value and self.critic is not None:
            # In float32 or wider, which a linear layer would not be within autocast.
            wide = torch.promote_types(hidden_ND.dtype, torch.float32)
            size = self.critic.in_features
            states = nn.functional.rms_norm(hidden_ND.to(wide), (size,))
            out["value"] = (states * self.critic.weight).sum(-1) + size**0.5 * self.critic.bias
        return out

    def _hidden(self, layout: Layout) -> tuple[Tensor, Tensor]:
        """Return the states from which the tokens are predicted, [N, D], and the weight of the LM
        head.
        """
        base = self.base
        head = base.get_output_embeddings()
        if isinstance(head.weight, DTensor):
            raise ValueError(
                "the weight of the LM head (lm_head, or the embedding that it is tied to) must be "
                "sharded together with the whole model: call fully_shard on layers and on the "
                "model, and not on embedding or head."
            )
        if layout.once is None or layout.place is None:
            hidden, weight = self._last_states(layout), head.weight
        else:
            with tied_rows(base.get_input_embeddings(), layout.once, layout.place) as weight:
                hidden = self._last_states(layout)
        return pick(hidden.flatten(0, 1), 0, layout.predictors), weight

    def _last_states(self, layout: Layout) -> Tensor:
        """Return the last states of the language model, [1, N, D] or [B, T - 1, D]."""
        inputs = layout.model_inputs()
        if layout.images is not None:
            assert self._image_features is not None
            features = self._image_features(layout.images.images)
            embeddings = self.base.get_input_embeddings()(inputs.pop("input_ids"))
            picked = [pick(part, 0, layout.images.features) for part in features]
            inputs |= with_features(embeddings, picked, layout.images.places)
            inputs |= bidirectional_masks(self.base, embeddings, layout.images.places)
        return language_model_of(self.base)(**inputs).last_hidden_state

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the log-probs and entropies of the sampled tokens; see the class."""
        if is_of_wrapper(tensordict):
            tensordict = sequences_of(tensordict)
        rows = Rows.read(tensordict, (keys.KEPT, keys.TEACHER_STATES))
        scores = self.score_rows(
            self.layout(rows), rows.values, teacher=self.teacher, value=self.critic is not None
        )
        ragged = isinstance(tensordict, LazyStackedTensorDict)
        width = None if ragged else tensordict.get(keys.FULL).shape[1]
        for name, value in scores.items():
            tensordict.set(_OUT_KEYS[name], rows.padded(value, width))
        return tensordict


_OUT_KEYS: dict[str, NestedKey] = {
    "log_prob": keys.CUR_LOG_PROBS,
    "entropy": keys.ENTROPY,
    "divergence": keys.DIVERGENCE,
    "value": keys.VALUE,
}


def _without_first(layout: Layout, values: Tensor) -> Tensor:
    """Return values of the scored tokens, with 0 for the first one of a sequence."""
    return values if layout.first is None else values.index_fill(0, layout.first, 0.0)


@torch.no_grad()
def check_scorer(scorer: TokenScorer) -> None:
    """Compare a scorer with its model's own logits on a few tokens, and itself with and without
    packing.

    They differ where a model does more to its logits than its LM head does (soft-capping, a scale,
    one more layer), and whether it looks at later tokens. A model that mixes tokens in other ways
    than Hugging Face's attention interface cannot be packed: its sequences are padded from then on.
    ``TokenScorer`` checks itself when it is made, unless its model is sharded: make it before
    ``shard_model``.

    Raises:
        ValueError: they differ by more than rounding.
    """
    base, head = scorer.base, scorer.base.get_output_embeddings().weight
    base.unpacked_because = "it is being checked"
    tokens = _some_tokens(scorer)
    try:
        with _evaluated(scorer.model), torch.autocast(tokens.device.type, enabled=False):
            problem = _compare_forward(scorer, tokens)
            base.unpacked_because = _check_packing(scorer, tokens, head.dtype)
    except _MODEL_ERRORS as error:
        problem = f"cannot be had ({_first_line(error)})"
    # Rounding in bfloat16 may be larger than what a soft cap does to a few tokens.
    config = base.config.get_text_config()
    for name in (
        "final_logit_softcapping",
        "logits_soft_cap",
        "logit_scale",
        "logits_scaling",
        "lm_head_multiplier",
    ):
        if getattr(config, name, None) not in (None, 1):
            problem = f"{problem or 'are off'} (its config has {name}={getattr(config, name)})"
    if problem:
        raise ValueError(
            f"{type(base).__name__} must have logits that are its LM head's output and depend on "
            f"no later token, as log-probs are computed from the head in chunks: those {problem}; "
            "use another model (docs/models.md has a table)."
        )


@torch.no_grad()
def check_packing(scorer: TokenScorer, autocast_dtype: torch.dtype | None) -> None:
    """Compare a scorer with itself with and without packing in mixed precision, which may take
    other kernels.

    If they differ, its sequences are padded from then on. A model is checked once for each
    dtype; one that is sharded is not. Trainer and ``KLScoring`` do this when they are made.

    Args:
        scorer: checked by ``check_scorer``.
        autocast_dtype: of the passes to come; None is the precision that ``check_scorer`` has
            checked.
    """
    base = scorer.base
    checked = vars(base).setdefault("packing_checked_in", set())
    packs = mesh_of(base) is None and getattr(base, "unpacked_because", None) == ""
    if autocast_dtype is None or autocast_dtype in checked or not packs:
        return
    checked.add(autocast_dtype)
    tokens = _some_tokens(scorer)
    with _evaluated(scorer.model), autocast(tokens.device, autocast_dtype):
        base.unpacked_because = _check_packing(scorer, tokens, autocast_dtype)


@torch.no_grad()
def check_images(scorer: TokenScorer, prompt: ImagePrompt) -> None:
    """Compare a scorer with its model's own forward on a prompt, up to its second image.

    Args:
        scorer: checked by ``check_scorer``.
        prompt: a prompt of the run.

    Raises:
        ValueError: they differ by more than rounding.
    """
    base, device = scorer.base, compute_device(scorer.model)
    first, *others = prompt.images
    tokens = prompt.tokens[None, : others[0].offset if others else len(prompt)]
    kinds = torch.zeros_like(tokens)
    kinds[0, first.offset : first.end] = first.is_embed
    inputs = {"input_ids": tokens, **first.image.inputs}
    inputs |= dict.fromkeys(("mm_token_type_ids", "token_type_ids"), kinds)
    accepted = inspect.signature(base.forward).parameters
    inputs = {name: value.to(device) for name, value in inputs.items() if name in accepted}
    with _evaluated(scorer.model), torch.autocast(device.type, enabled=False):
        problem = _compare_forward(scorer, inputs.pop("input_ids"), [(first,)], **inputs)
    if problem:
        raise ValueError(
            f"{type(base).__name__} must have the log-probs of its own forward for a prompt with "
            f"an image, but they {problem}: use another model (docs/models.md has a table)."
        )


def _compare_forward(
    scorer: TokenScorer, tokens: Tensor, images: Sequence[Spans] | None = None, **inputs: Any
) -> str:
    """Return how far the log-probs of a sequence, [1, T], are from those of the model's own forward;
    "" if not by more than rounding.
    """
    rows = Rows.from_padded(tokens, torch.ones_like(tokens, dtype=torch.bool), images)
    scores = scorer.score_rows(scorer.layout(rows))["log_prob"][1:]
    with scorer.for_passes():
        # The model is given the last token too, which the scorer leaves out: nothing may depend on
        # it.
        out = scorer.base(input_ids=tokens, use_cache=False, **inputs)
    logits = out.logits[0, :-1].float() / scorer.temperature
    expected = logits.log_softmax(-1).gather(-1, tokens[0, 1:, None]).squeeze(-1)
    difference = (scores - expected).abs().mean().item()
    is_right = difference <= _rounding(scorer.base.get_output_embeddings().weight.dtype, logits)
    return "" if is_right else f"are off by {difference:.2g} nats on average"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _some_tokens(scorer: TokenScorer) -> Tensor:
    """[1, 12] int64 on the model's device, the same each time."""
    vocabulary = len(scorer.base.get_output_embeddings().weight)
    generator = torch.Generator("cpu").manual_seed(0)
    tokens = torch.randint(vocabulary, (1, 12), generator=generator, device="cpu")
    return tokens.to(compute_device(scorer.model))


@contextmanager
def _changed(attributes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Context in which objects have other attributes: object, name, and value."""
    attributes = list(attributes)
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in attributes]
    try:
        for change in attributes:
            setattr(*change)
        yield
    finally:
        for change in before:
            setattr(*change)


def _evaluated(model: nn.Module) -> AbstractContextManager[None]:
    """Context in which a model is in eval mode."""
    return _changed((module, "training", False) for module in model.modules())


def _rounding(dtype: torch.dtype, logits: Tensor) -> float:
    """Return the average error of log-probs that counts as rounding, in nats, from the logits or
    log-probs themselves.
    """
    return max(1e-4, 2 * torch.finfo(dtype).eps) * max(1.0, logits.abs().max().item())


def _check_packing(scorer: TokenScorer, tokens: Tensor, dtype: torch.dtype) -> str:
    """Return why a model cannot be packed, within or beyond the lengths at which its layers change
    (``_LENGTHS``), because its log-probs would differ; or "".

    Recurrent layers that cannot start from the states of a prefix compute it again from then on.
    """
    for forks in (True, False):
        for layer in (layers := pack_recurrent(scorer.base)):
            layer.forks = forks
        if not (why := _compare_packing(scorer, tokens, dtype)) or not layers:
            break
    config = scorer.base.config.get_text_config()
    holders = [config, *scorer.base.modules()]
    # Of two tokens, so that short sequences are longer.
    lengths = [(at, name, 2) for at in holders for name in _LENGTHS if getattr(at, name, None)]
    if not why and lengths:
        with _changed(lengths):
            why = _compare_packing(scorer, tokens, dtype)
    if why and (attention := attention_of(config)) != "sdpa":
        why = f"its attention is {attention}, not sdpa"
    return why


def _compare_packing(scorer: TokenScorer, tokens: Tensor, dtype: torch.dtype) -> str:
    """Do ``_check_packing`` for a group and a tree of two branches, with the model's own windows."""
    shared = [0, 3, 0, 2, 4]
    tokens = tokens.view(2, 6)[[0, 0, 1, 1, 1]]
    tokens[1, 3:] = tokens[0, 2:5]
    tokens[3:, 2:4], tokens[3, 4:] = tokens[2, 1:3], tokens[2, 3:5]
    starts = torch.tensor([[3], [3], [2], [2], [2]], device=tokens.device)
    mask = torch.arange(6, device=tokens.device) >= starts
    changed = tokens.clone()
    changed[0, 3:] = tokens[0, :3]  # another first response, beside which the others are the same
    scores = []
    try:
        for why in ("it is being checked", ""):
            scorer.base.unpacked_because = why
            for batch in (tokens, changed):
                layout = scorer.layout(Rows.from_padded(batch, mask), shared)
                scores.append(scorer.score_rows(layout)["log_prob"])
    except _MODEL_ERRORS as error:
        return _first_line(error)
    padded, padded_beside, packed, packed_beside = scores
    difference = (packed - padded).abs().mean().item()
    if not difference <= _rounding(dtype, padded):
        return f"their log-probs would be off by {difference:.2g} nats on average"
    # The first response has three tokens. Experts round by the tokens that they share, padded too.
    noise = (padded_beside - padded)[3:].abs().max() + 1e-6 * padded.abs().max()
    leak = (packed_beside - packed)[3:].abs().max()
    if not leak <= 8 * noise:
        return f"their log-probs would depend on the other sequences, by {leak:.2g} nats"
    return ""


@functools.cache
def _warn_once(message: str) -> None:
    torchrl_logger.warning(message)


class AdapterOffScorer(TokenScorer):
    """Scores with a peft model's adapters switched off: the reference policy of a LoRA run, without
    a second model.
    """

    @contextmanager
    def for_passes(self) -> Iterator[None]:
        """Context in which only the base model computes."""
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        with self.model.disable_adapter():
            # peft turns this off meanwhile. If this is the first forward, FSDP2 would then believe
            # that nothing is trained, and not cast the gradients.
            for parameter in trained:
                parameter.requires_grad_(True)
            yield


class AverageScorer(TokenScorer):
    """Scores with an exponential moving average of the trained weights, which is kept with them.

    Of a sharded model each rank holds its part, and with LoRA the average is of the adapters. The
    weights and the average change places during the passes.

    Args:
        model: as for ``TokenScorer``, with trained weights in float32.
        temperature: likewise.

    Keyword Args:
        decay: weight of the average in ``average = decay average + (1 - decay) weights``.
        every: steps between two updates.

    Attributes:
        average: the average of each trained weight, by its name; at first the weight itself.
    """

    _is_swapped = True  # until there is an average

    def __init__(
        self, model: nn.Module, temperature: float = 1.0, *, decay: float, every: int = 1
    ) -> None:
        super().__init__(model, temperature=temperature)
        self.decay = decay
        self.every = every
        self._trained = {
            name: p
            for name, p in model.named_parameters()
            if p.requires_grad and not is_critic(name)
        }
        self.average = {name: p.detach().clone() for name, p in self._trained.items()}
        self._is_swapped = False

    @torch.no_grad()
    def update(self, version: int) -> None:
        """Take the weights of a step into the average, if it is their turn."""
        if version % self.every == 0:
            for mine, weight in self._pairs():
                mine.lerp_(weight, 1 - self.decay)

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's part of each average and of its weight."""
        for name, weight in self._trained.items():
            yield local_part(self.average[name]), local_part(weight.detach())

    @contextmanager
    def for_passes(self) -> Iterator[None]:
        """Context in which average and weights have changed places, once for all passes in it."""
        if self._is_swapped:
            yield
            return
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        device = compute_device(self.model)
        for mine, weight in self._pairs():
            if weight.device != device:  # the device may still be reading offloaded weights
                torch.accelerator.synchronize(device)
                device = weight.device
            copy = mine.clone()
            mine.copy_(weight)
            weight.copy_(copy)
        self._is_swapped = not self._is_swapped


class WrapperScorer(TokenScorer):
    """Scores, with the model of a TorchRL LLM wrapper, the batches that such wrappers write.

    The wrapper lends its model and nothing else: not its distribution, which holds the logits of
    all tokens, pads on the left and gives no mask that both sides understand.
    ``padding.sequences_of`` says what becomes of the batch.

    Reads ``("tokens", "full")`` and what else ``padding.sequences_of`` needs; writes what
    ``TokenScorer`` writes, the mask and the behavior log-probs.

    Args:
        wrapper: a ``TransformersWrapper``. Its log-probs are at temperature 1, whatever it
            samples with.

    Raises:
        ValueError: the wrapper's model is no Hugging Face model (vLLM), so it has no gradients.
    """

    in_keys: list[NestedKey] = [keys.FULL]  # noqa: RUF012
    out_keys: list[NestedKey] = [  # noqa: RUF012
        keys.CUR_LOG_PROBS,
        keys.ENTROPY,
        keys.ASSISTANT_MASK,
        keys.LOG_PROBS,
    ]
    optional_in_keys: tuple[NestedKey, ...] = (
        *TokenScorer.optional_in_keys,
        keys.ASSISTANT_MASK,
        keys.LOG_PROBS,
        keys.PROMPT,
        ("log_probs", "response"),
    )

    def __init__(self, wrapper: LLMWrapperBase) -> None:
        model = getattr(wrapper, "model", None)
        if not isinstance(model, nn.Module):
            raise ValueError(
                f"actor_network={type(wrapper).__name__} must hold a Hugging Face model to "
                f"train, but it holds {type(model).__name__}: use TransformersWrapper, or "
                "TokenScorer(model)."
            )
        super().__init__(model)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return a ragged batch [B] made of the wrapper's batch, with log-probs and entropies; see
        the class.
        """
        return super().forward(sequences_of(tensordict))
