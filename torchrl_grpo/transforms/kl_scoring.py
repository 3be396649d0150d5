"""``KLScoring``: a TorchRL transform for reference log-probs, from a model on its own device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from tensordict import (
    LazyStackedTensorDict,
    NestedKey,
    TensorDict,
    TensorDictBase,
    lazy_stack,
)
from torch import Tensor
from torchrl.data import Composite, Unbounded

from torchrl_grpo import keys
from torchrl_grpo.envs.specs import RaggedRows
from torchrl_grpo.host.extras import load_extra
from torchrl_grpo.images import Spans
from torchrl_grpo.models.entries import is_of_wrapper, sequences_of
from torchrl_grpo.models.loading import base_model_of
from torchrl_grpo.models.passes import Pass, make_passes
from torchrl_grpo.models.rows import Rows
from torchrl_grpo.models.scoring import TokenScorer, autocast, check_packing
from torchrl_grpo.models.sharding import compute_device, mesh_of
from torchrl_grpo.transforms.batch import BatchTransform, in_next
from torchrl_grpo.transforms.ragged import flatten, set_rows
from torchrl_grpo.weights import load_weights
from torchrl_grpo.weights.named import NamedTensors


class KLScoring(BatchTransform):
    """Writes the reference model's log-probs of the sampled tokens.

    It works on its own (``scoring(batch)``), in a replay buffer (where it scores new data) and in a
    ``TransformedEnv`` (where it scores the tokens sampled at each step). Tokens are copied to the
    reference model's device and log-probs are copied back; the model never moves. In a batch with
    ``("kept_tokens", "sampled")``, log-probs come from the distribution over these tokens.

    Args:
        scorer: the reference model, with the temperature of the policy.

    Keyword Args:
        max_tokens: token budget of one forward pass.
        autocast_dtype: dtype of mixed precision; use the trainer's, so that two equal models give
            equal log-probs. None disables it.
        out_key: key of the log-probs, ``("next", "ref_log_probs", "full")`` by default; [T] float32
            per sequence, 0 on tokens that were not sampled. A ragged batch stays ragged and a
            padded one stays padded.
        tokens_key: key of the tokens, [T] int64 per sequence.
        mask_key: key of the mask of tokens to score, [T] bool per sequence.

    Raises:
        ValueError: ``scorer`` is not a ``TokenScorer``, or ``max_tokens`` is below 1.
        KeyError: a batch has no tokens, or no mask of the sampled tokens.

    Example:
        >>> buffer = ReplayBuffer(transform=KLScoring(TokenScorer(reference)))  # doctest: +SKIP
    """

    def __init__(
        self,
        scorer: TokenScorer,
        *,
        max_tokens: int = 16384,
        autocast_dtype: torch.dtype | None = None,
        out_key: NestedKey = keys.REF_LOG_PROBS,
        tokens_key: NestedKey = keys.FULL,
        mask_key: NestedKey = keys.ASSISTANT_MASK,
    ) -> None:
        if not isinstance(scorer, TokenScorer):
            raise ValueError(
                f"scorer={type(scorer).__name__} must be a TokenScorer: use "
                "TokenScorer(hugging_face_model)."
            )
        if max_tokens < 1:
            raise ValueError(f"max_tokens={max_tokens} must be at least 1: for example, 16384.")
        super().__init__(in_keys=[tokens_key, mask_key], out_keys=[in_next(out_key)])
        self.batch_keys = [out_key]
        self.scorer = scorer
        self.max_tokens = max_tokens
        self.autocast_dtype = autocast_dtype
        self.out_key = out_key
        check_packing(scorer, autocast_dtype)

    def update_weights(self, weights: NamedTensors) -> None:
        """Replace the reference model's weights.

        Args:
            weights: pairs (name in the Hugging Face checkpoint, tensor), every parameter once, as
                for an engine.

        Raises:
            RuntimeError: a name is unknown or missing, or a shape differs; the reference model is
                then unchanged.
        """
        load_weights(base_model_of(self.scorer.model), weights)

    @torch.no_grad()
    def log_probs(
        self,
        tokens: Tensor,
        mask: Tensor,
        lengths: Tensor,
        kept: Tensor | None = None,
        images: Sequence[Spans] | None = None,
    ) -> Tensor:
        """Return the reference log-probs of right-padded sequences.

        The ranks of a sharded model divide the sequences among them as in a training step, and each
        gets all log-probs.

        Args:
            tokens: [B, T] int64.
            mask: [B, T] bool, the tokens to score.
            lengths: [B] int64, number of real tokens in each row.
            kept: [B, S, K] int32, see ``TokenScorer.score_rows``.
            images: of each sequence.

        Returns:
            [B, T] float32 on the device of ``tokens``, 0 outside the mask.

        Raises:
            MemoryShortError: the model's device has no more memory.
        """
        real = torch.arange(tokens.shape[1], device=lengths.device) < lengths[:, None]
        entries = {keys.FULL: tokens, keys.ASSISTANT_MASK: mask, keys.ATTENTION_MASK: real}
        entries |= {} if kept is None else {keys.KEPT: kept}
        batch = TensorDict({name: value.cpu() for name, value in entries.items()}, [len(tokens)])
        rows = replace(Rows.read(batch, (keys.KEPT,)), images=images)
        return rows.padded(self.score(rows), tokens.shape[1]).to(tokens.device)

    @torch.no_grad()
    def score(self, rows: Rows) -> Tensor:
        """Return the log-probs of the scored tokens, [S] float32; see ``log_probs``.

        Args:
            rows: the sequences, with the values that ``TokenScorer.score_rows`` reads.
        """
        device, model = compute_device(self.scorer.model), self.scorer.model
        mesh = mesh_of(model)
        rank, world_size = (0, 1) if mesh is None else (mesh.get_local_rank(), mesh.size())
        passes = make_passes(self.scorer, rows, self.max_tokens, rank, world_size)
        scores = []
        with self.scorer.for_passes():
            for each in passes:
                try:
                    with autocast(device, self.autocast_dtype):
                        scores.append(self._pass(each))
                except torch.OutOfMemoryError as error:
                    raise load_extra("explain_scoring_memory")(self, each, error) from error
        out = scores[0].new_zeros(len(rows.scored), *scores[0].shape[1:], device="cpu")
        for each, of_pass in zip(passes, scores, strict=True):
            if len(each.index):
                places = rows.of_scored.places(each.index)
                out[places] = of_pass.to("cpu")  # waits, now that all passes have started
        if mesh is not None:  # rows of other ranks are 0 here, so the sum does not round
            out = out.to(device)
            dist.all_reduce(out, group=mesh.get_group())
        return out

    def _pass(self, each: Pass) -> Tensor:
        """Return the scores of a pass, [S] float32."""
        assert each.layout is not None
        return self.scorer.score_rows(each.layout, each.rows.values)["log_prob"].float()

    def _score(self, batch: TensorDictBase) -> list[Tensor]:
        """Return the log-probs of each sequence of a flat batch, each as long as its tokens."""
        if self.in_keys[1] == keys.ASSISTANT_MASK and is_of_wrapper(batch):
            return self._score_wrappers(batch)
        rows = Rows.read(batch, (keys.KEPT,), *self.in_keys)
        tokens = batch[0].get(self.in_keys[0])
        scores = self.score(rows).to(tokens.device)
        ragged = isinstance(batch, LazyStackedTensorDict)
        return self._split(rows, scores, None if ragged else tokens.shape[-1])

    def _split(self, rows: Rows, scores: Tensor, width: int | None) -> list[Tensor]:
        """Return the scores [S, ...] of each sequence; ``width`` is the width of a padded batch."""
        return rows.split(scores) if width is None else list(rows.padded(scores, width))

    def _score_wrappers(self, batch: TensorDictBase) -> list[Tensor]:
        """Do ``_score`` for a batch of TorchRL's wrappers, which may be padded on either side."""
        scores = self._score(sequences_of(batch, self.in_keys[0]))
        rows = []
        for row, score in zip(batch.unbind(0), scores, strict=True):
            real = row.get(keys.ATTENTION_MASK, None)
            padded = torch.zeros_like(row.get(self.in_keys[0]), dtype=score.dtype)
            padded[... if real is None else real.bool()] = score
            rows.append(padded)
        return rows

    def write(self, batch: TensorDictBase) -> TensorDictBase:
        """Score a batch [B] (or one sequence) in place."""
        return set_rows(batch, self.out_key, self._score(flatten(batch)))

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        """Score the tokens that the policy sampled in a step of an environment [B]."""
        sequences = []
        for row in tensordict.unbind(0):
            prompt = row.get(keys.PROMPT)
            tokens = torch.cat([prompt, row.get(keys.RESPONSE)])
            sampled = torch.arange(len(tokens), device=tokens.device) >= len(prompt)
            sequence = TensorDict({keys.FULL: tokens, keys.ASSISTANT_MASK: sampled})
            for key in (keys.KEPT, keys.IMAGES):
                if row.get(key, None) is not None:
                    sequence.set(key, row.get(key))
            sequences.append(sequence)
        return self._set_in_env(next_tensordict, self._score(lazy_stack(sequences)))

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        """Write a zero for each token of the prompt, because nothing has been sampled yet."""
        prompts = [row.get(keys.PROMPT) for row in tensordict_reset.unbind(0)]
        return self._set_in_env(
            tensordict_reset, [torch.zeros_like(prompt, dtype=torch.float32) for prompt in prompts]
        )

    def _set_in_env(self, tensordict: TensorDictBase, rows: Sequence[Tensor]) -> TensorDictBase:
        """Write rows of different lengths as a lazy stack, which is also the form of an
        environment's tokens.
        """
        *path, leaf = self.out_keys[0]
        return tensordict.set(tuple(path), lazy_stack([TensorDict({leaf: row}) for row in rows]))

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Add the reference log-probs, ragged like the tokens."""
        *path, leaf = self.out_keys[0]
        row = Composite({leaf: Unbounded(shape=(-1,), dtype=torch.float32)})
        rows = [row.clone() for _ in range(observation_spec.shape[0])]
        observation_spec[tuple(path)] = RaggedRows(*rows, dim=0)
        return observation_spec


class PolicyScoring(KLScoring):
    """Writes several scores of a batch in one pass.

    Args:
        scorer: as in ``KLScoring``, like all other arguments.
        scores: the key of each score of ``TokenScorer.score_rows``.
    """

    def __init__(self, scorer: TokenScorer, scores: Mapping[str, NestedKey], **kwargs: Any) -> None:
        super().__init__(scorer, out_key=next(iter(scores.values())), **kwargs)
        self.scores = dict(scores)
        self.batch_keys = [*scores.values()]

    def _pass(self, each: Pass) -> Tensor:
        assert each.layout is not None
        value = "value" in self.scores
        scores = self.scorer.score_rows(each.layout, each.rows.values, value=value)
        return torch.stack([scores[name] for name in self.scores], -1).float()

    def write(self, batch: TensorDictBase) -> TensorDictBase:
        rows = self._score(flatten(batch))
        for number, key in enumerate(self.scores.values()):
            batch = set_rows(batch, key, [row[..., number] for row in rows])
        return batch
