"""Batching policies on a virtual clock: when groups join, and how much memory they take."""

from __future__ import annotations

import pytest

from scheduler_svc.core.policies.batching import MAX_WAITING_STEPS, ContinuousBatching, StaticBatching
from scheduler_svc.core.policies.policies import Policies
from scheduler_svc.core.types import BeamSpec, FinishDetail
from tests.helpers.core.core_bench import Bench


def static(batch_size: int, window_s: float | None = None, **limits: int) -> Bench:
    return Bench(Policies(batching=StaticBatching(batch_size, window_s)), **limits)


def test_a_static_batch_waits_until_it_is_full_and_runs_until_its_longest_sequence_ends() -> None:
    bench = static(3)
    bench.add("short", 3, max_tokens=2)
    bench.add("long", 3, max_tokens=9)
    for _ in range(5):
        bench.step()
    assert bench.order == [], "two are no batch"
    for name in ("middle", "next a", "next b"):
        bench.add(name, 3, max_tokens=4)
    while "long" not in bench.details:
        assert set(bench.order) <= {"short", "long", "middle"}, "nothing joins a running batch"
        bench.step()
    for _ in range(3):
        bench.step()
    assert bench.order == ["short", "long", "middle"], "two wait for a third"
    bench.add("next c", 3, max_tokens=2)
    bench.run()
    assert bench.order[3:] == ["next a", "next b", "next c"]
    assert bench.tokens["long"] == bench.known("long")


def test_a_draining_service_starts_a_batch_that_is_not_full() -> None:
    bench = static(8)
    bench.add("alone", 3, max_tokens=3)
    bench.step()
    assert bench.order == []
    bench.core.drain(True)
    bench.run()
    assert bench.details["alone"] is FinishDetail.MAX_TOKENS


def test_a_static_batch_reserves_its_whole_length() -> None:
    bench = static(2, num_blocks=12)
    for name in ("a", "b", "c"):
        bench.add(name, 4, max_tokens=17)  # 20 tokens with KV: 5 blocks of 4
    bench.step()
    blocks = bench.core.lanes[0].blocks
    assert blocks.pool.num_free == 2
    assert [blocks.num_reserved(sequence) for sequence in bench.core.lanes[0].running] == [3, 3]
    bench.run()
    assert bench.core.num_preemptions == 0, "what is reserved is never fought over"
    assert bench.order == ["a", "b"]


def test_what_memory_keeps_out_of_a_batch_waits_for_the_next() -> None:
    bench = static(3, num_blocks=12)
    for name in ("a", "b", "c", "d", "e"):
        bench.add(name, 4, max_tokens=17 if name in "abc" else 3)
    while "a" not in bench.details:
        assert set(bench.order) <= {"a", "b"}
        bench.step()
    bench.run()
    assert bench.order == ["a", "b", "c", "d", "e"]


def test_long_prompts_of_a_batch_join_step_by_step() -> None:
    bench = static(3)  # 16 tokens a step
    for name in ("a", "b", "c"):
        bench.add(name, 14, max_tokens=3)
    bench.run()
    assert bench.order == ["a", "b", "c"]
    assert all(tokens == bench.known(name) for name, tokens in bench.tokens.items())


def test_a_dynamic_batch_starts_when_its_window_is_over() -> None:
    bench = static(8, 5.0)
    bench.now = 100.0
    bench.add("first", 3, max_tokens=2)
    bench.now = 103.0
    bench.add("second", 3, max_tokens=4)
    assert bench.plan() is None
    assert bench.core.wakes_at(0, bench.now) == 105.0
    bench.now = 105.0
    bench.run()
    assert bench.order == ["first", "second"]
    assert bench.core.wakes_at(0, bench.now) is None


def test_a_dynamic_batch_whose_window_is_over_but_that_has_no_slot_waits_for_a_result() -> None:
    bench = static(8, 5.0, max_num_seqs=1, num_slots=1)
    bench.core.drain(True)
    bench.add("first", 3)
    assert bench.plan() is not None
    bench.core.drain(False)
    bench.add("second", 3)
    bench.core.abort(("", "first"), FinishDetail.ABORTED)
    bench.now = 10.0
    assert bench.plan() is not None, "it releases the slot"
    assert bench.plan() is None, "the slot is free after the first result"
    assert bench.core.wakes_at(0, bench.now) is None, "the loop would plan again at once, and again"


def test_a_dynamic_batch_that_is_full_does_not_wait() -> None:
    bench = static(2, 5.0)
    bench.add("a", 3)
    bench.add("b", 3)
    bench.add("late", 3)
    assert bench.plan() is not None
    assert bench.order == ["a", "b"]
    assert bench.core.wakes_at(0, bench.now) is None, "while a batch runs, only results trigger planning"


def test_newcomers_are_held_back_until_enough_wait() -> None:
    bench = Bench(Policies(batching=ContinuousBatching(waiting_served_ratio=1.0)), num_slots=16)
    bench.add("a", 3, max_tokens=40)
    bench.step()
    bench.add("b", 3, max_tokens=40)
    bench.step()
    assert bench.order == ["a", "b"], "one waits, one runs"
    bench.add("c", 3, max_tokens=40)
    for _ in range(5):
        bench.step()
    assert bench.order == ["a", "b"], "one waits, two run"
    bench.add("d", 3, max_tokens=40)
    bench.step()
    assert bench.order == ["a", "b", "c", "d"]


def test_newcomers_are_not_held_back_for_ever() -> None:
    bench = Bench(Policies(batching=ContinuousBatching(waiting_served_ratio=9.0)))
    bench.add("a", 3, max_tokens=40)
    for _ in range(3):
        bench.step(depth=1)  # Nobody waits: these do not count.
    bench.add("b", 3, max_tokens=40)
    steps = 0
    while "b" not in bench.order:
        bench.step(depth=1)
        steps += 1
    assert steps == MAX_WAITING_STEPS + 1


@pytest.mark.parametrize(("threshold", "first_token_of_short"), [(0, 6.0), (4, 2.0)])
def test_a_long_prompt_leaves_budget_for_short_ones(threshold: int, first_token_of_short: float) -> None:
    bench = Bench(Policies(long_prefill_token_threshold=threshold), max_num_batched_tokens=16, max_model_len=256)
    bench.add("long", 80, max_tokens=2)
    bench.step(depth=1)
    bench.add("short", 3, max_tokens=8)
    while not bench.tokens["short"]:
        bench.step(depth=1)
    assert bench.now == first_token_of_short
    bench.run()
    assert bench.tokens["long"] == bench.known("long")


def test_continuous_batches_reserve_nothing() -> None:
    bench = Bench()
    for index in range(4):
        bench.add(str(index), 3 + index, max_tokens=30)
    lane = bench.core.lanes[0]
    while len(bench.details) < 4:
        bench.step()
        assert not any(map(lane.blocks.num_reserved, lane.running))


def test_what_memory_kept_out_of_a_static_batch_runs_next_without_waiting_for_company() -> None:
    bench = static(3, num_blocks=12)
    for name in ("a", "b", "c"):
        bench.add(name, 4, max_tokens=17)  # 5 blocks each
    bench.run()
    assert bench.order == ["a", "b", "c"]
    assert bench.tokens["c"] == bench.known("c")


def test_those_that_were_in_a_static_batch_go_on_after_their_executor_was_lost() -> None:
    bench = static(3)
    bench.add("short", 3, max_tokens=2)
    for name in ("a", "b"):
        bench.add(name, 3, max_tokens=20)
    while "short" not in bench.details:
        bench.step()
    bench.lose_executor()
    bench.run()
    assert [bench.tokens[name] for name in ("a", "b")] == [bench.known("a"), bench.known("b")]


def test_a_static_batch_starts_for_one_that_is_overdue() -> None:
    bench = Bench(Policies(batching=StaticBatching(4), max_wait_s=3.0))
    bench.add("alone", 3, max_tokens=2)
    bench.step()
    assert bench.order == []
    assert bench.core.wakes_at(0, bench.now) == 3.0
    for _ in range(3):
        bench.step()
    assert bench.order == ["alone"]


def test_a_static_batch_reserves_for_beams_too() -> None:
    bench = static(2, num_blocks=40, max_num_seqs=8, num_slots=12)
    for name in ("a", "b"):
        bench.add(name, 6, max_tokens=15, beams=BeamSpec(3))  # a full block of prompt, and 4 more for each beam
    bench.step(depth=1)
    assert bench.lane.blocks.num_free == 40 - 2 * 13
    assert bench.lane.num_reserved_tokens == 4 * 2 * (13 - 2)
    free = []
    while len(bench.details) < 2:
        bench.step(depth=1)
        free.append(bench.lane.blocks.num_free)
    bench.run()
    assert min(free) >= 40 - 2 * 13
    assert bench.core.num_preemptions == 0
    assert bench.lane.blocks.num_free == 40
    assert [bench.found(name) for name in ("a", "b")] == [bench.known_beams(name)[:1] for name in ("a", "b")]
