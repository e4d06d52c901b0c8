"""The saves of recurrent states that the host derives from a step's results, with steps in flight."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from cadenza_common.plan.plan import StateSaves
from executor_svc.batch.mirror_slots import MirrorSlots
from executor_svc.batch.scheduled import Scheduled
from executor_svc.batch.step_states import StepStates
from executor_svc.gpu.kernels.slots.commit import IDLE
from executor_svc.gpu.slots.device_slots import CommittedTokens
from executor_svc.gpu.slots.slot_states import DeviceStates
from executor_svc.gpu.slots.staging import StagedChanges
from executor_svc.gpu.step_states import EnqueuedStates, StepSaves
from tests.helpers.executor.plans import ints, plan, scheduled, sequence
from tests.helpers.scheduler.fake_executor import LIMITS

DRAFTS = 3
STATES = replace(LIMITS, pages_per_state=3, max_drafts=DRAFTS)


class Steps:
    """Slots with the prompts of 12 tokens in slots 0 and 1, the saves of which are followed."""

    def __init__(self, *positions: int, slot: int = 0, computed: int = 0) -> None:
        self.slots = MirrorSlots(STATES)
        self.saves = StepSaves(self.slots)
        self.pages = list(range(20, 20 + 3 * len(positions)))
        admitted = tuple(
            sequence(
                index, list(range(12)), [0, 1], computed, state_pages=[50 + 3 * index, 51 + 3 * index, 52],
                max_drafts=DRAFTS, max_len=60,
            )
            for index in range(2)
        )  # fmt: skip
        saves = StateSaves([slot] * len(positions), positions, self.pages)
        self.slots.apply(plan(admitted=admitted, state_saves=saves))

    def enqueue(
        self, *rows: tuple[int, int, bool], drafts: int = 0, in_flight: int = 0
    ) -> tuple[EnqueuedStates, Scheduled]:
        """Begin a step, with up to so many drafts of each slot that samples."""
        step = self.slots.schedule(plan(scheduled=scheduled(*rows)))
        most = np.where(step.samples, drafts, 0)
        states = self.saves.before(step.with_drafts(most) if drafts else step, in_flight)
        self.slots.advance(step)
        return states, step

    def settle(
        self, enqueued: tuple[EnqueuedStates, Scheduled], *lengths: int, drafts: int = 0, idle: bool = False
    ) -> list[tuple[int, int]]:
        """End it: slots that sample had so many known tokens before, and so many drafts; returns the saves named."""
        states, step = enqueued
        ahead = np.tile(np.arange(1 + drafts), len(lengths))
        errors = np.full(len(ahead), IDLE if idle else 0)
        positions = np.array(lengths, np.int64).repeat(1 + drafts) + ahead
        committed = CommittedTokens(
            np.zeros_like(ahead), errors, np.zeros_like(positions) if idle else positions, ahead
        )
        found = self.saves.settle(states, committed.with_drafts(step), committed)
        return [] if found is None else list(zip(found.slots.tolist(), found.positions.tolist(), strict=True))


def test_saves_inside_a_chunk() -> None:
    steps = Steps(4, 8, 9)
    step = steps.enqueue((0, 12, False), (1, 5, False))
    assert steps.settle(step) == [(0, 4), (0, 8)]  # the last four of 12 lie in the tail
    assert [each.position for each in steps.slots.states.armed[0]] == [9]


def test_drafts_in_flight_are_counted_when_they_are_known() -> None:
    """The step behind one with drafts may come to a position, names it as possible, and comes to it or not."""
    for accepted, named in ((0, []), (2, []), (3, [(0, 16)])):
        steps = Steps(16)
        steps.settle(steps.enqueue((0, 12, True)), 12)
        first = steps.enqueue((0, 1, True), drafts=DRAFTS)
        second = steps.enqueue((0, 1, True), drafts=DRAFTS, in_flight=DRAFTS)
        assert first[0].saves is None
        assert second[0].saves is not None
        assert steps.settle(first, 13, drafts=DRAFTS) == []
        assert steps.settle(second, 14 + accepted, drafts=DRAFTS) == named
        assert bool(steps.slots.states.armed) == (not named)


def test_a_position_is_named_once() -> None:
    """Two steps begin where the state stands at the position: both write it, the first names it."""
    steps = Steps(12)
    prompt = steps.enqueue((0, 12, True))
    second = steps.enqueue((0, 1, True))
    third = steps.enqueue((0, 1, True), in_flight=DRAFTS)
    assert third[0].saves is not None
    assert steps.settle(prompt, 12) == []
    assert steps.settle(second, 13) == [(0, 12)]
    assert steps.settle(third, 14) == []


def test_slots_that_had_stopped_save_nothing() -> None:
    steps = Steps(12)
    steps.settle(steps.enqueue((0, 12, True)), 12)
    assert steps.settle(steps.enqueue((0, 1, True)), 0, idle=True) == []
    assert steps.slots.states.armed


def test_an_earlier_sequence_of_a_slot_names_its_own_and_drops_nothing_of_the_later() -> None:
    steps = Steps(8)
    step = steps.enqueue((0, 12, False))
    again = sequence(0, list(range(12)), [0, 1], state_pages=[50, 51, 52])
    steps.slots.apply(plan(released_slots=ints(0)))
    steps.slots.apply(plan(admitted=(again,), state_saves=StateSaves([0], [7], [30, 31, 32])))
    later = steps.enqueue((0, 12, False))
    assert steps.settle(step) == [(0, 8)]
    assert [each.position for each in steps.slots.states.armed[0]] == [7]
    assert steps.settle(later) == [(0, 7)]


def test_a_position_before_the_context_of_an_admission_is_not_named() -> None:
    """Its state may have passed it: only the device knows."""
    steps = Steps(8, 9, 10, computed=9)
    assert steps.settle(steps.enqueue((0, 3, True)), 12) == [(0, 9)]
    assert steps.settle(steps.enqueue((0, 1, True)), 13) == [(0, 10)]


def test_saves_are_sent_where_they_differ() -> None:
    """Starts are of all sequences, also of those that pad a step; an empty list is sent once."""
    states = DeviceStates(STATES, torch.zeros(DeviceStates.num_words(STATES), dtype=torch.int32))

    def sent(step: StepStates | None) -> dict[int, list[int]]:
        changes = StagedChanges()
        states.put_saves(step, changes)
        return {place: list(values) for place, values in changes.runs}

    steps = Steps(4, 8)
    enqueued, _ = steps.enqueue((0, 12, False), (1, 5, False))
    assert sent(None) == {}
    starts, positions, tables = (
        int(each.storage_offset()) for each in (states.saves.starts, states.saves.positions, states.saves.tables)
    )
    full = [0, *[2] * STATES.max_num_seqs]
    assert sent(enqueued.saves) == {starts: full, positions: [4, 8], tables: steps.pages}
    assert sent(None) == {starts: [0] * (STATES.max_num_seqs + 1)}
    assert sent(None) == {}
