"""Adds drafts to a step: how many each slot may have, what the source gives, and the rows that check them.

A draft is computed behind the slot's last token, in the same forward pass, and a token is sampled after each. See
`verification` for what is accepted.
"""

from __future__ import annotations

import numpy as np

from cadenza_common.plan.plan import StepPlan
from executor_svc.batch.scheduled import Scheduled
from executor_svc.batch.slots import Slots
from executor_svc.plan.arrays import IntArray, ints
from executor_svc.speculation.drafts import Drafts, DraftSource


class Drafting:
    """Asks a source for the drafts of each step."""

    def __init__(self, slots: Slots, source: DraftSource | None) -> None:
        """source: None if there are never drafts."""
        self._slots = slots
        self._source = source

    def clear(self) -> None:
        """Forget all sequences: every slot is free."""
        if self._source is not None:
            self._source.clear()

    def follow(self, plan: StepPlan) -> None:
        """Report a plan that the slots have applied to the source."""
        if self._source is None:
            return
        if len(plan.released_slots):
            self._source.released(ints(plan.released_slots))
        self._source.follow(plan)
        for sequence in plan.admitted:
            if sequence.max_drafts:
                self._source.admitted(sequence.slot, sequence.draft_scope)

    def add(self, plan: StepPlan, scheduled: Scheduled) -> Scheduled:
        """Return the step with drafts, whose tokens are written into the slots; before it is computed."""
        if self._source is None or not plan.max_drafts:
            return scheduled
        if not self._source.looks(self._slots, scheduled.slots):
            return scheduled
        most = draft_room(self._slots, plan, scheduled)
        (allowed,) = most.nonzero()
        if not len(allowed):
            return scheduled
        slots = scheduled.slots[allowed]
        drafts = self._within_limits(scheduled, self._source.propose(self._slots, slots, most[allowed]))
        if not drafts.counts.any():
            return scheduled
        self._slots.put_drafts(slots, drafts.counts, drafts.token_ids)
        num_drafts = np.zeros(len(most), np.int64)
        num_drafts[allowed] = drafts.counts
        return scheduled.with_drafts(num_drafts)

    def committed(self, scheduled: Scheduled, starts: IntArray) -> None:
        """Report a step whose tokens are in the slots to the source; starts as in `DraftSource`."""
        if self._source is not None and len(scheduled.slots):
            self._source.committed(self._slots, scheduled, starts)

    def _within_limits(self, scheduled: Scheduled, drafts: Drafts) -> Drafts:
        """Return the first of these drafts, as many as the step's rows of logits and tokens allow."""
        limits = self._slots.limits
        left = min(
            limits.max_num_seqs - len(scheduled.sampling_slots),
            limits.max_num_batched_tokens - int(scheduled.num_tokens.sum()),
        )
        ends = drafts.counts.cumsum()
        if not len(ends) or ends[-1] <= left:
            return drafts
        counts = np.clip(left - (ends - drafts.counts), 0, drafts.counts)
        return Drafts(counts, drafts.token_ids[: counts.sum()])


def draft_room(slots: Slots, plan: StepPlan, scheduled: Scheduled) -> IntArray:
    """Return [S] how many drafts each slot of the step may have.

    A slot that plans behind this one may not let grow in time keeps a place for one token of each of them.
    """
    rows = scheduled.slots
    limits, known = slots.limits, slots.num_tokens[rows]
    most = np.minimum(plan.max_drafts, slots.max_drafts[rows])
    for named in (plan.scheduled_slots, plan.fork_source_slots):  # they compute prompts, or are tried alone
        if len(named):
            most[np.isin(rows, ints(named))] = 0
    places, longest = slots.places.room(rows) * limits.block_size, slots.max_len[rows] - 1
    places = np.where(places >= longest, longest, places - (limits.max_inflight_plans - 1))
    room: IntArray = np.clip(places - known, 0, most)
    return room
