"""``GroupAdvantage``: the group-relative advantage of GRPO as a TorchRL transform."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import compress
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDictBase, lazy_stack
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torchrl.data import Composite, Unbounded

from torchrl_grpo import keys
from torchrl_grpo.checks import (
    AdvantageLevel,
    AdvantageMean,
    AdvantageStd,
    check_decoupled,
    check_group_size,
    check_level,
)
from torchrl_grpo.compat.torchrl import check_choice
from torchrl_grpo.functional import group_advantage, token_advantage, turn_advantage
from torchrl_grpo.host.extras import load_extra
from torchrl_grpo.models.entries import (
    entry,
    has,
    last_rows,
    pad,
    trajectories_of,
)
from torchrl_grpo.rewards.spec import PartWeights
from torchrl_grpo.transforms.batch import BatchTransform, in_next
from torchrl_grpo.transforms.decoupled import decoupled_advantage, reward_parts
from torchrl_grpo.transforms.ragged import (
    all_of_group,
    flatten,
    group_ids,
    group_keys,
    join_rows,
    set_tokens,
    split_rows,
)

if TYPE_CHECKING:
    from torchrl_grpo.transforms.groups import GroupQueue, Member

TrajectoryReturn = Literal["sum", "max", "mean"]

_REWARD_KEYS: dict[str, NestedKey] = {
    "sequence": keys.REWARD,
    "turn": keys.TURN_REWARDS,
    "token": keys.TOKEN_REWARD,
}
_KEYS_OF_TOKENS: dict[str, list[NestedKey]] = {
    "sequence": [],
    "turn": [keys.ASSISTANT_MASK, keys.REWARD, keys.STATE_VALUE],
    "token": [keys.ASSISTANT_MASK, keys.STATE_VALUE],
}
_REDUCTIONS = {"sum": "sum", "max": "amax", "mean": "mean"}


class GroupAdvantage(BatchTransform):
    """Writes ``A_i = (r_i - mean(r)) / (std(r) + eps)`` over the valid rewards of each group (arXiv
    2402.03300).

    It works in three places:

    - called on a flat batch of complete groups;
    - in a replay buffer: ``extend`` holds the members of a group back until all ``repeats`` are
      there, then writes the group. Rows sampled from the buffer have their advantage already and
      are not changed. ``state_dict`` has the waiting members;
    - in a ``TransformedEnv``: ``("next", "advantage")`` is the advantage once all rows of a group
      are done, and 0 before. It sees only the reward of the last step; if earlier steps have one,
      let ``RewardSum`` add them up.

    A member of a group is a trajectory: the rows of a batch up to one that is done, or one row if
    the batch has no ``done``. Its reward ``r_i`` is made of all rewards of its steps, and all of
    them get its advantage.

    With ``level="token"`` the advantage is one for each sampled token: the generalized advantage
    estimate (arXiv 1506.02438, TorchRL's function) over ``token_reward`` along the tokens that the
    policy sampled; tokens of the environment in between take no time. It is then centered and
    scaled as the rewards are, over all sampled tokens of the valid sequences of the group or the
    batch. With ``RewardShaping(kl_coef=...)`` before it and ``mean="batch", std="batch"`` this is
    REINFORCE++ (arXiv 2501.03262). Not in a ``TransformedEnv``, where no sequence is whole.

    With ``level="turn"`` it is one for each turn, for all of its tokens: the turn's return, its own
    reward and the rewards of later turns, each discounted once more by ``gamma``; with state values
    the generalized advantage estimate along turns. They are compared turn by turn: the first turns
    with each other, then the second ones, as long as all valid members of the group have that turn.
    Later turns are compared together with the last one that all have. Each sample of a trajectory
    (``"trajectory"`` in ``torchrl_grpo.keys``) is compared as a separate member.

    With ``part_weights`` the parts of the reward are normalized one by one, then summed by weight,
    and the sums normalized over the batch: GDPO (arXiv 2601.05242), see ``decoupled_advantage``.
    The parts come from a trajectory's last step.

    In a replay buffer a group may get more members than ``repeats`` to choose from, and be dropped
    where no choice has a mean return within bounds, as in TorchRL's ``MCAdvantage``: see there for
    ``keep_return_bounds``, ``candidate_group_size``, ``candidate_selection_min_size`` and
    ``candidate_selector``.

    ``"batch"`` means all that is computed at once: the batch that was passed; in a replay buffer,
    the groups that one ``extend`` completed, so extend with the whole batch; in an environment, the
    groups that are done at that step.

    Attributes:
        num_groups: groups completed so far.
        num_zero_variance_groups: how many of them have only advantages of 0.
        num_invalid: trajectories of these groups that have no valid reward.
        queue: the trajectories that wait in a replay buffer, and their counts.

    Args:
        repeats: size of a group, at least 2 where ``mean`` or ``std`` is over the group; it must
            be given, under this name or TorchRL's ``grpo_size``.

    Keyword Args:
        mean: the baseline, see ``functional.group_advantage``.
        std: the scale, see there.
        level: one advantage for each ``"sequence"``, for each ``"turn"`` or for each sampled
            ``"token"``.
        gamma: discount from one sampled token, or one turn, to the next, in [0, 1]; at level token
            and turn.
        lmbda: how far the estimate looks past the state values, in [0, 1]; at level token and turn.
        trajectory_return: how the rewards of a trajectory are combined: their sum, the largest, or
            the mean.
        reward_key: [..., 1] floating, one reward a row (or [..., n, 1]), ``("next", "reward")`` if
            None: what ``RewardShaping`` writes is read only if ``keys.SHAPED_REWARD`` is named
            here. At level token [..., T], one reward a token, ``("next", "token_reward")`` if None.
            At level turn likewise, if None ``("next", "turn_rewards")`` or, if a row has none, its
            reward.
        part_weights: weights of the parts in ``("next", "reward_parts")``, by part or function, by
            default 1; for several data sets, these by the name in ``"dataset"``. None reads the
            reward as a whole.
        valid_key: [..., 1] bool; if the key is missing, every reward is valid.
        group_key: [..., 1] int64, or text that is equal within a group.
        done_key: [..., 1] bool, the last step of a trajectory.
        advantage_key: [..., 1] float32, written; at level token or turn [..., T], ragged like the
            tokens and 0 on those that were not sampled.
        token_dim: write the advantage as [..., 1, 1] and [..., T, 1], as TorchRL's ``GRPOLoss``
            reads it; ours reads either.
        grpo_size: TorchRL's name of ``repeats``.
        prompt_key: TorchRL's name of ``group_key``.
        rewards_key: TorchRL's name of ``reward_key``.
        **candidates: arguments of ``MCAdvantage``, those that are named above.

    At level token and turn, ``"state_value"`` is read if the batch has it: [..., T] floating, at
    each sampled token the value of the state that it was sampled in (a turn's is that of its first
    token), and ``"value_target"`` is written, [..., T] float32: the estimate, before it is compared,
    plus the value. Without it the values are 0. A sequence has no value after its last token, whether
    it was truncated or not (TorchRL would go on from the value of a truncated one; TRL's and verl's
    PPO do as here).

    Raises:
        ValueError: an argument is out of its range, a batch has a group of another size or a
            trajectory without an end.
        TypeError: an argument is TorchRL's and has another name here.
        KeyError: a batch has no groups or no rewards (at level token: no token rewards, no mask).
        RuntimeError: at level token or turn, or with ``mean="length_weighted"``, it is in an
            environment.

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
        repeats: int | None = None,
        *,
        mean: AdvantageMean = "group",
        std: AdvantageStd = "group",
        level: AdvantageLevel = "sequence",
        gamma: float = 1.0,
        lmbda: float = 1.0,
        trajectory_return: TrajectoryReturn = "sum",
        reward_key: NestedKey | None = None,
        part_weights: PartWeights | None = None,
        valid_key: NestedKey = keys.REWARD_VALID,
        group_key: NestedKey = keys.GROUP_ID,
        done_key: NestedKey = keys.DONE,
        advantage_key: NestedKey = keys.ADVANTAGE,
        token_dim: bool = False,
        grpo_size: int | None = None,
        prompt_key: NestedKey | None = None,
        rewards_key: NestedKey | None = None,
        **candidates: Any,
    ) -> None:
        load_extra("refuse_arguments")(type(self), candidates)
        repeats = grpo_size if repeats is None else repeats
        if repeats is None:
            raise TypeError("GroupAdvantage needs repeats, the size of a group: use repeats=8.")
        group_key = prompt_key or group_key
        check_choice("mean", mean, get_args(AdvantageMean))
        check_choice("std", std, get_args(AdvantageStd))
        check_choice("level", level, get_args(AdvantageLevel))
        check_choice("trajectory_return", trajectory_return, get_args(TrajectoryReturn))
        check_group_size(repeats, mean, std)
        check_level(level, mean)
        check_level(level, std, "std")
        if part_weights is not None:
            check_decoupled(level, mean)
        for name, value in (("gamma", gamma), ("lmbda", lmbda)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name}={value} must be in [0, 1]: use 1.0.")
            if value != 1 and level == "sequence":
                raise ValueError(
                    f"{name}={value} must be 1 with level={level!r}, which ignores it: use "
                    "level='token'."
                )
        reward_key = reward_key or rewards_key or _REWARD_KEYS[level]
        weights_by_name = (part_weights or {}).values()
        self._of_datasets = any(isinstance(weights, Mapping) for weights in weights_by_name)
        optional = [
            *_KEYS_OF_TOKENS[level],
            *([keys.ASSISTANT_MASK] if mean == "length_weighted" else []),
            *([] if part_weights is None else [keys.REWARD_PARTS]),
            *([keys.DATASET] if self._of_datasets else []),
        ]
        super().__init__(
            in_keys=[reward_key, valid_key, group_key, done_key, *optional],
            out_keys=[advantage_key],
        )
        self.level = level
        self.gamma = gamma
        self.lmbda = lmbda
        self.repeats = repeats
        self.mean = mean
        self.std = std
        self.trajectory_return = trajectory_return
        self.reward_key = reward_key
        self.part_weights = part_weights
        self.valid_key = valid_key
        self.group_key = group_key
        self.done_key = done_key
        self.advantage_key = advantage_key
        self.token_dim = token_dim
        self._candidates = candidates
        if candidates:
            _ = self.queue  # it refuses what they cannot be
        self.reset_counts()

    def reset_counts(self) -> None:
        """Set the three counts to 0."""
        self.num_groups = 0
        self.num_zero_variance_groups = 0
        self.num_invalid = 0

    @property
    def queue(self) -> GroupQueue:
        if "queue" not in self._modules:
            # Imports vLLM, if it is installed.
            from torchrl_grpo.transforms.groups import GroupQueue

            trajectory_return = "sum" if self.repeats > 1 else None
            self._modules["queue"] = GroupQueue(
                self.repeats, trajectory_return=trajectory_return, **self._candidates
            )
        return self._modules["queue"]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        name = f"{prefix}queue._extra_state"
        if name in state_dict:
            _ = self.queue
        elif "queue" in self._modules:  # nothing waited where the state was made
            state_dict[name] = {}
        super()._load_from_state_dict(state_dict, prefix, *args)

    @property
    def num_waiting(self) -> int:
        """Trajectories held back because their group is not complete."""
        return self.queue.queued_trajectories

    def share_memory_(self) -> GroupAdvantage:
        """Let several processes write to one buffer, as in TorchRL: their members complete common
        groups.
        """
        self.queue.share_memory_()
        return self

    def advantage(self, reward: Tensor, group: Tensor, valid: Tensor) -> Tensor:
        """Turn the rewards of whole groups into advantages. Subclasses override this. It is not
        called with ``mean="length_weighted"``.

        Args:
            reward: [N] floating, of each sequence; at level token the estimate of each sampled
                token.
            group: [N] int64, equal within a group.
            valid: [N] bool; where it is False the result must be 0.

        Returns:
            [N] float32.
        """
        return group_advantage(reward, group, valid, mean=self.mean, std=self.std)

    def write(self, batch: TensorDictBase) -> TensorDictBase:
        """Write the advantage of a flat batch of complete groups.

        Raises:
            ValueError: a group has not ``repeats`` members.
        """
        flat = flatten(batch)
        member = self._members(flat)
        first = torch.cat([torch.ones_like(member[:1]), member.diff()]) > 0
        group = group_ids(flat, self.group_key).to(first.device)[first]
        ids, sizes = group.unique(return_counts=True)
        wrong = sizes[sizes != self.repeats]
        if wrong.numel():
            raise ValueError(
                f"each group of the batch must have repeats={self.repeats} members, "
                f"{wrong.numel()} of {ids.numel()} do not (the first has {int(wrong[0])}): pass "
                "whole groups, each once, or use their size as repeats; a prompt that was drawn "
                "twice is two groups, which group_key='group_id' tells apart."
            )
        return self._write_groups(batch, member, group)

    def _members(self, flat: TensorDictBase) -> Tensor:
        """[N] int64, the number of the trajectory that each row is a step of."""
        ones = torch.ones_like(group_ids(flat, self.group_key), dtype=torch.bool)
        done = _column(flat, self.done_key, ones).long()
        if len(done) and not done[-1]:
            raise ValueError(
                f"{self.done_key!r} must be True in the last row of a batch, which ends a "
                "trajectory, but is False: pass whole trajectories, as LLMCollector yields them "
                "with yield_completed_trajectories=True."
            )
        return done.cumsum(0) - done

    def _returns(self, flat: TensorDictBase, member: Tensor) -> Tensor:
        """Return [M] float64, the returns of the trajectories, from the rewards of their steps."""
        key = keys.REWARD if self.reward_key == keys.TURN_REWARDS else self.reward_key
        if isinstance(flat, LazyStackedTensorDict):
            rewards = [entry(row, key).reshape(-1) for row in flat.unbind(0)]
        else:
            rewards = list(entry(flat, key).flatten(1).unbind(0))
        lengths = torch.tensor([reward.numel() for reward in rewards], device=member.device)
        out = torch.zeros(int(member[-1]) + 1, dtype=torch.float64, device=member.device)
        index = member.repeat_interleave(lengths)
        values = torch.cat(rewards).double()
        return out.scatter_reduce(
            0, index, values, _REDUCTIONS[self.trajectory_return], include_self=False
        )

    def _valid(self, flat: TensorDictBase, member: Tensor) -> Tensor:
        """[M] bool, whether all rewards of a trajectory are valid."""
        valid = _column(flat, self.valid_key, torch.ones_like(member, dtype=torch.bool))
        return ~torch.isin(member.unique(), member[~valid])

    def _write_groups(
        self, tensordict: TensorDictBase, member: Tensor, group: Tensor
    ) -> TensorDictBase:
        """Write the advantages of whole groups.

        Args:
            tensordict: batch of N rows.
            member: [N] int64, the trajectory of each row.
            group: [M] int64, the group of each trajectory.
        """
        flat = flatten(tensordict)
        self._check_problems(flat, group.to(member.device)[member])
        valid = self._valid(flat, member)
        if self.level == "sequence":
            advantage = self._of_trajectories(flat, member, group, valid)
            self._count(advantage != 0, group, valid)
            of_row = advantage[member].reshape(self._shape(tensordict))
            return tensordict.set(self.advantage_key, of_row)
        joined = member
        if self.level == "turn" and trajectories_of(flat) is not None:
            joined = torch.arange(len(member), device=member.device)  # each sample by itself
        reward = join_rows(self._token_rewards(flat), joined)
        mask = pad(flat, keys.ASSISTANT_MASK, False)
        sampled = join_rows(mask & valid[member].unsqueeze(-1), joined)
        value = torch.zeros_like(reward)
        if has_values := has(flat, keys.STATE_VALUE):
            value = torch.where(mask, pad(flat, keys.STATE_VALUE).double(), 0.0)
            value = join_rows(value, joined)
        inputs, rates = (reward, value, sampled), (self.gamma, self.lmbda, self.advantage)
        if self.level == "token":
            advantage, target = token_advantage(*inputs, group, *rates)
        else:
            of_joined = member[last_rows(joined)]  # the trajectory of each
            advantage, target = turn_advantage(*inputs, group[of_joined], valid[of_joined], *rates)
        # In an invalid trajectory a row may be valid.
        target = torch.where(sampled, target, value)
        of_token, target = (split_rows(part, joined, mask.shape[1]) for part in (advantage, target))
        has_signal = torch.isin(group, group[member[(of_token != 0).any(-1)]])
        self._count(has_signal, group, valid)
        if self.token_dim:
            of_token = of_token.unsqueeze(-1)
        if has_values:
            tensordict = set_tokens(tensordict, keys.VALUE_TARGET, target.float())
        return set_tokens(tensordict, self.advantage_key, of_token)

    def _check_problems(self, flat: TensorDictBase, group: Tensor) -> None:
        """Check that the rows of a group have one problem, if the batch has its number."""
        if self.group_key == keys.GROUP_ID and has(flat, keys.PROBLEM):
            pairs = torch.stack([group, entry(flat, keys.PROBLEM).reshape(-1)]).unique(dim=1)
            if pairs.shape[1] > (num_groups := pairs[0].unique().numel()):
                raise ValueError(
                    f"{self.group_key!r} must be equal only within one problem, but {pairs.shape[1]} "
                    f"problems have {num_groups}: environments of different seeds number their "
                    "groups alike, so use the same seed for all, or group_key='query'."
                )

    def _shape(self, batch: TensorDictBase | Composite) -> tuple[int, ...]:
        """Return the shape of the advantages of a batch's sequences."""
        return (*batch.batch_size, 1, 1) if self.token_dim else (*batch.batch_size, 1)

    def _of_trajectories(
        self, flat: TensorDictBase, member: Tensor, group: Tensor, valid: Tensor
    ) -> Tensor:
        """Return the advantage of each trajectory, [M]."""
        if self.mean == "length_weighted":
            tokens = pad(flat, keys.ASSISTANT_MASK, False).sum(1)
            length = torch.zeros_like(group).index_add_(0, member, tokens)
            returns = self._returns(flat, member)
            return group_advantage(
                returns, group, valid, mean=self.mean, std=self.std, length=length
            )
        if self.part_weights is None:
            return self.advantage(self._returns(flat, member), group, valid)
        last = last_rows(member).tolist()
        parts = list(compress(reward_parts(flat), last))
        weights = list(compress(self._weights_of(flat), last))
        return decoupled_advantage(parts, weights, group, valid, self.advantage)

    def _weights_of(self, flat: TensorDictBase) -> list[Any]:
        """Return the weights of the parts of each row."""
        if not self._of_datasets:
            return [self.part_weights] * flat.numel()
        weights: Any = self.part_weights
        return [weights[name] for name in entry(flat, keys.DATASET).reshape(-1).tolist()]

    def _token_rewards(self, flat: TensorDictBase) -> Tensor:
        """Return the rewards of tokens, [N, T] float64. A sequence without rewards of turns has its
        reward on the last sampled token.
        """
        if self.reward_key != keys.TURN_REWARDS:
            return pad(flat, self.reward_key).double()
        rows = []
        for row in flat.unbind(0):
            rewards = row.get(keys.TURN_REWARDS, None)
            if rewards is None:
                mask = row.get(keys.ASSISTANT_MASK)
                rewards = torch.zeros(mask.shape, dtype=torch.float64, device=mask.device)
                rewards[mask.nonzero().reshape(-1)[-1:]] = entry(row, keys.REWARD).double()
            rows.append(rewards.double())
        return pad_sequence(rows, batch_first=True)

    def _count(self, has_signal: Tensor, group: Tensor, valid: Tensor) -> None:
        """Add trajectories of whole groups to the counts.

        Args:
            has_signal: [M] bool, whether an advantage of the trajectory is not 0.
            group: [M] int64.
            valid: [M] bool.
        """
        groups = group.unique().numel()
        self.num_groups += groups
        self.num_zero_variance_groups += groups - group[has_signal].unique().numel()
        self.num_invalid += int((~valid).sum())

    def extend(self, batch: TensorDictBase) -> TensorDictBase | None:
        """Hold the members of a group back until all are there, then write their advantages."""
        flat = flatten(batch)
        member = self._members(flat)
        names = group_keys(flat, self.group_key)
        rows = flat.unbind(0)
        returns = torch.where(self._valid(flat, member), self._returns(flat, member), 0.0)
        complete: list[Member] = []
        start = 0
        for value, length in zip(returns.tolist(), member.bincount().tolist(), strict=True):
            complete += self.queue.add(names[start], rows[start : start + length], value) or []
            start += length
        if not complete:
            return None
        sizes = [len(trajectory.steps) for trajectory in complete]
        lengths = torch.tensor(sizes, device=member.device)
        number = torch.arange(len(complete), device=member.device)
        steps = lazy_stack([step for trajectory in complete for step in trajectory.steps])
        return self._write_groups(steps, number.repeat_interleave(lengths), number // self.repeats)

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        step = tensordict.copy().update(next_tensordict).set("next", next_tensordict)
        group = group_ids(tensordict, self.group_key)
        ones = torch.ones_like(group, dtype=torch.bool)
        complete = all_of_group(group, _column(step, self.done_key, ones))
        before = all_of_group(group, _column(tensordict, in_next(self.done_key), ~ones))
        row = torch.arange(len(group), device=group.device)
        valid = self._valid(step, row)
        # What the batch means here: rewards of dialogs in progress are not known yet.
        advantage = self._of_trajectories(step, row, group, valid & complete)
        ended = complete & ~before
        self._count(advantage[ended] != 0, group[ended], valid[ended])
        return next_tensordict.set(
            in_next(self.advantage_key), advantage.reshape(self._shape(next_tensordict))
        )

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        if self.level != "sequence" or self.mean == "length_weighted":
            name, usual = ("level", "sequence") if self.level != "sequence" else ("mean", "group")
            raise RuntimeError(
                f"{name}={getattr(self, name)!r} must get finished sequences, but GroupAdvantage is in "
                "an environment, where a step has one turn of them: call it on the collector's "
                f"batch, put it into a ReplayBuffer, or use {name}={usual!r}."
            )
        group = group_ids(tensordict_reset, self.group_key)
        zeros = torch.zeros(self._shape(tensordict_reset), device=group.device)
        return tensordict_reset.set(in_next(self.advantage_key), zeros)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Add the advantage."""
        observation_spec[in_next(self.advantage_key)] = Unbounded(
            shape=self._shape(observation_spec), dtype=torch.float32, device=observation_spec.device
        )
        return observation_spec


def _column(tensordict: TensorDictBase, key: NestedKey, default: Tensor) -> Tensor:
    """[N] values of a [..., 1] entry."""
    value = tensordict.get(key, None)
    return default if value is None else value.reshape(-1)
