"""Two sources of drafts, one after the other."""

from __future__ import annotations

import numpy as np

from cadenza_common.plan.plan import StepPlan
from executor_svc.batch.ragged import spans
from executor_svc.batch.scheduled import Scheduled
from executor_svc.batch.slots import Slots
from executor_svc.plan.arrays import IntArray
from executor_svc.speculation.drafts import Drafts, DraftSource


class ChainedSource:
    """Implements `DraftSource`: a slot gets the first source's drafts, and the second's if the first has none."""

    def __init__(self, first: DraftSource, second: DraftSource) -> None:
        self._first = first
        self._second = second

    def propose(self, slots: Slots, rows: IntArray, most: IntArray) -> Drafts:
        """As in `DraftSource`."""
        drafts = self._first.propose(slots, rows, most)
        (without,) = ((drafts.counts == 0) & (most > 0)).nonzero()
        if not len(without):
            return drafts
        others = self._second.propose(slots, rows[without], most[without])
        if not others.counts.any():
            return drafts
        counts = drafts.counts.copy()
        counts[without] = others.counts
        starts = counts.cumsum() - counts
        token_ids = np.empty(counts.sum(), np.int64)
        _, places = spans(starts, drafts.counts)
        token_ids[places] = drafts.token_ids
        _, places = spans(starts[without], others.counts)
        token_ids[places] = others.token_ids
        return Drafts(counts, token_ids)

    def looks(self, slots: Slots, rows: IntArray) -> bool:
        """As in `DraftSource`."""
        first, second = self._first.looks(slots, rows), self._second.looks(slots, rows)
        return first or second

    def follow(self, plan: StepPlan) -> None:
        """As in `DraftSource`."""
        self._first.follow(plan)
        self._second.follow(plan)

    def admitted(self, slot: int, scope: int) -> None:
        """As in `DraftSource`."""
        self._first.admitted(slot, scope)
        self._second.admitted(slot, scope)

    def released(self, slots: IntArray) -> None:
        """As in `DraftSource`."""
        self._first.released(slots)
        self._second.released(slots)

    def committed(self, slots: Slots, scheduled: Scheduled, starts: IntArray) -> None:
        """As in `DraftSource`."""
        self._first.committed(slots, scheduled, starts)
        self._second.committed(slots, scheduled, starts)

    def clear(self) -> None:
        """As in `DraftSource`."""
        self._first.clear()
        self._second.clear()
