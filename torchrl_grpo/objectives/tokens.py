"""``Tokens``: the tokens that count in a loss, as flat tensors, and the sums and means over them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from tensordict import NestedKey
from torch import Tensor

from torchrl_grpo import functional as F
from torchrl_grpo.models.segments import Segments


@dataclass(eq=False)
class Tokens:
    """Values of the S tokens that count, by name: ``tokens["advantage"]`` is [S].

    There is no padding and no mask. The names are those of ``loss.set_keys``, and keys of the
    batch, of the entries that the parts of the loss say they read; ``"log_prob"`` and ``"entropy"``
    of the policy that is trained; and, from ``OffPolicy`` on, ``"prox_log_prob"``, ``"ratio"`` and
    ``"behaviour_weight"``.

    Args:
        values: by name or key, [S] each.
        rows: the sequences of the tokens, on their device.
        names: key of each name that is not a key itself.
        weights: [S], share of each token in the loss.
        count: divisor of means over tokens, those of the whole optimization batch.
        sequences: divisor of means over sequences, likewise.
    """

    values: dict[NestedKey, Tensor]
    rows: Segments
    names: Mapping[str, NestedKey] = field(default_factory=dict)
    weights: Tensor | None = None
    count: Tensor = field(default_factory=lambda: torch.ones(()))
    sequences: Tensor = field(default_factory=lambda: torch.ones(()))

    def __getitem__(self, name: NestedKey) -> Tensor:
        """Return the value of each token, [S]."""
        return self.values[self._key(name)]

    def __setitem__(self, name: NestedKey, value: Tensor) -> None:
        """Add a value of each token, for the parts that come later."""
        self.values[self._key(name)] = value

    def __contains__(self, name: NestedKey) -> bool:
        """Return whether the batch has an entry."""
        return self._key(name) in self.values

    def _key(self, name: NestedKey) -> NestedKey:
        key = self.names.get(name, name) if isinstance(name, str) else name
        prepared = ("loss", name)
        return prepared if key not in self.values and prepared in self.values else key

    def take(self, flags: Tensor) -> Tokens:
        """Return only the tokens whose flag, [S] bool, is True."""
        if bool(flags.all()):
            return self
        index = flags.nonzero().squeeze(-1)
        values = {
            key: value.index_select(0, index.to(value.device)) for key, value in self.values.items()
        }
        sizes = self.rows.row.cpu()[index.cpu()].bincount(minlength=len(self.rows))
        return replace(self, values=values, rows=Segments.of(sizes).to(self.rows.row.device))

    def weighted_sum(self, values: Tensor) -> Tensor:
        """Return the sum that is part of the loss."""
        assert self.weights is not None
        return (self.weights * values).sum()

    def means(self, **values: Tensor) -> dict[str, Tensor]:
        """Return metrics: the detached mean of each argument [S] under its name."""
        dtype = self["log_prob"].dtype
        return {name: value.detach().to(dtype).sum() / self.count for name, value in values.items()}

    def row_means(self, **values: Tensor) -> dict[str, Tensor]:
        """Return metrics: the mean of each argument [B] over the sequences with tokens."""
        dtype = self["log_prob"].dtype
        ends = self.rows.sizes > 0
        return {
            name: torch.where(ends, value.detach().to(dtype), 0.0).sum() / self.sequences
            for name, value in values.items()
        }

    def kl_means(self, policy: str, log_prob: Tensor) -> dict[str, Tensor]:
        """Return two estimates of the KL to another policy, by its log-probs [S], as metrics."""
        own = self["log_prob"].detach()
        k1, k3 = F.kl_k1(own, log_prob), F.kl_k3(own, log_prob)
        return self.means(**{f"kl_k1_to_{policy}": k1, f"kl_k3_to_{policy}": k3})
