"""Merges the turns of finished dialogs, as an environment and a policy wrote them, into one sequence per sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase

from torchrl_grpo import keys

_BEFORE = ("next", "done", "terminated", "truncated", "correct", "history", keys.LENGTH_STOPPED)
_OF_SEQUENCE = (keys.REWARD_VALID, keys.ADVANTAGE)
_ROUNDING = 1e-6
"""Share of float32's sums that is their rounding: rewards that are equal stay equal."""
_MOST_ROWS = 2**16
"""Rows of an environment, for a number that no other trajectory of the run has."""


def trajectories(
    last: TensorDictBase,
    turns: list[list[TensorDictBase]],
    transcripts: Sequence[Mapping[int, str]],
    errors: Sequence[str],
    rewards: Sequence[Sequence[float | None]],
    samples: Sequence[Sequence[int]],
) -> Sequence[TensorDictBase]:
    """Return the rows of the last transition with the token entries of all turns.

    Args:
        last: [B] the last transition; rows that were done before it repeat their outcome.
        turns: for each row, its turns.
        transcripts: for each row, the text of its dialog, by the number of the sample.
        errors: for each row, why its reward is not valid; empty where it is.
        rewards: for each row, what the task gave to its turns, as part of the reward of the last one; None where it
            gave nothing.
        samples: for each row, the sample that each of its turns is of, by number.

    Returns:
        of each row, its samples in the order in which they ended: the last one has the reward and is done.

    Raises:
        RuntimeError: a later turn did not keep the tokens of an earlier one.
    """
    nxt = last.get("next")
    out = last.exclude(*_BEFORE).set("text", nxt.get("text"))
    for key in _OF_SEQUENCE:  # an environment writes all it has to say under "next"
        if nxt.get(key, None) is not None:
            out.set(key, nxt.get(key))
    rows = out.set("next", nxt.exclude("tokens", "text", "history", *_OF_SEQUENCE)).unbind(0)
    for trajectory, error in zip(rows, errors, strict=True):
        if error:
            trajectory.set(keys.REWARD_ERROR, NonTensorData(error))
    if all(len(row) == 1 for row in turns):
        return rows
    if any(len(set(of_turns)) > 1 for of_turns in samples):
        parts = zip(rows, turns, transcripts, rewards, samples, strict=True)
        return [part for number, row in enumerate(parts) for part in _split(number, *row)]
    for trajectory, row, text, own in zip(rows, turns, transcripts, rewards, strict=True):
        trajectory.update(_merge(row, own).set(keys.RESPONSE_TEXT, next(iter(text.values()))))
    return rows


def _split(
    number: int,
    trajectory: TensorDictBase,
    turns: list[TensorDictBase],
    texts: Mapping[int, str],
    rewards: Sequence[float | None],
    samples: Sequence[int],
) -> list[TensorDictBase]:
    """The samples of a row of this number."""
    of_sample: dict[int, list[int]] = {}
    for turn, sample in enumerate(samples or [0]):  # it has none where its opening failed
        of_sample[sample] = [*of_sample.get(sample, ()), turn]
    out = []
    for sample, own in sorted(of_sample.items(), key=lambda one: one[1][-1]):
        merged = _merge([turns[turn] for turn in own], [rewards[turn] for turn in own] if rewards else ())
        part = trajectory.clone(recurse=False).update(merged).set(keys.RESPONSE_TEXT, texts[sample])
        part.set(keys.TRAJECTORY, trajectory.get(keys.GROUP_ID) * _MOST_ROWS + number)
        out.append(part)
    valid = torch.stack([part.get(keys.REWARD_VALID) for part in out]).all(0)
    for part in out:
        part.set(keys.REWARD_VALID, valid)
        part.set(keys.DONE, torch.tensor([part is out[-1]]))
    return out


def _merge(turns: list[TensorDictBase], own: Sequence[float | None]) -> TensorDictBase:
    """Join a dialog's turns into one sequence; each turn's tokens begin with all tokens of the turn before."""
    full, prompt = turns[-1].get(keys.FULL), turns[0].get(keys.PROMPT)
    sampled, versions = torch.zeros_like(full, dtype=torch.bool), torch.full_like(full, -1)
    written = [key for key in (keys.LOG_PROBS, keys.REF_LOG_PROBS) if turns[0].get(key, None) is not None]
    log_probs = [torch.zeros(full.shape) for _ in written]
    rewards = torch.zeros(full.shape, dtype=torch.float64)
    shares = [float(turn.get(keys.REWARD)) for turn in turns]
    given = [share or 0.0 for share in own]
    if any(given):
        rest = sum(shares) - sum(given)  # of a score that is more than its turns' rewards, or rounding
        shares = given
        shares[-1] += rest if abs(rest) > _ROUNDING * sum(map(abs, given)) else 0.0
    for turn, share in zip(turns, shares, strict=True):
        length, mask = turn.get(keys.FULL).numel(), turn.get(keys.ASSISTANT_MASK)
        if not torch.equal(turn.get(keys.FULL), full[:length]):
            raise RuntimeError(
                f"the {length} tokens of an earlier turn are not the first of the {full.numel()} tokens of the dialog: "
                "a transform of the environment changed tokens that the policy was given or sampled."
            )
        sampled[:length] |= mask
        versions[:length] = versions[:length].maximum(turn.get(keys.POLICY_VERSIONS))
        for key, total in zip(written, log_probs, strict=True):
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
        **dict(zip(written, log_probs, strict=True)),
    }
    if turns[0].get(("next", keys.REWARD_VALID), None) is not None:
        merged[keys.REWARD_VALID] = torch.stack([turn.get(("next", keys.REWARD_VALID)) for turn in turns]).all(0)
    return TensorDict(merged)
