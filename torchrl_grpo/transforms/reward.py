"""``RewardShaping``: a TorchRL transform from the task's reward to the reward used for training."""

from __future__ import annotations

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from torchrl_grpo import keys
from torchrl_grpo.checks import KLEstimator, check_bounds
from torchrl_grpo.functional import KL_ESTIMATORS, overlong_penalty
from torchrl_grpo.models.entries import (
    entry,
    has,
    last_rows,
    pad,
    trajectories_of,
)
from torchrl_grpo.transforms.batch import BatchTransform
from torchrl_grpo.transforms.ragged import flatten, set_tokens


class RewardShaping(BatchTransform):
    """Writes the shaped reward of each sequence, and its distribution over the tokens.

    ``("next", "shaped_reward")`` [1] float32 is ``clip(scale * reward + bias) + overlong - kl_coef
    * sum_t KL_t``. ``("next", "token_reward")`` [T] float32 has its parts: ``-kl_coef * KL_t`` on
    each sampled token, the rest on the last sampled token, and 0 on all other tokens. If the batch
    has ``("next", "turn_rewards")``, each turn keeps ``scale`` times its reward, and the last
    sampled token gets the difference to the shaped reward: bias, penalty and the effect of the
    clip. So the token rewards of a sequence add up to its shaped reward. In a sequence without a
    sampled token they are 0, and the shaped reward is the task's reward. Both are 0 where
    ``"reward_valid"`` is False. If a trajectory has several samples, the last one gets the task's
    reward with scale, bias, clip and penalty, and each gets its own KL; their sum is the
    trajectory's shaped reward. Turns of several samples keep ``scale`` times their rewards.
    ``("next", "reward")`` does not change, and ``GroupAdvantage`` reads
    it by default: for the shaped reward, use
    ``GroupAdvantage(..., reward_key=keys.SHAPED_REWARD)``, or ``level="token"``, which reads the
    token rewards.

    It works on finished sequences: called on a batch, in place, or in a replay buffer, where
    ``extend`` shapes new data. A buffer applies
    its transforms in reverse order when it is written to, so there this transform comes *after*
    ``GroupAdvantage``, as in the second example.

    Keyword Args:
        scale: factor of the reward.
        bias: term added to the scaled reward.
        clip: lowest and highest value of the scaled and biased reward; None for no bounds. The
            overlong penalty is added afterwards, so that a clip never hides it.
        overlong_buffer: number of tokens before ``max_response_tokens`` over which a penalty grows
            from 0 to 1 (arXiv 2503.14476, equation 13), by the number of sampled tokens of all
            turns and samples; 0 for no penalty.
        max_response_tokens: number of sampled tokens at which the penalty reaches 1.
        kl_coef: weight of the KL to the reference policy, subtracted token by token; 0 needs no
            reference log-probs.
        kl_estimator: ``"k1"`` (as in arXiv 2501.03262), ``"k2"`` or ``"k3"``, for the policy that
            sampled.
        reward_key: key of the task's reward, one value per sequence.
        valid_key: [..., 1] bool; if the key is missing, every reward is valid.
        mask_key: [T] bool per sequence, the tokens that the policy sampled.
        sample_log_prob_key: [T] per sequence, read only with a ``kl_coef``.
        ref_log_probs_key: [T] per sequence, read only with a ``kl_coef``.

    Raises:
        ValueError: an argument is out of range.
        KeyError: the batch has no reward or mask or, if ``kl_coef`` is not 0, lacks the log-probs
            of the policy or of the reference.
        RuntimeError: the transform is in an environment.

    Examples:
        >>> from tensordict import TensorDict
        >>> mask, group = torch.tensor([[False, True, True]] * 2), torch.zeros(2, 1, dtype=torch.int64)
        >>> batch = TensorDict({"masks": {"all_assistant_mask": mask}, "group_id": group}, [2])
        >>> batch["next", "reward"] = torch.tensor([[1.0], [0.0]])
        >>> RewardShaping(scale=2.0, bias=-0.5)(batch.clone())["next", "token_reward"][0]
        tensor([0.0000, 0.0000, 1.5000])

        In a replay buffer, before the advantage is computed:

        >>> from torchrl.data import LazyStackStorage, ReplayBuffer
        >>> from torchrl.envs import Compose
        >>> from torchrl_grpo.transforms import GroupAdvantage
        >>> advantage = GroupAdvantage(2, std="none", reward_key=keys.SHAPED_REWARD)
        >>> transforms = Compose(advantage, RewardShaping(scale=5.0))
        >>> buffer = ReplayBuffer(storage=LazyStackStorage(2), transform=transforms)
        >>> _ = buffer.extend(batch)
        >>> buffer[:]["advantage"].squeeze(-1)
        tensor([ 2.5000, -2.5000])
    """

    def __init__(
        self,
        *,
        scale: float = 1.0,
        bias: float = 0.0,
        clip: tuple[float, float] | None = None,
        overlong_buffer: int = 0,
        max_response_tokens: int | None = None,
        kl_coef: float = 0.0,
        kl_estimator: KLEstimator = "k1",
        reward_key: NestedKey = keys.REWARD,
        valid_key: NestedKey = keys.REWARD_VALID,
        mask_key: NestedKey = keys.ASSISTANT_MASK,
        sample_log_prob_key: NestedKey = keys.LOG_PROBS,
        ref_log_probs_key: NestedKey = keys.REF_LOG_PROBS,
    ) -> None:
        check_bounds(clip)
        if overlong_buffer < 0:
            raise ValueError(
                f"overlong_buffer={overlong_buffer} must be at least 0: use 0 for no penalty."
            )
        if overlong_buffer and (
            max_response_tokens is None or overlong_buffer > max_response_tokens
        ):
            raise ValueError(
                f"overlong_buffer={overlong_buffer} must be at most "
                f"max_response_tokens={max_response_tokens}: use a smaller buffer, or 0 for no "
                "penalty, and set the maximum length of a response."
            )
        if kl_estimator not in KL_ESTIMATORS:
            raise ValueError(
                f"kl_estimator={kl_estimator!r} must be one of {tuple(KL_ESTIMATORS)}: use 'k1'."
            )
        if kl_coef < 0:
            raise ValueError(
                f"kl_coef={kl_coef} must be at least 0: use 0.01, or 0 for no KL in the reward."
            )
        in_keys = [reward_key, valid_key, mask_key, keys.TURN_REWARDS, keys.TRAJECTORY]
        self.kl_keys = [sample_log_prob_key, ref_log_probs_key] if kl_coef else []
        super().__init__(
            in_keys=[*in_keys, *self.kl_keys],
            out_keys=[keys.SHAPED_REWARD, keys.TOKEN_REWARD],
        )
        self.reward_key = reward_key
        self.valid_key = valid_key
        self.mask_key = mask_key
        self.scale = scale
        self.bias = bias
        self.clip = clip
        self.overlong_buffer = overlong_buffer
        self.max_response_tokens = max_response_tokens
        self.kl_coef = kl_coef
        self.kl_estimator = kl_estimator

    def write(self, batch: TensorDictBase) -> TensorDictBase:
        """Shape the rewards of a batch in place."""
        flat = flatten(batch)
        mask = pad(flat, self.mask_key, False)
        valid = torch.ones_like(mask[:, :1])
        if has(flat, self.valid_key):
            valid = flat.get(self.valid_key).reshape(-1, 1)
        # In float64 until they are written, so that the parts add up to the whole.
        kl = torch.where(valid & mask, self._kl(flat, mask), 0.0)
        trajectory = trajectories_of(flat)
        trajectory = None if trajectory is None else trajectory.to(mask.device)
        task = torch.where(valid, self._task_reward(flat, mask, trajectory), 0.0)
        shaped = task - kl.sum(-1, keepdim=True)
        token = torch.where(valid & mask, self._turn_rewards(flat.unbind(0), mask), 0.0)
        credited = token.sum(-1, keepdim=True)
        if trajectory is not None:  # a sample may end with rewards of others
            has_turns = [[row.get(keys.TURN_REWARDS, None) is not None] for row in flat.unbind(0)]
            reward = entry(flat, self.reward_key).reshape(-1, 1).double() * self.scale
            is_last = last_rows(trajectory).unsqueeze(-1)
            credited = reward * (torch.tensor(has_turns, device=mask.device) & is_last)
        token = token + torch.where(_last(mask), task - credited, 0.0) - kl
        batch = set_tokens(batch, keys.TOKEN_REWARD, token.float(), self.mask_key)
        return batch.set(keys.SHAPED_REWARD, shaped.float().reshape(*batch.batch_size, 1))

    def _task_reward(self, flat: TensorDictBase, mask: Tensor, trajectory: Tensor | None) -> Tensor:
        """Return the shaped reward without the KL, [N, 1] float64; 0 in all samples of a trajectory
        but the last one.
        """
        length = mask.sum(-1, keepdim=True)
        if trajectory is not None:
            length = torch.zeros_like(length).index_add_(0, trajectory, length)[trajectory]
        reward = entry(flat, self.reward_key).reshape(-1, 1).double() * self.scale + self.bias
        if self.clip is not None:
            reward = reward.clamp(*self.clip)
        if self.overlong_buffer and self.max_response_tokens is not None:
            reward = reward + overlong_penalty(
                length, self.max_response_tokens, self.overlong_buffer
            )
        return (
            reward
            if trajectory is None
            else torch.where(last_rows(trajectory).unsqueeze(-1), reward, 0.0)
        )

    def _turn_rewards(self, rows: tuple[TensorDictBase, ...], mask: Tensor) -> Tensor:
        """Return the scaled rewards of the turns, [N, T] float64; 0 without turn rewards."""
        out = torch.zeros(mask.shape, dtype=torch.float64, device=mask.device)
        for row, target in zip(rows, out, strict=True):
            rewards = row.get(keys.TURN_REWARDS, None)
            if rewards is not None:
                target[: rewards.shape[-1]] = rewards * self.scale
        return out

    def _kl(self, flat: TensorDictBase, mask: Tensor) -> Tensor:
        """Return the weighted KL of each token, [N, T] float64; undefined outside the mask."""
        if not self.kl_coef:
            return torch.zeros(mask.shape, dtype=torch.float64, device=mask.device)
        sample, ref = (pad(flat, key).double() for key in self.kl_keys)
        return self.kl_coef * KL_ESTIMATORS[self.kl_estimator](sample, ref)


def _last(mask: Tensor) -> Tensor:
    """Return the mask of the last True in each row, [N, T] bool."""
    return mask & (mask.flip(-1).cumsum(-1).flip(-1) == 1)
