"""Expected drafts and accepted drafts from counts by position."""

from __future__ import annotations

import random

import pytest

from scheduler_svc.core.lanes.draft_acceptance import DraftAcceptance


def feed(
    acceptance: DraftAcceptance,
    most: int,
    num_results: int,
    share: float,
    start: int = 1,
    num_drafting: int = 1,
    found: float = 1.0,
    seed: int = 0,
) -> int:
    """Results in which each draft is accepted with probability `share`; returns the number of the next result."""
    rng = random.Random(seed)
    for now in range(start, start + num_results):
        drafted, accepted = [0] * most, [0] * most
        for _ in range(num_drafting):
            if rng.random() >= found:
                continue
            right = True
            for index in range(most):
                drafted[index] += 1
                right = right and rng.random() < share
                accepted[index] += right
        acceptance.observe(num_drafting, drafted, accepted, now)
    return start + num_results


def mean(acceptance: DraftAcceptance, most: int) -> float:
    return acceptance.expected()[1][most]


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 0.95])
def test_expected_counts_are_those_of_the_drafts(share: float) -> None:
    acceptance = DraftAcceptance(4)
    feed(acceptance, 4, 300, share, num_drafting=8)
    num_drafts, num_accepted = acceptance.expected()
    assert num_drafts == pytest.approx([0, 1, 2, 3, 4], abs=0.01)
    expected = [sum(share**position for position in range(1, most + 1)) for most in range(5)]
    assert num_accepted == pytest.approx(expected, rel=0.1, abs=0.03)


def test_drafts_that_are_seldom_found_leave_the_acceptance_of_others_as_it_is() -> None:
    acceptance = DraftAcceptance(3)
    feed(acceptance, 3, 500, 0.8, num_drafting=20, found=0.1)
    num_drafts, num_accepted = acceptance.expected()
    assert acceptance.coverage == pytest.approx(0.1, abs=0.05)
    assert num_drafts[3] == pytest.approx(3 * acceptance.coverage, rel=0.1)
    assert num_accepted[3] / num_drafts[3] == pytest.approx((0.8 + 0.64 + 0.512) / 3, rel=0.15)


def test_a_position_that_was_never_tried_takes_the_share_before_it() -> None:
    acceptance = DraftAcceptance(4)
    feed(acceptance, 1, 400, 0.5)
    one, two, three = acceptance.expected()[1][1:4]
    assert one == pytest.approx(0.5, abs=0.08)
    assert (two - one, three - two) == pytest.approx((one**2, one**3))


@pytest.mark.parametrize("num_drafting", [1, 2, 16])
@pytest.mark.parametrize(
    ("before", "after", "tolerance"), [(0.9, 0.0, 0.06), (0.9, 0.3, 0.32), (0.3, 0.9, 0.32), (0.0, 0.6, 0.32)]
)
def test_a_sudden_change_is_noticed_wherever_it_falls_in_a_block(
    num_drafting: int, before: float, after: float, tolerance: float
) -> None:
    """Within three blocks of 32 trials, at all positions; a mean of 400 alone would need several hundreds."""
    expected = after + after**2 + after**3
    for shift in range(0, 32, 3):
        acceptance = DraftAcceptance(3)
        now = feed(acceptance, 3, 900 // num_drafting + shift, before, num_drafting=num_drafting)
        feed(acceptance, 3, 96 // num_drafting, after, now, num_drafting, seed=shift)
        assert mean(acceptance, 3) == pytest.approx(expected, abs=tolerance), shift
        assert mean(acceptance, 1) == pytest.approx(after, abs=0.15), shift


def test_a_sudden_change_at_the_first_position_casts_doubt_on_the_next() -> None:
    """They are tried with other numbers of drafts only: what is known of them is of the former kind."""
    acceptance = DraftAcceptance(3)
    now = feed(acceptance, 3, 500, 0.3)
    changed = []
    for index in range(60):
        changed.append(acceptance.observe(1, [1], [1], now + index))
    assert changed.count(True) == 1
    assert changed.index(True) < 64
    assert mean(acceptance, 3) > 2 * (0.3 + 0.09 + 0.027)


def test_steady_acceptance_is_no_sudden_change() -> None:
    rng = random.Random(5)
    for share in (0.02, 0.3, 0.5, 0.8, 0.98):
        acceptance = DraftAcceptance(1)
        changes = [acceptance.observe(1, [1], [int(rng.random() < share)], now) for now in range(1, 4000)]
        assert sum(changes) <= 1, share
        assert mean(acceptance, 1) == pytest.approx(share, abs=0.08)


def test_evidence_of_long_ago_is_outweighed_soon() -> None:
    acceptance = DraftAcceptance(1)
    now = feed(acceptance, 1, 400, 0.9)
    kept = mean(acceptance, 1)
    for index in range(12):
        acceptance.observe(1, [1], [0], now + 1000 + index)
    assert kept > 0.85
    assert mean(acceptance, 1) < 0.3


def test_without_drafts_there_is_nothing_to_expect() -> None:
    acceptance = DraftAcceptance(2)
    before = acceptance.expected()
    acceptance.observe(3, [0, 0], [0, 0], 1)
    acceptance.observe(0, [], [], 2)
    num_drafts, num_accepted = acceptance.expected()
    assert num_drafts[1] < before[0][1]
    assert num_accepted[1] / num_drafts[1] == pytest.approx(before[1][1] / before[0][1])
