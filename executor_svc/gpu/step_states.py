"""What a step on a GPU saves of recurrent states, as the host follows it.

Positions of states hang on context lengths, which the device knows first. Before a step the host names the saves that
it may come to; with its results come the context lengths, and from these follow the saves that it has made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from executor_svc.batch.mirror_slots import MirrorSlots
from executor_svc.batch.scheduled import Scheduled
from executor_svc.batch.slot_states import SavedStates
from executor_svc.batch.step_states import StepStates, step_states
from executor_svc.plan.arrays import BoolArray, IntArray

if TYPE_CHECKING:
    from executor_svc.gpu.slots.device_slots import CommittedTokens


@dataclass(frozen=True, slots=True)
class EnqueuedStates:
    """The states of an enqueued step's S sequences."""

    generations: IntArray
    """[S] of the slots, as `MirrorSlots.generations`."""
    context: IntArray
    """[S] as the mirror had it: of slots that sample, drafts in flight may add to it."""
    saves: StepStates | None
    """Those that the step may have made; None: none."""


class StepSaves:
    """Follows where the states of slots stand, and what steps save of them. For models that have states."""

    def __init__(self, slots: MirrorSlots) -> None:
        self._slots = slots
        # Of each slot, for the sequence of this generation, which has settled steps: where its state stands after them,
        # and the last position saved.
        self._generations = np.full(slots.limits.num_slots, -1, np.int64)
        self._stands = np.zeros(slots.limits.num_slots, np.int64)
        self._saved = np.zeros(slots.limits.num_slots, np.int64)

    def before(self, drafted: Scheduled, num_in_flight: int) -> EnqueuedStates:
        """Return the states of a step that is enqueued next; the plan is applied, the mirror not advanced.

        drafted: with places for drafts. num_in_flight: drafts of a slot in earlier steps that are not settled.
        """
        slots, rows = self._slots, drafted.slots
        context = slots.num_computed_tokens[rows]
        generations, saves = slots.generations[rows], None
        furthest = context + num_in_flight
        if slots.states.is_due(rows, slots.states.ends(furthest, drafted.num_tokens)):
            saves = step_states(slots.states, rows, furthest, drafted.num_tokens, np.zeros_like(context))
        return EnqueuedStates(generations, context, saves)

    def settle(self, step: EnqueuedStates, scheduled: Scheduled, committed: CommittedTokens) -> SavedStates | None:
        """Return the saves that a step has made; all earlier steps are settled.

        scheduled: with the drafts that it had. committed: its tokens, those of idle slots too.
        """
        slots, rows = self._slots, scheduled.slots
        first = committed.ahead == 0
        live = np.ones(len(rows), np.bool_)
        context, sampling = step.context.copy(), np.searchsorted(scheduled.sampling_slots, rows[scheduled.samples])
        counts = scheduled.num_tokens
        known = counts if scheduled.num_drafts is None else counts - scheduled.num_drafts
        live[scheduled.samples] = ~committed.idle[first][sampling]
        context[scheduled.samples] = committed.positions[first][sampling] - known[scheduled.samples]
        ends = slots.states.ends(context, counts)
        # A state that was not computed here yet stands at the context that the plan gave, or before it.
        new = rows[self._generations[rows] != step.generations]
        self._stands[new], self._saved[new] = step.context[np.isin(rows, new)], 0
        made = None if step.saves is None else self._made(step.saves, rows, live, ends)
        same = live & slots.admitted[rows] & (slots.generations[rows] == step.generations)
        slots.states.made(rows[same], ends[same])
        self._stands[rows[live]], self._generations[rows] = ends[live], step.generations
        return made

    def _made(self, saves: StepStates, rows: IntArray, live: BoolArray, ends: IntArray) -> SavedStates:
        """Return those of a step's saves that it has made, and no earlier step."""
        counts, slots = np.diff(saves.save_starts.numpy()), saves.saved_slots
        positions = saves.save_positions.numpy().astype(np.int64)
        kept = live.repeat(counts) & (positions <= ends.repeat(counts))
        kept &= (positions >= self._stands[slots]) & (positions > self._saved[slots])
        self._saved[slots[kept]] = positions[kept]
        return SavedStates(slots[kept], positions[kept])
