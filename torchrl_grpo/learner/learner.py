"""``Learner``: batch transforms, trainer and weight sender. A local run calls it, a Ray actor wraps
it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.envs import Transform
from transformers import PreTrainedTokenizerBase

from torchrl_grpo import keys
from torchrl_grpo.collectors.summary import rollout_metrics, sample_rows
from torchrl_grpo.errors import NonFiniteError
from torchrl_grpo.learner.checkpoint import Checkpointer
from torchrl_grpo.learner.optimizer import has_small_states
from torchrl_grpo.learner.step import GRPOTrainer
from torchrl_grpo.learner.writer import CheckpointWriter
from torchrl_grpo.models.scoring import TokenScorer, autocast
from torchrl_grpo.models.sharding import copy_parts, is_writer
from torchrl_grpo.transforms.kl_scoring import KLScoring
from torchrl_grpo.transforms.ragged import join_groups
from torchrl_grpo.weights import ObjectSender, Sender, WeightHandle
from torchrl_grpo.weights.mismatch import Probe, log_prob_mismatch

_CHECKED = 64
"""Number of tokens that show whether weights are still usable."""


class Learner:
    """Turns a scored batch into a training step, metrics, sample rows and new weights.

    With a sharded model every rank has a learner and is given the same whole batch; all methods are
    then collective, and what goes out of the learner (weights, files, sample rows) comes from rank
    0.

    Args:
        trainer: trains the batch; of a sharded model, its rank's share.
        transforms: what is applied to the whole batch first, by name: reference scoring (LoRA, or a
            sharded reference model), reward shaping, advantage. The name appears in
            ``time/{name}_s``.
        sender: gives the weights to the engines.
        tokenizer: makes the text of the tokens in ``samples``; None leaves them out.
        makes_room: whether engines wake on this GPU when they are given weights: they get what
            training took of it.
        sampled: whether a policy sampled the batches, or they are demonstrations.
    """

    def __init__(
        self,
        trainer: GRPOTrainer,
        transforms: Sequence[tuple[str, Transform]],
        sender: Sender,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        makes_room: bool = False,
        sampled: bool = True,
    ) -> None:
        self.trainer = trainer
        self.transforms = list(transforms)
        self.sender = sender
        self.tokenizer = tokenizer
        self.makes_room = makes_room
        self.sampled = sampled
        self._batch: TensorDictBase | None = None
        self._checkpoint_writer = CheckpointWriter()
        self._trained_steps = trainer.optim_steps

    @property
    def version(self) -> int:
        """Batches trained so far."""
        return self.trainer.version

    @property
    def resumable(self) -> bool:
        """Whether the weights are those between two batches, not in the middle of one."""
        return self.trainer.optim_steps == self._trained_steps

    def load_state_dict(self, state: dict[str, Any], checkpoint: Path) -> None:
        """Restore the trainer's state; see ``GRPOTrainer.load_state_dict``."""
        self.trainer.load_state_dict(state, checkpoint)
        self._trained_steps = self.trainer.optim_steps

    def train_batch(self, batch: TensorDictBase) -> dict[str, float]:
        """Train a batch [N]; return its summary (``rollout/*``), the step's metrics, and each
        stage's seconds.

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
        """Train a batch that comes in groups, each a lazy stack of sequences; see ``train_batch``."""
        return self.train_batch(join_groups(groups))

    def train_fetched(self, *groups: TensorDictBase) -> dict[str, float]:
        """Train groups from other processes, and add the seconds of joining them to the metrics."""
        start = time.perf_counter()
        batch = join_groups(groups)
        seconds = {"time/transfer_s": time.perf_counter() - start}
        return self.train_batch(batch) | seconds

    def samples(self, most: int | None) -> list[dict[str, Any]]:
        """Return sequences of the latest batch, in whole groups, as rows of ``samples.jsonl``; None
        is all of them.
        """
        if self._batch is None:
            return []
        version, scores = self.version - 1, self.trainer.scores.of
        return sample_rows(
            self._batch,
            "train",
            most,
            tokenizer=self.tokenizer,
            version=version,
            scores=scores,
            sampled=self.sampled,
        )

    def weights(self) -> WeightHandle | None:
        """Return a handle of the current weights for the engines; None on a rank other than 0."""
        handle = self._send(self.sender)
        if self.makes_room:
            torch.cuda.empty_cache()
        return handle

    def resend(self, version: int, reason: str) -> WeightHandle:
        """Return another handle of a version, because the first one was refused."""
        return self.sender.resend(version, reason)

    def reference_weights(self) -> WeightHandle | None:
        """Return a handle of the current full weights in the trainer's dtype, for a reference model; None on
        a rank other than 0.

        A reference model on the ranks themselves takes them here, part by part.
        """
        own = next((transform for name, transform in self.transforms if name == "reference"), None)
        if isinstance(own, KLScoring) and own.scorer.model is not self.trainer.model:
            copy_parts(self.trainer.model, own.scorer.model)
            return None
        return self._send(ObjectSender(None))

    def _send(self, sender: Sender) -> WeightHandle | None:
        return sender.send(self.trainer, self.version, keep=is_writer(self.trainer.model))

    def release(self, version: int) -> None:
        """Free the weights of a version that nobody reads anymore."""
        self.sender.release(version)

    @torch.no_grad()
    def mismatch(self, probe: Probe) -> tuple[float, float]:
        """Return the mean and the largest difference between the log-probs of trainer and engine, in nats."""
        scorer = self.trainer.loss.actor_network
        assert isinstance(scorer, TokenScorer)
        scored = []
        for prompt, sampled, _ in probe:
            tokens = torch.cat([prompt, sampled])[None]
            mask = torch.arange(tokens.shape[1])[None] >= len(prompt)
            scored.append(scorer.score(tokens, mask)[0][0, len(prompt) :])
        return log_prob_mismatch(probe, scored)

    def sizes(self) -> tuple[int, int]:
        """Return the bytes of a checkpoint, which has AdamW's two moments of each trained weight, and of
        the exported model.
        """
        float_moments = has_small_states(
            self.trainer.optimizer
        )  # as any number of ranks reads them
        trained = sum(
            weight.nbytes + 2 * (4 * weight.numel() if float_moments else weight.nbytes)
            for weight in self.trainer.parameters
        )
        return trained, sum(weight.nbytes for weight in self.trainer.model.parameters())

    def save(self, checkpointer: Checkpointer, source: dict[str, Any]) -> Path:
        """Write a checkpoint of the trainer's state and of the source's; return its folder.

        Several ranks copy their parts and write them to a folder while training goes on: it is
        there, or the reason is, when ``finish_save`` returns.

        Raises:
            NonFiniteError: the weights are unusable; nothing is written.
            NotSavedError: there is no room for it, or its folder cannot be written to.
        """
        self._check_weights()
        return self._checkpoint_writer.start(checkpointer, self.trainer, source)

    def finish_save(self) -> None:
        """Wait for the checkpoint that is being written, if any.

        Raises:
            NotSavedError: it could not be written; raised once.
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
                "weights useless: use a lower optimizer.lr than "
                f"{self.trainer.optimizer.param_groups[0]['lr']:g}."
            )

    def export(
        self, checkpointer: Checkpointer, tokenizer: PreTrainedTokenizerBase, ended: bool = True
    ) -> Path:
        """Write the model as ``from_pretrained`` reads it; return the folder. See
        ``Checkpointer.export``.
        """
        return checkpointer.export(self.trainer.model, tokenizer, self.version, ended=ended)

    def close(self) -> None:
        """Free all weights that were sent. May be called again."""
        self.sender.close()
