"""States of slots: their pages, the copies that plans arm, and the steps that make them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cadenza_common.plan.errors import InvalidPlan
from cadenza_common.plan.plan import StateSaves, StepPlan
from executor_svc.batch.slot_digest import digest_of
from executor_svc.batch.slot_states import check_folded
from executor_svc.batch.slots import Slots
from executor_svc.batch.step_states import StepStates, step_states
from executor_svc.plan.limits import Limits
from tests.helpers.executor.plans import columns, ints, plan, run, scheduled, sequence
from tests.helpers.scheduler.fake_executor import LIMITS

STATES = replace(LIMITS, pages_per_state=3)
PAGES = [60, 61, 62]


def started(limits: Limits = STATES, **fields: Any) -> Slots:
    """Slot 0 has computed 12 of its 24 tokens."""
    slots = Slots(limits)
    first = sequence(0, list(range(24)), [0, 1, 2, 3], state_pages=PAGES, **fields)
    run(slots, plan(admitted=(first,), scheduled=scheduled((0, 12, False))), [])
    return slots


def saves(*each: tuple[int, int], page: int = 40) -> StepPlan:
    """A plan that arms copies of (slot, position), in pages from `page` on."""
    pages = list(range(page, page + 3 * len(each)))
    return plan(state_saves=StateSaves([slot for slot, _ in each], [at for _, at in each], pages))


def step_of(slots: Slots, counts: int, folded: int) -> StepStates:
    rows = ints(0)
    return step_states(slots.states, rows, slots.num_computed_tokens[rows], ints(counts), ints(folded))


def test_a_step_has_the_pages_of_its_slots_and_where_their_states_come_to_stand() -> None:
    slots = started()
    found = step_of(slots, 5, 11)
    assert found.tables.tolist() == [PAGES]
    assert (found.context_lens.tolist(), found.folded.tolist(), found.ends.tolist()) == ([12], [11], [16])
    assert step_of(slots, 1, 12).ends.tolist() == [12]  # the tail keeps the last token
    drafted = started(replace(STATES, max_drafts=3))
    assert step_of(drafted, 4, 9).ends.tolist() == [12]
    assert step_of(drafted, 6, 9).ends.tolist() == [14]


def test_a_copy_is_made_in_the_step_in_which_the_state_stands_there_and_named_once() -> None:
    slots = started()
    slots.apply(saves((0, 13), (0, 16), (0, 17)))
    found = step_of(slots, 5, 11)
    assert (found.saved_slots.tolist(), found.save_positions.tolist()) == ([0, 0], [13, 16])
    assert (found.save_starts.tolist(), found.save_tables.tolist()) == ([0, 2], [[40, 41, 42], [43, 44, 45]])
    slots.states.made(ints(0), found.ends.numpy())
    assert [each.position for each in slots.states.armed[0]] == [17]
    slots.num_computed_tokens[0] = 17
    assert step_of(slots, 1, 16).save_positions.tolist() == [17]
    slots.states.made(ints(0), ints(17))
    assert not slots.states.armed
    assert step_of(slots, 1, 16).save_positions.tolist() == []


def test_a_copy_of_a_state_that_stands_at_the_position_already_is_made() -> None:
    slots = started()
    slots.apply(saves((0, 11)))
    assert step_of(slots, 1, 11).save_positions.tolist() == [11]


def test_a_position_that_drafts_have_passed_is_dropped() -> None:
    slots = started(replace(STATES, max_drafts=3), max_drafts=3)
    slots.num_tokens[0] = slots.num_computed_tokens[0] = 20
    slots.apply(saves((0, 8), (0, 17)))
    found = step_of(slots, 1, 17)
    assert found.save_positions.tolist() == [17]
    slots.states.made(ints(0), found.ends.numpy())
    assert not slots.states.armed


def test_releasing_a_slot_and_a_new_session_drop_what_is_armed() -> None:
    slots = started()
    slots.apply(saves((0, 20)))
    slots.apply(plan(released_slots=ints(0)))
    assert not slots.states.armed
    again = sequence(0, list(range(24)), [0, 1, 2, 3], 19, state_pages=PAGES)
    slots.apply(plan(admitted=(again,)))
    assert step_of(slots, 4, 19).save_positions.tolist() == []
    slots.apply(saves((0, 20)))
    slots.clear()
    assert not slots.states.armed


def test_the_digest_and_the_writes_are_over_pages_of_states_and_what_is_armed() -> None:
    def digests(pages: list[int], at: int, first: int) -> tuple[bytes, bytes]:
        slots = Slots(STATES, compared=True)
        slots.apply(plan(admitted=(sequence(0, [1] * 9, [0, 1], state_pages=pages),)))
        slots.apply(saves((0, at), page=first))
        return digest_of(slots), slots.writes.digest()

    own = digests(PAGES, 8, 40)
    assert own == digests(PAGES, 8, 40)
    for other in (digests([60, 62, 61], 8, 40), digests(PAGES, 7, 40), digests(PAGES, 8, 41)):
        assert own[0] != other[0]
        assert own[1] != other[1]


REFUSED: list[tuple[StepPlan, str]] = [
    (saves((3, 16)), "state_saves: slot 3 is not admitted"),
    (saves((99, 16)), "state_saves: slot 99 is out of range"),
    (saves((0, 0)), "state_saves: slot 0: position 0 is not 1 to max_model_len 64"),
    (saves((0, 65)), "state_saves: slot 0: position 65 is not 1 to max_model_len 64"),
    (saves((0, 16), (0, 16)), "state_saves: slot 0: position 16 is not above 16, which is armed already"),
    (saves((0, 16), (0, 15)), "state_saves: slot 0: position 15 is not above 16"),
    (saves((0, 10)), "state_saves: slot 0: position 10: the state stands at 11 or later"),
    (saves((0, 16), page=62), "state_saves: page 64 is out of range"),
    (plan(state_saves=StateSaves([0], [16], [1, 2, 1])), "state_saves: page 1 is named twice"),
    (plan(state_saves=StateSaves([0], [16], [1, 2])), "state_saves: 2 page_ids for 1 states of 3 pages"),
    (plan(admitted=(sequence(1, [1], [9]),)), "admitted: slot 1 has 0 state_pages: a state has 3"),
    (plan(admitted=(sequence(1, [1], [9], state_pages=[1, 2]),)), "admitted: slot 1 has 2 state_pages"),
    (plan(admitted=(sequence(1, [1], [9], state_pages=[1, 2, 64]),)), "slot 1: state_pages: page 64 is out of range"),
    (plan(admitted=(sequence(1, [1], [9], state_pages=[1, 2, 2]),)), "slot 1: state_pages: page 2 is named twice"),
]


@pytest.mark.parametrize(("wrong", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_plans_that_contradict_states_are_refused(wrong: StepPlan, message: str) -> None:
    with pytest.raises(InvalidPlan, match=message):
        started().apply(wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (saves((0, 16)), "not supported by this executor: state_saves"),
        (plan(admitted=(sequence(1, [1], [9], state_pages=[1]),)), "slot 1 has 1 state_pages: a state has 0"),
    ],
)
def test_plans_with_states_are_refused_where_the_model_has_none(wrong: StepPlan, message: str) -> None:
    slots = Slots(LIMITS)
    slots.apply(plan(admitted=(sequence(0, [1] * 9, [0, 1]),)))
    with pytest.raises(InvalidPlan, match=message):
        slots.apply(wrong)


def test_states_must_stand_where_their_tails_reach_the_context() -> None:
    context = np.array([12, 0, 7])
    check_folded(ints(4, 5, 6), ints(11, 99, 7), context, 1)
    check_folded(ints(4, 5, 6), ints(9, 99, 4), context, 3)
    for folded in (ints(10, 0, 7), ints(13, 0, 7)):
        with pytest.raises(InvalidPlan, match=f"slot 4 hold a state that stands at {folded[0]}: .* must be 11 to 12"):
            check_folded(ints(4, 5, 6), folded, context, 1)


def test_forks_leave_states_alone() -> None:
    """A fork has pages of its own, with any content until the next plan copies its source's."""
    slots = Slots(STATES)
    pair = [sequence(slot, [1] * 9, [0, 1], 8 * slot, state_pages=[50 + slot, 54 + slot, 58 + slot]) for slot in (0, 1)]
    step = plan(admitted=tuple(pair), forks=columns((1, 0)), scheduled=scheduled((0, 9, True)))
    assert run(slots, step, [3, 4]) == [0]
    assert slots.states.tables[:2].tolist() == [[50, 54, 58], [51, 55, 59]]
    assert slots.num_computed_tokens[:2].tolist() == [9, 9]
