"""``ByteCache``: values by key; the latest used ones are kept."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")

MOST_BYTES = 1 << 30
"""Most bytes of pixels that a process keeps, and of features that a model keeps, in the memory of
the host. A photograph takes about 25 MB of pixels in Qwen's models."""


class ByteCache(Generic[T]):
    """Values that are kept until they take more than a number of bytes; the least recently used
    are dropped first. The latest is always kept.

    Args:
        most_bytes: the number of bytes.
        size: function that returns the bytes of a value.

    >>> cache = ByteCache[str](8, len)
    >>> [cache.get(key, lambda: value) for key, value in (("a", "12345"), ("b", "678"), ("a", ""))]
    ['12345', '678', '12345']
    >>> cache.get("c", lambda: "9"), cache.get("b", lambda: "new")
    ('9', 'new')
    """

    def __init__(self, most_bytes: int, size: Callable[[T], int]) -> None:
        self._most_bytes = most_bytes
        self._size = size
        self._values: OrderedDict[Hashable, T] = OrderedDict()
        self._bytes = 0

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the value of a key, which is made if it is missing."""
        if key not in self._values:
            self._values[key] = make()
            self._bytes += self._size(self._values[key])
        self._values.move_to_end(key)
        while self._bytes > self._most_bytes and len(self._values) > 1:
            _, oldest = self._values.popitem(last=False)
            self._bytes -= self._size(oldest)
        return self._values[key]

    def clear(self) -> None:
        """Drop all values."""
        self._values.clear()
        self._bytes = 0
