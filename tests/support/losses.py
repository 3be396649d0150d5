"""A batch for the losses and an actor whose logits are a table, in float64."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from torchrl_grpo.models.segments import Segments
from torchrl_grpo.objectives import Tokens

SETTINGS = {
    "clip_epsilon": (0.2, 0.28),
    "kl_to_ref_coeff": 0.3,
    "kl_to_inference_coeff": 0.2,
    "entropy_coeff": 0.05,
}


class Table(TensorDictModuleBase):
    """An actor whose current log-probs come from a table of logits [B, T, V], which receives the
    gradients.
    """

    in_keys = [("tokens", "full")]  # noqa: RUF012
    out_keys = [("cur_log_probs", "full"), ("entropy", "full")]  # noqa: RUF012

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, tensordict):
        tokens = tensordict.get(
            ("tokens", "full"), as_padded_tensor=True, padding_side="right", padding_value=0
        )
        rows = tensordict.get("row").reshape(-1)
        log_p = self.logits[rows, : tokens.shape[1]].log_softmax(-1)
        tensordict.set(("cur_log_probs", "full"), log_p.gather(-1, tokens[..., None]).squeeze(-1))
        tensordict.set(("entropy", "full"), -(log_p.exp() * log_p).sum(-1))
        return tensordict


def make_batch(
    seed: int, lengths: tuple[int, ...] = (6, 9, 4, 7), vocabulary: int = 5
) -> tuple[Tensor, list[TensorDict]]:
    generator = torch.Generator().manual_seed(seed)
    logits = (
        torch.randn(
            len(lengths), max(lengths), vocabulary, generator=generator, dtype=torch.float64
        )
        * 2
    )
    rows = []
    for row, length in enumerate(lengths):
        mask = torch.rand(length, generator=generator) < 0.7
        mask[0] = False
        tokens = torch.randint(0, vocabulary, (length,), generator=generator)
        cur = logits[row, :length].log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)
        noise = torch.randn(2, length, generator=generator, dtype=torch.float64) * 0.4
        rows.append(
            TensorDict(
                {
                    ("tokens", "full"): tokens,
                    ("masks", "all_assistant_mask"): mask,
                    ("log_probs", "full"): torch.where(mask, cur + noise[0], 0.0),
                    ("next", "ref_log_probs", "full"): torch.where(mask, cur + noise[1], 0.0),
                    "advantage": torch.randn(1, generator=generator, dtype=torch.float64),
                    "row": torch.tensor([row]),
                }
            )
        )
    return logits, rows


def tokens_of(*sizes: int, **values: Tensor) -> Tokens:
    """Return tokens of sequences of these sizes, by default a single one, with these values."""
    length = next(iter(values.values())).numel()
    return Tokens(dict(values), Segments.of(sizes or (length,)))


def rows_of(mask: Tensor) -> Segments:
    """Return the sequences of the tokens in a mask [N, T]."""
    return Segments.of(mask.sum(1))


def padded(mask: Tensor, values: Tensor) -> Tensor:
    """Return values of the tokens in a mask, [S], as [N, T] with 0 elsewhere."""
    return values.new_zeros(mask.shape).masked_scatter(mask, values)


def total(out: TensorDict) -> Tensor:
    return sum(value for name, value in out.items() if name.startswith("loss_"))


Token = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of a token's ratio, log-prob and advantage: its objective, which is to be maximized."""


def clip(low: float = 0.2, high: float = 0.2, dual: float | None = None) -> Token:
    def objective(ratio: Tensor, log_prob: Tensor, advantage: Tensor) -> Tensor:
        clipped = ratio
        if ratio < 1 - low:
            clipped = torch.tensor(1 - low, dtype=torch.float64)
        if ratio > 1 + high:
            clipped = torch.tensor(1 + high, dtype=torch.float64)
        a, b = ratio * advantage, clipped * advantage
        value = a if a <= b else b
        if dual is not None and advantage < 0 and value < dual * advantage:
            value = dual * advantage
        return value

    return objective


def cispo(low: float, high: float) -> Token:
    def objective(ratio: Tensor, log_prob: Tensor, advantage: Tensor) -> Tensor:
        return min(max(ratio.item(), 1 - low), 1 + high) * advantage * log_prob

    return objective


def sapo(positive: float = 1.0, negative: float = 1.05) -> Token:
    def objective(ratio: Tensor, log_prob: Tensor, advantage: Tensor) -> Tensor:
        tau = positive if advantage > 0 else negative
        return 4 / tau / (1 + torch.exp(-tau * (ratio - 1))) * advantage

    return objective
