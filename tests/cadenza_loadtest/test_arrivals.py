"""Arrival processes: rate, burstiness, the same numbers for the same seed, the same pattern at another rate."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from cadenza_loadtest.arrivals import PROCESSES, make_arrivals
from cadenza_loadtest.requests import LoadTestError

COUNT = 20_000


def times(process: str, rate: float, seed: int = 1, count: int = COUNT, burstiness: float = 1.0) -> np.ndarray:
    return np.array(
        list(itertools.islice(make_arrivals(process, rate, burstiness=burstiness).times(seed), count)), float
    )


def gaps(process: str, rate: float, **options: float) -> np.ndarray:
    return np.diff(times(process, rate, **options), prepend=0.0)


@pytest.mark.parametrize("rate", [0.5, 20.0])
def test_poisson_gaps_are_exponential(rate: float) -> None:
    found = gaps("poisson", rate)
    assert stats.kstest(found, "expon", args=(0, 1 / rate)).pvalue > 0.01
    # Independent of each other: of n pairs the correlation has a standard deviation of 1/sqrt(n).
    assert abs(np.corrcoef(found[1:], found[:-1])[0, 1]) < 4 / math.sqrt(COUNT)


def test_poisson_counts_in_equal_times_have_a_variance_of_their_mean() -> None:
    arrived = times("poisson", 10.0)
    counts = np.bincount(arrived.astype(int))[:-1]
    # The index of dispersion of n Poisson counts has a standard deviation of sqrt(2/n).
    assert counts.var() / counts.mean() == pytest.approx(1, abs=4 * math.sqrt(2 / len(counts)))


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_gaps_have_the_rate_and_the_burstiness(burstiness: float) -> None:
    found = gaps("gamma", 5.0, burstiness=burstiness)
    assert stats.kstest(found, "gamma", args=(burstiness, 0, 1 / (5.0 * burstiness))).pvalue > 0.01
    deviation = 0.2 / math.sqrt(burstiness)
    assert found.mean() == pytest.approx(0.2, abs=4 * deviation / math.sqrt(COUNT))
    assert found.std() / found.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


def test_gamma_of_shape_one_is_poisson() -> None:
    assert (times("gamma", 3.0, count=100) == times("poisson", 3.0, count=100)).all()


def test_constant_gaps() -> None:
    assert times("constant", 4.0, count=5).tolist() == [0.25, 0.5, 0.75, 1.0, 1.25]
    assert times("constant", 3.0)[-1] == COUNT / 3.0, "no error piles up"


@pytest.mark.parametrize("process", PROCESSES)
def test_a_rate_of_inf_is_all_at_once(process: str) -> None:
    assert times(process, math.inf, count=100).tolist() == [0.0] * 100


@pytest.mark.parametrize("process", ["poisson", "gamma"])
@given(seed=st.integers(0, 2**70), count=st.integers(1, 9000))
def test_the_seed_decides_however_many_are_taken(process: str, seed: int, count: int) -> None:
    few, many = times(process, 2.0, seed, count), times(process, 2.0, seed, 9001)
    assert (few == many[:count]).all()
    assert few[0] > 0
    assert (np.diff(many) >= 0).all()
    assert (times(process, 2.0, seed + 1, count) != few).any()


def test_the_sum_is_that_of_all_gaps_at_once() -> None:
    from cadenza_loadtest.seeds import stream

    whole = np.cumsum(stream(7, "arrivals").standard_exponential(COUNT))
    assert (times("poisson", 1.0, 7) == whole).all()


def test_another_rate_stretches_the_same_pattern() -> None:
    slow = make_arrivals("gamma", 2.0, burstiness=0.5)
    fast = slow.scaled(8.0)
    assert (fast.process, fast.rate, fast.burstiness) == ("gamma", 8.0, 0.5)
    pairs = itertools.islice(zip(slow.times(3), fast.times(3), strict=False), 10_000)
    assert all(late == pytest.approx(4 * early, rel=1e-14) for late, early in pairs)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("uniform", 1.0), ["--arrivals uniform", "poisson, gamma, constant"]),
        (("poisson", 0.0), ["--request-rate 0.0", "over 0"]),
        (("poisson", -1.0), ["--request-rate -1.0"]),
        (("poisson", math.nan), ["--request-rate nan"]),
        (("gamma", 1.0, 0.0), ["--burstiness 0.0", "over 0"]),
        (("gamma", 1.0, math.nan), ["--burstiness nan"]),
        (("gamma", 1.0, math.inf), ["--burstiness inf"]),
        (("poisson", 1.0, 0.5), ["--burstiness 0.5", "gamma only"]),
    ],
)
def test_bad_options_are_named(arguments: tuple[str, float, float], words: list[str]) -> None:
    process, rate, *burstiness = arguments
    with pytest.raises(LoadTestError) as caught:
        make_arrivals(process, rate, **({"burstiness": burstiness[0]} if burstiness else {}))
    assert all(word in str(caught.value) for word in words)


def test_a_negative_seed_is_refused_at_once() -> None:
    with pytest.raises(LoadTestError, match="--seed -1: must be 0 or more"):
        make_arrivals("poisson", 1.0).times(-1)
