"""The groups that one admission has passed over: it looks at none of them again, and goes on behind them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from scheduler_svc.core.sequences.sequence import SequenceGroup

MAX_LOOKED_AT = 1024
"""Groups from the head of a queue that are looked at for one that is not passed over."""


class PassedOver:
    """Groups, and adapters. Of an adapter, all groups are passed over that have not run before."""

    def __init__(self) -> None:
        self._groups: set[SequenceGroup] = set()
        self._adapters: set[int] = set()
        self._positions: dict[Hashable, int] = {}
        """By queue: how many of its first groups are passed over, or have been."""

    def __bool__(self) -> bool:
        return bool(self._groups)

    def __contains__(self, group: object) -> bool:
        assert isinstance(group, SequenceGroup)
        return group in self._groups or (group.spec.adapter_index in self._adapters and not group.was_admitted)

    def add(self, group: SequenceGroup) -> None:
        """Pass a group over."""
        self._groups.add(group)

    def add_adapter_of(self, group: SequenceGroup) -> None:
        """Pass a group over, and with it all others of its adapter, which find no place either."""
        self._groups.add(group)
        if not group.was_admitted:
            self._adapters.add(group.spec.adapter_index)

    def first_of(self, groups: Sequence[SequenceGroup], queue: Hashable) -> SequenceGroup | None:
        """The first group of a queue that is not passed over, near its head; queue: names it among all of them.

        Since groups leave a queue where they are found, the next call goes on from there.
        """
        most = min(len(groups), MAX_LOOKED_AT)
        for position in range(self._positions.get(queue, 0), most):
            if groups[position] not in self:
                self._positions[queue] = position
                return groups[position]
        self._positions[queue] = most
        return None


NOTHING_PASSED = PassedOver()
"""For callers that admit nothing; never changed."""
