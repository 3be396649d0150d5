"""Receipts of weights: digests, their comparison, and faults of a sync in this process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torchrl_grpo.errors import ReceiptError
from torchrl_grpo.weights.receipts import compare, digest

MODULUS = 2**64
FACTOR = 0x9E3779B97F4A7C15


def by_hand(tensor: Tensor, chunk: int = 2**18) -> int:
    """Return the digest in Python's integers."""
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    data += bytes(-len(data) % 8)
    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]
    total = 0
    for start in range(0, len(words), chunk):
        part = words[start : start + chunk]
        own = sum(word * (2 * place + 1) * FACTOR for place, word in enumerate(part))
        total = (total * FACTOR + own) % MODULUS
    return total - MODULUS if total >= MODULUS // 2 else total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_a_digest_is_the_weighted_sum_of_the_words(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(7, 13, generator=generator) * 100).to(dtype)
    for view in (weight, weight.T, weight[1:, 1:], weight.reshape(-1)[3:], weight[:0]):
        assert digest(view).item() == by_hand(view) == digest(view.clone()).item()


def test_a_digest_is_another_one_for_a_changed_moved_or_missing_byte() -> None:
    weight = torch.arange(2**21 + 100).remainder(251).to(torch.uint8)
    same = digest(weight).item()
    assert same == by_hand(weight)
    for place in (0, 2**21 - 1, 2**21, 2**21 + 99):
        other = weight.clone()
        other[place] += 1
        assert digest(other).item() != same
    for places in ([5, 9], [8, 80], [8, 2**21 + 8]):  # in a word, of words, of chunks
        moved = weight.clone()
        moved[places] = moved[places[::-1]]
        assert digest(moved).item() != same
    rows = torch.randn(64, 1024)
    assert digest(rows).item() != digest(rows[[1, 0, *range(2, 64)]]).item()
    signs = torch.ones(2**12, dtype=torch.float64)
    signs[6] = -1  # the highest bit of a word
    assert digest(signs).item() != digest(signs.abs()).item()


def test_a_comparison_names_each_tensor_that_did_not_arrive() -> None:
    expected = {"q": 1, "k": 2, "v": 3, "norm": 4}
    compare(expected, expected | {"more": 5}, "an engine")
    with pytest.raises(ReceiptError) as raised:
        compare(expected, {"q": 2, "k": 1, "v": 9}, "an engine")
    for part in (
        "q has the weights of k",
        "k has the weights of q",
        "v differs",
        "norm is missing",
    ):
        assert part in str(raised.value)
