"""``GroupBuffer``: bounds staleness by deciding how many groups may be in progress, and which ones
form the next batch.

Pure bookkeeping, without data, processes or time. A group holds a slot from its admission until the
weights that it trained are published.

Let S be the bound, B the number of groups in a batch, and p the latest published version. At most
(S + 1) * B groups hold a slot. At most (S + 1 - (p - w)) * B of them were started by weights of a
version <= w, because no more fit into the batches for which they are fresh enough. ``admit``
enforces the first rule, and ``take`` the second, by taking enough of the older groups, so the bound
holds without discarding any group.

The cost per group does not grow with the number of groups: ``take`` iterates over waiting groups
only when it returns a batch, and otherwise over one count for each version.
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
        max_staleness: largest ``trainer_version - policy_version`` of a group in a batch, at least
            0.
        version: the latest published version.

    Raises:
        ValueError: an argument is out of range.

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
        self._waiting: dict[int, tuple[int, Any]] = {}  # version and item, in order of arrival
        self._training: dict[int, int] = {}
        self._pending_of: Counter[int] = Counter()  # groups by version
        self._waiting_of: Counter[int] = Counter()

    @property
    def capacity(self) -> int:
        """Number of slots."""
        return (self.max_staleness + 1) * self.groups_per_batch

    @property
    def pending(self) -> int:
        """Number of groups that are being sampled or scored."""
        return len(self._pending)

    @property
    def waiting(self) -> int:
        """Number of groups that are ready for a batch."""
        return len(self._waiting)

    @property
    def num_taken(self) -> int:
        """Number of groups that batches have taken so far."""
        return self.version * self.groups_per_batch + len(self._training)

    @property
    def room(self) -> int:
        """Number of free slots."""
        return self.capacity - len(self._pending) - len(self._waiting) - len(self._training)

    def admit(self, group: int) -> None:
        """Give a slot to a new group that starts with the published weights.

        Raises:
            RuntimeError: no slot is free, or the group already has one.
        """
        if group in self._pending or group in self._waiting or group in self._training:
            raise RuntimeError(f"group {group} was admitted twice.")
        if self.room < 1:
            raise RuntimeError(
                f"group {group} was admitted while all {self.capacity} slots were taken."
            )
        self._pending[group] = self.version
        self._pending_of[self.version] += 1

    def withdraw(self, group: int) -> None:
        """Withdraw a pending group whose sampler died; it can be admitted again."""
        self._leave(self._pending_of, self._pending.pop(group))

    def finish(self, group: int, version: int, item: Any) -> None:
        """Mark a group as ready.

        Args:
            group: a pending group.
            version: the oldest version that sampled any of its tokens.
            item: value that ``take`` returns for the group.

        Raises:
            RuntimeError: the group is not pending, or was sampled by weights older than its
                admission.
        """
        admitted = self._pending.get(group)
        if admitted is None:
            raise RuntimeError(f"group {group} arrived but is not pending.")
        if version < admitted:
            raise RuntimeError(
                f"group {group} was admitted at version {admitted} but sampled by version "
                f"{version}."
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
        """Return the next batch for the published version, as pairs (group, item) sorted by group.

        Groups that would be too old for later batches come first, and the batch waits for them.
        Others follow in order of arrival.

        Returns:
            ``groups_per_batch`` groups, or None until enough of them are ready.

        Raises:
            RuntimeError: groups are already too old, or a batch is in training and its weights must
                be published first.
        """
        if self._training:
            raise RuntimeError(f"a batch is in training: publish version {self.version + 1} first.")
        by_version = self._pending_of + self._waiting_of
        oldest = self.version - self.max_staleness
        num_late = sum(count for version, count in by_version.items() if version < oldest)
        if num_late:
            raise RuntimeError(
                f"{num_late} groups of version {oldest - 1} or older remain at version "
                f"{self.version}, but max_staleness={self.max_staleness}."
            )
        due = []  # number of groups of a version or older that must be in this batch
        started = waiting = 0  # groups of a version or older ones
        for version in sorted(by_version):
            started += by_version[version]
            waiting += self._waiting_of[version]
            # Those that do not fit into the later batches for which they are fresh enough.
            later_batches = self.max_staleness - (self.version - version)
            needed = started - later_batches * self.groups_per_batch
            if version < self.version and needed > 0:
                due.append((version, needed))
                if needed > waiting:
                    return None
        if len(self._waiting) < self.groups_per_batch:
            return None
        batch: dict[int, None] = {}
        for version, needed in due:
            old = (n for n, (by, _) in self._waiting.items() if by <= version and n not in batch)
            batch |= dict.fromkeys(islice(old, max(0, needed - len(batch))))
        others = (number for number in self._waiting if number not in batch)
        batch |= dict.fromkeys(islice(others, self.groups_per_batch - len(batch)))
        return [self._train(number) for number in sorted(batch)]

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
        """Return ``trainer_version - policy_version`` of each group in training."""
        return [self.version - version for version in self._training.values()]
