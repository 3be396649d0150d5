"""``PolicyLoss``: a loss made of parts, as a TorchRL ``LossModule``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torchrl.objectives.common import LossModule

from torchrl_grpo import functional as F
from torchrl_grpo import keys
from torchrl_grpo.checks import Aggregation
from torchrl_grpo.compat.torchrl import CHOICES, check_choice
from torchrl_grpo.models.padding import (
    copy_entry,
    has,
    is_of_wrapper,
    missing,
    sequences_of,
    trajectories_of,
)
from torchrl_grpo.models.rows import Rows
from torchrl_grpo.models.scoring import TokenScorer, WrapperScorer
from torchrl_grpo.models.sharding import compute_device
from torchrl_grpo.objectives.off_policy import OffPolicy
from torchrl_grpo.objectives.output import TORCHRL_METRICS, GRPOLossOutput
from torchrl_grpo.objectives.parts import Part, Select, Surrogate, Term
from torchrl_grpo.objectives.tokens import Tokens

_METRICS = (
    "objective",
    "clip_fraction_low",
    "clip_fraction_high",
    "ESS",
    "ratio_mean",
    "ratio_square_mean",
)
"""Metrics of every batch."""
_Values = dict[NestedKey, Tensor]
_TOTALS = (keys.TOKEN_COUNT, keys.SEQUENCE_COUNT)
_OF_TOKENS = (keys.LOSS_WEIGHTS, keys.TOKEN_ROLES, keys.DEMONSTRATION_WEIGHTS)


class PolicyLoss(LossModule):
    """A loss of parts: what each token is worth, which tokens count, and what is added.

    ``loss_objective`` is minus the average of ``objective`` over the selected tokens, each with the
    weight of ``off_policy``; each of ``terms`` adds its ``loss_`` entry. Only entries named
    ``loss_*`` belong to the loss: add those up, and never average over the whole output.
    Everything else is a detached metric.

    ``normalize`` fixes what depends on a whole optimization batch, such as the weights of tokens;
    then the outputs of its micro-batches add up to those of the batch, and so do the gradients. For
    a batch without these entries, ``forward`` computes them from the batch itself.

    Args:
        actor_network: a TensorDict module that writes the current log-probs ``("cur_log_probs",
            "full")`` and ``("entropy", "full")``, [B, T] padded on the right, such as
            ``TokenScorer``. TorchRL's ``TransformersWrapper`` becomes a ``WrapperScorer`` of its
            model.
        objective: the objective of each token.
        off_policy: the ratio, and the weights of stale tokens; by default plain PPO's.

    Keyword Args:
        select: selections of tokens, all of which a token must pass.
        terms: further terms.
        reduce: average over tokens, see ``functional.token_weights``.
        constant_length: divisor of ``reduce="constant"``, in tokens, at least 1.
        dual_clip: bound of the objective where the advantage is negative, above 1 (arXiv
            1912.09729); None disables it.
        kl_mask_threshold: tokens with a larger k2 estimate of the KL to the sampling policy are
            removed from loss and metrics, as in TorchRL; None keeps all.
        sft_coeff: weight of minus the log-likelihood of the demonstrations in the batch.
        device: of the loss's own buffers; by default, the device on which the model computes.

    Raises:
        ValueError: ``actor_network`` is not a TensorDict module, or an argument is out of its
            range; the batch has more than one dimension, or an entry has a wrong shape.
        KeyError: the batch lacks one of ``required_in_keys``.

    Example:
        >>> loss = PolicyLoss(  # doctest: +SKIP
        ...     scorer,
        ...     Clip(0.2, 0.28),
        ...     OffPolicy(proximal="recomputed", reject={"geometric": (0.99, 1.01)}),
        ...     select=[Valid(), TopEntropy(0.2)],
        ...     terms=[KLTo("ref", 0.01), Entropy(0.0)],
        ... )
    """

    @dataclass
    class _AcceptedKeys(LossModule._AcceptedKeys):
        advantage: NestedKey = keys.ADVANTAGE
        action: NestedKey = keys.FULL
        sample_log_prob: NestedKey = keys.LOG_PROBS
        ref_log_probs: NestedKey = keys.REF_LOG_PROBS
        mask: NestedKey = keys.ASSISTANT_MASK
        cur_log_prob: NestedKey = keys.CUR_LOG_PROBS
        entropy: NestedKey = keys.ENTROPY
        prox_log_prob: NestedKey = keys.PROX_LOG_PROBS
        prox_entropy: NestedKey = keys.PROX_ENTROPY
        staleness: NestedKey = keys.STALENESS
        truncated: NestedKey = keys.TRUNCATED
        reward_valid: NestedKey = keys.REWARD_VALID
        teacher_valid: NestedKey = keys.TEACHER_VALID
        teacher_log_probs: NestedKey = keys.TEACHER_LOG_PROBS
        divergence: NestedKey = keys.DIVERGENCE
        is_demonstration: NestedKey = keys.IS_DEMONSTRATION

    default_keys = _AcceptedKeys
    tensor_keys: _AcceptedKeys

    actor_network: TensorDictModuleBase
    objective: Surrogate
    off_policy: OffPolicy
    select: Any
    terms: Any
    _in_keys: list[NestedKey] | None = None
    _out_keys_apparent: list[NestedKey] | None = None

    def __init__(
        self,
        actor_network: TensorDictModuleBase,
        objective: Surrogate,
        off_policy: OffPolicy | None = None,
        *,
        select: Sequence[Select] = (),
        terms: Sequence[Term] = (),
        reduce: Aggregation = "sequence_mean",
        constant_length: int | None = None,
        dual_clip: float | None = None,
        kl_mask_threshold: float | None = None,
        sft_coeff: float = 0.0,
        device: torch.device | str | int | None = None,
    ) -> None:
        super().__init__()
        self.actor_network = _scorer(actor_network)
        self.objective = objective
        self.off_policy = OffPolicy() if off_policy is None else off_policy
        self.select = nn.ModuleList(select)
        self.terms = nn.ModuleList(terms)
        self.aggregation = CHOICES.get(reduce, reduce)
        self.constant_length = constant_length
        self.dual_clip = dual_clip
        self.kl_mask_threshold = kl_mask_threshold or 0.0
        self.sft_coeff = sft_coeff
        check_choice("aggregation", self.aggregation, get_args(Aggregation))
        if dual_clip is not None and objective.bounds_itself:
            raise ValueError(
                f"dual_clip={dual_clip} must be None with {type(self).__name__}, which already "
                "bounds every token: leave it out, or use GRPOLoss."
            )
        if dual_clip is not None and dual_clip <= 1:
            raise ValueError(
                f"dual_clip={dual_clip} must be above 1: use 3.0, or None to disable it."
            )
        if (constant_length or 0) < 1 and (
            constant_length is not None or self.aggregation == "constant"
        ):
            raise ValueError(
                f"constant_length={constant_length} must be at least 1, because it divides the sums "
                "of aggregation='constant': use the longest response allowed, in tokens."
            )
        if sft_coeff < 0:
            raise ValueError(
                f"sft_coeff={sft_coeff} must not be negative: use 0 to switch the term off."
            )
        device = _device(self.actor_network) if device is None else torch.device(device)
        for part in self._parts():
            part.to(device)

    def _parts(self) -> list[Part]:
        return [self.off_policy, self.objective, *self.select, *self.terms]

    def _key(self, name: NestedKey) -> NestedKey:
        """Return the key of a name of ``set_keys``, or a key itself."""
        return getattr(self.tensor_keys, name, name) if isinstance(name, str) else name

    @property
    def in_keys(self) -> list[NestedKey]:
        """Keys of all entries that ``forward`` may read, or those that were set, until keys are
        renamed: ``batch.select(*loss.in_keys, strict=False)`` changes no output.
        """
        if self._in_keys is not None:
            return self._in_keys
        optional = [
            *getattr(self.actor_network, "optional_in_keys", ()),
            *(self._key(name) for part in self._parts() for name in part.optional_in_keys),
            keys.TRAJECTORY,
            *self._prepared_keys(),
            *_TOTALS,
        ]
        return list(dict.fromkeys([*self.required_in_keys, *optional]))

    @in_keys.setter
    def in_keys(self, names: list[NestedKey] | None) -> None:
        self._in_keys = names

    @property
    def required_in_keys(self) -> list[NestedKey]:
        """Keys of the entries that a batch must have."""
        scorer = self.actor_network
        own = [key for key in self._needs() if key not in scorer.out_keys]
        renamed = dict(self._renamed())
        return list(dict.fromkeys([*(renamed.get(key, key) for key in scorer.in_keys), *own]))

    def _needs(self) -> list[NestedKey]:
        """Keys of the entries that the loss needs, whether the batch or the scorer has them."""
        names: list[NestedKey] = ["mask", "sample_log_prob", "advantage"]
        names += [name for part in self._parts() for name in part.in_keys]
        names += ["is_demonstration"] if self.sft_coeff else []
        names += [keys.KEPT, keys.KEPT_LOG_PROBS] if self._centers else []
        return [self._key(name) for name in names]

    def _renamed(self) -> list[tuple[NestedKey, NestedKey]]:
        """Return the keys of the scorer's entries that have another name in the batch, and that."""
        names = self.tensor_keys
        pairs = [(keys.FULL, names.action), (keys.ASSISTANT_MASK, names.mask)]
        own = self.actor_network.in_keys
        return [(key, name) for key, name in pairs if key != name and key in own]

    @property
    def _centers(self) -> bool:
        """Whether the scorer is asked for the mean scores."""
        return self.off_policy.centering and isinstance(self.actor_network, TokenScorer)

    def _prepared_keys(self) -> list[NestedKey]:
        """Keys of what ``prepare`` makes of each token."""
        own: list[NestedKey] = [("loss", name) for part in self._parts() for name in part.prepared]
        return [*_OF_TOKENS, *own]

    @property
    def out_keys(self) -> list[NestedKey]:
        """Keys that ``forward`` returns for a batch with exactly the required ``in_keys``, or those
        that ``select_out_keys`` leaves.
        """
        if self._out_keys_apparent is not None:
            return self._out_keys_apparent
        metrics = [name for part in self._parts() for name in part.out_keys]
        terms = [f"loss_{term.name}" for term in self.terms if term.coeff]
        terms += ["loss_sft"] if self.sft_coeff else []
        terms += ["loss_score_centering"] if self.off_policy.centering else []
        theirs = [TORCHRL_METRICS[0]]
        theirs += TORCHRL_METRICS[1:3] if "kl_k1_to_inference" in metrics else ()
        theirs += TORCHRL_METRICS[3:] if "kl_k3_to_ref" in metrics else ()
        return ["loss_objective", *terms, *_METRICS, *metrics, *theirs]

    @out_keys.setter
    def out_keys(self, names: list[NestedKey]) -> None:
        self._out_keys_apparent = names

    def select_out_keys(self, *out_keys: str) -> PolicyLoss:
        """Return only these outputs from here on. TorchRL's own needs a batch with all in_keys."""
        self.out_keys = list(out_keys)
        return self

    def reset_out_keys(self) -> PolicyLoss:
        """Return all outputs again."""
        self._out_keys_apparent = None
        return self

    def _forward_value_estimator_keys(self, **kwargs: object) -> None:
        """Nothing to forward without a value estimator, and the scorer stays as it is."""
        self.in_keys = None

    # Reading a batch

    @torch.compiler.disable
    def read(self, batch: TensorDictBase, required: Sequence[NestedKey] | None = None) -> Rows:
        """Read the entries of a batch [B], ragged or padded on the right, that the loss needs.

        Args:
            batch: batch size [B].
            required: keys of the entries that it must have; by default ``required_in_keys``.

        Raises:
            KeyError: one of them is missing.
            ValueError: an entry has a wrong shape.
        """
        names = self.tensor_keys
        required = self.required_in_keys if required is None else required
        _check(batch, required)
        wanted = {*required, *self._needs(), *self.in_keys, keys.CENTERING}
        wanted -= {names.action, names.mask, *_NO_VALUES}
        rows = Rows.read(batch, sorted(wanted, key=str), names.action, names.mask)
        totals = {key: batch[0].get(key).reshape(()) for key in _TOTALS if has(batch, key)}
        trajectory = None if keys.LOSS_WEIGHTS in rows.values else trajectories_of(batch)
        return replace(rows, totals=totals, trajectory=trajectory)

    def normalize(self, batch: TensorDictBase) -> TensorDictBase:
        """Fix what depends on a whole optimization batch, such as the weight of each token, in
        place.

        Call it before splitting the batch, so that micro-batches add up to the batch.

        Args:
            batch: [N], ragged or padded, with the entries that decide which tokens count.
        """
        action, mask = self.tensor_keys.action, self.tensor_keys.mask
        ragged = sequences_of(batch, action) if is_of_wrapper(batch, mask) else batch
        parts = [part for part in self._parts() if isinstance(part, Select) or part.prepared]
        names = ["mask", "sample_log_prob", *(name for part in parts for name in part.in_keys)]
        names += ["is_demonstration"] if self.sft_coeff else []
        rows = self.read(ragged, list(map(self._key, names)))
        rows = self.prepare(replace(rows, trajectory=trajectories_of(batch)))
        for key in self._prepared_keys():
            if key in rows.values:
                rows.write(batch, key, rows.values[key], action)
        for key, total in rows.totals.items():
            batch.set(key, total.expand(len(rows), 1).contiguous())
        return batch

    def prepare(self, rows: Rows) -> Rows:
        """Return the sequences of a whole optimization batch with what depends on all of them."""
        whole = self._tokens(rows, {})
        keep = self._keep(whole)
        fixed, totals = self._fix(whole.take(keep), rows.trajectory)
        places = keep.nonzero().squeeze(-1)
        values = {
            key: value.new_zeros(len(keep)).index_copy(0, places, value)
            for key, value in fixed.items()
        }
        if self.sft_coeff:
            values[keys.DEMONSTRATION_WEIGHTS] = self._of_demonstrations(whole)
        return replace(rows, values=rows.values | values, totals=totals, trajectory=None)

    def count(self, rows: Rows) -> Rows:
        """Return sequences with the places of the tokens that count; best on the CPU."""
        whole = self._tokens(rows, {})
        keep = self._keep(whole)
        counted = None if bool(keep.all()) else keep.nonzero().squeeze(-1)
        return replace(rows, counted=counted, of_counted=whole.take(keep).rows)

    def _tokens(self, rows: Rows, scores: Mapping[str, Tensor]) -> Tokens:
        """Return all scored tokens, those that do not count too."""
        names = {
            name: key for name, key in vars(self.tensor_keys).items() if name != "cur_log_prob"
        }
        names |= {"log_prob": self.tensor_keys.cur_log_prob, "centering": keys.CENTERING}
        values = rows.values | {names.get(name, name): value for name, value in scores.items()}
        return Tokens(values, rows.of_scored, names)

    def _keep(self, t: Tokens) -> Tensor:
        """Return which tokens count, [S] bool."""
        keep = torch.ones_like(t["sample_log_prob"], dtype=torch.bool)
        for select in self.select:
            if select.is_of_loss:
                keep = keep & select(t)
        if self.sft_coeff:
            keep = keep & ~t["is_demonstration"].bool()
        return keep

    def _fix(self, t: Tokens, trajectory: Tensor | None) -> tuple[_Values, _Values]:
        """Return what depends on all tokens that count: values of each, and totals."""
        dtype, device = t["sample_log_prob"].dtype, t["sample_log_prob"].device
        weights = F.token_weights(
            t.rows.to(device),
            self.aggregation,
            constant_length=self.constant_length or 1,
            dtype=dtype,
            trajectory=None if trajectory is None else trajectory.to(device),
        )
        trained = torch.ones_like(weights, dtype=torch.bool)
        for select in self.select:
            if not select.is_of_loss:
                trained = trained & select(t)
        values: _Values = {keys.LOSS_WEIGHTS: weights, keys.TOKEN_ROLES: trained}
        for part in self._parts():
            values |= {("loss", name): value for name, value in part.prepare(t).items()}
        sizes = t.rows.sizes
        counts = (sizes.sum().clamp(min=1), (sizes > 0).sum().clamp(min=1))
        return values, dict(zip(_TOTALS, counts, strict=True))

    def _of_demonstrations(self, t: Tokens) -> Tensor:
        """Return the share of each token in the demonstrations' log-likelihood, [S]."""
        flags = t["is_demonstration"].bool()
        share = 1.0 / flags.sum().clamp(min=1).to(t["sample_log_prob"].dtype)
        return torch.where(flags, share, 0.0)

    # Computing the loss

    def forward(self, tensordict: TensorDictBase) -> GRPOLossOutput:
        """Return the loss terms and the metrics of a batch [B], ragged or padded on the right; see
        the class.
        """
        if tensordict.ndim != 1 or not len(tensordict):
            raise ValueError(
                f"batch_size={list(tensordict.batch_size)} must be [N], at least one sequence: use "
                "batch[:1] for one of them, batch.reshape(-1) for more dimensions, and leave out "
                "empty batches."
            )
        scorer = self.actor_network
        if not isinstance(scorer, TokenScorer):
            written = [self.tensor_keys.cur_log_prob, self.tensor_keys.entropy]
            _check(tensordict, self.required_in_keys)
            data = self._act(tensordict)
            rows = self.read(data, [*self.required_in_keys, *written])
            scores = dict[str, Tensor]()
        else:
            if isinstance(scorer, WrapperScorer) or is_of_wrapper(
                tensordict, self.tensor_keys.mask
            ):
                tensordict = sequences_of(tensordict, self.tensor_keys.action)
            rows = self.read(tensordict)
            scores = self.score(rows, scorer.layout(rows))
        return self.of_rows(rows, scores)

    def _act(self, batch: TensorDictBase) -> TensorDictBase:
        """Return a batch with what the actor network writes."""
        data = batch.copy()
        for key, name in self._renamed():
            copy_entry(data, name, key)
        return self.actor_network(data)

    def scores_of_actor(self, batch: TensorDictBase, rows: Rows) -> dict[str, Tensor]:
        """Return the scores of an actor network that is no ``TokenScorer``; see ``score``."""
        names, out = self.tensor_keys, self._act(batch)
        keys_of = {"log_prob": names.cur_log_prob, "entropy": names.entropy}
        keys_of |= {"divergence": names.divergence, "centering": keys.CENTERING}
        return {name: rows.value(out, key) for name, key in keys_of.items() if has(out, key)}

    def score(self, rows: Rows, layout: Any) -> dict[str, Tensor]:
        """Return the scores of a ``TokenScorer`` that the loss reads, [S] each, by name."""
        scorer = self.actor_network
        assert isinstance(scorer, TokenScorer)
        center = self.off_policy.center if self._centers else None
        return scorer.score_rows(layout, rows.values, center=center, teacher=scorer.teacher)

    def of_rows(self, rows: Rows, scores: Mapping[str, Tensor]) -> GRPOLossOutput:
        """Return the loss terms and the metrics of scored sequences.

        Args:
            rows: from ``read``, on any device; from ``prepare``, if they are a part of a batch.
            scores: [S] each, by name, from ``score``; none if the rows have them.
        """
        t, every = self._counting(rows, scores)
        out = self.of_tokens(t)
        if self.sft_coeff:
            weights = every.values.get(keys.DEMONSTRATION_WEIGHTS)
            weights = self._of_demonstrations(every) if weights is None else weights
            log_prob = torch.where(weights > 0, every["log_prob"], 0.0)
            out["loss_sft"] = -self.sft_coeff * (weights * log_prob).sum()
        selected = self._out_keys_apparent
        return GRPOLossOutput(out if selected is None else {name: out[name] for name in selected})

    @torch.compiler.disable
    def _counting(self, rows: Rows, scores: Mapping[str, Tensor]) -> tuple[Tokens, Tokens]:
        """Return the tokens that count, with their weights, and all of them."""
        rows = self.count(rows) if rows.of_counted is None else rows
        every = self._tokens(rows, scores)
        device = every["log_prob"].device
        every.values = {key: value.to(device) for key, value in every.values.items()}
        t = every
        if rows.counted is not None:
            index = rows.counted.to(device)
            t = replace(
                every,
                values={key: value.index_select(0, index) for key, value in t.values.items()},
            )
        assert rows.of_counted is not None
        t.rows = rows.of_counted.to(device)
        t["sample_log_prob"] = t["sample_log_prob"].detach()
        if self.objective.is_supervised:
            t["sample_log_prob"] = t["log_prob"].detach()
        if self.kl_mask_threshold > 0:
            k2 = F.kl_k2(t["log_prob"].detach(), t["sample_log_prob"])
            t = t.take(k2 <= self.kl_mask_threshold)
        totals = rows.totals
        if keys.LOSS_WEIGHTS not in t.values:
            fixed, totals = self._fix(t, rows.trajectory)
            t.values |= {key: value.to(device) for key, value in fixed.items()}
        t.weights = t.values[keys.LOSS_WEIGHTS].to(t["log_prob"].dtype)
        t.count, t.sequences = (totals[key].to(device) for key in _TOTALS)
        return t, every

    def of_tokens(self, t: Tokens) -> dict[str, Tensor]:
        """Return the loss terms and the metrics of the tokens that count."""
        correction = self.off_policy(t)
        advantage, ratio = t["advantage"], t["ratio"]
        surrogate = self.objective(t)
        if self.dual_clip is not None:
            surrogate = F.dual_clip(surrogate, advantage, self.dual_clip)
        trained = t[keys.TOKEN_ROLES]
        surrogate = torch.where(trained, t["behaviour_weight"] * surrogate, 0.0)
        out = {"loss_objective": -t.weighted_sum(surrogate)}
        if self.off_policy.centering:
            centering = torch.where(trained & ~t["is_rejected"], t[keys.CENTERING], 0.0)
            out["loss_score_centering"] = t.weighted_sum(advantage * centering)
        low, high = self.objective.clipped(t)
        out |= t.means(
            objective=surrogate,
            clip_fraction_low=low,
            clip_fraction_high=high,
            ratio_mean=ratio,
            ratio_square_mean=ratio.square(),
        )
        own, size = ratio.detach(), max(1, len(ratio))
        out["ESS"] = F.effective_sample_size(own.sum() / size, own.square().sum() / size)
        out |= correction
        for term in self.terms:
            value, metrics = term(t)
            if term.coeff:
                out[f"loss_{term.name}"] = term.coeff * t.weighted_sum(value)
            out |= metrics
        out["clip_fraction"] = out["clip_fraction_low"] + out["clip_fraction_high"]
        if "kl_k1_to_inference" in out:
            out["kl_approx"] = -out["kl_k1_to_inference"]
            out["kl_to_inference"] = out["kl_k3_to_inference"]
        if "kl_k3_to_ref" in out:
            out["kl_to_ref"] = out["kl_k3_to_ref"]
        return out


_NO_VALUES = (
    keys.ATTENTION_MASK,
    keys.IMAGES,
    keys.TRAJECTORY,
    keys.PROMPT,
    ("log_probs", "response"),
    *_TOTALS,
)
"""Entries that are read in another way than as a value of each token."""


@torch.compiler.disable
def _check(batch: TensorDictBase, required: Sequence[NestedKey]) -> None:
    """Refuse a batch that lacks an entry."""
    for key in required:
        if not has(batch, key):
            raise missing(batch, key)


def _device(scorer: TensorDictModuleBase) -> torch.device:
    return compute_device(scorer.model if isinstance(scorer, TokenScorer) else scorer)


def _scorer(actor_network: nn.Module) -> TensorDictModuleBase:
    """Return the module that writes current log-probs and entropy, made from a TorchRL wrapper's
    model if necessary.

    Raises:
        ValueError: ``actor_network`` is not a TensorDict module, or the wrapper has no Hugging Face
            model.
    """
    # A caller with a wrapper has imported this module; importing it here would import vLLM if it
    # is installed.
    wrappers = sys.modules.get("torchrl.modules.llm")
    if wrappers is not None and isinstance(actor_network, wrappers.LLMWrapperBase):
        return WrapperScorer(actor_network)
    if not hasattr(actor_network, "out_keys"):
        raise ValueError(
            f"actor_network={type(actor_network).__name__} must be a TensorDict module that writes "
            "log-probs and entropy of the sampled tokens: use TokenScorer(model)."
        )
    return actor_network
