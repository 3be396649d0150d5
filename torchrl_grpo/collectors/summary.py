"""Summary of a batch of sequences: numbers for ``metrics.jsonl`` and rows for ``samples.jsonl``."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import fmean, pstdev
from typing import Any

import torch
from tensordict import TensorDictBase, lazy_stack
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from torchrl_grpo import keys
from torchrl_grpo.images import PLACEHOLDER, Prompt, Spans, prompt_text
from torchrl_grpo.models.entries import (
    has,
    images_of_row,
    last_rows,
    pad,
    trajectories_of,
)
from torchrl_grpo.transforms.decoupled import reward_parts

_LONGEST_CHARACTER = 4
"""Maximum number of tokens per character: one for each byte."""


_OF_SAMPLES = tuple(
    f"rollout/{name}"
    for name in ("reward_", "accuracy", "advantage_", "zero_variance", "repeated", "length_")
)


def rollout_metrics(batch: TensorDictBase, *, sampled: bool = True) -> dict[str, float]:
    """Return the metrics of a batch [N]: rewards over valid sequences (NaN without any), lengths,
    and counts of truncated and invalid sequences.

    The samples of a trajectory count as one sequence with the length of all of them together.

    Args:
        batch: sequences with rewards and advantages.
        sampled: whether a policy sampled the batch; demonstrations have no metrics of rewards,
            advantages and groups.
    """
    samples, batch, lengths = batch, ends_of(batch), response_lengths(batch)
    valid = batch.get(keys.REWARD_VALID).reshape(-1)
    reward = batch.get(keys.REWARD).reshape(-1).float()[valid]
    scored_lengths = lengths[valid]
    advantage = pad(samples, keys.ADVANTAGE)  # one for each sequence or token
    mask = pad(samples, keys.ASSISTANT_MASK, False)
    is_per_token = advantage.shape[-1] > 1
    counts = samples.get(keys.REWARD_VALID).reshape(-1)[:, None] & mask
    valid_advantages = advantage[counts] if is_per_token else pad(batch, keys.ADVANTAGE)[valid]
    _, group = samples.get(keys.GROUP_ID).reshape(-1).unique(return_inverse=True)
    signal = (
        torch.zeros(int(group.max()) + 1).index_add_(0, group, (advantage != 0).any(-1).float()) > 0
    )
    values: dict[str, Any] = {
        "reward_mean": reward.mean(),
        "reward_std": _std(reward),
        "accuracy": batch.get(keys.CORRECT).reshape(-1)[valid].float().mean(),
        "advantage_mean": valid_advantages.mean(),
        "advantage_std": _std(valid_advantages),
        "advantage_min": valid_advantages.min() if len(valid_advantages) else math.nan,
        "advantage_max": valid_advantages.max() if len(valid_advantages) else math.nan,
        "response_length": lengths.mean(),
        "response_length_max": lengths.max(),
        "length_correlation": torch.cosine_similarity(
            reward - reward.mean(), scored_lengths - scored_lengths.mean(), dim=0
        ),
        "truncated": batch.get(keys.TRUNCATED).float().mean(),
        "zero_variance_groups": (~signal).float().mean(),
        "repeated": _repeated(samples, group.tolist()),
        "invalid": (~valid).sum(),
        "sequences": len(valid),
        "tokens": mask.sum(),
    }
    if has(samples, keys.TEACHER_VALID):
        values["without_teacher"] = 1 - samples.get(keys.TEACHER_VALID).float().mean()
    if has(samples, keys.KEPT):
        kept = torch.cat([row.get(keys.KEPT) for row in samples.unbind(0)]) >= 0
        values["kept_tokens"] = kept.sum(-1).float().mean()
        values["kept_tokens_capped"] = kept.all(-1).float().mean()
    if len(samples) > len(batch):
        values["samples"] = len(samples)
    numbers = {f"rollout/{name}": float(value) for name, value in values.items()}
    numbers |= _by_dataset(batch) | _by_part(batch)
    if sampled:
        return numbers
    return {name: value for name, value in numbers.items() if not name.startswith(_OF_SAMPLES)}


def ends_of(batch: TensorDictBase) -> TensorDictBase:
    """Return the row of each trajectory that has the reward: of several samples, the last one."""
    trajectory = trajectories_of(batch)
    if trajectory is None:
        return batch
    return lazy_stack([batch[int(row)] for row in last_rows(trajectory).nonzero()])


def response_lengths(batch: TensorDictBase) -> Tensor:
    """Return the number of tokens that the policy sampled in each trajectory, over all of its
    samples, [M] float32.
    """
    lengths = pad(batch, keys.ASSISTANT_MASK, False).sum(-1).float()
    trajectory = trajectories_of(batch)
    if trajectory is None:
        return lengths
    return torch.zeros(int(trajectory.max()) + 1).index_add_(0, trajectory, lengths)


def _std(values: Tensor) -> Tensor:
    """Return the standard deviation, NaN without values, where ``Tensor.std`` would warn."""
    return (values - values.mean()).square().mean().sqrt()


def _repeated(batch: TensorDictBase, group: list[int]) -> float:
    """Return the fraction of responses that repeat another response of their group exactly."""
    responses = [row.get(keys.RESPONSE).cpu().numpy().tobytes() for row in batch.unbind(0)]
    counts = Counter(zip(group, responses, strict=True))
    return sum(count for count in counts.values() if count > 1) / len(responses)


def _by_dataset(batch: TensorDictBase) -> dict[str, float]:
    """Return the accuracy and mean reward of each data set, if there are several."""
    column = batch.get(keys.DATASET, None)
    if column is None:
        return {}
    names = column.reshape(-1).tolist()
    valid = batch.get(keys.REWARD_VALID).reshape(-1)
    reward, correct = (batch.get(key).reshape(-1).float() for key in (keys.REWARD, keys.CORRECT))
    metrics: dict[str, float] = {}
    for name in sorted(set(names) - {""}):
        rows = torch.tensor([other == name for other in names]) & valid
        if rows.any():
            metrics[f"rollout/accuracy/{name}"] = float(correct[rows].mean())
            metrics[f"rollout/reward_mean/{name}"] = float(reward[rows].mean())
    return metrics


def _by_part(batch: TensorDictBase) -> dict[str, float]:
    """Return the mean and standard deviation of each part of the reward over the rows it applies
    to, and the fraction of rows it does not apply to.
    """
    if batch.get(keys.REWARD_PARTS, None) is None:
        return {}
    valid = batch.get(keys.REWARD_VALID).reshape(-1).tolist()
    rows = [parts for parts, counts in zip(reward_parts(batch), valid, strict=True) if counts]
    metrics: dict[str, float] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [value for row in rows if (value := row.get(name)) is not None]
        if values:
            metrics |= {f"reward/{name}/mean": fmean(values), f"reward/{name}/std": pstdev(values)}
        metrics[f"reward/{name}/none"] = 1 - len(values) / len(rows)
    return metrics


_OF_REWARDS = ("reward", "correct", "valid", "advantage")


def sample_rows(
    batch: TensorDictBase,
    split: str,
    max_rows: int | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    version: int | None = None,
    scores: Callable[[int], dict[str, Tensor]] = lambda row: {},
    sampled: bool = True,
) -> list[dict[str, Any]]:
    """Return the sequences of a batch as rows of ``samples.jsonl``, with images as files.

    Args:
        batch: a collector's flat batch.
        split: ``"train"`` or ``"test"``.
        max_rows: maximum number of rows, rounded up to whole groups; groups with scores come first.
            Of a test set, further rows follow without prompt and tokens.
        tokenizer: decodes the prompt and each token; None leaves both out.
        version: version of the weights that trained the batch, for the staleness.
        scores: function from a position in the batch to further per-token numbers of its sequence,
            by name, [T] each.
        sampled: whether a policy sampled the batch; demonstrations have no reward.
    """
    groups = batch.get(keys.GROUP_ID).reshape(-1).tolist()
    numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    order = sorted(range(len(groups)), key=lambda row: not scores(row))
    chosen_groups = _first_groups(
        [groups[row] for row in order], len(groups) if max_rows is None else max_rows
    )
    out = []
    rows = batch.unbind(0)
    for position, (row, siblings) in enumerate(zip(rows, _siblings(batch), strict=True)):
        is_chosen = groups[position] in chosen_groups
        if split == "train" and not is_chosen:
            continue
        entry = _sample(row, split, rows[siblings[-1]])
        if not sampled:
            entry = {name: value for name, value in entry.items() if name not in _OF_REWARDS}
        if len(siblings) > 1:
            entry["sample"] = siblings.index(position)
        if split == "test":
            entry["problem"] = numbers[groups[position]]
        else:
            entry["group"] = groups[position]
            if version is not None:
                sampled_by = row.get(keys.POLICY_VERSION).item()
                entry |= {"version": sampled_by, "staleness": version - sampled_by}
        if tokenizer is not None and is_chosen:
            prompt = row[keys.FULL][: len(row[keys.FULL]) - len(row[keys.RESPONSE])]
            entry["prompt"] = prompt_text(Prompt(prompt, _own_images(row)), tokenizer.decode)
            if spans := images_of_row(row):
                entry["images"] = [span.image.file for span in spans]
            entry["tokens"] = _tokens(row, tokenizer, scores(position))
        out.append(entry)
    return out


def _siblings(batch: TensorDictBase) -> list[list[int]]:
    """Return the rows of each row's trajectory."""
    trajectory = trajectories_of(batch)
    if trajectory is None:
        return [[row] for row in range(len(batch))]
    rows: dict[int, list[int]] = {}
    for row, number in enumerate(trajectory.tolist()):
        rows.setdefault(number, []).append(row)
    return [rows[number] for number in trajectory.tolist()]


def _first_groups(groups: Sequence[int], max_rows: int) -> set[int]:
    """Return as many of the first groups as needed for at least this many sequences."""
    chosen_groups = set[int]()
    count = 0
    for group, size in Counter(groups).items():
        if count < max_rows:
            chosen_groups.add(group)
            count += size
    return chosen_groups


def _sample(row: TensorDictBase, split: str, end: TensorDictBase) -> dict[str, Any]:
    """Return the fields of a whole sequence. The reward is in the last row of its trajectory."""
    names = {
        "reward": keys.REWARD,
        "correct": keys.CORRECT,
        "valid": keys.REWARD_VALID,
        "advantage": keys.ADVANTAGE,
    }
    query = row[keys.QUERY]
    if PLACEHOLDER not in query:
        query = PLACEHOLDER * len(_own_images(row)) + query
    entry = {"split": split, "query": query, "response": row[keys.RESPONSE_TEXT]}
    values = {name: row.get(key, None) for name, key in names.items()} | {
        "reward": end.get(keys.REWARD, None)
    }
    advantage = values["advantage"]
    if advantage is not None and advantage.numel() > 1:  # one per token
        sampled = advantage.reshape(-1)[row[keys.ASSISTANT_MASK]]
        values["advantage"] = sampled.sum() / max(1, len(sampled))
    entry |= {name: value.item() for name, value in values.items() if value is not None}
    label_keys = {"parts": keys.REWARD_PARTS, "dataset": keys.DATASET, "error": keys.REWARD_ERROR}
    labels = {name: row.get(key, None) for name, key in label_keys.items()}
    entry |= {
        name: value.data for name, value in labels.items() if value is not None and value.data
    }
    if any((turns := _turn_rewards(row))[:-1]):
        entry["turn_rewards"] = turns
    length = int(row[keys.ASSISTANT_MASK].sum())
    return entry | {
        "length": length,
        "finish_reason": "length" if row[keys.TRUNCATED].item() else "stop",
    }


def _own_images(row: TensorDictBase) -> Spans:
    """Return the images of a sequence's prompt."""
    spans = images_of_row(row)
    if not spans:
        return ()
    end = len(row[keys.FULL]) - len(row[keys.RESPONSE])
    return tuple(span for span in spans if span.end <= end)


def _turn_rewards(row: TensorDictBase) -> list[float]:
    """Return the reward of each turn; empty if the sequence has none."""
    rewards, mask = row.get(keys.TURN_REWARDS, None), row[keys.ASSISTANT_MASK]
    ends = mask & ~torch.cat([mask[1:], torch.zeros_like(mask[:1])])
    return [] if rewards is None else rewards[ends].tolist()


def _tokens(
    row: TensorDictBase, tokenizer: PreTrainedTokenizerBase, scores: dict[str, Tensor]
) -> dict[str, list[Any]]:
    """Return the response token by token: the text, and numbers with four digits, which are None
    where the policy did not sample the token.
    """
    tokens = row[keys.RESPONSE].tolist()
    prompt = len(row[keys.FULL]) - len(row[keys.RESPONSE])
    numbers = {
        "log_prob": row[keys.LOG_PROBS],
        "reference": row.get(keys.REF_LOG_PROBS, None),
        **scores,
    }
    advantage = row.get(keys.ADVANTAGE, None)
    if advantage is not None and advantage.numel() > 1:
        numbers["advantage"] = advantage.reshape(-1)
    sampled = row[keys.ASSISTANT_MASK][prompt:].tolist()
    columns: dict[str, list[Any]] = {"text": token_texts(tokenizer, tokens)}
    for name, values in numbers.items():
        if values is not None:
            response_values = values[prompt : prompt + len(tokens)].tolist()
            columns[name] = [
                round(x, 4) if is_sampled else None
                for x, is_sampled in zip(response_values, sampled, strict=True)
            ]
    return columns


def token_texts(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> list[str]:
    """Return the text that each token adds. Joined, they are the whole text.

    If several tokens form one character, the last one has it and the others are empty.
    """
    texts = []
    start = 0
    decoded = 0
    for end in range(1, len(tokens) + 1):
        before = tokenizer.decode(tokens[start:decoded])
        after = tokenizer.decode(tokens[start:end])
        if after.endswith("\ufffd") and end < min(len(tokens), decoded + _LONGEST_CHARACTER):
            texts.append("")
        else:
            texts.append(after[len(before) :])
            start = decoded
            decoded = end
    return texts
