"""The recurrent states of a step: where they stand, as their headers say, and whether plans agree with that."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cadenza_common.plan.plan import StepPlan
from executor_svc.batch.scheduled import Scheduled
from executor_svc.batch.slot_states import check_folded
from executor_svc.batch.slots import Slots
from executor_svc.batch.step_states import StepStates, step_states
from executor_svc.plan.arrays import IntArray, ints


class Headers(Protocol):
    """The headers of states in a pool, as `device.state_layout.StateHeaders`."""

    def read(self, tables: NDArray[np.int32], context: IntArray) -> IntArray:
        """Return [S] where the states in pages tables [S, P] stand; 0 with no context."""
        ...


def check_admitted_states(slots: Slots, plan: StepPlan, headers: Headers) -> None:
    """Check that the states of a plan's admissions stand where these say, once its blocks are moved.

    Slots that it forks have no state yet. Raises InvalidPlan.
    """
    named = [sequence.slot for sequence in plan.admitted if sequence.num_computed_tokens]
    if named:
        rows = np.setdiff1d(ints(named), ints(plan.fork_slots))
        _folded(slots, rows, headers)


def states_of_step(slots: Slots, scheduled: Scheduled, headers: Headers) -> StepStates:
    """Return the states of the scheduled slots; raises InvalidPlan where one does not stand at its slot's context."""
    rows = scheduled.slots
    folded = _folded(slots, rows, headers)
    return step_states(slots.states, rows, slots.num_computed_tokens[rows], scheduled.num_tokens, folded)


def _folded(slots: Slots, rows: IntArray, headers: Headers) -> IntArray:
    context = slots.num_computed_tokens[rows]
    folded = headers.read(slots.states.tables[rows], context)
    check_folded(rows, folded, context, slots.limits.state_tail)
    return folded
