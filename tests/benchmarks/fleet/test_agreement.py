"""The coarse model of executors against the simulator with the core, on the same requests.

The tolerances are what docs/simulate.md states.
"""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.fleet.arrivals import Arrivals, alone
from benchmarks.fleet.caches import model_of
from benchmarks.fleet.results import FleetResult
from cadenza_loadtest.measures.columns import RequestColumns
from cadenza_loadtest.requests import RequestShape
from cadenza_loadtest.workloads.prompts import Prompts
from cadenza_simulator.executor_profiles import ExecutorProfile
from cadenza_simulator.published import PUBLISHED
from tests.helpers.loadtest.fleets import serve
from tests.helpers.loadtest.simulations import options, shape, simulate

TOLERANCE = 0.1
"""Of medians of TTFT and TPOT, and of the time of all steps."""
TAIL = 0.25
"""Of the 90th percentile of TTFT."""


def loads(rate: float, count: int, prompt: float, output: float, seed: int) -> list[tuple[float, RequestShape]]:
    rng = np.random.default_rng(seed)
    due = np.cumsum(rng.exponential(1 / rate, count))
    prompts = np.clip(rng.lognormal(np.log(prompt), 0.8, count), 4, 1500).astype(int)
    outputs = np.clip(rng.exponential(output, count), 1, 500).astype(int)
    rows = zip(due.tolist(), prompts.tolist(), outputs.tolist(), strict=True)
    return [(at, shape(place, one, other)) for place, (at, one, other) in enumerate(rows)]


def fine(schedule: list[tuple[float, RequestShape]], profile: ExecutorProfile, executors: int) -> RequestColumns:
    found = simulate(schedule, [profile] * executors, config=options(max_queued_requests=100_000), keep_steps=False)
    assert found.requests.ok.all()
    return found.requests


def coarse(columns: RequestColumns, profile: ExecutorProfile, executors: int) -> FleetResult:
    arrivals = alone(columns.due_s, columns.num_prompt_tokens, columns.num_output_tokens)
    return serve(arrivals, model_of(profile), num_executors=executors, duration_s=float(columns.due_s[-1]) + 0.1)


def check(columns: RequestColumns, found: FleetResult) -> None:
    ttft = columns.first_s - columns.due_s
    several = columns.num_output_tokens > 1
    tpot = ((columns.last_s - columns.first_s)[several]) / (columns.num_output_tokens[several] - 1)
    tally = found.tally
    assert tally.output_tokens == columns.num_output_tokens.sum()
    assert tally.ttft.percentile(50) == pytest.approx(np.percentile(ttft, 50), rel=TOLERANCE)
    assert tally.ttft.percentile(90) == pytest.approx(np.percentile(ttft, 90), rel=TAIL)
    assert tally.tpot.percentile(50) == pytest.approx(np.percentile(tpot, 50), rel=TOLERANCE)
    assert tally.tpot.percentile(90) == pytest.approx(np.percentile(tpot, 90), rel=TOLERANCE)
    assert tally.e2e.mean == pytest.approx((columns.last_s - columns.due_s).mean(), rel=TOLERANCE)


@pytest.mark.parametrize(
    ("name", "rate", "prompt", "output", "executors"),
    [
        ("a100-80gb-opt-13b", 6.0, 150, 150, 2),
        ("h200-llama-3.1-8b", 60.0, 300, 100, 2),
        ("8xh200-llama-3.1-405b-fp8", 6.0, 600, 60, 1),
    ],
)
def test_medians_agree_below_saturation(name: str, rate: float, prompt: float, output: float, executors: int) -> None:
    profile = PUBLISHED[name]
    columns = fine(loads(rate, 400, prompt, output, seed=1), profile, executors)
    check(columns, coarse(columns, profile, executors))


def test_they_agree_when_memory_is_short() -> None:
    """3,200 tokens of memory for requests of some 350 tokens: many wait, some are preempted."""
    profile = PUBLISHED["a100-40gb-opt-13b"].changed({"num_gpu_blocks": 200})
    columns = fine(loads(2.2, 300, 150, 150, seed=2), profile, 1)
    assert columns.queue_s.max() > 0.5
    assert columns.num_preemptions.sum() > 0
    found = coarse(columns, profile, 1)
    assert found.tally.e2e.mean == pytest.approx((columns.last_s - columns.due_s).mean(), rel=0.15)
    assert found.tally.ttft.mean == pytest.approx((columns.first_s - columns.due_s).mean(), rel=0.3)


def test_sessions_find_as_much_in_caches() -> None:
    """Chats of four turns on two executors: the later turns' histories are cached, in both."""
    profile, rng = PUBLISHED["h200-llama-3.1-8b"], np.random.default_rng(3)
    schedule: list[tuple[float, RequestShape]] = []
    for session in range(80):
        due = float(rng.uniform(0, 40))
        for turn in range(4):
            schedule.append(
                (due, shape(len(schedule), 200, 60, session=session, turn=turn, think_s=1.0 + float(rng.random())))
            )
    order = sorted(range(80), key=lambda session: schedule[4 * session][0])
    schedule = [
        (schedule[4 * session][0], shape(4 * place + turn, 200, 60, session=place, turn=turn, think_s=1.5))
        for place, session in enumerate(order)
        for turn in range(4)
    ]
    config = options(max_queued_requests=100_000, enable_prefix_caching=True)
    columns = simulate(schedule, [profile] * 2, config=config, prompts=Prompts(1, 32_768), keep_steps=False).requests
    by_time = columns.select(np.ones(len(columns), bool))
    rows = np.argsort(by_time.due_s, kind="stable")
    prompt, turn = by_time.num_prompt_tokens[rows], by_time.turn[rows]
    nothing = np.full(len(rows), -1)
    arrivals = Arrivals(
        by_time.due_s[rows], prompt, by_time.num_output_tokens[rows], by_time.session[rows], turn == 0,
        np.where(turn > 0, prompt - 200, 0), nothing, np.zeros(len(rows), np.int64),
    )  # fmt: skip
    found = serve(arrivals, model_of(profile), num_executors=2, duration_s=float(by_time.due_s.max()) + 0.1)
    expected = columns.num_cached_tokens.sum() / columns.num_prompt_tokens.sum()
    assert expected > 0.5
    assert found.summary()["cached_share"] == pytest.approx(expected, rel=0.05)
    check(columns, found)
