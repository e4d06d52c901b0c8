"""How many executors and sequences does one scheduler plan for?

`core`: the scheduler's core alone, with every sequence of every lane decoding: CPU time of a step of all lanes, its
share of a step of 20 ms, by executors and sequences of each, without changes and with outputs of --output-tokens, where
one in so many sequences ends in each step and another one joins. Conversions to and from bytes are counted, output to
clients is not. `virtual`: the simulator with the same core, executors whose steps take 20 ms and these measured times
for plans, one after the other: output tokens/s of all executors over those of as many that are planned in no time.
With `front`, a plan takes longer by the CPU time of its tokens on their way to clients (rows of service_plane).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict

from benchmarks.common.benchmark import Benchmark, positive, progress
from benchmarks.common.lane_load import STEP_S, LaneCase, LaneLoad
from benchmarks.common.other_load import OtherLoad, wait_quiet
from benchmarks.common.rows import BenchmarkError, Row, make_row
from benchmarks.fleet.engine import FRONT_US
from cadenza_loadtest.settings import make_settings
from cadenza_simulator.campaign import simulate
from cadenza_simulator.executor_profiles import ExecutorProfile, Overheads, ProfileLimits
from cadenza_simulator.options import scheduler_config
from executor_svc.simulated.costs import StepCosts
from scheduler_svc.front.process_memory import collect_rarely

NAME = "lane_scaling"
_TRANSIT_US = 150.0
_VIRTUAL_OUTPUT = 400
"""Tokens of each output: enough that all executors are full before the first request ends."""


def cases_of(options: argparse.Namespace) -> list[LaneCase]:
    """The cases that the options select."""
    outputs = [0, options.output_tokens] if options.output_tokens else [0]
    return [
        LaneCase(lanes, running, output) for lanes in options.lanes for running in options.running for output in outputs
    ]


def measure_core(case: LaneCase, rounds: int, seed: int) -> dict[str, float]:
    """CPU times of a filled core."""
    load = LaneLoad(case, seed)
    load.fill()
    return load.measure(rounds).metrics(case)


def virtual_tokens_per_s(lanes: int, running: int, plan_us: float, seed: int) -> float:
    """Output tokens a second of virtual time, while every executor is full. Raises BenchmarkError if they never are."""
    profile = ExecutorProfile(
        name="20 ms a step",
        costs=StepCosts(step_us=1e6 * STEP_S),
        overheads=Overheads(plan_us=plan_us, transit_us=_TRANSIT_US if plan_us else 0.0),
        limits=ProfileLimits(max_num_seqs=running, max_num_batched_tokens=max(8192, running), max_model_len=512),
    )
    settings = make_settings(
        {
            "num_requests": lanes * running,
            "input_len": "16",
            "output_len": str(_VIRTUAL_OUTPUT),
            "request_rate": float("inf"),
        }
    )
    config = scheduler_config({"max_queued_requests": 1_000_000})
    outcome = simulate(settings, [profile] * lanes, config, seed)
    if not outcome.requests.ok.all():
        raise BenchmarkError(f"{(~outcome.requests.ok).sum()} requests failed")
    begin_s, end_s = float(outcome.requests.first_s.max()), float(outcome.requests.last_s.min())
    if begin_s >= end_s or outcome.steps is None or outcome.step_stride != 1:
        raise BenchmarkError(f"the last request begins after {begin_s:.1f} s, the first one ends after {end_s:.1f} s")
    within = (outcome.steps.applied_s > begin_s) & (outcome.steps.applied_s <= end_s)
    return float(outcome.steps.num_sampled[within].sum()) / (end_s - begin_s)


def _run(options: argparse.Namespace) -> Iterator[Row]:
    collect_rarely()  # As in the service.
    wait_quiet(options.quiet_wait_s)
    lane_us: dict[tuple[int, int], float] = {}
    for case in cases_of(options):
        repeats, other_cores = [], []
        for index in range(options.repeats):
            progress(f"{NAME}: {case}, repeat {index + 1} of {options.repeats}")
            with OtherLoad() as other:
                repeats.append(measure_core(case, options.rounds, options.seed + index))
            other_cores.append(other.cores)
        params = {"what": "core", **asdict(case), "rounds": options.rounds, "step_ms": 1000 * STEP_S}
        row = make_row(NAME, seed=options.seed, params=params, repeats=repeats, other_cores=other_cores)
        lane_us[case.lanes, case.running] = row.medians["us_per_lane"]
        yield row
    for (lanes, running), plan_us in lane_us.items() if options.virtual else ():
        yield from _virtual_rows(options.seed, lanes, running, plan_us)


def _virtual_rows(seed: int, lanes: int, running: int, plan_us: float) -> Iterator[Row]:
    ideal = virtual_tokens_per_s(lanes, running, 0.0, seed)
    for front in (False, True):
        progress(f"{NAME}: {lanes} executors of {running} sequences in virtual time")
        took_us = plan_us + FRONT_US * running * front
        found = virtual_tokens_per_s(lanes, running, took_us, seed)
        params = {"what": "virtual", "lanes": lanes, "running": running, "front": front, "step_ms": 1000 * STEP_S}
        metrics = {"plan_us": took_us, "output_tokens_per_s": found, "of_ideal_percent": 100 * found / ideal}
        yield make_row(NAME, seed=seed, params=params, repeats=[metrics], other_cores=[])


def _describe(row: Row) -> str:
    found, params = row.medians, row.params
    where = f"{params['lanes']} executors of {params['running']} sequences"
    if params["what"] == "virtual":
        front = ", output to clients included" if params["front"] else ""
        return (
            f"{where} in virtual time, {found['plan_us']:.0f} us a plan{front}: "
            f"{found['output_tokens_per_s']:,.0f} output tokens/s, {found['of_ideal_percent']:.1f}% of the ideal"
        )
    change = f"outputs of {params['output_tokens']}" if params["output_tokens"] else "no changes"
    return (
        f"{where}, {change}: plans {found['plan_ms']:.2f} ms ({found['plan_percent']:.1f}% of a step of 20 ms), "
        f"results {found['apply_ms']:.2f}, conversions {found['convert_ms']:.2f}, new requests {found['add_ms']:.2f}; "
        f"whole {found['whole_ms']:.2f} ms ({found['whole_percent']:.1f}%), p99 {found['whole_p99_ms']:.2f}"
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lanes", type=positive, nargs="+", default=[1, 4, 16, 64], help="executors")
    parser.add_argument("--running", type=positive, nargs="+", default=[64, 256, 1024], help="sequences of each")
    parser.add_argument("--output-tokens", type=int, default=256, help="of each request; 0: nothing changes")
    parser.add_argument("--rounds", type=positive, default=100, help="timed steps of all lanes (default 100)")
    parser.add_argument("--virtual", action="store_true", help="also in virtual time, with the measured times")


BENCHMARK = Benchmark(
    NAME, "how many executors and sequences does one scheduler plan for?", _add_options, _run, _describe
)
