"""``AdvantageWhitening``: a second normalization of advantages, over a batch's sampled tokens."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torchrl.envs import Transform

from torchrl_grpo import keys
from torchrl_grpo.functional import group_advantage
from torchrl_grpo.models.entries import has, pad
from torchrl_grpo.transforms.ragged import flatten, set_tokens


class AdvantageWhitening(Transform):
    """Centers advantages and divides them by their standard deviation, over all sampled tokens of
    the batch.

    A sequence's advantage counts once for each of its sampled tokens (like AReaL's ``adv_norm``
    after its ``reward_norm``). Advantages of sequences whose reward is not valid do not count and
    do not change. If all are equal, they become 0. In a group without variance, the advantages of 0
    are shifted by the batch's mean too.

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
        """Normalize the advantages of a batch in place, without changing their shapes."""
        flat = flatten(tensordict)
        mask = pad(flat, keys.ASSISTANT_MASK, False)
        advantage = pad(flat, keys.ADVANTAGE)
        valid_mask = mask
        if has(flat, keys.REWARD_VALID):
            valid_mask = mask & flat.get(keys.REWARD_VALID).reshape(-1, 1)
        of_token = advantage.expand(mask.shape).clone()
        values = of_token[valid_mask]
        group = torch.zeros_like(values, dtype=torch.int64)
        whitened = group_advantage(values, group, group == 0, mean="batch", std="batch")
        of_token[valid_mask] = whitened.to(of_token.dtype)
        if advantage.shape[1] > 1:
            return set_tokens(tensordict, keys.ADVANTAGE, of_token)
        # The value is the same for all tokens of a sequence.
        first = valid_mask.int().argmax(1, keepdim=True)
        of_row = torch.where(valid_mask.any(1, keepdim=True), of_token.gather(1, first), advantage)
        return tensordict.set(keys.ADVANTAGE, of_row.reshape(*tensordict.batch_size, 1))
