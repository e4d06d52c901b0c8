"""Distributions of lengths: draws have the stated mean, the limits and the requested form."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from cadenza_loadtest.requests import LoadTestError
from cadenza_loadtest.workloads.lengths import (
    FORMS,
    SHAREGPT_MEAN_INPUT,
    SHAREGPT_MEAN_OUTPUT,
    lengths_of,
    lognormal_text,
    parse_lengths,
    sharegpt_lengths,
)

COUNT = 100_000


def draw(text: str, count: int = COUNT, seed: int = 5) -> np.ndarray:
    return parse_lengths(text, "--input-len").draw(np.random.default_rng(seed), count)


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [
        ("128", 128, 128),
        ("1", 1, 1),
        ("uniform:16:256", 16, 256),
        ("uniform:7:7", 7, 7),
        ("exponential:64:8:256", 8, 256),
        ("exponential:300:8:256", 8, 256),
        ("exponential:64", 1, None),
        ("lognormal:300:1.2:4:2048", 4, 2048),
        ("lognormal:300:0.5", 1, None),
        ("normal:256:64:1:300", 1, 300),
        ("normal:256:64", 1, None),
        ("normal:50:200:10:90", 10, 90),
    ],
)
def test_draws_have_the_mean_and_keep_the_limits(text: str, low: int, high: int | None) -> None:
    lengths = parse_lengths(text, "--input-len")
    found = draw(text)
    assert found.dtype == np.int64
    assert found.shape == (COUNT,)
    assert lengths.max == high
    assert found.min() >= low
    assert high is None or found.max() <= high
    # Four standard errors, and the possible shift by rounding to whole tokens.
    assert lengths.mean == pytest.approx(found.mean(), abs=4 * found.std() / math.sqrt(COUNT) + 0.01)


def test_uniform_takes_each_length_as_often() -> None:
    counts = np.bincount(draw("uniform:3:12"))[3:]
    assert len(counts) == 10
    assert stats.chisquare(counts).pvalue > 0.01


@pytest.mark.parametrize(
    ("text", "distribution"),
    [
        ("exponential:5000", stats.expon(0, 5000)),
        ("normal:9000:1000", stats.norm(9000, 1000)),
        # SIGMA is of the logarithm, MEAN of the lengths: a median of MEAN / exp(SIGMA²/2).
        ("lognormal:20000:1.5", stats.lognorm(1.5, 0, 20000 / math.exp(1.5**2 / 2))),
    ],
)
def test_forms(text: str, distribution: object) -> None:
    found = draw(text, 10_000)
    # Ties by rounding are rare at such means; half a token moves the distribution by little.
    assert stats.kstest(found, distribution.cdf).pvalue > 0.01


@pytest.mark.slow
@given(
    mean=st.floats(1, 5000),
    shape=st.floats(0.05, 2.5),
    low=st.integers(1, 300),
    span=st.integers(1, 4000),
    form=st.sampled_from(["exponential:{mean}:{low}:{high}", "lognormal:{mean}:{shape}:{low}:{high}", "normal"]),
)
def test_the_clipped_mean_is_that_of_integration(mean: float, shape: float, low: int, span: int, form: str) -> None:
    high = low + span
    std = shape * mean
    form = "normal:{mean}:{std}:{low}:{high}" if form == "normal" else form
    lengths = lengths_of(form.format(mean=mean, shape=shape, std=std, low=low, high=high))
    exact = {
        "e": stats.expon(0, mean),
        "l": stats.lognorm(shape, 0, mean / math.exp(shape**2 / 2)),
        "n": stats.norm(mean, std),
    }[form[0]]
    # E[clip(X, low, high)] = low + the integral of P(X > x) from low to high, here by the midpoints of 2^16 strips,
    # narrow where most happens.
    edges = np.geomspace(low, high, 2**16 + 1)
    expected = low + exact.sf((edges[1:] + edges[:-1]) / 2) @ np.diff(edges)
    assert lengths.mean == pytest.approx(expected, rel=1e-4)


def test_lengths_are_at_least_one() -> None:
    assert draw("normal:1:50").min() == 1
    assert draw("exponential:0.001").tolist() == [1] * COUNT


def test_a_long_tail_does_not_overflow() -> None:
    for text in ("exponential:1e12", "lognormal:1e300:1", "normal:1e18:1"):
        assert np.median(draw(text)) == 2**31 - 1


def test_sharegpt_has_the_published_means() -> None:
    texts = sharegpt_lengths()
    for text, mean in zip(texts, (161.31, 337.99), strict=True):
        found = draw(text)
        assert lengths_of(text).mean == pytest.approx(mean, rel=1e-5)
        assert found.mean() == pytest.approx(mean, abs=4 * found.std() / math.sqrt(COUNT))
        assert found.min() >= 4
        assert found.max() == 1024
    assert (SHAREGPT_MEAN_INPUT, SHAREGPT_MEAN_OUTPUT) == (161.31, 337.99)


@given(low=st.integers(1, 50), factor=st.floats(1.5, 10), room=st.floats(1.5, 20), sigma=st.floats(0.3, 2))
def test_lognormal_text_finds_the_mean(low: int, factor: float, room: float, sigma: float) -> None:
    mean = low * factor
    text = lognormal_text(mean, sigma, low, math.ceil(mean * room))
    assert lengths_of(text).mean == pytest.approx(mean, rel=1e-4)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", FORMS),
        ("many", FORMS),
        ("0", "the length must be from 1 to 2147483647 tokens, not 0"),
        ("-5", FORMS),
        ("1.5", FORMS),
        ("12:13", FORMS),
        ("zipf:3", FORMS),
        ("uniform:16", "uniform takes LOW and HIGH, as in uniform:16:256"),
        ("uniform:1:2:3", "uniform takes LOW and HIGH"),
        ("uniform:a:3", "LOW must be a whole number of tokens, not 'a'"),
        ("uniform:0:3", "LOW must be from 1"),
        ("uniform:9:3", "LOW 9 is over HIGH 3"),
        ("uniform:1:9999999999", "HIGH must be from 1 to 2147483647 tokens"),
        ("exponential:", "MEAN must be a number, not ''"),
        ("exponential:64:8", "exponential takes MEAN, or MEAN, LOW and HIGH"),
        ("exponential:0", "MEAN must be over 0, not 0"),
        ("exponential:nan", "MEAN must be over 0, not nan"),
        ("exponential:inf", "MEAN must be over 0, not inf"),
        ("exponential:64:256:8", "LOW 256 is over HIGH 8"),
        ("lognormal:64", "lognormal takes MEAN and SIGMA"),
        ("lognormal:64:0", "SIGMA must be over 0"),
        ("normal:64", "normal takes MEAN and STD"),
        ("normal:64:x", "STD must be a number, not 'x'"),
        ("normal:64:-2", "STD must be over 0, not -2"),
    ],
)
def test_bad_texts_are_named(text: str, problem: str) -> None:
    with pytest.raises(LoadTestError) as caught:
        parse_lengths(text, "--output-len")
    assert str(caught.value).startswith(f"--output-len {text}: ")
    assert problem in str(caught.value)
