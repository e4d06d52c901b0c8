"""Measured rates: what they say before and after the first measurements, and which steps they leave out."""

from __future__ import annotations

import pytest

from scheduler_svc.core.rates import MeasuredRates


def test_before_both_are_measured_blocks_are_moved() -> None:
    rates = MeasuredRates()
    assert (rates.ns_per_token, rates.ns_per_block) == (None, None)
    assert rates.swap_is_cheaper(1, 1000)
    assert rates.swap_in_is_cheaper(1, 1000)
    rates.observe(100, 0, 100_000, 0)
    assert (rates.ns_per_token, rates.ns_per_block) == (1000, None)
    assert rates.swap_is_cheaper(1, 1000)
    rates.observe(0, 10, 0, 50_000)
    assert (rates.ns_per_token, rates.ns_per_block) == (1000, 5000)
    assert not rates.swap_is_cheaper(1, 1000)
    assert rates.swap_is_cheaper(16, 1)


def test_a_swap_is_paid_both_ways_a_swap_in_once_and_a_draw_goes_to_computing() -> None:
    rates = MeasuredRates()
    rates.observe(100, 100, 100_000, 800_000)  # 1 us a token, 8 us a block
    assert not rates.swap_is_cheaper(16, 1)
    assert rates.swap_is_cheaper(17, 1)
    assert not rates.swap_in_is_cheaper(8, 1)
    assert rates.swap_in_is_cheaper(9, 1)


@pytest.mark.parametrize(
    ("num_tokens", "num_moved", "device_ns", "moves_ns"), [(15, 0, 9_000_000, 0), (64, 0, 0, 0), (0, 4, 0, 0)]
)
def test_steps_that_say_nothing_change_nothing(num_tokens: int, num_moved: int, device_ns: int, moves_ns: int) -> None:
    rates = MeasuredRates()
    rates.observe(100, 100, 100_000, 800_000)
    rates.observe(num_tokens, num_moved, device_ns, moves_ns)
    assert (rates.ns_per_token, rates.ns_per_block) == (1000, 8000)


def test_long_steps_weigh_more_and_old_ones_fade() -> None:
    rates = MeasuredRates()
    rates.observe(16, 0, 16 * 10_000, 0)
    rates.observe(1600, 0, 1600 * 1000, 0)
    assert 1000 < rates.ns_per_token < 1100
    for _ in range(100):
        rates.observe(16, 1, 16 * 10_000, 3000)
    assert rates.ns_per_token == pytest.approx(10_000, rel=0.01)
    assert rates.ns_per_block == pytest.approx(3000)
