"""Beams over recurrent states in the core: who gets a copy of whose, what comes back after a preemption, and at what
cost."""

from __future__ import annotations

from collections.abc import Sequence as Ids

import pytest

from scheduler_svc.core.errors import RequestRejectedError
from scheduler_svc.core.kv_groups import KVGroup
from scheduler_svc.core.policies.policies import Policies, Preemption
from scheduler_svc.core.queues.orders import PriorityOrder
from scheduler_svc.core.sequences.sequence import Sequence
from scheduler_svc.core.types import BeamSpec
from tests.helpers.core.core_bench import Bench
from tests.scheduler_svc.core.test_states import KINDS, draw, fill, hits, pool_of, stateful

WIDE = BeamSpec(4)


def check(bench: Bench, *names: str) -> None:
    for name in names:
        assert bench.found(name) == bench.known_beams(name)
    assert not pool_of(bench).states


def urgent(preemption: Preemption = "recompute", *, caching: bool = True) -> Policies:
    return Policies(PriorityOrder(), prefix_caching=caching, preemption=preemption)


@KINDS
@pytest.mark.parametrize("depth", [1, 2])
def test_beams_are_those_of_a_search_alone(groups: Ids[KVGroup], depth: int) -> None:
    bench = stateful(groups=groups, max_num_seqs=8)
    for number, num_prompt in enumerate([30, 32, 3]):
        bench.add(f"b{number}", draw(num_prompt, number), 12, n=2, beams=WIDE)
        bench.add(f"s{number}", draw(num_prompt, number), 12)
        bench.run(depth)
        assert bench.tokens[f"s{number}"] == bench.known(f"s{number}")
    check(bench, "b0", "b1", "b2")


def test_a_state_is_copied_to_each_child_but_the_first_of_its_parent() -> None:
    bench = stateful()
    bench.add("b", draw(30), 12, n=4, beams=WIDE)
    states: dict[Sequence, tuple[int, ...]] = {}
    num_copied = 0
    while (plan := bench.plan()) is not None:
        for group in filter(lambda group: group.forked, bench.core.groups.values()):
            states = states or {beam: beam.state_pages for beam in group.sequences}
            pages = {page: beam for beam in group.sequences for page in beam.state_pages}
            written = [pages[page] for page in plan.copies.destinations if page in pages]
            # The others were described again: only those have other parents.
            again = {admitted.slot for admitted in plan.admitted}
            assert {beam.slot for beam in written} == again
            assert len(written) == 3 * len(again)
            num_copied += len(again)
            assert {beam: beam.state_pages for beam in group.sequences} == states
        bench.apply()
    assert 0 < num_copied < 3 * 12
    check(bench, "b")


@KINDS
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_beams_come_back_as_they_were(groups: Ids[KVGroup], preemption: Preemption) -> None:
    bench = stateful(groups=groups, policies=urgent(preemption), num_host_blocks=300, max_num_seqs=8)
    bench.add("b", draw(30), 40, n=4, beams=WIDE, priority=1)
    for number in range(3):
        for _ in range(11 + number):
            bench.step()
        bench.add(f"urgent {number}", draw(30, number), 2, n=5, priority=0)
        while f"urgent {number}" not in bench.order:
            bench.step()
        assert bench.lane.counts.num_preemptions == number + 1
    bench.run()
    assert (bench.lane.counts.num_swap_preemptions > 0) is (preemption == "swap")
    check(bench, "b")


def preempted(bench: Bench, num_steps: int) -> int:
    """Run beams for so many steps, let them be preempted and end; returns the tokens that are computed from then on."""
    bench.add("b", draw(61), 20, n=4, beams=WIDE, priority=1)
    for _ in range(num_steps):
        bench.step()
    bench.add("urgent", draw(9, 1), 1, n=5, priority=0)
    while "urgent" not in bench.order:
        bench.step()
    assert bench.lane.counts.num_preemptions == 1
    before = bench.num_computed_tokens
    bench.run()
    check(bench, "b")
    return bench.num_computed_tokens - before


def test_what_beams_have_in_common_is_computed_once_and_held_once() -> None:
    """Four beams of 61 + 10 tokens have 61 in common: alone, each would need 18 blocks, and the pool has 48."""
    bench = stateful(4 * 3 + 48, policies=urgent(caching=False), max_num_seqs=8)
    assert preempted(bench, 11) < 61 + 4 * 24


def test_beams_go_on_behind_the_state_that_was_saved_at_the_end_of_their_prompt() -> None:
    bench = stateful(policies=urgent(), max_num_seqs=8)
    assert preempted(bench, 11) < 4 * 24
    assert bench.lane.blocks.prefix_counts.num_hits == 60


def test_a_hit_that_ends_behind_what_beams_have_in_common_is_not_taken() -> None:
    """Another request has saved the state behind a beam's output: the others cannot begin there."""
    bench = stateful(policies=urgent(), max_num_seqs=8)
    bench.add("b", draw(30), 20, n=4, beams=WIDE, priority=1)
    for _ in range(16):
        bench.step()
    best = bench.sequences("b")[0]
    bench.add("same", best.token_ids, 2, priority=1)
    for _ in range(3):
        bench.step()
    bench.add("urgent", draw(9, 1), 1, n=5, priority=0)
    before = bench.lane.blocks.prefix_counts.num_hits
    while "urgent" not in bench.order:
        bench.step()
    bench.run()
    assert bench.lane.counts.num_preemptions > 0
    assert bench.lane.blocks.prefix_counts.num_hits == before
    check(bench, "b")


def test_beams_begin_behind_a_hit() -> None:
    bench, text = stateful(max_num_seqs=8), draw(60)
    assert hits(bench, "a", text, 4) == 0
    fill(bench, 1)
    bench.add("b", (*text, *draw(5, 1)), 9, n=2, beams=WIDE)
    bench.run()
    assert bench.lane.blocks.prefix_counts.num_hits == 56
    check(bench, "b")


def test_beams_that_no_pool_holds_are_refused_with_the_field() -> None:
    bench = stateful(8 + 3 * 4 + 3, max_num_seqs=8)
    bench.add("b", draw(30), 2, beams=WIDE)
    with pytest.raises(RequestRejectedError, match="5 sequences need 27 pages of KV; the pool has 23"):
        bench.add("c", draw(30), 2, beams=BeamSpec(5))
    bench.run()
    check(bench, "b")


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_beams_that_are_few_keep_a_state_for_those_to_come(preemption: Preemption) -> None:
    """Two tokens are allowed: two beams run, then four, then five. Preempted between, they come back with five states,
    of which the pool holds no more."""
    bench = stateful(5 * 3 + 14, policies=urgent(preemption), num_host_blocks=90, max_num_seqs=8, num_slots=9)
    bench.add("b", draw(3), 6, n=5, beams=BeamSpec(5), allowed_token_ids=(7, 8), priority=1)
    while not (beams := bench.sequences("b"))[0].num_output_tokens:
        bench.step(1)
    assert sum(beam.is_spare_beam for beam in beams) == 3
    bench.add("urgent", draw(5, 1), 1, n=4, priority=0)
    while "urgent" not in bench.order:
        bench.step(1)
    while bench.core.groups:
        bench.step(1)
        if "b" in bench.order[1:] and ("", "b") in bench.core.groups:
            assert all(len(beam.state_pages) == 3 for beam in beams if beam.slot is not None)
    assert bench.lane.counts.num_preemptions == 1
    check(bench, "b")


def test_a_lost_plan_may_not_have_copied_the_states_of_beams() -> None:
    """A prompt takes the budget of the plan that copies a state to the beams that come back: nothing else of them is
    in it."""
    bench = stateful(policies=urgent(caching=False), max_num_seqs=8, max_num_batched_tokens=12)
    bench.add("b", draw(30), 20, n=2, beams=BeamSpec(2), priority=2)
    for _ in range(10):
        bench.step()
    bench.add("urgent", draw(60, 1), 1, n=7, priority=0)
    while "urgent" not in bench.order or ("", "urgent") in bench.core.groups:
        bench.step()
    beams = bench.sequences("b")
    while not any(beam.kv_source for beam in beams):
        bench.step(1)
    bench.add("prompt", draw(100, 2), 1, priority=1)
    while (plan := bench.plan()) is None or not plan.copies:
        bench.apply()
    assert not {chunk.sequence for chunk in bench.lane.inflight[-1].chunks} & set(beams)
    bench.cut_session()
    bench.run()
    check(bench, "b")


@pytest.mark.parametrize("num_steps", [6, 7])
def test_a_lost_session_that_has_not_copied_a_state_yet(num_steps: int) -> None:
    """The first beam has computed all that the second one waits for, up to its own last token: the KV is there."""
    bench = stateful(block_size=1, policies=urgent(caching=False))
    bench.add("b", draw(9, 2), 12, n=2, beams=BeamSpec(2), priority=2)
    for _ in range(num_steps):
        bench.step()
    bench.add("urgent", draw(9, 1), 1, n=3, priority=0)
    while "urgent" not in bench.order or ("", "urgent") in bench.core.groups:
        bench.step(1)
    beams = bench.sequences("b")
    while not any(beam.num_computed_tokens for beam in beams):
        bench.step(1)
    assert [beam.num_uncomputed_tokens for beam in beams] == [1, 1]
    assert beams[1].kv_source is beams[0]
    bench.cut_session()
    bench.run()
    check(bench, "b")
