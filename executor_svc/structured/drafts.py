"""Drafts of sequences with grammars: the tokens that the grammar forces, else a source's, as far as it allows them."""

from __future__ import annotations

import numpy as np

from cadenza_common.plan.plan import StepPlan
from executor_svc.batch.scheduled import Scheduled
from executor_svc.batch.slots import Slots
from executor_svc.plan.arrays import IntArray
from executor_svc.speculation.drafts import Drafts, DraftSource
from executor_svc.structured.slot_grammars import SlotGrammars


class GrammarDrafts:
    """Implements `DraftSource`. A slot whose grammar's state is not there yet has no drafts."""

    def __init__(self, source: DraftSource, grammars: SlotGrammars) -> None:
        self._source, self._grammars = source, grammars

    def looks(self, slots: Slots, rows: IntArray) -> bool:
        """As in `DraftSource`."""
        found = self._source.looks(slots, rows)
        return found or bool(self._grammars.have(rows).any())

    def propose(self, slots: Slots, rows: IntArray, most: IntArray) -> Drafts:
        """As in `DraftSource`."""
        if not self._grammars.have(rows).any():
            return self._source.propose(slots, rows, most)
        forced = self._forced(rows, most)
        asked = most.copy()
        asked[list(forced)] = 0
        found = self._source.propose(slots, rows, asked)
        ends = found.counts.cumsum()
        parts = [found.token_ids[end - count : end].tolist() for end, count in zip(ends, found.counts, strict=True)]
        for index in np.flatnonzero(self._grammars.have(rows)).tolist():
            parts[index] = forced.get(index) or self._allowed(int(rows[index]), parts[index])
        counts = np.array([len(part) for part in parts], np.int64)
        return Drafts(counts, np.array([token for part in parts for token in part], np.int64))

    def _forced(self, rows: IntArray, most: IntArray) -> dict[int, list[int]]:
        """Return the forced tokens of each of rows that has any, by its index."""
        forced = {}
        for index in np.flatnonzero(self._grammars.have(rows) & (most > 0)).tolist():
            state = self._grammars.ready_state(int(rows[index]))
            if state is not None and state.forced:
                forced[index] = list(state.forced[: int(most[index])])
        return forced

    def _allowed(self, slot: int, drafts: list[int]) -> list[int]:
        state = self._grammars.ready_state(slot) if drafts else None
        return [] if state is None else drafts[: state.num_allowed(drafts)]

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
