"""``GroupBuffer``: bounds staleness by deciding how many groups may be in progress, and which ones
make the next batch.

Pure bookkeeping, without data, processes or time. A group holds a slot from the moment its sampling
is allowed until the weights that it trained were published.

Let S be the bound, B the groups in a batch, p the latest published version. At most (S + 1) * B
groups hold a slot, and those of them that were begun by weights of a version <= w are never more
than (S + 1 - (p - w)) * B, which is what fits into the batches for which they are fresh enough.
``admit`` keeps the first rule and ``take`` the second, by taking enough of the older groups: so the
bound holds without a group ever being thrown away.

What a group costs does not grow with the number of groups: ``take`` looks at those that wait only
when it gives a batch, and else at a count for each version.
"""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Any


class GroupBuffer:
    """Admission and order of groups.

    A group is *pending* after ``admit``, *waiting* after ``finish``, *in training* after ``take``,
    and gone after ``publish``.

    Args:
        groups_per_batch: groups in one batch, at least 1.
        max_staleness: largest ``trainer_version - policy_version`` of a group that ``take`` gives,
            at least 0.
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
            raise ValueError(
                f"groups_per_batch={groups_per_batch} must be at least 1: use 1 or more."
            )
        if max_staleness < 0:
            raise ValueError(
                f"max_staleness={max_staleness} must be at least 0: use 0 for synchronous training."
            )
        self.groups_per_batch = groups_per_batch
        self.max_staleness = max_staleness
        self.version = version
        self._pending: dict[int, int] = {}  # version of each group
        self._waiting: dict[int, tuple[int, Any]] = {}  # version and item, in the order of arrival
        self._training: dict[int, int] = {}
        self._pending_of: Counter[int] = Counter()  # groups by version
        self._waiting_of: Counter[int] = Counter()

    @property
    def capacity(self) -> int:
        """Maximum number of groups that hold a slot at a time."""
        return (self.max_staleness + 1) * self.groups_per_batch

    @property
    def pending(self) -> int:
        """Groups that are being sampled or scored."""
        return len(self._pending)

    @property
    def waiting(self) -> int:
        """Groups ready for a batch."""
        return len(self._waiting)

    @property
    def taken(self) -> int:
        """Groups that batches have taken so far."""
        return self.version * self.groups_per_batch + len(self._training)

    @property
    def room(self) -> int:
        """Number of groups that the published weights may begin now."""
        return self.capacity - len(self._pending) - len(self._waiting) - len(self._training)

    def admit(self, group: int) -> None:
        """Give a new group a slot; the published weights begin it.

        Raises:
            RuntimeError: there is no room, or the group has a slot already.
        """
        if group in self._pending or group in self._waiting or group in self._training:
            raise RuntimeError(f"group {group} was admitted twice.")
        if self.room < 1:
            raise RuntimeError(f"group {group} has no room: all {self.capacity} slots are taken.")
        self._pending[group] = self.version
        self._pending_of[self.version] += 1

    def withdraw(self, group: int) -> None:
        """Withdraw a pending group whose sampler is lost; it may be admitted again."""
        self._leave(self._pending_of, self._pending.pop(group))

    def finish(self, group: int, version: int, item: Any) -> None:
        """Mark a group as ready.

        Args:
            group: one that is pending.
            version: the oldest version that sampled one of its tokens.
            item: what ``take`` gives back.

        Raises:
            RuntimeError: the group is not pending, or was sampled by older weights than it was
                admitted for.
        """
        begun = self._pending.get(group)
        if begun is None:
            raise RuntimeError(f"group {group} arrived, and is not pending.")
        if version < begun:
            raise RuntimeError(
                f"group {group} was admitted for version {begun} and sampled by {version}."
            )
        self._leave(self._pending_of, self._pending.pop(group))
        self._waiting[group] = (version, item)
        self._waiting_of[version] += 1

    @staticmethod
    def _leave(groups: Counter[int], version: int) -> None:
        groups[version] -= 1
        if not groups[version]:
            del groups[version]

    def take(self) -> list[tuple[int, Any]] | None:
        """Return the next batch for the published version, as (group, item) in the order of the
        groups.

        Groups that would be too old for later batches come first, and are waited for; the others
        come in the order in which they arrived.

        Returns:
            ``groups_per_batch`` groups, or None while they are not all there.

        Raises:
            RuntimeError: groups are too old already, or a batch is in training: publish its weights
                first.
        """
        if self._training:
            raise RuntimeError(f"a batch is in training: publish version {self.version + 1} first.")
        held = self._pending_of + self._waiting_of
        oldest = self.version - self.max_staleness
        late = sum(count for version, count in held.items() if version < oldest)
        if late:
            raise RuntimeError(
                f"{late} groups of version {oldest - 1} or older were left for version "
                f"{self.version}, and max_staleness={self.max_staleness}."
            )
        due, begun, waiting = [], 0, 0  # how many of a version or older ones must be in this batch
        for version in sorted(held):
            begun += held[version]
            waiting += self._waiting_of[version]
            # All of them, but for those that fit into the batches after this one.
            needed = begun - (self.max_staleness - (self.version - version)) * self.groups_per_batch
            if version < self.version and needed > 0:
                due.append((version, needed))
                if needed > waiting:
                    return None
        if len(self._waiting) < self.groups_per_batch:
            return None
        chosen: dict[int, None] = {}
        for version, needed in due:
            old = (n for n, (by, _) in self._waiting.items() if by <= version and n not in chosen)
            chosen |= dict.fromkeys(islice(old, max(0, needed - len(chosen))))
        others = (number for number in self._waiting if number not in chosen)
        chosen |= dict.fromkeys(islice(others, self.groups_per_batch - len(chosen)))
        return [self._train(number) for number in sorted(chosen)]

    def _train(self, group: int) -> tuple[int, Any]:
        version, item = self._waiting.pop(group)
        self._leave(self._waiting_of, version)
        self._training[group] = version
        return group, item

    def publish(self, version: int) -> None:
        """Free the slots of the trained batch, whose weights are published."""
        self.version = version
        self._training = {}

    def staleness(self) -> list[int]:
        """``trainer_version - policy_version`` of the groups in training."""
        return [self.version - version for version in self._training.values()]
