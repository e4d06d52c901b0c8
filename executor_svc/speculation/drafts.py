"""Drafts of a step, and the interface of what makes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

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
