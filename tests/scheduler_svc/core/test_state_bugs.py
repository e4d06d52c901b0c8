"""Bugs of states in plans, results and sessions, put in by hand: what `test_states.py` tests would not hold."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cadenza_common.plan.errors import InvalidPlan
from scheduler_svc.core.errors import InvariantError
from tests.scheduler_svc.core import test_state_beams as beams
from tests.scheduler_svc.core import test_states as tests
from tests.simulation.bugs.seeded_bugs import SeededBug, seeded
from tests.simulation.bugs.state_bugs import WAYS

_FULL = tests.GROUPS["full"]
_FOUND_BY: dict[str, Callable[[], None]] = {
    "a copy's position is counted in blocks of another size (vLLM 53142, 55600)": lambda: (
        tests.test_a_prompt_is_found_at_its_end_and_a_branch_once_it_was_seen_twice(_FULL)
    ),
    "a state that a lost plan was to change is kept": lambda: (
        tests.test_a_sequence_that_a_lost_plan_was_to_compute_goes_on_behind_a_saved_state(_FULL)
    ),
    "copies that a lost session was to make are waited for": (
        tests.test_copies_that_a_lost_session_was_to_make_are_given_up
    ),
    "no state is saved where a prefix branches that was seen twice (vLLM 45238, 57610)": lambda: (
        tests.test_requests_that_share_a_shortened_prefix_hit_as_the_rules_say(100)
    ),
    "no state is saved in the middle of a long prompt": lambda: (
        tests.test_requests_that_share_a_shortened_prefix_hit_as_the_rules_say(100)
    ),
    "the last states of talks go before those of others (vLLM 48435)": (
        tests.test_the_last_state_of_a_talk_goes_with_its_end
    ),
    "samples begin without their source's state": lambda: tests.test_samples_have_states_of_their_own(_FULL, 2, 0),
    "a state that a lost plan was to copy is kept": (beams.test_a_lost_plan_may_not_have_copied_the_states_of_beams),
    "a state that no plan has copied yet is taken for the KV that is there": lambda: (
        beams.test_a_lost_session_that_has_not_copied_a_state_yet(6)
    ),
    "a beam goes on from another state than its parent's": lambda: beams.test_beams_are_those_of_a_search_alone(
        _FULL, 2
    ),
    "beams that come back begin without the state of what they have in common": (
        beams.test_what_beams_have_in_common_is_computed_once_and_held_once
    ),
    "a beam that comes back does not wait where others need its state": (
        beams.test_what_beams_have_in_common_is_computed_once_and_held_once
    ),
    "beams come back behind a hit that not all of them have": (
        beams.test_a_hit_that_ends_behind_what_beams_have_in_common_is_not_taken
    ),
    "a beam to come has no state": lambda: beams.test_beams_that_are_few_keep_a_state_for_those_to_come("recompute"),
    "copies take the last pages": tests.test_copies_take_no_page_that_is_needed,
}


@pytest.mark.slow
@pytest.mark.parametrize("bug", WAYS, ids=lambda bug: bug.name)
def test_a_bug_of_states_in_plans_is_found(bug: SeededBug) -> None:
    check = _FOUND_BY[bug.name]
    check()
    with seeded(bug), pytest.raises((AssertionError, InvariantError, InvalidPlan, ValueError)):
        check()
