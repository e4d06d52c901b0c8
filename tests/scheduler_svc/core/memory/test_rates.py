"""Measured rates: what they say before and after the first measurements, and what a token adds to a step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.core.memory.rates import MeasuredRates

STEP_NS, TOKEN_NS = 25_000_000, 100_000


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


@pytest.mark.parametrize(("num_tokens", "num_moved", "device_ns", "moves_ns"), [(64, 0, 0, 0), (0, 4, 0, 0)])
def test_steps_that_say_nothing_change_nothing(num_tokens: int, num_moved: int, device_ns: int, moves_ns: int) -> None:
    rates = MeasuredRates()
    rates.observe(100, 100, 100_000, 800_000)
    rates.observe(num_tokens, num_moved, device_ns, moves_ns)
    assert (rates.ns_per_token, rates.ns_per_block) == (1000, 8000)


@given(st.lists(st.integers(1, 4096), min_size=2).filter(lambda sizes: len({size.bit_length() for size in sizes}) > 1))
def test_a_token_costs_what_it_adds_to_a_step(sizes: list[int]) -> None:
    """Whatever steps were seen, if there were two sizes of them."""
    rates = MeasuredRates()
    for size in sizes:
        rates.observe(size, 0, STEP_NS + size * TOKEN_NS, 0)
    assert rates.ns_per_token == pytest.approx(TOKEN_NS)


def test_decodes_do_not_make_a_token_dear_nor_forget_what_prompts_took() -> None:
    rates = MeasuredRates()
    for _ in range(3):
        rates.observe(512, 0, STEP_NS + 512 * TOKEN_NS, 0)
    for _ in range(1000):
        rates.observe(20, 0, STEP_NS + 20 * TOKEN_NS, 0)
    assert rates.ns_per_token == pytest.approx(TOKEN_NS)
    rates.observe(0, 1, 0, 40 * TOKEN_NS)
    assert not rates.swap_is_cheaper(64, 1), "64 tokens cost 64 times what one adds, not 64 shares of a step"


def test_a_step_that_takes_no_longer_for_its_tokens_makes_them_free() -> None:
    rates = MeasuredRates()
    rates.observe(100, 1, STEP_NS - 1, 10)
    rates.observe(1, 1, STEP_NS, 10)
    assert rates.ns_per_token == 0
    assert not rates.swap_is_cheaper(1000, 1)


def test_old_steps_of_a_size_fade() -> None:
    rates = MeasuredRates()
    for size, token_ns in [(16, 10_000), (1600, 10_000), *[(16, 1000), (1600, 1000)] * 100]:
        rates.observe(size, 1, size * token_ns, 3000)
    assert rates.ns_per_token == pytest.approx(1000, rel=0.01)
    assert rates.ns_per_block == pytest.approx(3000)
