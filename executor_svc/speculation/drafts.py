"""Drafts of a step, and the interface of what makes them.

Sources that index tokens take a long prompt over several steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from cadenza_common.plan.plan import StepPlan
from executor_svc.batch.scheduled import Scheduled
from executor_svc.batch.slots import Slots
from executor_svc.plan.arrays import IntArray


@dataclass(frozen=True, slots=True)
class Drafts:
    """Guesses of the next tokens of n slots."""

    counts: IntArray
    """[n] number of drafts of each slot."""
    token_ids: IntArray
    """[counts.sum()] joined in the order of the slots."""


class DraftSource(Protocol):
    """Makes drafts. A function of its calls alone, so that a replay of the plans makes the same drafts."""

    def propose(self, slots: Slots, rows: IntArray, most: IntArray) -> Drafts:
        """Return drafts of the slots `rows` [n], ascending, at most most[i] of each."""
        ...

    def looks(self, slots: Slots, rows: IntArray) -> bool:
        """Return whether any of the slots `rows` [n] may have drafts now; False: `propose` would give none.

        Asked once in a step that may have drafts, before `propose`, for all slots of the step.
        """
        ...

    def follow(self, plan: StepPlan) -> None:
        """Note a plan that the slots have applied, after its releases and before its admissions are noted."""
        ...

    def admitted(self, slot: int, scope: int) -> None:
        """Note that a sequence was admitted into this slot: its tokens are in the slots.

        scope: sequences with the same number may get drafts from each other's tokens; 0: from its own only.
        """
        ...

    def released(self, slots: IntArray) -> None:
        """Note that the sequences in these slots have left, before others are admitted into them."""
        ...

    def committed(self, slots: Slots, scheduled: Scheduled, starts: IntArray) -> None:
        """Note that a step was computed, and that its tokens are in the slots.

        starts: [S] the position of the first token that it computed of each of scheduled.slots.
        """
        ...

    def clear(self) -> None:
        """Note that every slot is free."""
        ...


def tokens_to_index(waiting: IntArray, always: int, budget: int) -> IntArray:
    """Return [n] how many of the waiting [n] tokens of n slots this step indexes.

    always: up to this number is indexed for every slot, so that none falls further behind as it grows; budget: the
    number of tokens beyond that, for all slots together; it goes to those with the fewest waiting, then the first ones.
    """
    beyond = waiting - always
    if not len(waiting) or beyond.max() <= 0:
        return waiting
    beyond = np.maximum(beyond, 0)
    order = np.argsort(beyond, kind="stable")
    sorted_beyond = beyond[order]
    before = sorted_beyond.cumsum() - sorted_beyond
    taken = np.empty_like(waiting)
    taken[order] = np.clip(budget - before, 0, sorted_beyond)
    result: IntArray = np.minimum(waiting, always) + taken
    return result
