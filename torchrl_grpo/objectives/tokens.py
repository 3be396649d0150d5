"""``Tokens``: the tokens that count in a loss, as flat tensors, and the sums and means over them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from tensordict import NestedKey
from torch import Tensor

from torchrl_grpo import keys
from torchrl_grpo.checks import Aggregation
from torchrl_grpo.models.segments import Segments, send


@dataclass(eq=False)
class Tokens:
    """Values of the S tokens that count, by name: ``tokens["advantage"]`` is [S].

    There is no padding and no mask. There are the entries that the parts of the loss read, by their
    name in ``loss.set_keys`` or else by their key in the batch; ``"log_prob"`` and ``"entropy"`` of
    the trained policy; and, once ``OffPolicy`` has run, ``"prox_log_prob"``, ``"ratio"`` and
    ``"behaviour_weight"``.

    Args:
        values: by name or key, [S] each.
        segments: the sequences of the tokens, on their device.
        totals: counts of the whole optimization batch, which divide sums into means:
            ``TOKEN_COUNT`` over tokens, ``SEQUENCE_COUNT`` over sequences.
    """

    values: dict[NestedKey, Tensor]
    segments: Segments
    totals: dict[NestedKey, Tensor] = field(default_factory=dict)

    def __getitem__(self, name: NestedKey) -> Tensor:
        """Return the value of each token, [S].

        Raises:
            KeyError: no part has it in ``in_keys``, or it is not known yet.
        """
        if name not in self.values:
            raise KeyError(
                f"the tokens have no {name!r}, only {', '.join(map(repr, self.values))}: if the "
                "batch has it, name it in in_keys of the part. A Select has no scores (log_prob, "
                "entropy) and no ratio."
            )
        return self.values[name]

    def checked(self, values: Tensor, part: object, dtype: torch.dtype | None = None) -> Tensor:
        """Return values that a part has returned, if there is one for each token.

        Raises:
            ValueError: it is not [S], or not of a type that it must have.
        """
        shape = (len(self.segments.row),)
        if values.shape != shape or values.dtype != (dtype or values.dtype):
            of_type = "" if dtype is None else f" {dtype}"
            raise ValueError(
                f"{type(part).__name__}.forward must return one value for each token, "
                f"{list(shape)}{of_type}, not {list(values.shape)} {values.dtype}: use "
                "t.segments.spread for a value of each sequence."
            )
        return values

    def __setitem__(self, name: NestedKey, value: Tensor) -> None:
        """Add a value of each token, for the parts that come later."""
        self.values[name] = value

    def __contains__(self, name: NestedKey) -> bool:
        """Return whether the batch has an entry."""
        return name in self.values

    def take(self, flags: Tensor) -> Tokens:
        """Return only the tokens whose flag, [S] bool, is True."""
        if bool(flags.all()):
            return self
        index, row = flags.cpu().nonzero().squeeze(-1), self.segments.row
        values = {
            name: value.index_select(0, send(index, value.device))
            for name, value in self.values.items()
        }
        sizes = row.cpu()[index].bincount(minlength=len(self.segments))
        return replace(self, values=values, segments=Segments.of(sizes).to(row.device))

    def to(self, device: torch.device) -> Tokens:
        """Return the tokens on a device, copied without waiting."""
        values, totals = (
            {name: send(value, device) for name, value in part.items()}
            for part in (self.values, self.totals)
        )
        return Tokens(values, self.segments.to(device), totals)

    def weighted_sum(self, values: Tensor) -> Tensor:
        """Return the sum of the values, times the weights of their tokens in the loss."""
        return (self["weights"] * values).sum()

    def means(self, *, of: NestedKey = keys.TOKEN_COUNT, **values: Tensor) -> dict[str, Tensor]:
        """Return metrics: the detached mean of each argument under its name.

        Args:
            of: ``TOKEN_COUNT`` for values [S], ``SEQUENCE_COUNT`` for values [B], which must be 0
                for sequences without tokens.
            values: by name.
        """
        dtype, count = self["log_prob"].dtype, self.totals.get(of, 1)
        return {name: value.detach().to(dtype).sum() / count for name, value in values.items()}


def token_weights(
    segments: Segments,
    aggregation: Aggregation = "sequence_mean",
    *,
    constant_length: int = 1,
    dtype: torch.dtype = torch.float32,
    trajectory: Tensor | None = None,
) -> Tensor:
    """Weights that turn a weighted sum over tokens into the requested average.

    ``sequence_mean``: mean over sequences of the mean over their tokens (arXiv 2402.03300).
    ``token_mean``: mean over all tokens (arXiv 2503.14476). ``constant``: sum over tokens divided
    by ``constant_length``, mean over sequences (arXiv 2503.20783). Rows that are samples of one
    trajectory are one sequence: the trajectory counts once, and all its tokens count the same.

    Args:
        segments: the sequences of the S tokens that count, N of them.
        aggregation: the average.
        constant_length: divisor of ``constant``, in tokens; 1 for the plain sum.
        dtype: dtype of the weights.
        trajectory: number of the trajectory of each row, [N] int64 in [0, N); None if each row is
            one.

    Returns:
        [S] of ``dtype``. A sequence without tokens has no effect.
    """
    sizes = length = segments.sizes
    if trajectory is not None:
        trajectory = trajectory.to(sizes.device)
        sizes = torch.zeros_like(sizes).index_add_(0, trajectory, sizes)
        length = sizes[trajectory]
    sequences = (sizes > 0).sum()
    divisor = {
        "sequence_mean": length * sequences,
        "token_mean": sizes.sum(),
        "constant": constant_length * sequences,
    }[aggregation]
    return (1.0 / divisor.to(dtype)).expand(len(segments))[segments.row]
