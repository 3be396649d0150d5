"""``GroupBuffer``: how many groups may be under way, and which make the next batch, so that staleness is bounded.

Pure bookkeeping, without data, processes or time. A group holds a slot from the moment its sampling is allowed until
the weights that it trained were published.

Let S be the bound, B the groups in a batch, p the latest published version. At most (S + 1) * B groups hold a slot, and
those of them that were begun by weights of a version <= w are never more than (S + 1 - (p - w)) * B, which is what fits
into the batches for which they are fresh enough. ``admit`` keeps the first rule and ``take`` the second, by taking
enough of the older groups: so the bound holds without a group ever being thrown away.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class _Group:
    version: int
    item: Any = None
    ready: bool = False


class GroupBuffer:
    """Admission and order of groups.

    A group is *pending* after ``admit``, *waiting* after ``finish``, *in training* after ``take``, and gone after
    ``publish``.

    Args:
        groups_per_batch: groups in one batch, at least 1.
        max_staleness: largest ``trainer_version - policy_version`` of a group that ``take`` gives, at least 0.
        version: the version that is published already.

    Raises:
        ValueError: a number is out of its range.

    Examples:
        >>> buffer = GroupBuffer(groups_per_batch=2, max_staleness=1)
        >>> for group in range(buffer.room):
        ...     buffer.admit(group)
        >>> buffer.finish(2, 0, "c")
        >>> buffer.finish(0, 0, "a")
        >>> buffer.take(), buffer.room
        ([(0, 'a'), (2, 'c')], 0)
        >>> buffer.publish(1)
        >>> buffer.room
        2
    """

    def __init__(self, groups_per_batch: int, max_staleness: int, version: int = 0) -> None:
        if groups_per_batch < 1:
            raise ValueError(f"groups_per_batch={groups_per_batch} must be at least 1: use 1 or more.")
        if max_staleness < 0:
            raise ValueError(f"max_staleness={max_staleness} must be at least 0: use 0 for synchronous training.")
        self.groups_per_batch = groups_per_batch
        self.max_staleness = max_staleness
        self.version = version
        self._untrained: dict[int, _Group] = {}  # in the order of arrival, once they have arrived
        self._training: dict[int, int] = {}

    @property
    def capacity(self) -> int:
        """Most groups that hold a slot at a time."""
        return (self.max_staleness + 1) * self.groups_per_batch

    @property
    def pending(self) -> int:
        """Groups that are being sampled or scored."""
        return sum(not group.ready for group in self._untrained.values())

    @property
    def waiting(self) -> int:
        """Groups that are ready for a batch."""
        return sum(group.ready for group in self._untrained.values())

    @property
    def taken(self) -> int:
        """Groups that batches have taken so far."""
        return self.version * self.groups_per_batch + len(self._training)

    @property
    def room(self) -> int:
        """How many more groups the published weights may begin now."""
        return self.capacity - len(self._untrained) - len(self._training)

    def _begun(self, version: int) -> int:
        """Groups pending or waiting that were begun by weights of this version or older ones."""
        return sum(group.version <= version for group in self._untrained.values())

    def admit(self, group: int) -> None:
        """Gives a new group a slot: it is begun by the published weights.

        Raises:
            RuntimeError: there is no room, or the group has a slot already.
        """
        if group in self._untrained or group in self._training:
            raise RuntimeError(f"group {group} was admitted twice.")
        if self.room < 1:
            raise RuntimeError(f"group {group} has no room: all {self.capacity} slots are taken.")
        self._untrained[group] = _Group(self.version)

    def withdraw(self, group: int) -> None:
        """Takes a pending group back, because what was making it is gone; it may be admitted again."""
        del self._untrained[group]

    def finish(self, group: int, version: int, item: Any) -> None:
        """Makes a group ready.

        Args:
            group: one that is pending.
            version: the oldest version that sampled one of its tokens.
            item: what ``take`` gives back.

        Raises:
            RuntimeError: the group is not pending, or was sampled by older weights than it was admitted for.
        """
        known = self._untrained.pop(group, None)
        if known is None or known.ready:
            raise RuntimeError(f"group {group} arrived, and is not pending.")
        if version < known.version:
            raise RuntimeError(f"group {group} was admitted for version {known.version} and sampled by {version}.")
        self._untrained[group] = _Group(version, item, ready=True)

    def take(self) -> list[tuple[int, Any]] | None:
        """The next batch for a trainer of the published version, as (group, item) in the order of the groups.

        Groups that would be too old for later batches come first, and are waited for; the others come in the order in
        which they arrived.

        Returns:
            ``groups_per_batch`` groups, or None while they are not all there.

        Raises:
            RuntimeError: groups are too old already, or a batch is in training: publish its weights first.
        """
        if self._training:
            raise RuntimeError(f"a batch is in training: publish version {self.version + 1} first.")
        ready = [number for number, group in self._untrained.items() if group.ready]
        chosen: list[int] = []
        oldest = self.version - self.max_staleness
        if self._begun(oldest - 1):
            raise RuntimeError(
                f"{self._begun(oldest - 1)} groups of version {oldest - 1} or older were left for version "
                f"{self.version}, and max_staleness={self.max_staleness}."
            )
        for version in range(oldest, self.version):
            # All groups of this version or older, but for those that fit into the batches after this one.
            begun = self._begun(version)
            needed = begun - (self.max_staleness - (self.version - version)) * self.groups_per_batch
            old = [n for n in ready if self._untrained[n].version <= version and n not in chosen]
            missing = needed - len(chosen)
            if missing > len(old):
                return None
            chosen += old[: max(0, missing)]
        chosen += [number for number in ready if number not in chosen][: self.groups_per_batch - len(chosen)]
        if len(chosen) < self.groups_per_batch:
            return None
        taken = []
        for number in sorted(chosen):
            group = self._untrained.pop(number)
            self._training[number] = group.version
            taken.append((number, group.item))
        return taken

    def publish(self, version: int) -> None:
        """Frees the slots of the batch that was trained: the weights that it made are published."""
        self.version = version
        self._training = {}

    def staleness(self) -> list[int]:
        """``trainer_version - policy_version`` of the groups in training."""
        return [self.version - version for version in self._training.values()]
