"""``PolicyTrainer``: a batch of scored sequences in, updated weights out.

It does not sample, score rewards or loop: ``loop.fit`` does that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import NestedKey, TensorDictBase
from torch import Tensor, nn
from torchrl import torchrl_logger

from torchrl_grpo import keys
from torchrl_grpo.compat.torch import counters, mark_overflow
from torchrl_grpo.errors import NonFiniteError, NoSignalError
from torchrl_grpo.functional import effective_sample_size
from torchrl_grpo.host.extras import load_extra
from torchrl_grpo.images.families import vision_parameters
from torchrl_grpo.learner.measures import PassScores, StepMeasures
from torchrl_grpo.learner.optimizer import EntropyControl, has_small_states
from torchrl_grpo.learner.shards import read_parts
from torchrl_grpo.models.compiled import compile_layers
from torchrl_grpo.models.entries import has, trajectories_of
from torchrl_grpo.models.loading import base_model_of, shape_of
from torchrl_grpo.models.memory import MEMORY_SHARE, StepSetup, step_memory
from torchrl_grpo.models.passes import Pass, make_passes
from torchrl_grpo.models.rows import Rows
from torchrl_grpo.models.scoring import AverageScorer, TokenScorer, autocast, check_packing
from torchrl_grpo.models.segments import send
from torchrl_grpo.models.sharding import (
    clip_grad_norm,
    compute_device,
    mesh_of,
    num_replicas,
    sum_gradients,
)
from torchrl_grpo.objectives.output import LARGEST_RATIO, TORCHRL_METRICS, accumulate
from torchrl_grpo.objectives.parts import Entropy, Term
from torchrl_grpo.objectives.policy_loss import PolicyLoss
from torchrl_grpo.transforms.kl_scoring import PolicyScoring
from torchrl_grpo.weights import LoraDelta, named_adapters, named_weights
from torchrl_grpo.weights.named import is_critic


@dataclass(eq=False, repr=False)
class PolicyTrainer:
    """Trains a policy on batches of sequences with advantages.

    A batch contains the groups that are trained between two weight syncs. ``train_batch`` splits it
    into optimization batches, and ``train_step`` makes one optimizer step with each of them:
    passes -> ``forward_backward`` -> ``optim_step``. The loss is normalized over the whole
    optimization batch, so the split into micro-batches affects only memory.

    ``version`` counts trained batches, and is the engines' ``policy_version``. ``scores`` has the
    per-token results of the passes over the latest batch.

    With a model that ``shard_model`` or FSDP2 by hand has spread over several ranks, every rank has
    a trainer, gets the same whole batch and computes its share of it. Losses, metrics and weights
    are the same as with one process. ``train_batch``, ``train_step``, ``weights`` and
    ``state_dict`` are then collective: all ranks call them in the same order.

    Args:
        loss: a loss with the policy as its actor network, whose ``forward`` is not overridden.
        model: the trained model (or a peft model), in eval mode: dropout stays off.
        optimizer: optimizer of the trainable parameters of ``model``.

    Keyword Args:
        scheduler: learning rate scheduler, stepped after each optimizer step; or None.
        optim_batch_size: number of trajectories per optimizer step, with all of their samples.
        epochs: number of passes over a batch.
        micro_batch_tokens: maximum number of tokens that one forward and backward pass computes. A
            prompt that several sequences share counts once, and padding counts if the model cannot
            be packed (``TokenScorer.packs``).
        autocast_dtype: bfloat16 or float16 for mixed precision, None for none. With float16 the
            loss is scaled, by a scaler that lives as long as the trainer.
        clip_grad_norm: maximum gradient norm.
        max_nonfinite_steps: number of consecutive optimizer steps with a non-finite loss or
            gradient, or without a token that counts, after which ``train_step`` raises. None of
            them changes a weight. An overflow that merely makes the loss scaler lower its scale is
            skipped and counted, and does not stop the run.
        entropy_control: sets the loss's coefficient of the entropy bonus before each optimizer
            step; None leaves it alone.
        averages: averages of the weights, by role, which are updated after each batch; none by default.
        compiles: whether decoder layers are compiled (``compile_layers``).
    """

    loss: PolicyLoss
    model: nn.Module
    optimizer: torch.optim.Optimizer
    _: KW_ONLY
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None
    optim_batch_size: int
    epochs: int = 1
    micro_batch_tokens: int = 16384
    autocast_dtype: torch.dtype | None = None
    clip_grad_norm: float = 1.0
    max_nonfinite_steps: int = 5
    entropy_control: EntropyControl | None = None
    averages: Mapping[str, AverageScorer] = field(default_factory=dict)
    compiles: bool = False

    def __post_init__(self) -> None:
        loss, model = self.loss, self.model
        sum_gradients(model)
        if self.compiles:
            compile_layers(base_model_of(model))
        if type(loss).forward.__qualname__ != PolicyLoss.forward.__qualname__:  # it is wrapped
            raise TypeError(
                f"{type(loss).__name__}.forward must not be overridden, since a step computes the "
                "loss from its parts: write a Term (docs/tutorials/own_loss.md)."
            )
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.mesh = mesh_of(model)
        self.rank = 0 if self.mesh is None else self.mesh.get_local_rank()
        self.world_size = 1 if self.mesh is None else self.mesh.size()
        self.scaler = torch.amp.GradScaler(
            self.device.type, enabled=self.autocast_dtype == torch.float16
        )
        self.scores = PassScores()
        if isinstance(loss.actor_network, TokenScorer):
            check_packing(loss.actor_network, self.autocast_dtype)
        self.version = 0
        self.optim_steps = 0
        self.skipped_steps = 0
        self.update_size = 0.0  # mean of the latest batch's steps
        self._nonfinite_in_a_row = 0
        self._pass_sizes: list[tuple[int, int, int]] = []
        self._nonfinite_reason = ""
        named = model.named_parameters()
        of_policy = [p for name, p in named if p.requires_grad and not is_critic(name)]
        self._measures = StepMeasures(of_policy, self._sum_over_ranks)
        self._measured: dict[str, Tensor] = {}

    @property
    def device(self) -> torch.device:
        """Device on which the model computes."""
        return compute_device(self.model)

    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Return all weights under their Hugging Face names, adapters merged, for an engine.

        Several ranks gather them in ``dtype`` during the iteration, so ranks that don't need the
        weights must exhaust the iterator too.
        """
        return named_weights(self.model, dtype)

    def adapters(self) -> Iterator[tuple[str, LoraDelta]]:
        """Return the updates that a LoRA model's adapters add to its base model's weights. They are
        gathered as in ``weights``.
        """
        return named_adapters(self.model)

    def train_batch(self, batch: TensorDictBase) -> dict[str, float]:
        """Make all optimizer steps of one batch [N] and increase ``version`` by 1.

        Returns:
            the metrics, averaged over the optimizer steps where they are finite, and
            ``train/skipped_steps``, the count of the whole run.

        Raises:
            NonFiniteError: too many bad steps in a row.
            NoSignalError: too many steps in a row without a token that counts.
            MemoryShortError: the device has no more memory.
        """
        batches = self._optim_batches(batch)
        self.scores.begin_batch(len(batch))
        try:
            scores = self._scores_before
            if scores and "value" not in scores:
                batches = [self._scored(each.exclude(*scores.values())) for each in batches]
            steps = [self.train_step(each) for _ in range(self.epochs) for each in batches]
        except torch.OutOfMemoryError as error:
            raise load_extra("explain_step_memory")(self, error) from error
        self.version += 1
        for average in self.averages.values():
            average.update(self.version)
        metrics = {name: _finite_mean([step[name] for step in steps]) for name in steps[0]}
        self.update_size = metrics.get("train/update_size", 0.0)
        if self.compiles:
            metrics["train/compiled_graphs"] = float(counters["stats"]["unique_graphs"])
        return metrics | {"train/skipped_steps": float(self.skipped_steps)}

    def _optim_batches(self, batch: TensorDictBase) -> Sequence[TensorDictBase]:
        """Split a batch into ``optim_batch_size`` trajectories each, with all of their samples."""
        trajectory = trajectories_of(batch)
        if trajectory is None:
            return batch.split(self.optim_batch_size)
        _, rows = (trajectory // self.optim_batch_size).unique_consecutive(return_counts=True)
        return batch.split(rows.tolist())

    def setup(self) -> StepSetup:
        """Describe the current or latest step, as far as its memory depends on it."""
        first = (self.micro_batch_tokens, 1, 0)
        tokens, sequences, features = max(self._pass_sizes, default=first)
        adapters = getattr(self.model, "peft_config", None)
        base = base_model_of(self.model)
        master = next(base.parameters()).element_size()
        return StepSetup(
            tokens,
            sequences,
            max(1, len(self._pass_sizes)),
            number=master if self.autocast_dtype is None else 2,
            master=master,
            checkpoints=bool(base.is_gradient_checkpointing),
            adapters=adapters["default"].r if adapters else 0,
            quantized=any(hasattr(weight, "dequantized") for weight in base.parameters()),
            small_states=has_small_states(self.optimizer),
            ranks=self.world_size,
            replicas=num_replicas(self.model),
            offloads=self.parameters[0].device.type != self.device.type,
            averages=len(self.averages),
            images=features / tokens,
            trains_vision=any(p.requires_grad for _, p in vision_parameters(base)),
            critic="value" in self._scores_before,
        )

    @property
    def _bonus(self) -> Term:
        """The term of the loss with the entropy bonus."""
        return next(term for term in self.loss.terms if isinstance(term, Entropy))

    @property
    def _scores_before(self) -> dict[str, NestedKey]:
        """Keys of the scores, by name, that the loss reads from before the batch's first step."""
        names = self.loss.tensor_keys
        scores = {
            "log_prob": names.prox_log_prob,
            "entropy": names.prox_entropy,
            "value": names.state_value,
        }
        needed = self.loss.required_in_keys
        return {name: key for name, key in scores.items() if key in needed}

    def score(self, batch: TensorDictBase) -> TensorDictBase:
        """Write what a loss with a critic needs before the batch's first step into a ragged batch
        [N], in place: the values, from which the advantages are computed, and the rest of its
        entries. ``train_batch`` adds what a loss without a critic needs.
        """
        # In the optimization batches and passes of the step, so that the rounding is the same.
        for each in self._optim_batches(batch):
            self._scored(each)
        return batch

    def _scored(self, batch: TensorDictBase) -> TensorDictBase:
        """Add the policy's current scores to a batch, before its first step on it."""
        scorer = self.loss.actor_network
        if not isinstance(scorer, TokenScorer):
            raise TypeError(
                "proximal='recomputed' needs a TokenScorer as actor network, but got "
                f"{type(scorer).__name__}: write {self.loss.tensor_keys.prox_log_prob} into the "
                "batch and call train_step."
            )
        scoring = PolicyScoring(
            scorer,
            self._scores_before,
            max_tokens=self.micro_batch_tokens,
            autocast_dtype=self.autocast_dtype,
            tokens_key=self.loss.tensor_keys.action,
            mask_key=self.loss.tensor_keys.mask,
        )
        return scoring(batch)

    def train_step(self, batch: TensorDictBase) -> dict[str, float]:
        """Make one optimizer step of an optimization batch [n], ragged or padded.

        Sequences whose reward is not valid have no effect. If no sampled token counts at all, no
        weight is changed, even if there are demonstrations.

        Returns:
            metrics, named ``train/*``.
        """
        if self.entropy_control is not None:
            self._bonus.coeff = self.entropy_control.applied
        rows = self._prepare(batch)
        scorer, budget = self.loss.actor_network, self.micro_batch_tokens
        passes = make_passes(scorer, rows, budget, self.rank, self.world_size)
        self._pass_sizes = [(each.tokens, len(each.index), each.features) for each in passes]
        self.scores.begin_step(len(batch))
        totals = self._accumulate_gradients(passes, batch)
        computed = totals.pop("computed")
        losses = (value for name, value in totals.items() if name.startswith("loss_"))
        empty = not rows.values[keys.LOSS_WEIGHTS].any()
        why = partial(self._why, batch, rows, [each.index for each in passes])
        metrics = self.optim_step(sum(losses, torch.zeros(())), empty=empty, why=why)

        totals["ESS"] = effective_sample_size(totals["ratio_mean"], totals["ratio_square_mean"])
        totals |= {name: send(value, self.device) for name, value in self._measured.items()}
        if empty:  # without tokens, they would be zeros
            totals = dict.fromkeys(totals, self._number(math.nan))
        totals["token_efficiency"] = self._number(int(rows.lengths.sum())) / computed
        values = torch.stack([value.float() for value in totals.values()]).tolist()
        metrics |= {f"train/{name}": value for name, value in zip(totals, values, strict=True)}
        if self.entropy_control is not None:
            metrics["train/entropy_coef"] = self._bonus.coeff
            metrics.setdefault("train/loss_entropy", 0.0)  # in the steps without the bonus
            self.entropy_control.update(metrics["train/entropy"])
        return metrics | {"train/micro_batches": float(len(passes))}

    def _accumulate_gradients(
        self, passes: Sequence[Pass], batch: TensorDictBase
    ) -> dict[str, Tensor]:
        """Return the outputs of the loss, and the number of tokens ``computed``, summed over
        micro-batches and ranks.
        """
        totals: dict[str, Tensor] = {}
        sums_on_device = len(passes) > 1 and self._sums_on_device
        # In an outer context of autocast, even a disabled one, all passes share the converted
        # weights. Sharding and checkpoints save their memory.
        base = base_model_of(self.model)
        saves = self.mesh is not None or getattr(base, "is_gradient_checkpointing", False)
        shares = self.autocast_dtype is not None and not saves
        with torch.autocast(self.device.type, enabled=False) if shares else nullcontext():
            for each in passes:
                if sums_on_device:
                    base_model_of(self.model).set_requires_gradient_sync(each is passes[-1])
                accumulate(totals, self.forward_backward(each, batch))
        totals["computed"] = self._number(sum(each.tokens for each in passes))
        return self._sum_over_ranks(totals, self.mesh.get_group() if self.mesh else None)

    @cached_property
    def _sums_on_device(self) -> bool:
        """Return whether an offloaded model's unsharded gradients are summed on the devices during
        a step and copied to the host once, because all ranks have room for them.

        Otherwise they are copied after each pass, and the host adds them.
        """
        setup = self.setup()
        if not setup.offloads:
            return False
        setup = replace(setup, tokens=max(setup.tokens, self.micro_batch_tokens))
        gradients = 4 * sum(parameter.numel() for parameter in self.parameters)
        free, _ = torch.cuda.mem_get_info(self.device)
        cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        needs = step_memory(shape_of(self.model), setup).peak + gradients
        short = self._number(needs > MEMORY_SHARE * (free + cached))
        return not self._sum_over_ranks({"short": short})["short"].item()

    def _number(self, value: float) -> Tensor:
        """Return a scalar float32 on the model's device, copied without waiting."""
        return torch.full((), float(value), device=self.device)

    def _prepare(self, batch: TensorDictBase) -> Rows:
        """Read a batch, on the CPU, and fix what depends on the whole of it."""
        loss, names = self.loss, self.loss.tensor_keys
        made = {names.staleness, names.is_demonstration}
        rows = loss.read(batch, [key for key in loss.required_in_keys if key not in made])
        if names.staleness in loss.required_in_keys:
            of_token = has(batch, keys.POLICY_VERSIONS)
            key = keys.POLICY_VERSIONS if of_token else keys.POLICY_VERSION
            rows.values[names.staleness] = self.version - rows.value(batch, key)
        if loss.sft_coeff:
            flags = torch.zeros(len(rows.scored), dtype=torch.bool, device="cpu")
            rows.values[names.is_demonstration] = flags
            rows = rows.with_demonstrations(batch, names.is_demonstration)
        values = {name: value.cpu() for name, value in rows.values.items()}
        return loss.prepare(replace(rows, values=values))

    def _sum_over_ranks(
        self, totals: dict[str, Tensor], group: dist.ProcessGroup | None = None
    ) -> dict[str, Tensor]:
        """Sum over a group of ranks, by default all, with bitwise equal results on each rank. Of
        ``LARGEST_RATIO``, take the maximum instead.
        """
        if self.mesh is None:
            return totals
        values = {name: value.float().to(self.device) for name, value in totals.items()}
        largest = {name: values[name] for name in (LARGEST_RATIO,) if name in values}
        summed = torch.stack(list(values.values()))
        dist.all_reduce(summed, group=group)
        for value in largest.values():
            dist.all_reduce(value, dist.ReduceOp.MAX, group=group)
        return dict(zip(totals, summed.unbind(), strict=True)) | largest

    def forward_backward(self, each: Pass, batch: TensorDictBase) -> dict[str, Tensor]:
        """Add the gradient of one pass. Return the detached outputs of the loss.

        Args:
            each: the pass, over sequences from ``PolicyLoss.prepare``.
            batch: the batch of these sequences, for an actor network that reads TensorDicts.
        """
        rows = each.rows
        with autocast(self.device, self.autocast_dtype):
            if each.layout is not None:
                scores = self.loss.score(rows, each.layout)
            else:
                index = each.index if len(each.index) else torch.tensor([0])
                scores = self.loss.scores_of_actor(batch[index].to(self.device), rows)
            out = self.loss.of_rows(rows, scores)
            total = sum(value for name, value in out.items() if name.startswith("loss_"))
        self.scaler.scale(total).backward()
        self.scores.note(each, scores)
        return {name: value.detach() for name, value in out.items() if name not in TORCHRL_METRICS}

    def _why(self, batch: TensorDictBase, rows: Rows, indices: Sequence[Tensor]) -> str:
        """Describe why no token of a step counts, or the origin of its non-finite numbers, without
        changing the weights.
        """
        if not rows.values[keys.LOSS_WEIGHTS].any():
            return load_extra("why_no_token")(batch)

        def passes(index: Tensor) -> dict[str, Tensor]:
            return self.forward_backward(Pass(index, rows, self.loss.actor_network), batch)

        diagnose, alone = load_extra("where_not_finite"), self.mesh is None
        return diagnose(self.model, rows, indices, passes, batch, one_by_one=alone)

    def optim_step(self, loss: Tensor, *, empty: bool, why: Callable[[], str]) -> dict[str, float]:
        """Clip the gradients and step, unless the loss or the gradient norm is not finite. Then
        clear the gradients.

        Args:
            loss: the total loss of the optimization batch, scalar.
            empty: whether no token counted. If so, there is no step, because it would only follow
                the moments of earlier steps.
            why: function that explains why no token counted or, for the first non-finite step in a
                row, where the non-finite numbers come from.

        Raises:
            NonFiniteError: too many bad steps in a row.
            NoSignalError: too many steps in a row without a token that counts.
        """
        learning_rate = self.optimizer.param_groups[0]["lr"]
        self.scaler.unscale_(self.optimizer)
        norm = clip_grad_norm(self.parameters, self.clip_grad_norm)
        scalars = [loss.to(norm.device, torch.float32), norm.float()]
        loss_value, norm_value = torch.stack(scalars).tolist()
        finite = math.isfinite(loss_value) and math.isfinite(norm_value)
        if finite and not empty:
            self._update_weights()
        else:
            self._measured = dict.fromkeys(self._measured, self._number(math.nan))
            self.skipped_steps += 1
            rescaling = math.isfinite(loss_value) and self.scaler.get_scale() > 1
            if empty or not rescaling:
                self._nonfinite_in_a_row += 1
        if self.scaler.is_enabled():
            if not math.isfinite(norm_value):  # perhaps in another rank's part of a layer
                mark_overflow(self.scaler, self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if empty:
            self._report_empty_step(why())
            loss_value = norm_value = math.nan  # zeros would look like a batch's values
        elif not finite:
            if self._nonfinite_in_a_row == 1:
                self._nonfinite_reason = f": {why()}"
            self._report_nonfinite_step(loss_value, norm_value, learning_rate)
        return {
            "train/loss": loss_value,
            "train/grad_norm": norm_value,
            "train/lr": learning_rate,
        }

    def _update_weights(self) -> None:
        """Step the optimizer and the scheduler, and measure the step."""
        before = self._measures.before()
        self.scaler.step(self.optimizer)
        self.optim_steps += 1
        self._measured = self._measures.after(
            before, self.optimizer, self.optim_steps, self.optim_batch_size
        )
        self._nonfinite_in_a_row = 0
        self._nonfinite_reason = ""
        if self.scheduler is not None:
            self.scheduler.step()

    def _report_empty_step(self, reason: str) -> None:
        """Warn about a step without a token that counts, or raise if there were too many."""
        cause = f"its batch has no token to train on: {reason}"
        if self._nonfinite_in_a_row >= self.max_nonfinite_steps:
            raise NoSignalError(
                f"{self._nonfinite_in_a_row} optimizer steps in a row changed nothing, the last "
                f"of them because {cause}. The limit is "
                f"train.max_nonfinite_steps={self.max_nonfinite_steps}."
            )
        torchrl_logger.warning(f"Skipped an optimizer step: {cause}.")

    def _report_nonfinite_step(self, loss: float, norm: float, learning_rate: float) -> None:
        """Warn about a step whose numbers are not finite, or raise if there were too many."""
        if self._nonfinite_in_a_row >= self.max_nonfinite_steps:
            raise NonFiniteError(
                f"{self._nonfinite_in_a_row} optimizer steps in a row had a non-finite loss "
                f"({loss}) or gradient norm ({norm}){self._nonfinite_reason}. They changed no "
                f"weight. Lower optimizer.lr={learning_rate:g}, or use "
                "train.mixed_precision=full or bf16."
            )
        torchrl_logger.warning(
            f"Skipped an optimizer step: loss {loss}, gradient norm {norm}{self._nonfinite_reason}."
        )

    def averages_by_name(self) -> dict[str, Tensor]:
        """Return the averages' tensors, without copies, by their names in a checkpoint."""
        return {
            f"averages/{role}/{name}": tensor
            for role, average in self.averages.items()
            for name, tensor in average.average.items()
        }

    def progress(self) -> dict[str, Any]:
        """Return the state without weights and optimizer; it is the same on all ranks."""
        return {
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "version": self.version,
            "optim_steps": self.optim_steps,
            "skipped_steps": self.skipped_steps,
            "nonfinite_in_a_row": self._nonfinite_in_a_row,
            "entropy_control": self.entropy_control and asdict(self.entropy_control),
        }

    def load_state_dict(self, state: dict[str, Any], checkpoint: Path) -> None:
        """Restore the state of a checkpoint that any number of ranks wrote.

        Args:
            state: ``progress``, and ``optimizer``: the optimizer's state without tensors.
            checkpoint: the folder that has the tensors; each rank reads its own part.

        Raises:
            RuntimeError: the model has different parameters.
        """
        averages = self.averages_by_name()
        read_parts(checkpoint, self.model, self.optimizer, state["optimizer"], averages)
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        self.scaler.load_state_dict(state["scaler"])
        self.version = state["version"]
        self.optim_steps = state["optim_steps"]
        self.skipped_steps = state["skipped_steps"]
        self._nonfinite_in_a_row = state["nonfinite_in_a_row"]
        control = state.get("entropy_control")  # none in a checkpoint from before it existed
        if self.entropy_control is not None and control is not None:
            self.entropy_control.coefficient = control["coefficient"]
            self.entropy_control.entropy = control["entropy"]


def _finite_mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan
