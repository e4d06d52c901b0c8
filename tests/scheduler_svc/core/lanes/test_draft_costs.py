"""What drafts add to a step, from measured times by batch size and number of drafts."""

from __future__ import annotations

import pytest

from scheduler_svc.core.lanes.draft_costs import DraftCosts, bucket_of


def add(costs: DraftCosts, num_decodes: int, most: int, ns: int, *, times: int = 4, start: int = 1) -> int:
    for now in range(start, start + times):
        costs.observe(bucket_of(num_decodes), most, num_decodes, most * num_decodes, ns, now)
    return start + times


def share(costs: DraftCosts, num_decodes: int, most: int) -> float | None:
    found = costs.extra(bucket_of(num_decodes), most)
    return None if found is None else found[0]


def test_buckets_are_one_per_size_up_to_8_then_four_per_octave() -> None:
    buckets = [bucket_of(size) for size in range(1, 129)]
    assert buckets[:8] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert buckets == sorted(buckets)
    assert set(buckets) == set(range(1, buckets[-1] + 1)), "none is left out"
    assert [bucket_of(size) for size in (8, 16, 32, 64, 128)] == [8, 12, 16, 20, 24]


def test_the_cost_is_relative_to_steps_without_drafts_of_the_same_size() -> None:
    costs = DraftCosts(3)
    assert costs.extra(4, 2) is None
    now = add(costs, 4, 0, 1000)
    assert costs.extra(4, 2) is None
    add(costs, 4, 2, 1300, start=now)
    assert costs.extra(4, 2) == (pytest.approx(0.3), pytest.approx(2.0))
    assert costs.has(4, 2)
    assert not costs.has(4, 1)


def test_one_step_is_no_measurement() -> None:
    costs = DraftCosts(1)
    add(costs, 4, 0, 1000, times=1)
    add(costs, 4, 1, 1100, times=2, start=2)
    assert not costs.has(4, 0)
    assert costs.extra(4, 1) is None


@pytest.mark.parametrize(
    ("plain_size", "is_near"), [(5, True), (6, True), (3, True), (2, True), (7, False), (1, False)]
)
def test_steps_without_drafts_of_near_sizes_are_compared_with(plain_size: int, is_near: bool) -> None:
    """Up to two buckets away; half of the difference in size counts."""
    costs = DraftCosts(2)
    now = add(costs, 4, 2, 3000)
    add(costs, plain_size, 0, 1000, start=now)
    expected = 3000 / (1000 * (1 + 0.5 * (4 / plain_size - 1))) - 1
    assert share(costs, 4, 2) == (pytest.approx(expected) if is_near else None)


def test_the_nearest_steps_without_drafts_count() -> None:
    costs = DraftCosts(1)
    now = add(costs, 4, 1, 2000)
    now = add(costs, 6, 0, 9000, start=now)
    now = add(costs, 5, 0, 1600, start=now)
    assert share(costs, 4, 1) == pytest.approx(2000 / (1600 * 0.9) - 1)
    add(costs, 4, 0, 1000, start=now)
    assert share(costs, 4, 1) == pytest.approx(1.0)


def test_what_is_not_measured_is_taken_from_the_nearest_size_larger_ones_first() -> None:
    costs = DraftCosts(1)
    now = 1
    for size, with_drafts in ((2, 1100), (6, 1500), (64, 3000)):
        now = add(costs, size, 0, 1000, start=now)
        now = add(costs, size, 1, with_drafts, start=now)
    assert [share(costs, size, 1) for size in (1, 3, 4, 5, 8, 28, 64, 200)] == pytest.approx(
        [0.1, 0.1, 0.5, 0.5, 0.5, 2.0, 2.0, 2.0]
    )
    assert share(costs, 1000, 1) is None, "over two octaves away"


def test_a_neighbour_must_have_both_measurements_itself() -> None:
    """Else one guess would rest on another."""
    costs = DraftCosts(1)
    now = add(costs, 4, 0, 1000)
    add(costs, 5, 1, 2000, start=now)
    assert share(costs, 5, 1) is not None
    assert share(costs, 8, 1) is None


def test_few_outliers_count_little_and_many_are_the_truth() -> None:
    costs = DraftCosts(1)
    now = add(costs, 4, 0, 1000, times=20)
    now = add(costs, 4, 1, 1200, times=20, start=now)
    now = add(costs, 4, 1, 500_000, times=2, start=now)
    found = share(costs, 4, 1)
    assert found is not None
    assert 0.2 < found < 0.35
    add(costs, 4, 1, 2400, times=8, start=now)
    assert share(costs, 4, 1) == pytest.approx(1.4, abs=0.1)


def test_a_first_step_that_was_too_long_is_forgotten() -> None:
    """Such as one that compiled something."""
    costs = DraftCosts(1)
    now = add(costs, 4, 0, 1000)
    now = add(costs, 4, 1, 90_000, times=2, start=now)
    add(costs, 4, 1, 1100, times=3, start=now)
    assert share(costs, 4, 1) == pytest.approx(0.1)


def test_drafts_never_make_a_step_shorter() -> None:
    costs = DraftCosts(1)
    add(costs, 4, 0, 1000)
    add(costs, 4, 1, 900, start=5)
    assert share(costs, 4, 1) == 0
