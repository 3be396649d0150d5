"""Ragged batches as padded ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tensordict import NestedKey, TensorDict, TensorDictBase

from torchrl_grpo.models.entries import entry, pad


def pad_batch(
    batch: TensorDictBase, keys: Mapping[NestedKey, float], flat: Sequence[NestedKey] = ()
) -> TensorDict:
    """Return a contiguous TensorDict [N] of padded sequences, with only the named entries.

    Args:
        batch: batch size [N], ragged or padded.
        keys: per-token entries and their padding values.
        flat: entries of a fixed shape (rewards, ids), stacked without padding.

    Raises:
        KeyError: an entry is missing.
    """
    out = TensorDict({}, batch_size=[batch.shape[0]])
    for key, value in keys.items():
        out.set(key, pad(batch, key, value))
    for key in flat:
        out.set(key, entry(batch, key))
    return out
