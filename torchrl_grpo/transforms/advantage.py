"""``GroupAdvantage``: the group-relative advantage of GRPO as a TorchRL transform."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import torch
from tensordict import NestedKey, TensorDictBase, lazy_stack
from torch import Tensor
from torchrl.data import Composite, Unbounded
from torchrl.envs import EnvBase, Transform

from torchrl_grpo.checks import check_group_size, check_level
from torchrl_grpo.choices import AdvantageLevel, AdvantageMean, AdvantageStd
from torchrl_grpo.functional import group_advantage, sampled_token_gae
from torchrl_grpo.keys import (
    ADVANTAGE,
    ASSISTANT_MASK,
    DONE,
    GROUP_ID,
    REWARD,
    REWARD_VALID,
    STATE_VALUE,
    TOKEN_REWARD,
)
from torchrl_grpo.models.packing import entry, has, pad
from torchrl_grpo.transforms.ragged import flatten, set_rows


class GroupAdvantage(Transform):
    """Writes ``A_i = (r_i - mean(r)) / (std(r) + eps)`` over the valid rewards of each group (arXiv 2402.03300).

    It works in three places:

    - called on a flat batch of complete groups;
    - in a replay buffer: ``extend`` holds the members of a group back until all ``repeats`` are there, then writes the
      group. What is sampled from it has its advantage already and is left alone;
    - in a ``TransformedEnv``: ``("next", "advantage")`` is the advantage where all rows of a group are done, else 0.
      It sees the reward of the last step alone; where earlier steps have one, let ``RewardSum`` add them up.

    With ``level="token"`` the advantage is one for each sampled token: the generalised advantage estimate (arXiv
    1506.02438, TorchRL's function) over ``token_reward`` along the tokens that the policy sampled; tokens of the
    environment in between take no time. It is then centred and scaled as the rewards are, over all sampled tokens of
    the valid sequences of the group or the batch. With ``RewardShaping(kl_coef=...)`` before it and ``mean="batch",
    std="batch"`` this is REINFORCE++ (arXiv 2501.03262). Not in a ``TransformedEnv``, where no sequence is whole.

    ``"batch"`` means all that is computed at once: the batch that was passed; in a replay buffer, the groups that one
    ``extend`` completed, so extend with the whole batch; in an environment, the groups that are done at that step.

    Attributes:
        num_groups: groups completed so far.
        num_zero_signal_groups: those of them in which every advantage is 0.
        num_invalid: sequences of these groups that have no valid reward.

    Args:
        repeats: size of a group, at least 2 where ``mean`` or ``std`` is over the group.

    Keyword Args:
        mean: the baseline, see ``functional.group_advantage``.
        std: the scale, see there.
        level: one advantage for each ``"sequence"`` or for each sampled ``"token"``.
        gamma: discount from one sampled token to the next, in [0, 1]; at level token.
        lmbda: how far the estimate looks past the state values, in [0, 1]; at level token.
        reward_key: [..., 1] floating, one reward a sequence, ``("next", "reward")`` if None: what ``RewardShaping``
            writes is read only where ``keys.SHAPED_REWARD`` is named here. At level token [..., T], one reward a token,
            ``("next", "token_reward")`` if None.
        valid_key: [..., 1] bool; where the key is missing every reward is valid.
        group_key: [..., 1] int64, or text that is equal within a group.
        done_key: [..., 1] bool, read in an environment.
        advantage_key: [..., 1] float32, written; at level token [..., T], ragged like the tokens and 0 on those that
            were not sampled.

    At level token, ``"state_value"`` is read where the batch has it: [..., T] floating, at each sampled token the value
    of the state that it was sampled in. Without it the values are 0. A sequence has no value after its last token,
    whether it was truncated or not.

    Raises:
        ValueError: an argument is out of its range, or a batch has a group of another size.
        KeyError: a batch has no groups or no rewards (at level token: no token rewards, no mask).
        RuntimeError: at level token, it is in an environment.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> reward = torch.tensor([[0.0], [1.0]])
        >>> batch = TensorDict({"group_id": torch.zeros(2, 1, dtype=torch.int64), "next": {"reward": reward}}, [2])
        >>> GroupAdvantage(2, std="none")(batch)["advantage"].squeeze(-1)
        tensor([-0.5000,  0.5000])

        Of another reward than the task's, such as ``RewardShaping`` writes:

        >>> batch = batch.exclude("advantage").set(("next", "shaped_reward"), 5 * reward)
        >>> GroupAdvantage(2, std="none", reward_key=("next", "shaped_reward"))(batch)["advantage"].squeeze(-1)
        tensor([-2.5000,  2.5000])
    """

    def __init__(
        self,
        repeats: int,
        *,
        mean: AdvantageMean = "group",
        std: AdvantageStd = "group",
        level: AdvantageLevel = "sequence",
        gamma: float = 1.0,
        lmbda: float = 1.0,
        reward_key: NestedKey | None = None,
        valid_key: NestedKey = REWARD_VALID,
        group_key: NestedKey = GROUP_ID,
        done_key: NestedKey = DONE,
        advantage_key: NestedKey = ADVANTAGE,
    ) -> None:
        check_group_size(repeats, mean, std)
        for name, choice, choices in (
            ("mean", mean, get_args(AdvantageMean)),
            ("std", std, get_args(AdvantageStd)),
            ("level", level, get_args(AdvantageLevel)),
        ):
            if choice not in choices:
                raise ValueError(f"{name}={choice!r} must be one of {choices}: use {choices[0]!r}.")
        check_level(level, mean)
        for name, value in (("gamma", gamma), ("lmbda", lmbda)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name}={value} must be in [0, 1]: use 1.0.")
            if level == "sequence" and value != 1:
                raise ValueError(
                    f"{name}={value} must be 1 with level='sequence', nothing reads it: use level='token'."
                )
        if reward_key is None:
            reward_key = REWARD if level == "sequence" else TOKEN_REWARD
        per_token = [ASSISTANT_MASK, STATE_VALUE] if level == "token" else []
        super().__init__(in_keys=[reward_key, valid_key, group_key, *per_token], out_keys=[advantage_key])
        self.level = level
        self.gamma = gamma
        self.lmbda = lmbda
        self.repeats = repeats
        self.mean = mean
        self.std = std
        self.reward_key = reward_key
        self.valid_key = valid_key
        self.group_key = group_key
        self.done_key = done_key
        self.advantage_key = advantage_key
        self._waiting: dict[int | str, list[TensorDictBase]] = {}
        self.reset_counts()

    def reset_counts(self) -> None:
        """Sets the three counts to 0."""
        self.num_groups = 0
        self.num_zero_signal_groups = 0
        self.num_invalid = 0

    @property
    def num_waiting(self) -> int:
        """Sequences held back because their group is not complete."""
        return sum(len(members) for members in self._waiting.values())

    def advantage(self, reward: Tensor, group: Tensor, valid: Tensor) -> Tensor:
        """What is made of the rewards of whole groups. Subclasses put their own here.

        Args:
            reward: [N] floating, of each sequence; at level token the estimate of each sampled token.
            group: [N] int64, equal within a group.
            valid: [N] bool; where it is False the result must be 0.

        Returns:
            [N] float32.
        """
        return group_advantage(reward, group, valid, mean=self.mean, std=self.std)

    # On its own, and when a replay buffer is sampled

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Writes the advantage of a flat batch of complete groups; a batch that has it is returned as it is.

        Raises:
            ValueError: a group has not ``repeats`` members.
        """
        return tensordict if has(tensordict, self.advantage_key) else self._write(tensordict)

    def _write(self, tensordict: TensorDictBase) -> TensorDictBase:
        group = _group_ids(tensordict, self.group_key)
        ids, sizes = group.unique(return_counts=True)
        wrong = (sizes != self.repeats).nonzero().reshape(-1)
        if wrong.numel():
            first = int(wrong[0])
            raise ValueError(
                f"each group of the batch must have repeats={self.repeats} members, {wrong.numel()} of {ids.numel()} "
                f"have not (the first has {int(sizes[first])}): pass whole groups, each once."
            )
        every = torch.ones_like(group, dtype=torch.bool)
        valid = _column(tensordict, self.valid_key, every)
        if self.level == "token":
            return self._write_tokens(tensordict, group, valid)
        reward = entry(tensordict, self.reward_key).reshape(-1)
        advantage = self.advantage(reward, group, valid)
        self._count(advantage != 0, group, valid, every)
        return tensordict.set(self.advantage_key, advantage.reshape(*tensordict.batch_size, 1))

    def _write_tokens(self, tensordict: TensorDictBase, group: Tensor, valid: Tensor) -> TensorDictBase:
        """Writes one advantage for each sampled token.

        Args:
            tensordict: batch of N sequences.
            group: [N] int64.
            valid: [N] bool.
        """
        flat = flatten(tensordict)
        reward, mask = pad(flat, self.reward_key).double(), pad(flat, ASSISTANT_MASK, False)
        value = pad(flat, STATE_VALUE).double() if has(flat, STATE_VALUE) else torch.zeros_like(reward)
        counted = mask & valid.unsqueeze(-1)
        estimate = sampled_token_gae(reward, value, counted, self.gamma, self.lmbda)
        of_token = group.unsqueeze(-1).expand_as(counted)[counted]
        every = torch.ones_like(of_token, dtype=torch.bool)
        advantage = torch.zeros(counted.shape, dtype=torch.float32, device=counted.device)
        advantage[counted] = self.advantage(estimate[counted], of_token, every)
        self._count((advantage != 0).any(-1), group, valid, torch.ones_like(valid))
        widths = [row.get(ASSISTANT_MASK).shape[-1] for row in flat.unbind(0)]
        return set_rows(
            tensordict, self.advantage_key, [row[:width] for row, width in zip(advantage, widths, strict=True)]
        )

    def _count(self, signal: Tensor, group: Tensor, valid: Tensor, counted: Tensor) -> None:
        """Adds the groups whose members are ``counted`` to the counts; ``signal`` is an advantage that is not 0."""
        groups = group[counted].unique()
        self.num_groups += groups.numel()
        self.num_zero_signal_groups += groups.numel() - group[counted & signal].unique().numel()
        self.num_invalid += int((counted & ~valid).sum())

    # In a replay buffer

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase | None:
        if self._in_env():
            return tensordict
        complete: list[TensorDictBase] = []
        rows = tensordict.reshape(-1).unbind(0)
        for key, row in zip(_group_keys(tensordict, self.group_key), rows, strict=True):
            members = self._waiting.setdefault(key, [])
            members.append(row)
            if len(members) == self.repeats:
                complete.extend(self._waiting.pop(key))
        if not complete:
            return None
        return self._write(lazy_stack(complete))

    def _in_env(self) -> bool:
        try:
            return isinstance(self.container, EnvBase)
        except ValueError:
            # TorchRL's way of saying that the Compose around this transform is in no environment.
            return False

    # In a TransformedEnv

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        group = _group_ids(tensordict, self.group_key)
        every = torch.ones_like(group, dtype=torch.bool)
        complete = _all_of_group(group, _column(next_tensordict, _in_next(self.done_key), every))
        before = _all_of_group(group, _column(tensordict, _in_next(self.done_key), ~every))
        valid = _column(next_tensordict, _in_next(self.valid_key), every)
        reward = entry(next_tensordict, _in_next(self.reward_key)).reshape(-1)
        # What the batch means here: rewards of dialogs that still go on are not known yet.
        advantage = self.advantage(reward, group, valid & complete)
        self._count(advantage != 0, group, valid, complete & ~before)
        next_tensordict.set(_in_next(self.advantage_key), advantage.reshape(*next_tensordict.batch_size, 1))
        return next_tensordict

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        if self.level == "token":
            raise RuntimeError(
                "level='token' must get finished sequences, GroupAdvantage is in an environment, where a step has one "
                "turn of them: call it on the collector's batch, put it into a ReplayBuffer, or use level='sequence'."
            )
        zeros = torch.zeros((*tensordict_reset.batch_size, 1), dtype=torch.float32)
        return tensordict_reset.set(_in_next(self.advantage_key), zeros)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Adds the advantage."""
        observation_spec[_in_next(self.advantage_key)] = Unbounded(
            shape=(*observation_spec.shape, 1), dtype=torch.float32, device=observation_spec.device
        )
        return observation_spec


def _in_next(key: NestedKey) -> NestedKey:
    """``key`` as it is named inside the ``"next"`` entry."""
    if isinstance(key, tuple) and key[0] == "next":
        return key[1] if len(key) == 2 else key[1:]
    return key


def _column(tensordict: TensorDictBase, key: NestedKey, default: Tensor) -> Tensor:
    """[N] values of a [..., 1] entry."""
    value = tensordict.get(key, None)
    return default if value is None else value.reshape(-1)


def _group_keys(tensordict: TensorDictBase, key: NestedKey) -> Sequence[int | str]:
    """The group of each sequence, as something hashable."""
    value = entry(tensordict, key)
    if isinstance(value, Tensor):
        return value.reshape(-1).tolist()
    return [str(text) for text in value.reshape(-1).tolist()]


def _group_ids(tensordict: TensorDictBase, key: NestedKey) -> Tensor:
    """[N] int64 ids, equal where the groups are."""
    value = entry(tensordict, key)
    if isinstance(value, Tensor):
        return value.reshape(-1)
    ids: dict[int | str, int] = {}
    return torch.tensor([ids.setdefault(name, len(ids)) for name in _group_keys(tensordict, key)])


def _all_of_group(group: Tensor, flag: Tensor) -> Tensor:
    """[N] bool, True where ``flag`` is True for all members of the group."""
    return ~torch.isin(group, group[~flag])
