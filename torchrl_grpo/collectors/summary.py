"""What a batch of sequences is reported as: numbers for ``metrics.jsonl`` and rows for ``samples.jsonl``."""

from __future__ import annotations

from collections import Counter
from statistics import fmean, pstdev
from typing import Any

import torch
from tensordict import TensorDictBase

from torchrl_grpo import keys
from torchrl_grpo.functional import masked_mean
from torchrl_grpo.models.packing import pad
from torchrl_grpo.transforms.parts import reward_parts


def rollout_metrics(batch: TensorDictBase) -> dict[str, float]:
    """What a batch [N] was like: rewards over valid sequences, lengths, and how many were cut or not valid."""
    valid = batch.get(keys.REWARD_VALID).reshape(-1)
    reward = batch.get(keys.REWARD).reshape(-1).float()
    count = valid.sum().clamp(min=1)
    mean = torch.where(valid, reward, 0.0).sum() / count
    variance = torch.where(valid, (reward - mean).square(), 0.0).sum() / count
    advantage = pad(batch, keys.ADVANTAGE).abs().amax(-1)  # of a sequence, or of its tokens
    _, group = batch.get(keys.GROUP_ID).reshape(-1).unique(return_inverse=True)
    signal = torch.zeros(int(group.max()) + 1).index_add_(0, group, (advantage > 0).float()) > 0
    lengths = (pad(batch, keys.RESPONSE, -1) >= 0).sum(-1).float()
    values: dict[str, Any] = {
        "reward_mean": mean,
        "reward_std": variance.sqrt(),
        "accuracy": (batch.get(keys.CORRECT).reshape(-1) & valid).sum() / count,
        "response_length": lengths.mean(),
        "response_length_max": lengths.max(),
        "truncated": batch.get(keys.TRUNCATED).float().mean(),
        "zero_variance_groups": (~signal).float().mean(),
        "repeated": _repeated(batch, group.tolist()),
        "invalid": (~valid).sum(),
        "sequences": len(valid),
        "tokens": pad(batch, keys.ASSISTANT_MASK, False).sum(),
    }
    numbers = {f"rollout/{name}": float(value) for name, value in values.items()}
    return numbers | _by_dataset(batch) | _by_part(batch)


def _repeated(batch: TensorDictBase, group: list[int]) -> float:
    """Share of the responses that are, token by token, another one of their group too."""
    responses = [row.get(keys.RESPONSE).cpu().numpy().tobytes() for row in batch.unbind(0)]
    counts = Counter(zip(group, responses, strict=True))
    return sum(count for count in counts.values() if count > 1) / len(responses)


def _by_dataset(batch: TensorDictBase) -> dict[str, float]:
    """Accuracy and mean reward of each data set, where there are several."""
    column = batch.get(keys.DATASET, None)
    if column is None:
        return {}
    names, valid = column.reshape(-1).tolist(), batch.get(keys.REWARD_VALID).reshape(-1)
    reward, correct = (batch.get(key).reshape(-1).float() for key in (keys.REWARD, keys.CORRECT))
    metrics: dict[str, float] = {}
    for name in sorted(set(names) - {""}):
        rows = torch.tensor([other == name for other in names]) & valid
        if rows.any():
            metrics[f"rollout/accuracy/{name}"] = float(correct[rows].mean())
            metrics[f"rollout/reward_mean/{name}"] = float(reward[rows].mean())
    return metrics


def _by_part(batch: TensorDictBase) -> dict[str, float]:
    """Mean and deviation of each part of the reward where it applies, and the share where it does not."""
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


def sample_rows(batch: TensorDictBase, split: str, most: int | None = None) -> list[dict[str, Any]]:
    """The sequences of a batch as rows of ``samples.jsonl``.

    Args:
        batch: flat, as a collector gives it.
        split: ``"train"`` or ``"test"``.
        most: take so many rows, the first of each group first.
    """
    rows = list(batch.unbind(0))
    if most is not None:
        seen: dict[int, int] = {}
        order = []
        for position, group in enumerate(batch.get(keys.GROUP_ID).reshape(-1).tolist()):
            seen[group] = seen.get(group, -1) + 1
            order.append((seen[group], position))
        rows = [rows[position] for _, position in sorted(order)[:most]]
    names = {"reward": keys.REWARD, "correct": keys.CORRECT, "valid": keys.REWARD_VALID, "advantage": keys.ADVANTAGE}
    out = []
    for row in rows:
        entry = {"split": split, "query": row[keys.QUERY], "response": row[keys.RESPONSE_TEXT]}
        present = {name: row.get(key, None) for name, key in names.items()}
        advantage = present["advantage"]
        if advantage is not None and advantage.numel() > 1:  # one for each token
            present["advantage"] = masked_mean(advantage, row[keys.ASSISTANT_MASK])
        entry |= {name: value.item() for name, value in present.items() if value is not None}
        other = {"parts": row.get(keys.REWARD_PARTS, None), "dataset": row.get(keys.DATASET, None)}
        out.append(entry | {name: value.data for name, value in other.items() if value is not None and value.data})
    return out
