"""Intervals of a single run's rates: whether their coverage is as stated, and when there are none."""

from __future__ import annotations

import numpy as np
import pytest

from cadenza_loadtest.measures.columns import RequestColumns
from cadenza_loadtest.measures.metrics import Slo, measure
from cadenza_loadtest.measures.rate_uncertainty import FEWEST_BLOCKS, rate_replicates
from cadenza_loadtest.measures.uncertainty import RATES, interval, summarise
from cadenza_loadtest.reports.summary import unknown_sentences
from cadenza_loadtest.results.comparison import compare
from cadenza_loadtest.results.results import LoadTestFile, point_of, run_of
from tests.helpers.loadtest.loadtest_runs import columns, made_up

WINDOW = (2.0, 62.0)


def served(seed: int, rate: float = 5.0, takes_s: float = 1.0) -> RequestColumns:
    """Requests of ten tokens with Poisson arrivals at a rate, each of the same duration."""
    rng = np.random.default_rng(seed)
    due_s = np.sort(rng.uniform(0, 62, rng.poisson(62 * rate)))
    gaps = [[takes_s / 10] * 9 for _ in due_s]
    first_s = due_s + takes_s / 10
    return columns(gaps, due_s=due_s, first_s=first_s, last_s=due_s + takes_s, num_output_tokens=[10] * len(due_s))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("takes_s", [0.2, 4.0])
def test_intervals_hold_the_rate_about_as_often_as_they_say(takes_s: float) -> None:
    """Of 300 runs 285 at 95%, give or take 3.8; with 15 blocks of 4 s somewhat less."""
    held = dict.fromkeys(("requests_per_s", "output_tokens_per_s"), 0)
    for seed in range(300):
        run = served(seed, takes_s=takes_s)
        metrics = measure(run, window=WINDOW, slo=None)
        got = rate_replicates(run, metrics, seed=seed, num_resamples=1000, level=0.95)
        for name, truth in (("requests_per_s", 5.0), ("output_tokens_per_s", 50.0)):
            low, high = interval(got[name][0])
            held[name] += low <= truth <= high
    assert all(270 <= count <= 297 for count in held.values()), held


@pytest.mark.slow
def test_rates_are_resampled_around_what_was_measured() -> None:
    run = made_up(800, 1)
    metrics = measure(run, window=(5.0, 70.0), slo=Slo(ttft_s=0.2))
    got = summarise([metrics], run)
    for name in RATES:
        each = got[name]
        assert each.low is not None, name
        assert each.high is not None, name
        assert each.how == "bootstrap"
        assert each.low < each.value < each.high, name
        assert (each.n, each.value) == (64, getattr(metrics, name)), name
    whole = measure(run, window=None, slo=None)
    assert summarise([whole], run)["requests_per_s"].low is not None
    replicates = [rate_replicates(run, metrics, seed=3, num_resamples=50, level=0.95) for _ in range(2)]
    assert replicates[0]["goodput_per_s"][0].tolist() == replicates[1]["goodput_per_s"][0].tolist()


def test_tokens_count_when_they_came_with_gaps_or_without() -> None:
    """All tokens of one half of the run: whatever is drawn, no interval is as narrow as of an even stream."""
    due_s = np.arange(0.0, 60.0, 0.5)
    run = columns(due_s=due_s, first_s=due_s, last_s=due_s + 2, num_output_tokens=[20] * 120)
    kept = columns([[2 / 19] * 19] * 120, due_s=due_s, first_s=due_s, last_s=due_s + 2, num_output_tokens=[20] * 120)
    widths = []
    for each in (run, kept):
        metrics = measure(each, window=(4.0, 58.0), slo=None)
        drawn, num_blocks = rate_replicates(each, metrics, seed=0, num_resamples=1000, level=0.95)[
            "output_tokens_per_s"
        ]
        assert num_blocks == 27
        low, high = interval(drawn)
        widths.append((high - low) / 40)
    assert max(widths) < 0.02, "as even as it was sent"
    halves = columns(due_s=due_s, first_s=due_s, last_s=due_s + 2, num_output_tokens=[20] * 60 + [1] * 60)
    metrics = measure(halves, window=(4.0, 58.0), slo=None)
    low, high = interval(
        rate_replicates(halves, metrics, seed=0, num_resamples=1000, level=0.95)["output_tokens_per_s"][0]
    )
    assert high - low > 10


def file_of(label: str, run: RequestColumns) -> LoadTestFile:
    point = point_of([run_of(run, None, seed=1, started_unix_s=0, window=None, slo=Slo(e2e_s=1e3))])
    return LoadTestFile(label=label, command=[], settings={}, server=None, points=[point])


def test_a_run_too_short_for_its_requests_says_so() -> None:
    """Nine times as long as a request takes."""
    due_s = np.arange(0.0, 8.0, 0.1)
    short = columns(due_s=due_s, first_s=due_s + 0.5, last_s=due_s + 1, num_output_tokens=[5] * 80)
    assert FEWEST_BLOCKS == 10
    assert summarise([measure(short, window=None, slo=None)], short)["requests_per_s"].how == "single"
    (changes,) = compare([file_of("a", short), file_of("b", short)]).points[0].changes
    assert changes["requests_per_s"].why_unknown.startswith("the run is shorter than 10 requests")
    assert changes["ttft_s.p99"].why_unknown == "needs 368 values"
    assert changes["ttft_s.p50"].why_unknown == ""
    chosen = [changes[name] for name in ("requests_per_s", "goodput_per_s", "ttft_s.p50", "ttft_s.p99", "e2e_s.p99")]
    rates, percentiles = unknown_sentences(chosen)
    assert rates.startswith("Uncertainty not known for request throughput, goodput: the run is shorter than 10")
    assert percentiles == "Uncertainty not known for TTFT p99, E2E p99: needs 368 values."


@pytest.mark.slow
def test_two_runs_differ_by_their_throughput() -> None:
    (changes,) = compare([file_of("a", served(1)), file_of("b", served(2, rate=8.0))]).points[0].changes
    for name in ("requests_per_s", "goodput_per_s", "output_tokens_per_s"):
        assert (changes[name].how, changes[name].verdict) == ("bootstrap", "higher"), name
    (changes,) = compare([file_of("a", served(1)), file_of("b", served(2))]).points[0].changes
    assert changes["requests_per_s"].verdict == "no difference shown"
    nothing = columns(due_s=[0.0], error=["TIMEOUT"])
    assert summarise([measure(nothing, window=None, slo=None)], nothing)["num_failed"].value == 1
