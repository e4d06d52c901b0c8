"""Forks: slots that sample from another slot's logits, and share its computed tokens."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from cadenza_common.plan.errors import InvalidPlan
from cadenza_common.plan.plan import StepPlan
from executor_svc.batch.scheduled import NamedSlots
from executor_svc.plan.arrays import BoolArray, IntArray, check_unique, ints


class ForkedSlots(Protocol):
    """What forks depend on, of all slots; as in `Slots`."""

    num_tokens: IntArray
    held: BoolArray
    stopped: BoolArray

    def check_admitted(self, slots: IntArray, part: str) -> None:
        """Raise InvalidPlan for a slot that is not admitted; part: of the plan, for the message."""
        ...


def check_forks(slots: ForkedSlots, plan: StepPlan, part: NamedSlots) -> None:
    """Check a plan's forks, as far as that does not depend on which slots sample; raises InvalidPlan."""
    forks, sources = ints(plan.fork_slots), ints(plan.fork_source_slots)
    if not len(forks):
        return
    slots.check_admitted(forks, "forks")
    slots.check_admitted(sources, "forks: source")
    check_unique(forks, "forks: slot")
    for wrong, reason in (
        (np.isin(sources, forks), "reads from a slot that is a fork itself"),
        (slots.stopped[forks], "has stopped"),
        (np.isin(forks, part.slots), "is named in scheduled too"),
    ):
        if wrong.any():
            raise InvalidPlan(f"forks: slot {forks[wrong][0]} {reason}")


def with_forks(
    slots: ForkedSlots, plan: StepPlan, readers: IntArray, idle: IntArray
) -> tuple[IntArray, IntArray, IntArray]:
    """Add forks to the slots that sample from their own logits row [L] and to the idle slots, both ascending.

    Returns (sampling slots [R], the logits row of each [R], idle slots). Raises InvalidPlan.
    """
    forks, sources = ints(plan.fork_slots), ints(plan.fork_source_slots)
    reads, is_idle = np.isin(sources, readers), np.isin(sources, idle)
    if plan.decode_ready:
        # This source would be ready if it had not stopped, which the scheduler may not know yet.
        unnamed = ~np.isin(sources, ints(plan.scheduled_slots))
        is_idle |= slots.stopped[sources] & ~slots.held[sources] & unnamed
    silent = ~(reads | is_idle)
    if silent.any():
        i = silent.argmax()
        raise InvalidPlan(f"forks: the source {sources[i]} of slot {forks[i]} does not sample in this step")
    uneven = reads & (slots.num_tokens[forks] != slots.num_tokens[sources])
    if uneven.any():
        i = uneven.argmax()
        raise InvalidPlan(
            f"forks: slot {forks[i]} has {slots.num_tokens[forks[i]]} known tokens, its source {sources[i]} "
            f"{slots.num_tokens[sources[i]]}"
        )
    sampling = np.concatenate((readers, forks[reads]))
    rows = np.concatenate((np.arange(len(readers)), np.searchsorted(readers, sources[reads])))
    order = np.argsort(sampling)
    return sampling[order], rows[order], np.sort(np.concatenate((idle, forks[is_idle])))
