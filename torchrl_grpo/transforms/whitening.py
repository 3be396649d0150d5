"""``AdvantageWhitening``: a second normalization of advantages, over the sampled tokens of the
batch.
"""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torchrl.envs import Transform

from torchrl_grpo import keys
from torchrl_grpo.functional import group_advantage
from torchrl_grpo.models.packing import has, pad
from torchrl_grpo.transforms.ragged import flatten, set_rows


class AdvantageWhitening(Transform):
    """Centers advantages and divides them by their standard deviation, over all sampled tokens of
    the batch.

    A sequence's advantage counts once for each of its tokens (AReaL's ``adv_norm`` over its
    ``reward_norm``). Those of sequences whose reward is not valid do not count and stay as they
    are; where all are equal, they become 0. A group without variance gets what the batch's mean
    makes of its 0.

    It works on finished sequences, after ``GroupAdvantage``.

    Raises:
        KeyError: the batch has no advantage or no mask.

    Example:
        >>> from tensordict import TensorDict
        >>> mask = torch.tensor([[True, True, True], [False, False, True]])
        >>> batch = TensorDict({"advantage": torch.tensor([[1.0], [-1.0]]), "masks": {"all_assistant_mask": mask}}, [2])
        >>> AdvantageWhitening()(batch)["advantage"].squeeze(-1)
        tensor([ 0.5000, -1.5000])
    """

    def __init__(self) -> None:
        super().__init__(
            in_keys=[keys.ADVANTAGE, keys.ASSISTANT_MASK, keys.REWARD_VALID],
            out_keys=[keys.ADVANTAGE],
        )

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Writes the advantages of a batch, each of the shape that it has, in place."""
        flat = flatten(tensordict)
        mask, advantage = pad(flat, keys.ASSISTANT_MASK, False), pad(flat, keys.ADVANTAGE)
        counted = (
            mask & flat.get(keys.REWARD_VALID).reshape(-1, 1)
            if has(flat, keys.REWARD_VALID)
            else mask
        )
        of_tokens = advantage.expand(mask.shape).clone()
        values = of_tokens[counted]
        one, every = (
            torch.zeros(len(values), dtype=torch.int64),
            torch.ones(len(values), dtype=torch.bool),
        )
        of_tokens[counted] = group_advantage(values, one, every, mean="batch", std="batch").to(
            of_tokens.dtype
        )
        if advantage.shape[1] == 1:  # the same for all tokens of a sequence
            first = counted.int().argmax(1, keepdim=True)
            whole = torch.where(counted.any(1, keepdim=True), of_tokens.gather(1, first), advantage)
            return tensordict.set(keys.ADVANTAGE, whole.reshape(*tensordict.batch_size, 1))
        widths = [row.get(keys.ASSISTANT_MASK).shape[-1] for row in flat.unbind(0)]
        return set_rows(
            tensordict,
            keys.ADVANTAGE,
            [row[:width] for row, width in zip(of_tokens, widths, strict=True)],
        )
