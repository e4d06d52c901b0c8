"""Drafts of several ranks: rank 0 makes them, and the others write the same ones into their slots."""

from __future__ import annotations

from cadenza_common.plan.plan import StepPlan
from executor_svc.batch.scheduled import Scheduled
from executor_svc.batch.slots import Slots
from executor_svc.plan.arrays import IntArray
from executor_svc.ranks.links import read_columns, write_columns
from executor_svc.ranks.steps import LeaderRanks, MemberRanks
from executor_svc.speculation.drafts import Drafts, DraftSource


class LeaderDrafts:
    """Implements `DraftSource` for rank 0: a source whose drafts the others get."""

    def __init__(self, source: DraftSource, ranks: LeaderRanks) -> None:
        self._source, self._ranks = source, ranks

    def looks(self, slots: Slots, rows: IntArray) -> bool:
        """As in `DraftSource`; the others wait for what is proposed, be it nothing."""
        self._source.looks(slots, rows)
        return True

    def propose(self, slots: Slots, rows: IntArray, most: IntArray) -> Drafts:
        """As in `DraftSource`."""
        drafts = self._source.propose(slots, rows, most)
        self._ranks.send_drafts(write_columns(drafts.counts, drafts.token_ids))
        return drafts

    def follow(self, plan: StepPlan) -> None:
        """As in `DraftSource`."""
        self._source.follow(plan)

    def admitted(self, slot: int, scope: int) -> None:
        """As in `DraftSource`."""
        self._source.admitted(slot, scope)

    def released(self, slots: IntArray) -> None:
        """As in `DraftSource`."""
        self._source.released(slots)

    def committed(self, slots: Slots, scheduled: Scheduled, starts: IntArray) -> None:
        """As in `DraftSource`."""
        self._source.committed(slots, scheduled, starts)

    def clear(self) -> None:
        """As in `DraftSource`."""
        self._source.clear()


class MemberDrafts:
    """Implements `DraftSource` for the other ranks."""

    def __init__(self, ranks: MemberRanks) -> None:
        self._ranks = ranks

    def looks(self, slots: Slots, rows: IntArray) -> bool:
        """As in `DraftSource`."""
        return True

    def propose(self, slots: Slots, rows: IntArray, most: IntArray) -> Drafts:
        """As in `DraftSource`."""
        return Drafts(*read_columns(self._ranks.receive_drafts(), 2))

    def follow(self, plan: StepPlan) -> None:
        """As in `DraftSource`."""

    def admitted(self, slot: int, scope: int) -> None:
        """As in `DraftSource`."""

    def released(self, slots: IntArray) -> None:
        """As in `DraftSource`."""

    def committed(self, slots: Slots, scheduled: Scheduled, starts: IntArray) -> None:
        """As in `DraftSource`."""

    def clear(self) -> None:
        """As in `DraftSource`."""
