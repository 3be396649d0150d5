"""Trajectories from the transitions of dialogs: the turns of each training sample joined into one
sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase

from torchrl_grpo import keys
from torchrl_grpo.envs.dialog_state import DialogState
from torchrl_grpo.models.entries import has

_BEFORE = ("next", "done", "terminated", "truncated", "correct", "history", keys.LENGTH_STOPPED)
"""Entries of a transition from before its step: a sequence has those of "next", or none."""
_OF_SEQUENCE = (keys.REWARD_VALID, keys.ADVANTAGE)
"""Entries that an environment writes under "next", as all of its entries, and a sequence has at the
top.
"""
_ROUNDING = 1e-6
"""Relative rounding error of float32 sums, so that equal rewards stay equal."""
_MOST_ROWS = 2**16
"""Upper bound of an environment's rows, to number the trajectories of a run uniquely."""


def make_trajectories(
    steps: Sequence[TensorDictBase], states: Sequence[DialogState], compared: bool
) -> Sequence[TensorDictBase]:
    """Return the training samples of dialogs as sequences, in the order in which they ended. The
    last one of a dialog has the reward and is done.

    Args:
        steps: [B] transitions; rows that were done before one repeat their outcome.
        states: for each row, its dialog. The task's rewards of turns are part of the last turn's
            reward.
        compared: whether a group reward function set rewards in the last step.

    Raises:
        RuntimeError: a later turn did not keep the tokens of an earlier one.
    """
    rows = _last_turns(steps[-1], states)
    if len(steps) == 1:
        return rows
    samples = [state.samples() for state in states]
    several = any(len(of_dialog) > 1 for of_dialog in samples)
    unbound = [step.unbind(0) for step in steps]
    sequences = []
    for number, (row, state) in enumerate(zip(rows, states, strict=True)):
        # A dialog whose opening failed has a transition too.
        turns = [of_step[number] for of_step in unbound[: max(1, len(state.responses))]]
        last, end = turns[-1], samples[number][-1].turns[-1]
        valid = torch.stack([turn.get(("next", keys.REWARD_VALID)) for turn in turns]).all(0)
        if compared:  # when the last dialog was over
            last, valid = row, valid & row.get(keys.REWARD_VALID)
        # The last turn has the reward, but may belong to no sample.
        turns[end] = turns[end].copy().set(keys.REWARD, last.get(keys.REWARD))
        row.set(keys.REWARD_VALID, valid)
        row.set(keys.NEXT_POLICY_VERSION, turns[-1].get(keys.POLICY_VERSION))
        for sample in samples[number]:
            of_sample = [turns[turn] for turn in sample.turns]
            joined = _join(of_sample, sample.rewards, state.outcome.credits_turns)
            sequence = row.copy().update(joined).set(keys.RESPONSE_TEXT, sample.text)
            if several:
                sequence.set(keys.TRAJECTORY, row.get(keys.GROUP_ID) * _MOST_ROWS + number)
            if sample is not samples[number][-1]:
                sequence.set(keys.DONE, torch.tensor([False]))
            sequences.append(sequence)
    return sequences


def _last_turns(step: TensorDictBase, states: Sequence[DialogState]) -> Sequence[TensorDictBase]:
    """Return the latest turn and the outcome of each row, given the last transition. If there was
    only one turn, that is the whole sequence.
    """
    after = step.get("next")
    latest = step.exclude(*_BEFORE).set("text", after.get("text"))
    for key in _OF_SEQUENCE:
        if has(after, key):
            latest.set(key, after.get(key))
    repeated = ("tokens", "masks", "text", "history", keys.IMAGES, *_OF_SEQUENCE)
    latest.set("next", after.exclude(*repeated))
    rows = latest.set(keys.NEXT_POLICY_VERSION, latest.get(keys.POLICY_VERSION)).unbind(0)
    has_feedback = any(state.outcome.feedback for state in states)
    for row, state in zip(rows, states, strict=True):
        if has_feedback:
            row.set(keys.FEEDBACK, NonTensorData(state.outcome.feedback))
        if state.outcome.error:
            row.set(keys.REWARD_ERROR, NonTensorData(state.outcome.error))
    return rows


def _join(
    turns: list[TensorDictBase], task_rewards: Sequence[float | None], credits_turns: bool
) -> TensorDictBase:
    """Return the entries of a training sample that its turns have together. The tokens of each turn
    begin with all tokens of the turn before it.

    Args:
        turns: their transitions.
        task_rewards: the task's reward of each turn.
        credits_turns: whether a turn gets only its own reward.
    """
    full = turns[-1].get(keys.FULL)
    prompt = turns[0].get(keys.PROMPT)
    sampled = torch.zeros_like(full, dtype=torch.bool)
    versions = torch.full_like(full, -1)
    log_probs = {
        key: torch.zeros(full.shape)
        for key in (keys.LOG_PROBS, keys.REF_LOG_PROBS)
        if has(turns[0], key)
    }
    rewards = torch.zeros(full.shape, dtype=torch.float64)
    shares = [float(turn.get(keys.REWARD)) for turn in turns]
    turn_rewards = [reward or 0.0 for reward in task_rewards]
    if credits_turns:
        shares = turn_rewards
    elif any(turn_rewards):
        # The rest is a score in addition to the turn rewards, or rounding.
        rest = shares[-1] - sum(turn_rewards)
        is_score = abs(rest) > _ROUNDING * sum(map(abs, turn_rewards))
        shares[-1] = rest if is_score else 0.0
        shares = [a + b for a, b in zip(shares, turn_rewards, strict=True)]
    for turn, share in zip(turns, shares, strict=True):
        length, mask = turn.get(keys.FULL).numel(), turn.get(keys.ASSISTANT_MASK)
        if not torch.equal(turn.get(keys.FULL), full[:length]):
            raise RuntimeError(
                f"the {length} tokens of an earlier turn are not the first of the {full.numel()} "
                "tokens of the dialog: a transform of the environment changed tokens that the "
                "policy read or sampled."
            )
        sampled[:length] |= mask
        versions[:length] = versions[:length].maximum(turn.get(keys.POLICY_VERSIONS))
        for key, total in log_probs.items():
            total[:length] += turn.get(key)  # 0 on tokens that the turn did not sample
        rewards[mask.nonzero().reshape(-1)[-1:]] = share
    merged: dict[Any, Any] = {
        keys.PROMPT: prompt,
        keys.RESPONSE: full[prompt.numel() :].clone(),
        keys.FULL: full,
        keys.ATTENTION_MASK: torch.ones_like(sampled),
        keys.ASSISTANT_MASK: sampled,
        keys.POLICY_VERSION: torch.stack([turn.get(keys.POLICY_VERSION) for turn in turns]).amin(0),
        keys.POLICY_VERSIONS: versions,
        keys.REWARD: torch.stack([turn.get(keys.REWARD) for turn in turns]).sum(0),
        keys.TURN_REWARDS: rewards,
        **log_probs,
    }
    if has(turns[-1], keys.IMAGES):
        merged[keys.IMAGES] = turns[-1].get(keys.IMAGES)
    for key in (keys.KEPT, keys.KEPT_LOG_PROBS):
        if has(turns[0], key):
            merged[key] = torch.cat([turn.get(key) for turn in turns])
    return TensorDict(merged)
