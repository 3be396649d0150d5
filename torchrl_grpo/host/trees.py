"""Flat views of nested mappings, such as configs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def dotted(node: Any, name: str = "", *, into_lists: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested mappings by their dotted names; an empty mapping is a leaf.

    Args:
        node: the mappings.
        name: of ``node`` itself.
        into_lists: whether the elements of a list are the leaves, as ``name[0]``, instead of the
            list.

    >>> dict(dotted({"a": {"b": [1, 2]}, "c": {}}))
    {'a.b': [1, 2], 'c': {}}
    >>> dict(dotted([1, {"b": 2}], "a", into_lists=True))
    {'a[0]': 1, 'a[1].b': 2}
    """
    if isinstance(node, Mapping) and node:
        for key, value in node.items():
            yield from dotted(value, f"{name}.{key}" if name else str(key), into_lists=into_lists)
    elif into_lists and isinstance(node, list | tuple):
        for index, value in enumerate(node):
            yield from dotted(value, f"{name}[{index}]", into_lists=into_lists)
    else:
        yield name, node


def inner_nodes(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all values of nested mappings, including inner mappings, by their dotted names.

    >>> dict(inner_nodes({"a": {"b": 1}}))
    {'a': {'b': 1}, 'a.b': 1}
    """
    for key, value in node.items() if isinstance(node, Mapping) else ():
        yield f"{prefix}{key}", value
        yield from inner_nodes(value, f"{prefix}{key}.")
