"""Entries of a batch, ragged or padded: whether it has them, as one padded tensor, and how to add one
that is missing.

Sequences are padded on the right. Under causal attention a real token never attends to later
tokens, so no attention mask is needed and padding cannot change a result.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDictBase, lazy_stack
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from torchrl_grpo import keys as K
from torchrl_grpo.images import Spans

# Fixes for a missing entry that one of our parts writes.
_FIXES: dict[NestedKey, str] = {
    K.ADVANTAGE: "apply GroupAdvantage(repeats) to the batch, or add it to the replay buffer's transforms",
    K.REF_LOG_PROBS: (
        "apply KLScoring(TokenScorer(reference)) to the batch first, or add it to the replay "
        "buffer's transforms; a KL coefficient of 0 does not need it"
    ),
    K.REWARD_PARTS: "name reward functions, as LLMEnv writes their parts, or do not set part_weights",
    K.SHAPED_REWARD: "apply RewardShaping() to the batch first",
    K.TOKEN_REWARD: "apply RewardShaping() to the batch first, or use level='sequence'",
    K.PROX_LOG_PROBS: (
        "apply KLScoring(TokenScorer(model), out_key=keys.PROX_LOG_PROBS) before the batch's "
        "first optimizer step, or use proximal='current'"
    ),
    K.STALENESS: "write the trainer's version less the policy_version of each sequence, or use another proximal",
    K.TRUNCATED: "write it when a response is cut off, as LLMEnv does, or use mask_truncated=False",
    K.DEMONSTRATION: "have Demonstrations.give write it into the rows of each group, or use sft_coeff=0",
    K.IS_DEMONSTRATION: "write which rows are demonstrations, or use sft_coeff=0",
}


def entry(batch: TensorDictBase, key: NestedKey) -> Any:
    """Return one entry of a batch, unchanged.

    Raises:
        KeyError: the batch has no such entry; the message says how to add it.
    """
    value = batch.get(key, None)
    if value is None:
        raise missing(batch, key)
    return value


def pad(batch: TensorDictBase, key: NestedKey, padding_value: float = 0) -> Tensor:
    """Return one entry of a batch as a tensor padded on the right.

    Args:
        batch: batch size [N]; a lazy stack of ragged sequences, or an already padded TensorDict.
        key: key of the entry, [T_i] or [T_i, 1] in each sequence (or [1], which stays [N, 1]).
        padding_value: value of the padding.

    Returns:
        [N, max T_i].

    Raises:
        KeyError: the batch has no such entry.
        ValueError: the entry is a number without an axis in each sequence.
    """
    if not isinstance(batch, LazyStackedTensorDict):
        padded = entry(batch, key)
    else:
        rows = columns(batch, [key], required=[key])[key]
        is_scalar = not rows[0].ndim
        padded = torch.stack(rows) if is_scalar else pad_sequence(rows, True, padding_value)
    if padded.ndim < 2:
        raise ValueError(
            f"entry {key!r} of shape {list(padded.shape)} must be [{len(batch)}, 1], one value for "
            f"each sequence, or [{len(batch)}, T], one for each token: use unsqueeze(-1)."
        )
    return padded.squeeze(-1) if padded.ndim > 2 else padded


def has(batch: TensorDictBase, key: NestedKey) -> bool:
    """Return whether a batch has an entry. ``key in batch.keys(True, True)`` would be wrong for
    nested keys of a lazy stack.
    """
    return all(part.get(key, None) is not None for part in parts_of(batch))


def columns(
    batch: TensorDictBase, names: Iterable[NestedKey], required: Iterable[NestedKey] = ()
) -> dict[NestedKey, list[Any]]:
    """Return the entries that all sequences of a batch have, by key, each as a list with the value
    of each sequence.

    Args:
        batch: batch size [N], ragged or padded.
        names: keys of the entries.
        required: those that the batch must have.

    Raises:
        KeyError: the batch lacks a required entry.
    """
    rows, out = batch.unbind(0), dict[NestedKey, list[Any]]()
    for name in names:
        values = list(
            takewhile(lambda value: value is not None, (row.get(name, None) for row in rows))
        )
        if len(values) == len(rows):
            out[name] = values
        elif name in required:
            raise missing(batch, name)
    return out


def parts_of(batch: TensorDictBase) -> Sequence[TensorDictBase]:
    """Return the TensorDicts that hold a batch's tensors: its sequences, or a padded batch itself."""
    return batch.tensordicts if isinstance(batch, LazyStackedTensorDict) else [batch]


def copy_entry(batch: TensorDictBase, source: NestedKey, target: NestedKey) -> None:
    """Write an entry under a second key, in place.

    Raises:
        KeyError: the batch has no such entry.
    """
    for part in parts_of(batch):
        part.set(target, entry(part, source))


def images_of_rows(batch: TensorDictBase, key: NestedKey = K.IMAGES) -> list[Spans] | None:
    """Return the images of each sequence of a batch; None if there are none."""
    images = [images_of_row(row, key) for row in batch.unbind(0)]
    return images if any(images) else None


def images_of_row(row: TensorDictBase, key: NestedKey = K.IMAGES) -> Spans:
    """Return the images of a sequence."""
    images = row.get(key, None)
    return () if images is None else images.data


def trajectories_of(batch: TensorDictBase) -> Tensor | None:
    """Return the trajectory of each row, if any trajectory has several training samples.

    Args:
        batch: batch size [N]; each row without ``keys.TRAJECTORY`` is a trajectory.

    Returns:
        [N] int64, numbered from 0 in the order of the rows; None if each row is a trajectory.

    >>> from tensordict import TensorDict
    >>> rows = [TensorDict({"trajectory": torch.tensor([7])}), TensorDict({"trajectory": torch.tensor([7])})]
    >>> trajectories_of(lazy_stack([TensorDict({}), *rows]))
    tensor([0, 1, 1])
    """
    values = [row.get(K.TRAJECTORY, None) for row in batch.unbind(0)]
    names = [
        ("row", row) if value is None else ("trajectory", int(value))
        for row, value in enumerate(values)
    ]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    if len(numbers) == len(names):
        return None
    return torch.tensor([numbers[name] for name in names], device="cpu")


def last_rows(trajectory: Tensor) -> Tensor:
    """Return the mask of the last sample of each trajectory from ``trajectories_of``, [N] bool."""
    following = torch.cat([trajectory[1:], trajectory.new_full((1,), -1)])
    return trajectory != following


def missing(batch: TensorDictBase, key: NestedKey) -> KeyError:
    """Return the error of an entry that a batch lacks, with its fix."""
    fix = _FIXES.get(
        key,
        "write it, or set the key that has it (set_keys of a loss, ..._key of a transform)",
    )
    entries = ", ".join(map(_dotted, batch.keys(True, True)))
    return KeyError(f"the batch has no entry {_dotted(key)}, only {entries}: {fix}.")


def _dotted(key: NestedKey) -> str:
    return key if isinstance(key, str) else ".".join(key)


def demonstrations_in(batch: TensorDictBase) -> list[int]:
    """Return the rows of a batch that carry a demonstration (``keys.DEMONSTRATION``).

    Raises:
        KeyError: the rows lack the entry, even an empty one.
    """
    return [
        number for number, row in enumerate(batch.unbind(0)) if len(entry(row, K.DEMONSTRATION))
    ]


def is_of_wrapper(batch: TensorDictBase, mask_key: NestedKey = K.ASSISTANT_MASK) -> bool:
    """Whether a batch must go through ``sequences_of``: it has no mask of the sampled tokens, or is
    padded on the left.
    """
    if not has(batch, mask_key):
        return True
    return has(batch, K.ATTENTION_MASK) and not bool(pad(batch, K.ATTENTION_MASK, True)[:, 0].all())


def sequences_of(batch: TensorDictBase, tokens_key: NestedKey = K.FULL) -> TensorDictBase:
    """Convert a batch of TorchRL's LLM wrappers to a ragged batch with this package's entries.

    Tokens where ``("masks", "all_attention_mask")`` is False are dropped, on either side of a
    sequence. Entries that the wrappers leave out are added: ``("masks", "all_assistant_mask")`` is
    True after the prompt, and ``("log_probs", "full")`` is made from ``("log_probs", "response")``.
    A sampled token whose behavior log-prob is unknown is removed from the mask: a token with NaN
    and, if only the response has log-probs, a first token with exactly 0 (TorchRL 0.14 writes that
    instead of the log-prob).

    Args:
        batch: batch size [N], ragged or padded on either side. The tensors are not changed.
        tokens_key: key of the tokens, in the batch and in the result.

    Returns:
        lazy stack [N], without the separate entries of prompt and response, texts and histories.

    Raises:
        KeyError: a sequence has no tokens, or neither kind of log-probs.
    """
    return lazy_stack([_sequence_of(row, tokens_key) for row in batch.unbind(0)])


def _sequence_of(row: TensorDictBase, tokens_key: NestedKey) -> TensorDictBase:
    """Convert one row for ``sequences_of``."""
    full = row.get(tokens_key, None)
    prompt = row.get(K.PROMPT, None)
    response = row.get(("log_probs", "response"), None)
    real = row.get(K.ATTENTION_MASK, None)
    mask = row.get(K.ASSISTANT_MASK, None)
    log_probs = row.get(K.LOG_PROBS, None)
    if (
        full is None
        or (mask is None and prompt is None)
        or (log_probs is None and response is None)
    ):
        raise KeyError(
            "a batch of a TorchRL wrapper must have tokens.full, tokens.prompt or "
            "masks.all_assistant_mask, and log_probs.full or log_probs.response, but has only "
            f"{', '.join(map(_dotted, row.keys(True, True)))}: use a TransformersWrapper with "
            "return_log_probs=True."
        )
    real = torch.ones_like(full, dtype=torch.bool) if real is None else real.bool()
    if mask is None:
        mask = torch.arange(len(full), device=full.device) >= len(prompt)
    if log_probs is None:
        log_probs = torch.cat([response.new_zeros(len(full) - len(response)), response])
        log_probs[len(full) - len(response) :][:1].masked_fill_(response[:1] == 0, torch.nan)
    mask = mask.bool() & real & log_probs.isfinite()
    out = row.exclude("tokens", "masks", "log_probs", "history", "text")
    for key, value in row.items(True, True):
        # All other per-token entries: reference and proximal log-probs, advantages.
        if (
            key in out.keys(True)
            and isinstance(value, Tensor)
            and value.shape == full.shape
            and len(full) > 1
        ):
            out.set(key, value[real])
    out.set(tokens_key, full[real])
    out.set(K.ATTENTION_MASK, real[real])
    out.set(K.ASSISTANT_MASK, mask[real])
    out.set(K.LOG_PROBS, torch.where(mask, log_probs, 0.0)[real])
    return out
