"""Receipts of weight syncs: the digests of all tensors, computed by sender and receiver on each
tensor's device.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache

import torch
from torch import Tensor

from torchrl_grpo.errors import ReceiptError

Receipt = Mapping[str, int]
"""Digest of each tensor by name."""

_CHUNK = 2**18
_FACTOR = 0x9E3779B97F4A7C15 - 2**64
"""Odd, like each factor of a digest, so a product with it loses no bits."""


@lru_cache
def _factors(device: torch.device) -> Tensor:
    """Return an odd factor for each place of a chunk, [_CHUNK] int64."""
    return torch.arange(1, 2 * _CHUNK, 2, device=device) * _FACTOR


@torch.no_grad()
def digest(tensor: Tensor) -> Tensor:
    """Return a digest of a tensor's bytes on its device, scalar int64.

    The digest is the sum of the tensor's 8-byte words, each multiplied by an odd factor that depends
    on its position, modulo 2**64. It is the same on every device and in any order of summation, and
    it changes if rows are moved or swapped. It does not depend on the shape.
    """
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if len(data) % 8 or data.data_ptr() % 8:
        data = torch.nn.functional.pad(data, (0, -len(data) % 8))
    words, factors = data.view(torch.int64), _factors(tensor.device)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for chunk in words.split(_CHUNK):
        places = factors[: len(chunk)]
        # Other devices have no dot product of integers.
        product = chunk.dot(places) if chunk.is_cpu else (chunk * places).sum()
        total = total * _FACTOR + product
    return total


class Digests:
    """Computes digests of tensors in a stream.

    Attributes:
        seconds: time that the digests took on this thread.

    Example:
        >>> digests = Digests()
        >>> [name for name, _ in digests.of([("norm", torch.ones(2))])]
        ['norm']
        >>> digests.receipt() == receipt_of([("norm", torch.ones(2))])
        True
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._sums: dict[str, Tensor] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor."""
        start = time.perf_counter()
        self._sums[name] = digest(tensor)
        self.seconds += time.perf_counter() - start

    def of(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors, and add each one as it is read."""
        for name, tensor in tensors:
            self.add(name, tensor)
            yield name, tensor

    def receipt(self) -> Receipt:
        """Return the digests so far, copied from their device at once."""
        start = time.perf_counter()
        sums = torch.stack(list(self._sums.values())).tolist() if self._sums else []
        self.seconds += time.perf_counter() - start
        return dict(zip(self._sums, sums, strict=True))


class TensorsWithReceipt(Iterator[tuple[str, Tensor]]):
    """Stream of tensors with their sender's receipt, which the reader must compare.

    Args:
        tensors: pairs of name and tensor.
        receipt: None if there is none.
    """

    def __init__(self, tensors: Iterable[tuple[str, Tensor]], receipt: Receipt | None) -> None:
        self._tensors = iter(tensors)
        self.receipt = receipt

    def __next__(self) -> tuple[str, Tensor]:
        return next(self._tensors)


def receipt_of(tensors: Iterable[tuple[str, Tensor]]) -> Receipt:
    """Return the receipt of tensors."""
    digests = Digests()
    for name, tensor in tensors:
        digests.add(name, tensor)
    return digests.receipt()


def compare(expected: Receipt, received: Receipt, where: str) -> None:
    """Check that all expected tensors arrived.

    Args:
        expected: receipt of the sender.
        received: receipt of the receiver, which may have more tensors.
        where: name of the receiver, for the error message.

    Raises:
        ReceiptError: tensors are missing or differ.
    """
    sources = {value: name for name, value in expected.items()}
    problems = [
        f"{name} is missing"
        if name not in received
        else f"{name} has the weights of {sources[received[name]]}"
        if received[name] in sources
        else f"{name} differs"
        for name, value in expected.items()
        if received.get(name) != value
    ]
    if problems:
        raise ReceiptError(
            f"{where} must have the {len(expected)} tensors that the trainer sent, but "
            f"{len(problems)} of them did not arrive: {', '.join(problems[:5])}. Use another "
            "inference_model.weight_transfer."
        )
