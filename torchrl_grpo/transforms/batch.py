"""``BatchTransform``: base of the transforms of finished sequences."""

from __future__ import annotations

from collections.abc import Sequence

from tensordict import NestedKey, TensorDictBase
from torchrl.envs import Transform

from torchrl_grpo.models.entries import has


class BatchTransform(Transform):
    """Base of the transforms that write entries of finished sequences.

    Subclasses implement ``write``; those that also work in a ``TransformedEnv`` override ``_step``,
    ``_reset`` and ``transform_observation_spec``. A call computes the entries, and so does a replay
    buffer when data is added. Data sampled from it already has them and does not change.

    Attributes:
        batch_keys: keys of the entries in a batch, if ``out_keys`` name an environment's.
    """

    batch_keys: Sequence[NestedKey] | None = None

    def write(self, batch: TensorDictBase) -> TensorDictBase:
        """Write the entries into a batch, in place, and return it."""
        raise NotImplementedError

    def extend(self, batch: TensorDictBase) -> TensorDictBase | None:
        """Write the entries into data that is added to a replay buffer; None adds nothing yet."""
        return self.write(batch)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the entries of a batch. In a replay buffer, a batch that has them is returned
        unchanged.
        """
        return tensordict if self._is_written(tensordict) else self.write(tensordict)

    def _inv_call(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        """Write the entries of data that is added to a replay buffer. In an environment it does
        nothing, because ``_step`` computes them.
        """
        # None if another transform of the buffer adds nothing yet
        if tensordict is None or self.parent is not None or self._is_written(tensordict):
            return tensordict
        return self.extend(tensordict)

    _call = _inv_call  # a buffer with append_transform(invert=True) also samples through it

    def _is_written(self, batch: TensorDictBase) -> bool:
        """Return whether the entries were written when the data was added to a replay buffer. A
        buffer puts its transforms into eval mode; a direct call computes again.
        """
        return not self.training and all(
            has(batch, key) for key in self.batch_keys or self.out_keys
        )

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        raise RuntimeError(
            f"{type(self).__name__} must get finished sequences, but it is in an environment, where "
            "a step has only one turn: call it on the collector's batch, or put it into a "
            "ReplayBuffer."
        )


def in_next(key: NestedKey) -> NestedKey:
    """Return ``key`` as it is named inside the ``"next"`` entry."""
    if isinstance(key, tuple) and key[0] == "next":
        return key[1:]
    return key
