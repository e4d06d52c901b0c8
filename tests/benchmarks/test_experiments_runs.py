"""Parts of experiments 3 to 6: allocators, the core step by step, counts, and the cost of moving blocks."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from benchmarks.common.rows import BenchmarkError
from benchmarks.experiments.contiguous import (
    Allocator,
    BuddyAllocator,
    ContiguousReservation,
    FirstFitAllocator,
    round_up,
    to_max,
    to_oracle,
    to_power_of_two,
)
from benchmarks.experiments.experiment import Repeated, percent_more, ratio, series
from benchmarks.experiments.memory_runs import paged, reserved
from benchmarks.experiments.preemption_runs import PIECEWISE, WHOLE, with_copies
from benchmarks.experiments.sharing_runs import BEAMS, SAMPLES, widened
from benchmarks.experiments.simulated import a100_13b, apart, fixed, step_through
from cadenza_simulator.executor_profiles import ExecutorProfile, ProfileLimits
from executor_svc.simulated.costs import StepCosts
from scheduler_svc.core.policies.policies import Policies
from scheduler_svc.core.scheduler import Scheduler

SLOTS = 15_696
"""Of the published A100: no power of two."""


def profile(num_blocks: int, block_size: int = 16, max_num_seqs: int = 8, max_model_len: int = 64) -> ExecutorProfile:
    """1 ms a step, whatever is in it."""
    limits = ProfileLimits(
        num_blocks=num_blocks, block_size=block_size, max_num_seqs=max_num_seqs, max_model_len=max_model_len
    )
    return ExecutorProfile(costs=StepCosts(step_us=1000), limits=limits)


# --- allocators -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "rounded"), [(BuddyAllocator, round_up), (FirstFitAllocator, lambda count: count)])
def test_ranges_never_touch_and_all_come_back(make: Callable[[int], Allocator], rounded: Callable[[int], int]) -> None:
    chance = random.Random(5)
    allocator = make(SLOTS)
    taken: dict[int, int] = {}
    num_refused = 0
    for _ in range(3000):
        if taken and chance.random() < 0.45:
            allocator.give(old := chance.choice(list(taken)))
            del taken[old]
            continue
        count = chance.randint(1, 2048)
        start = allocator.take(count)
        if start is None:
            num_refused += 1
            continue
        taken[start] = start + rounded(count)
        assert 0 <= start < taken[start] <= SLOTS
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(sorted(taken.items())))
    assert num_refused > 100
    for old in taken:
        allocator.give(old)
    # Whole again: the largest range that such a pool has.
    assert allocator.take(8192) == 0


def test_a_buddy_range_is_aligned_to_its_size_and_rounded_up() -> None:
    allocator = BuddyAllocator(64)
    assert [allocator.take(5), allocator.take(9), allocator.take(32)] == [0, 16, 32]
    # 8 to 16 is free, and too short.
    assert allocator.take(9) is None
    assert allocator.take(8) == 8


def test_halves_are_joined_when_both_are_free() -> None:
    allocator = BuddyAllocator(16)
    starts = [allocator.take(4) for _ in range(4)]
    assert starts == [0, 4, 8, 12]
    for start in (0, 12, 8):
        allocator.give(start)
    assert allocator.take(16) is None
    assert allocator.take(8) == 8
    allocator.give(8)
    allocator.give(4)
    assert allocator.take(16) == 0


def test_seven_requests_of_2048_fit_as_in_the_paper() -> None:
    allocator = BuddyAllocator(SLOTS)
    assert sum(allocator.take(2048) is not None for _ in range(20)) == 7


def test_first_fit_takes_the_first_hole_that_is_long_enough() -> None:
    allocator = FirstFitAllocator(30)
    assert [allocator.take(10) for _ in range(4)] == [0, 10, 20, None]
    allocator.give(10)
    assert allocator.take(11) is None
    assert [allocator.take(4), allocator.take(6)] == [10, 14]


def test_what_is_reserved() -> None:
    assert to_max(2048)(25, 25) == 2048
    # The paper's example: an output of 25 tokens has 32 slots.
    assert to_power_of_two(2048)(100, 25) == 132
    assert to_power_of_two(2048)(1500, 513) == 2048
    assert to_oracle(100, 25) == 125
    assert [round_up(count) for count in (1, 2, 3, 4, 5)] == [1, 2, 4, 4, 8]


# --- step by step -----------------------------------------------------------------------------------------------------


def test_steps_take_what_they_cost() -> None:
    """Two batches of 4 slots; each request takes one step for its prompt and first token, and 9 more."""
    seen: list[float] = []
    stepped = step_through(
        profile(64, max_num_seqs=4), fixed([8] * 8, [10] * 8), lambda core, seconds: seen.append(seconds)
    )
    assert stepped.duration_s == pytest.approx(20e-3)
    assert stepped.num_steps == len(seen) == 20
    assert sum(seen) == pytest.approx(stepped.duration_s)
    assert stepped.num_preemptions == 0


def test_a_policy_that_admits_no_request_is_an_error() -> None:
    policy = ContiguousReservation(BuddyAllocator(16), to_max(64))
    with pytest.raises(BenchmarkError, match="2 requests wait forever"):
        step_through(
            profile(16, 1), fixed([8] * 2, [4] * 2), lambda core, seconds: None, policies=Policies(batching=policy)
        )


def test_no_more_run_at_once_than_have_a_range() -> None:
    """128 slots, 32 for each: four run at once although 8 batch slots are free, and all are served in the end."""
    counts: list[int] = []
    policy = ContiguousReservation(BuddyAllocator(128), to_max(32))
    stepped = step_through(
        profile(128, 1),
        fixed([4] * 12, [8] * 12),
        lambda core, seconds: counts.append(len(core.lanes[0].running)),
        policies=Policies(batching=policy),
        watermark=0.0,
    )
    assert max(counts) == 4
    assert stepped.num_steps == 3 * 8


def test_samples_share_the_prompts_full_blocks() -> None:
    """A prompt of 40 tokens in blocks of 16: two full ones are shared by 3 samples, 4 holders beyond the first."""
    saved: list[int] = []
    shapes = widened(fixed([40], [8]), SAMPLES, 3)
    step_through(profile(32), shapes, lambda core, seconds: saved.append(core.lanes[0].blocks.num_shared_refs))
    assert saved[2:-1] == [4] * len(saved[2:-1])
    assert len(saved) > 5


@pytest.mark.parametrize("algorithm", [SAMPLES, BEAMS])
def test_apart_nothing_is_shared(algorithm: str) -> None:
    shapes = widened(fixed([40] * 2, [8] * 2), algorithm, 3)
    alone = apart(shapes)
    assert [shape.index for shape in alone] == list(range(6))
    assert {(shape.n, shape.beam_width, shape.num_prompt_tokens) for shape in alone} == {(1, 0, 40)}
    together: list[int] = []
    separate: list[int] = []

    def look(kept: list[int]) -> Callable[[Scheduler, float], None]:
        return lambda core, seconds: kept.append(core.lanes[0].blocks.num_shared_refs)

    step_through(profile(64), shapes, look(together))
    step_through(profile(64), alone, look(separate))
    assert max(together) > 0
    assert max(separate) == 0


# --- use of the pool --------------------------------------------------------------------------------------------------


def test_shares_under_reservation_are_as_computed_by_hand() -> None:
    """256 slots, 64 for each; a request needs KV for 31 tokens, as the last one's is never read."""
    held = reserved(profile(16), fixed([16] * 40, [16] * 40), to_max(64), BuddyAllocator)
    stored, future, internal, external = held.shares
    assert sum(held.shares) == pytest.approx(1)
    assert held.num_sequences == pytest.approx(4)
    assert internal == pytest.approx(33 / 64)
    assert external == 0
    # From 16 tokens, with the prompt's step, to 31: 16 steps, 23.5 on average.
    assert stored == pytest.approx(23.5 / 64)
    assert future == pytest.approx(7.5 / 64)
    assert held.output_tokens_per_s == pytest.approx(4 * 16 / 16e-3)


def test_blocks_hold_more_than_reservation_and_large_ones_less_than_small_ones() -> None:
    shapes = fixed([5 + i % 11 for i in range(60)], [4 + i % 13 for i in range(60)])
    small, large = (paged(profile(32, max_num_seqs=64), shapes, size) for size in (2, 32))
    whole = reserved(profile(32, max_num_seqs=64), shapes, to_max(64), BuddyAllocator)
    assert small.shares[0] > large.shares[0] > whole.shares[0]
    assert small.num_sequences > large.num_sequences > whole.num_sequences == pytest.approx(8)
    for held in (small, large, whole):
        assert sum(held.shares) == pytest.approx(1)
        assert min(held.shares) >= 0


def test_a_pool_for_which_no_request_waits_has_no_shares() -> None:
    with pytest.raises(BenchmarkError, match="no request waited"):
        paged(profile(64), fixed([8] * 2, [8] * 2), 16)


# --- costs and repeats ------------------------------------------------------------------------------------------------


def test_moving_a_block_takes_its_copies_and_its_bytes() -> None:
    # 819,200 bytes a token at 0.8 * 32 GB/s: 32 us; 2.3 us for each of 80 copies, or for one.
    def move_us(block_size: int, layout: str) -> float:
        return with_copies(a100_13b().changed({"block_size": block_size}), layout).costs.moved_block_us

    assert move_us(1, PIECEWISE) == pytest.approx(80 * 2.3 + 32)
    assert move_us(16, PIECEWISE) == pytest.approx(80 * 2.3 + 16 * 32)
    assert move_us(16, WHOLE) == pytest.approx(2.3 + 16 * 32)


def test_repeats_have_a_mean_and_a_range() -> None:
    values = Repeated((1.0, 2.0, 6.0))
    assert (values.mean, values.low, values.high) == (3.0, 1.0, 6.0)
    assert values.text(".1f", " ms") == "3.0 ms (1.0 to 6.0)"
    assert Repeated((0.5, 0.501)).text(".0%") == "50%"
    assert ratio(values, Repeated((2.0, 2.0, 2.0))).values == (0.5, 1.0, 3.0)
    assert percent_more(values, Repeated((2.0, 2.0, 2.0))).values == (-50.0, 0.0, 200.0)
    line = series("a", ["x"], [values], scale=10)
    assert (line.y, line.low, line.high) == ([30.0], [10.0], [60.0])
