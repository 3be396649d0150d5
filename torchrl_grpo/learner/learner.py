"""``Learner``: batch transforms, trainer and weight sender. Local runs call it directly; on Ray, an
actor wraps it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torch.profiler import record_function
from transformers import PreTrainedTokenizerBase

from torchrl_grpo import keys
from torchrl_grpo.collectors.summary import rollout_metrics, sample_rows
from torchrl_grpo.errors import NonFiniteError
from torchrl_grpo.learner.checkpoint import Checkpointer
from torchrl_grpo.learner.export import exported_bytes
from torchrl_grpo.learner.optimizer import has_small_states
from torchrl_grpo.learner.step import PolicyTrainer
from torchrl_grpo.learner.writer import CheckpointWriter
from torchrl_grpo.models.scoring import TokenScorer, autocast
from torchrl_grpo.models.sharding import copy_parts, is_writer
from torchrl_grpo.transforms.kl_scoring import KLScoring
from torchrl_grpo.transforms.ragged import join_groups
from torchrl_grpo.weights import ObjectSender, Sender, WeightHandle

_MIN_CHANGED_WEIGHTS = 100
"""Expected number of changed weights above which at least one surely changes after rounding."""
_CHECKED = 64
"""Number of tokens that show whether weights are still usable."""


class Learner:
    """Turns a scored batch into a training step, metrics, sample rows and new weights.

    With a sharded model every rank has a learner and gets the same whole batch. All methods are
    then collective, and all outputs (weights, files, sample rows) come from rank 0.

    Args:
        trainer: trains the batch or, with a sharded model, its rank's share of it.
        transforms: transforms of the whole batch before training, by name: reference scoring (LoRA,
            or a sharded reference model), values, reward shaping, advantage. The name appears in
            ``time/{name}_s``.
        sender: sends the weights to the engines.
        tokenizer: decodes the tokens in ``samples``; None leaves them out.
        turns: whether engines on this GPU wake when they get weights. If so, training first
            releases its cached memory.
        sampled: whether a policy sampled the batches; False for demonstrations.
    """

    def __init__(
        self,
        trainer: PolicyTrainer,
        transforms: Sequence[tuple[str, Callable[[TensorDictBase], TensorDictBase]]],
        sender: Sender,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        turns: bool = False,
        sampled: bool = True,
    ) -> None:
        self.trainer = trainer
        self.transforms = list(transforms)
        self.sender = sender
        self.tokenizer = tokenizer
        self.turns = turns
        self.sampled = sampled
        self._batch: TensorDictBase | None = None
        self._checkpoint_writer = CheckpointWriter()
        self._trained_steps = trainer.optim_steps

    @property
    def version(self) -> int:
        """Number of batches trained so far."""
        return self.trainer.version

    @property
    def resumable(self) -> bool:
        """Whether training is between two batches, not in the middle of one."""
        return self.trainer.optim_steps == self._trained_steps

    def load_state_dict(self, state: dict[str, Any], checkpoint: Path) -> None:
        """Restore the trainer's state; see ``PolicyTrainer.load_state_dict``."""
        self.trainer.load_state_dict(state, checkpoint)
        self._trained_steps = self.trainer.optim_steps

    @record_function("learner: train_batch")
    def train_batch(self, batch: TensorDictBase) -> dict[str, float]:
        """Train a batch [N]. Return its summary (``rollout/*``), the metrics of the step, and the
        seconds of each stage.

        Raises:
            NonFiniteError: too many bad steps in a row.
        """
        seconds = {}
        for name, transform in self.transforms:
            start = time.perf_counter()
            batch = transform(batch)
            seconds[f"time/{name}_s"] = time.perf_counter() - start
        start = time.perf_counter()
        metrics = self.trainer.train_batch(batch)
        seconds["time/train_s"] = time.perf_counter() - start
        self._trained_steps = self.trainer.optim_steps
        self._batch = batch
        return metrics | rollout_metrics(batch, sampled=self.sampled) | seconds

    def train_groups(self, *groups: TensorDictBase) -> dict[str, float]:
        """Train a batch of groups, each a lazy stack of sequences; see ``train_batch``."""
        return self.train_batch(join_groups(groups))

    def train_fetched(self, *groups: TensorDictBase) -> dict[str, float]:
        """Train groups from other processes, and add the time to join them to the metrics."""
        start = time.perf_counter()
        batch = join_groups(groups)
        seconds = {"time/transfer_s": time.perf_counter() - start}
        return self.train_batch(batch) | seconds

    def samples(self, limit: int | None) -> list[dict[str, Any]]:
        """Return up to ``limit`` sequences of the latest batch, rounded up to whole groups, as rows
        of ``samples.jsonl``; None returns all.
        """
        if self._batch is None:
            return []
        version, scores = self.version - 1, self.trainer.scores.of
        return sample_rows(
            self._batch,
            "train",
            limit,
            tokenizer=self.tokenizer,
            version=version,
            scores=scores,
            sampled=self.sampled,
        )

    def weights(self) -> WeightHandle | None:
        """Return a handle of the current weights for the engines; None on a rank other than 0."""
        handle = self._send(self.sender)
        if handle is not None:
            weights = self.trainer.parameters
            # A small update changes about update size / eps of the rounded weights.
            eps = torch.finfo(self.sender.dtype or weights[0].dtype).eps
            changed = self.trainer.update_size * sum(weight.numel() for weight in weights) / eps
            handle.note(changes=changed > _MIN_CHANGED_WEIGHTS)
        if self.turns:
            torch.cuda.empty_cache()
        return handle

    def resend(self, version: int, reason: str) -> WeightHandle:
        """Return another handle of a version, because the first one was refused."""
        return self.sender.resend(version, reason)

    def reference_weights(self) -> WeightHandle | None:
        """Return a handle of the current full weights in the trainer's dtype, for a reference
        model; None on a rank other than 0.

        If the ranks hold the reference model themselves, this copies the weights into it, part by
        part, and returns None.
        """
        scoring = next((part for name, part in self.transforms if name == "reference"), None)
        if isinstance(scoring, KLScoring) and scoring.scorer.model is not self.trainer.model:
            copy_parts(self.trainer.model, scoring.scorer.model)
            return None
        return self._send(ObjectSender(None))

    def _send(self, sender: Sender) -> WeightHandle | None:
        return sender.send(self.trainer, self.version, keep=is_writer(self.trainer.model))

    def release(self, version: int) -> None:
        """Free the weights of a version that no engine reads anymore."""
        self.sender.release(version)

    def sizes(self) -> tuple[int, int]:
        """Return the sizes in bytes of a checkpoint, which includes AdamW's two moments of each
        trained weight and the averages, and of the exported model.
        """
        # A checkpoint has the moments of 8 bits as floats, which any number of ranks can read.
        float_moments = has_small_states(self.trainer.optimizer)
        trained = sum(
            weight.nbytes + 2 * (4 * weight.numel() if float_moments else weight.nbytes)
            for weight in self.trainer.parameters
        )
        trained += sum(tensor.nbytes for tensor in self.trainer.averages_by_name().values())
        return trained, exported_bytes(self.trainer.model)

    def save(self, checkpointer: Checkpointer, source: dict[str, Any]) -> Path:
        """Write a checkpoint of the trainer's and the source's state. Return its folder.

        Several ranks copy their parts and write them while training continues: the folder is
        complete when ``finish_save`` returns, or ``finish_save`` raises.

        Raises:
            NonFiniteError: the weights are unusable; nothing is written.
            NotSavedError: there is no room for the checkpoint, or its folder is not writable.
        """
        self._check_weights()
        return self._checkpoint_writer.start(checkpointer, self.trainer, source)

    def finish_save(self) -> None:
        """Wait for the checkpoint that is being written, if any.

        Raises:
            NotSavedError: the checkpoint could not be written; raised once.
        """
        self._checkpoint_writer.finish()

    @torch.no_grad()
    def _check_weights(self) -> None:
        """Check that the weights still give finite log-probs, in training precision, for the start
        of a trained sequence.
        """
        scorer, device = self.trainer.loss.actor_network, self.trainer.device
        if self._batch is None or not isinstance(scorer, TokenScorer):
            return
        tokens = self._batch[0].get(keys.FULL)[:_CHECKED].clamp(min=0)[None]
        with autocast(device, self.trainer.autocast_dtype):
            log_probs, _ = scorer.score(tokens, torch.arange(tokens.shape[1])[None] > 0)
        if not log_probs.isfinite().all():
            raise NonFiniteError(
                f"the policy's log-probs are not finite after step {self.version}, which made its "
                "weights unusable: use a lower optimizer.lr than "
                f"{self.trainer.optimizer.param_groups[0]['lr']:g}."
            )

    def export(
        self, checkpointer: Checkpointer, tokenizer: PreTrainedTokenizerBase, ended: bool = True
    ) -> Path:
        """Write the model in the form that ``from_pretrained`` reads. Return the folder. See
        ``Checkpointer.export``.
        """
        return checkpointer.export(self.trainer.model, tokenizer, self.version, ended=ended)

    def close(self) -> None:
        """Free all weights that were sent. May be called again."""
        self.sender.close()
