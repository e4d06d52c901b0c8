"""Which part of a run counts: the steady window, the warm-up, and whether the server kept up."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from cadenza_loadtest.measures.metrics import measure, steady_window
from cadenza_loadtest.measures.windows import mser5, warm_up_end
from cadenza_loadtest.requests import LoadTestError
from tests.helpers.loadtest.loadtest_runs import columns


@pytest.mark.parametrize(
    ("each_s", "kept"), [(0.1, True), (0.1001, True), (0.105, True), (0.11, False), (0.2, False)], ids=str
)
def test_a_server_keeps_up_if_as_many_end_as_come(each_s: float, kept: bool) -> None:
    """A hundred seconds of ten requests a second, served one after the other; a few more or less may be chance."""
    due_s = np.arange(1000) / 10
    done = (np.arange(1000) + 1) * each_s
    run = columns(due_s=due_s, first_s=done, last_s=done)
    assert measure(run, window=(0.0, 99.9), slo=None).kept_up is kept
    assert measure(run, window=None, slo=None).kept_up is None


def test_long_answers_are_no_sign_of_a_server_that_falls_behind() -> None:
    """A fifth of the run passes before the first request ends; then as many end as arrive."""
    due_s = np.arange(1000) / 10
    run = columns(due_s=due_s, first_s=due_s + 1, last_s=due_s + 20)
    assert measure(run, window=(0.0, 99.9), slo=None).kept_up is True


def test_failed_requests_do_not_wait() -> None:
    due_s = np.arange(100) / 10
    refused = columns(due_s=due_s, sent_s=due_s, error=["RESOURCE_EXHAUSTED"] * 100)
    assert measure(refused, window=(0.0, 9.9), slo=None).kept_up is True


def test_the_steady_window_ends_with_the_last_arrival() -> None:
    run = columns(due_s=[0.0, 4.0, 9.0], first_s=[50.0] * 3, last_s=[60.0] * 3)
    assert steady_window(run) == (0.0, 9.0)
    assert steady_window(run, 2.0, 1.5) == (2.0, 7.5)
    with pytest.raises(LoadTestError, match=r"--warm-up-s: a warm-up of 9 s leaves nothing .* due at 9 s"):
        steady_window(run, 9.0)
    with pytest.raises(LoadTestError, match="cool-down of 5 s"):
        steady_window(run, 4.0, 5.0)
    assert steady_window(columns(due_s=[3.0, 3.0])) is None
    assert steady_window(columns()) is None


def test_a_warm_up_is_found() -> None:
    """TTFTs that fall from 5 s to 0.1 s over the first 100 requests, and then stay."""
    rng = np.random.default_rng(7)
    ttft_s = 0.1 + np.clip(5 - np.arange(500) / 20, 0, None) + rng.normal(0, 0.01, 500)
    due_s = np.arange(500.0)
    run = columns(due_s=due_s, first_s=due_s + ttft_s, last_s=due_s + ttft_s)
    end = warm_up_end(run)
    assert end is not None
    assert 90 <= end <= 110
    assert steady_window(run, None) == (end, 499.0)
    assert steady_window(run.select(run.index < 10), None) == (0.0, 9.0), "too few to find one"


def test_a_queue_that_grows_all_along_has_no_steady_state() -> None:
    assert mser5(np.arange(500.0)) is None


@given(st.lists(st.integers(-100, 100), min_size=20, max_size=120))
def test_mser_is_that_of_a_loop(values: list[int]) -> None:
    means = [sum(values[at : at + 5]) / 5 for at in range(0, len(values) - 4, 5)]
    errors = []
    for cut in range(len(means) - 3):
        rest = means[cut:]
        mean = sum(rest) / len(rest)
        errors.append(sum((value - mean) ** 2 for value in rest) / len(rest) ** 2)
    got = mser5(np.array(values, float))
    if got is None:
        assert min(errors[: len(means) // 2 + 1]) >= min(errors) - 1e-9
    else:
        assert got % 5 == 0
        assert errors[got // 5] == pytest.approx(min(errors), abs=1e-9)
