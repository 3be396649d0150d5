"""``PolicyLoss``: a loss made of parts, as a TorchRL ``LossModule``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
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
from torchrl_grpo.models.entries import (
    copy_entry,
    has,
    is_of_wrapper,
    missing,
    sequences_of,
    trajectories_of,
)
from torchrl_grpo.models.rows import Rows
from torchrl_grpo.models.scoring import TokenScorer, WrapperScorer
from torchrl_grpo.models.segments import Segments
from torchrl_grpo.models.sharding import compute_device
from torchrl_grpo.objectives.off_policy import OffPolicy
from torchrl_grpo.objectives.output import GRPOLossOutput
from torchrl_grpo.objectives.parts import Part, Select, Surrogate, Term
from torchrl_grpo.objectives.tokens import Tokens, token_weights

_TOTALS = (keys.TOKEN_COUNT, keys.SEQUENCE_COUNT, keys.DEMONSTRATION_COUNT)


class PolicyLoss(LossModule):
    """A loss of parts: what each token is worth, which tokens count, and what is added.

    ``loss_objective`` is minus the average of ``objective`` over the selected tokens, each with the
    weight of ``off_policy``; each of ``terms`` adds its ``loss_`` entry. Only entries named
    ``loss_*`` belong to the loss: add those up, and never average over the whole output.
    Everything else is a detached metric.

    ``normalize`` fixes what depends on a whole optimization batch, such as the weights of tokens;
    then the outputs and gradients of its micro-batches add up to the whole batch's. Without it,
    ``forward`` computes these entries from the batch that it gets.

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
        aggregation: average over tokens, see ``token_weights``.
        constant_length: divisor of ``aggregation="constant"``, in tokens, at least 1.
        dual_clip: bound of the objective where the advantage is negative, above 1 (arXiv
            1912.09729); None disables it.
        kl_mask_threshold: tokens with a larger k2 estimate of the KL to the sampling policy are
            removed from loss and metrics, as in TorchRL; None keeps all.
        sft_coeff: weight of minus the log-likelihood of the demonstrations in the batch.
        device: device of the loss's buffers; by default, the device on which the model computes.

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
        value: NestedKey = keys.VALUE
        state_value: NestedKey = keys.STATE_VALUE
        value_target: NestedKey = keys.VALUE_TARGET
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
        aggregation: Aggregation = "sequence_mean",
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
        self.aggregation = CHOICES.get(aggregation, aggregation)
        self.constant_length = constant_length
        self.dual_clip = dual_clip
        self.kl_mask_threshold = kl_mask_threshold
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

    @property
    def in_keys(self) -> list[NestedKey]:
        """Keys of all entries that ``forward`` may read, or those that were set, until keys are
        renamed: ``batch.select(*loss.in_keys, strict=False)`` changes no output.
        """
        if self._in_keys is not None:
            return self._in_keys
        of_scorer = getattr(self.actor_network, "optional_in_keys", ())
        of_parts = [*self._part_keys(optional=True).values(), *self._prepared_keys().values()]
        all_keys = [*self.required_in_keys, *of_scorer, keys.TRAJECTORY, *of_parts, *_TOTALS]
        return list(dict.fromkeys(all_keys))

    @in_keys.setter
    def in_keys(self, names: list[NestedKey] | None) -> None:
        self._in_keys = names

    @property
    def required_in_keys(self) -> list[NestedKey]:
        """Keys of the entries that a batch must have."""
        scorer, names = self.actor_network, self.tensor_keys
        of_scorer = [key for key in scorer.in_keys if key not in (keys.FULL, keys.ASSISTANT_MASK)]
        if self.off_policy.centering and isinstance(scorer, TokenScorer):
            of_scorer += [keys.KEPT, keys.KEPT_LOG_PROBS]
        of_parts = [key for key in self._part_keys().values() if key not in scorer.out_keys]
        return list(dict.fromkeys([names.action, *of_scorer, *of_parts]))

    def _part_keys(self, *, optional: bool = False) -> dict[NestedKey, NestedKey]:
        """Return by name the keys of the entries that the parts need, from the batch or the scorer
        or, if ``optional``, the keys of the entries that they read if a batch has them.
        """
        names: list[NestedKey] = [] if optional else ["mask", "sample_log_prob", "advantage"]
        names += ["is_demonstration"] if self.sft_coeff else []
        for part in self._parts():
            names += part.optional_in_keys if optional else part.in_keys if part.active else ()
        return {name: self._key(name) for name in names}

    def _key(self, name: NestedKey) -> NestedKey:
        """Return the key of a name of ``set_keys``, or of a key itself."""
        return vars(self.tensor_keys).get(name, name)

    def _prepared_keys(self) -> dict[str, NestedKey]:
        """Return by name the keys of the values that ``prepare`` computes for each token."""
        names = [name for part in self._parts() for name in part.prepared]
        return {name: ("loss", name) for name in ("weights", "token_roles", *names)}

    @property
    def out_keys(self) -> list[NestedKey]:
        """Keys that ``forward`` returns for a batch with exactly the required ``in_keys``, or those
        that ``select_out_keys`` leaves.
        """
        if self._out_keys_apparent is not None:
            return self._out_keys_apparent
        one = torch.ones(1, device=self.objective.low.device)
        names = ["log_prob", "entropy", "centering", *self._part_keys()]
        t = Tokens(dict.fromkeys(names, one), Segments.of([1]).to(one.device))
        with torch.no_grad():
            self._add_batch_values(t, t)
            return [*self.of_tokens(t), *(["loss_sft"] if self.sft_coeff else [])]

    def select_out_keys(self, *out_keys: str) -> PolicyLoss:
        """Return only these outputs from now on. TorchRL's method needs a batch with all in_keys."""
        self._out_keys_apparent = list(out_keys)
        return self

    def reset_out_keys(self) -> PolicyLoss:
        """Return all outputs again."""
        self._out_keys_apparent = None
        return self

    def _forward_value_estimator_keys(self, **kwargs: object) -> None:
        """Reset ``in_keys``. There is no value estimator to forward keys to."""
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
        tokens, mask = self.tensor_keys.action, self.tensor_keys.mask
        required = self.required_in_keys if required is None else required
        of_scorer = {keys.KEPT, keys.KEPT_LOG_PROBS, keys.TEACHER_STATES}.intersection(self.in_keys)
        names = {*self._all_keys().values(), *of_scorer} - {mask}
        for key in {*required} - {tokens, mask, *names}:
            if not has(batch, key):
                raise missing(batch, key)
        rows = Rows.read(batch, sorted(names, key=str), tokens, mask, required=required)
        totals = {key: batch[0].get(key).reshape(()) for key in _TOTALS if has(batch, key)}
        trajectory = None if totals else trajectories_of(batch)
        return replace(rows, totals=totals, trajectory=trajectory)

    def normalize(self, batch: TensorDictBase) -> TensorDictBase:
        """Write what depends on a whole optimization batch, such as token weights, into the batch.

        Call it before splitting the batch, so that micro-batches add up to the batch.

        Args:
            batch: [N], ragged or padded, with the entries that decide which tokens count.
        """
        names = self.tensor_keys
        ragged = sequences_of(batch, names.action) if is_of_wrapper(batch, names.mask) else batch
        parts = [part for part in self._parts() if part.prepared or isinstance(part, Select)]
        entries = ["sample_log_prob", *(name for part in parts for name in part.in_keys)]
        required = [key for key in self.required_in_keys if key in map(self._key, entries)]
        rows = self.read(ragged, required)
        rows = self.prepare(replace(rows, trajectory=trajectories_of(batch)))
        for key in self._prepared_keys().values():
            rows.write(batch, key, rows.values[key], names.action)
        for key, total in rows.totals.items():
            batch.set(key, total.expand(len(rows), 1).contiguous())
        return batch

    def prepare(self, rows: Rows) -> Rows:
        """Return the sequences of a whole optimization batch with what depends on all of them."""
        all_tokens = self._all_tokens(rows, {})
        counts = self._selected(all_tokens, of_loss=True)
        t = all_tokens.take(counts)
        self._add_batch_values(t, all_tokens, rows.trajectory)
        values = {
            key: t[name].new_zeros(len(counts)).masked_scatter(counts, t[name])
            for name, key in self._prepared_keys().items()
        }
        return replace(rows, values=rows.values | values, totals=t.totals, trajectory=None)

    def _score_keys(self) -> dict[str, NestedKey]:
        """Return the keys of scores that an actor network may write, by name."""
        names = self.tensor_keys
        scores = {"log_prob": names.cur_log_prob, "entropy": names.entropy}
        scores |= {"divergence": names.divergence, "value": names.value}
        return scores | {"centering": keys.CENTERING}

    def _all_keys(self) -> dict[NestedKey, NestedKey]:
        """Return the keys of all values of tokens that a batch may have, by name."""
        return (
            self._part_keys()
            | self._part_keys(optional=True)
            | self._prepared_keys()
            | self._score_keys()
        )

    def _all_tokens(self, rows: Rows, scores: dict[str, Tensor]) -> Tokens:
        """Return all scored tokens, counted or not, with the scores of a pass."""
        values = {
            name: rows.values[key] for name, key in self._all_keys().items() if key in rows.values
        }
        device = values["sample_log_prob"].device
        return Tokens(values | scores, rows.of_scored.to(device), rows.totals)

    def _selected(self, t: Tokens, *, of_loss: bool) -> Tensor:
        """Return, [S] bool, which sampled tokens count, because they pass the selections of the
        loss, or which pass the selections of the objective.
        """
        flags = torch.ones_like(t["sample_log_prob"], dtype=torch.bool)
        if self.sft_coeff:
            flags = ~t["is_demonstration"].bool()
        for select in self.select:
            if select.active and select.is_of_loss == of_loss:
                chosen = select(t)
                if not isinstance(chosen, bool):
                    t.checked(chosen, select, torch.bool)
                flags = flags & chosen
        return flags

    def _add_batch_values(
        self, t: Tokens, all_tokens: Tokens, trajectory: Tensor | None = None
    ) -> None:
        """Add the values that depend on a whole batch to the tokens that count."""
        t["weights"] = token_weights(
            t.segments,
            self.aggregation,
            constant_length=self.constant_length or 1,
            dtype=t["sample_log_prob"].dtype,
            trajectory=trajectory,
        )
        t["token_roles"] = self._selected(t, of_loss=False)
        for part in self._parts():
            t.values |= part.prepare(t)
        sizes = t.segments.sizes
        totals = {keys.TOKEN_COUNT: sizes.sum(), keys.SEQUENCE_COUNT: (sizes > 0).sum()}
        if self.sft_coeff:
            totals[keys.DEMONSTRATION_COUNT] = all_tokens["is_demonstration"].sum()
        t.totals = {key: total.clamp(min=1) for key, total in totals.items()}

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
        scorer, names = self.actor_network, self.tensor_keys
        if not isinstance(scorer, TokenScorer):
            data = self._act(tensordict)
            rows = self.read(data, [*self.required_in_keys, names.cur_log_prob, names.entropy])
            return self.of_rows(rows, {})
        if isinstance(scorer, WrapperScorer) or is_of_wrapper(tensordict, names.mask):
            tensordict = sequences_of(tensordict, names.action)
        rows = self.read(tensordict)
        return self.of_rows(rows, self.score(rows, scorer.layout(rows)))

    def _act(self, batch: TensorDictBase) -> TensorDictBase:
        """Return a batch with what the actor network writes."""
        data = batch.copy()
        names = self.tensor_keys
        for key, name in ((keys.FULL, names.action), (keys.ASSISTANT_MASK, names.mask)):
            if key != name and key in self.actor_network.in_keys:
                copy_entry(data, name, key)
        return self.actor_network(data)

    def scores_of_actor(self, batch: TensorDictBase, rows: Rows) -> dict[str, Tensor]:
        """Return the scores of an actor network that is not a ``TokenScorer``; see ``score``."""
        out = self._act(batch)
        return {
            name: rows.value(out, key) for name, key in self._score_keys().items() if has(out, key)
        }

    def score(self, rows: Rows, layout: Any) -> dict[str, Tensor]:
        """Return the scores of a ``TokenScorer`` that the loss reads, [S] each, by name."""
        scorer = self.actor_network
        assert isinstance(scorer, TokenScorer)
        center = self.off_policy.center if self.off_policy.centering else None
        return scorer.score_rows(
            layout,
            rows.values,
            center=center,
            teacher=scorer.teacher,
            value="value" in self._part_keys(),
        )

    def of_rows(self, rows: Rows, scores: dict[str, Tensor]) -> GRPOLossOutput:
        """Return the loss terms and the metrics of scored sequences.

        Args:
            rows: from ``read``, best on the CPU; from ``prepare``, if they are a part of a batch.
            scores: [S] each, by name, from ``score``; none if the rows have them.
        """
        t, demonstrated = self.tokens(rows, scores)
        out = self.of_tokens(t)
        if demonstrated is not None:
            count = t.totals[keys.DEMONSTRATION_COUNT]
            out["loss_sft"] = -self.sft_coeff * demonstrated["log_prob"].sum() / count
        selected = self._out_keys_apparent
        return GRPOLossOutput(out if selected is None else {name: out[name] for name in selected})

    @torch.compiler.disable
    def tokens(self, rows: Rows, scores: dict[str, Tensor]) -> tuple[Tokens, Tokens | None]:
        """Return the tokens that count, with the values that depend on the whole batch, and the
        tokens of demonstrations, on the device of the scores; for the arguments, see ``of_rows``.
        """
        all_tokens = self._all_tokens(rows, scores)
        t = all_tokens.take(self._selected(all_tokens, of_loss=True)).to(
            all_tokens["log_prob"].device
        )
        sampler = "log_prob" if self.objective.is_supervised else "sample_log_prob"
        t["sample_log_prob"] = t[sampler].detach()
        if self.kl_mask_threshold:
            k2 = F.kl_k2(t["log_prob"].detach(), t["sample_log_prob"])
            t = t.take(k2 <= self.kl_mask_threshold)
        if not t.totals:
            self._add_batch_values(t, all_tokens, rows.trajectory)
        return t, all_tokens.take(all_tokens["is_demonstration"].bool()) if self.sft_coeff else None

    def of_tokens(self, t: Tokens) -> dict[str, Tensor]:
        """Return the loss terms and the metrics of the tokens that count."""
        correction = self.off_policy(t)
        advantage, ratio, trained = t["advantage"], t["ratio"], t["token_roles"]
        objective = t.checked(self.objective(t), self.objective)
        if self.dual_clip is not None:
            bounded = torch.maximum(objective, self.dual_clip * advantage)
            objective = torch.where(advantage < 0, bounded, objective)
        objective = torch.where(trained, t["behaviour_weight"] * objective, 0.0)
        out = {"loss_objective": -t.weighted_sum(objective)}
        if self.off_policy.centering:
            centered = torch.where(trained & ~t["is_rejected"], t["centering"], 0.0)
            out["loss_score_centering"] = t.weighted_sum(advantage * centered)
        low, high = self.objective.clipped(t)
        out |= t.means(
            objective=objective,
            clip_fraction_low=low,
            clip_fraction_high=high,
            ratio_mean=ratio,
            ratio_square_mean=ratio.square(),
        )
        out["ESS"] = F.effective_sample_size(out["ratio_mean"], out["ratio_square_mean"])
        out |= correction
        for term in self.terms:
            if all(name in t for name in term.in_keys):
                value, metrics = term(t)
                added = {f"loss_{term.name}"} if term.active else set[str]()
                if wrong := (out.keys() & added) | {n for n in metrics if n.startswith("loss_")}:
                    raise ValueError(
                        f"{type(term).__name__} adds {', '.join(sorted(wrong))}, but the name of a term "
                        "must be unique, and the name of a metric must not begin with loss_: rename it."
                    )
                out |= metrics
                for name in added:
                    out[name] = term.coeff * t.weighted_sum(t.checked(value, term))
        out["clip_fraction"] = out["clip_fraction_low"] + out["clip_fraction_high"]
        if "kl_k1_to_inference" in out:
            out["kl_approx"] = -out["kl_k1_to_inference"]
        for policy in ("inference", "ref"):
            if f"kl_k3_to_{policy}" in out:
                out[f"kl_to_{policy}"] = out[f"kl_k3_to_{policy}"]
        return out


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
