"""Drafts of a replay: what the recorded step accepted. So a step gives as many tokens as it did, whatever made
the drafts then; those that were not accepted change nothing.
"""

from __future__ import annotations

import numpy as np

from cadenza.v1 import execution_pb2 as pb
from cadenza_common.plan.plan import StepPlan
from executor_svc.batch.scheduled import Scheduled
from executor_svc.batch.slots import Slots
from executor_svc.plan.arrays import IntArray
from executor_svc.speculation.drafts import Drafts


def late_slots(result: pb.StepResult | None) -> frozenset[int]:
    """Return the slots that gave nothing in a recorded step and did not fail: with a grammar they were late."""
    if result is None or not result.num_tokens:
        return frozenset()
    silent = {slot for slot, count in zip(result.slots, result.num_tokens, strict=True) if not count}
    beams = {candidates.slot for candidates in result.candidates}
    return frozenset(silent.difference(result.error_slots, beams))


class RecordedDrafts:
    """Implements `DraftSource`."""

    def __init__(self) -> None:
        self._tokens: dict[int, list[int]] = {}

    def expect(self, result: pb.StepResult | None) -> None:
        """Take the next step's drafts from its recorded result; None: there are none."""
        self._tokens, start = {}, 0
        if result is None or not result.num_drafts:
            return
        for slot, count in zip(result.slots, result.num_tokens or [1] * len(result.slots), strict=True):
            # The last token of a slot is sampled without a draft of it.
            self._tokens[slot] = list(result.token_ids[start : start + count][:-1])
            start += count

    def looks(self, slots: Slots, rows: IntArray) -> bool:
        """As in `DraftSource`."""
        return bool(self._tokens)

    def propose(self, slots: Slots, rows: IntArray, most: IntArray) -> Drafts:
        """As in `DraftSource`."""
        made = [self._tokens.get(slot, [])[:count] for slot, count in zip(rows.tolist(), most.tolist(), strict=True)]
        counts = np.array([len(tokens) for tokens in made], np.int64)
        return Drafts(counts, np.array([token for tokens in made for token in tokens], np.int64))

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
