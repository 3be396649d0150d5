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
from torchrl_grpo.transforms.ragged import flatten, set_tokens


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
        mask = pad(flat, keys.ASSISTANT_MASK, False)
        advantage = pad(flat, keys.ADVANTAGE)
        counted = mask
        if has(flat, keys.REWARD_VALID):
            counted = mask & flat.get(keys.REWARD_VALID).reshape(-1, 1)
        of_token = advantage.expand(mask.shape).clone()
        values = of_token[counted]
        group = torch.zeros_like(values, dtype=torch.int64)
        whitened = group_advantage(values, group, group == 0, mean="batch", std="batch")
        of_token[counted] = whitened.to(of_token.dtype)
        if advantage.shape[1] > 1:
            return set_tokens(tensordict, keys.ADVANTAGE, of_token)
        # The same for all tokens of a sequence.
        first = counted.int().argmax(1, keepdim=True)
        of_row = torch.where(counted.any(1, keepdim=True), of_token.gather(1, first), advantage)
        return tensordict.set(keys.ADVANTAGE, of_row.reshape(*tensordict.batch_size, 1))
