"""How much faster than real time is the simulator, and does the cost of a request grow with their number?

The load of the goal: Poisson arrivals at 10 requests/s, prompts of mean 256 and outputs of mean 128 tokens (both
exponential), 25 ms a step, two plans in flight, keeping everything that `cadenza simulate` keeps by default. The
default is an hour; `--hours 24` is a day, `--requests 1000000` the run that must fit in 2 GB. Each repeat is a separate
process, so that its peak memory is its own.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import resource
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

from benchmarks.common.benchmark import Benchmark, positive, progress
from benchmarks.common.other_load import OtherLoad, wait_quiet
from benchmarks.common.rows import BenchmarkError, Row, make_row
from cadenza_loadtest.requests import RequestShape
from cadenza_loadtest.settings import LoadSettings, make_settings
from cadenza_simulator.campaign import simulate
from cadenza_simulator.executor_profiles import ExecutorProfile, Overheads, ProfileLimits
from cadenza_simulator.options import scheduler_config
from executor_svc.simulated.costs import StepCosts

NAME = "simulate_speed"
RATE, STEP_MS, MEAN_PROMPT, MEAN_OUTPUT = 10.0, 25.0, 256, 128
_PROFILE = ExecutorProfile(
    name="25 ms a step",
    costs=StepCosts(step_us=1000 * STEP_MS),
    overheads=Overheads(plan_us=200, transit_us=150, request_us=500, reply_us=200),
    limits=ProfileLimits(max_num_seqs=256, max_num_batched_tokens=2048, max_model_len=8192),
)


def load(num_requests: int) -> LoadSettings:
    """The settings of the load."""
    return make_settings(
        {
            "request_rate": RATE,
            "num_requests": num_requests,
            "input_len": f"exponential:{MEAN_PROMPT}:1:4096",
            "output_len": f"exponential:{MEAN_OUTPUT}:1:4096",
        }
    )


class Tenths:
    """A watch that records the time when each tenth of the requests has ended."""

    def __init__(self, num_requests: int) -> None:
        self._marks = [math.ceil(num_requests * part / 10) for part in range(1, 11)]
        self._num_ended = 0
        self.moments = [time.perf_counter()]

    def ended(
        self, shape: RequestShape, due_s: float, first_s: float, last_s: float, num_output_tokens: int, error: str
    ) -> bool:
        """Count a request that has ended; the run continues."""
        self._num_ended += 1
        if self._num_ended == self._marks[len(self.moments) - 1]:
            self.moments.append(time.perf_counter())
        return False

    @property
    def seconds(self) -> list[float]:
        """[10] seconds of each tenth."""
        return [end - begin for begin, end in zip(self.moments, self.moments[1:], strict=False)]


def measure_once(num_requests: int, seed: int) -> dict[str, float]:
    """One run in this process."""
    settings, config = load(num_requests), scheduler_config({})
    watch, began = Tenths(num_requests), time.perf_counter()
    outcome = simulate(settings, [_PROFILE], config, seed, watch=watch)
    wall_s = time.perf_counter() - began
    if len(outcome.requests) != num_requests or not outcome.requests.ok.all():
        raise BenchmarkError(f"{len(outcome.requests)} of {num_requests} requests ended, or some failed")
    tenths = watch.seconds
    return {
        "times_real_time": outcome.duration_s / wall_s,
        "wall_s": wall_s,
        "virtual_s": outcome.duration_s,
        "us_per_request": 1e6 * wall_s / num_requests,
        "us_per_step": 1e6 * wall_s / outcome.num_steps,
        "last_tenth_over_first": tenths[-1] / tenths[0],
        "slowest_tenth_over_fastest": max(tenths) / min(tenths),
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "output_tokens": float(outcome.requests.num_output_tokens.sum()),
    }


def _in_a_process(num_requests: int, seed: int) -> dict[str, float]:
    context = multiprocessing.get_context("spawn")
    own_end, child_end = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(child_end, num_requests, seed))
    process.start()
    child_end.close()
    try:
        found = own_end.recv()
    except EOFError:
        raise BenchmarkError("the simulation's process has died") from None
    finally:
        process.join()
        own_end.close()
    if isinstance(found, str):
        raise BenchmarkError(found)
    return dict(found)


def _child(answer: Connection, num_requests: int, seed: int) -> None:
    try:
        answer.send(measure_once(num_requests, seed))
    except BenchmarkError as error:
        answer.send(str(error))


def _run(options: argparse.Namespace) -> Iterator[Row]:
    num_requests = options.requests or round(options.hours * 3600 * RATE)
    wait_quiet(options.quiet_wait_s)
    repeats, other_cores = [], []
    for index in range(options.repeats):
        progress(f"{NAME}: {num_requests} requests, repeat {index + 1} of {options.repeats}")
        with OtherLoad() as other:
            repeats.append(_in_a_process(num_requests, options.seed + index))
        other_cores.append(other.cores)
    params = {
        "requests": num_requests,
        "rate_per_s": RATE,
        "step_ms": STEP_MS,
        "mean_prompt_tokens": MEAN_PROMPT,
        "mean_output_tokens": MEAN_OUTPUT,
        "inflight_plans": scheduler_config({}).max_inflight_plans,
    }
    yield make_row(NAME, seed=options.seed, params=params, repeats=repeats, other_cores=other_cores)


def _describe(row: Row) -> str:
    found = row.medians
    return (
        f"{row.params['requests']} requests, {found['virtual_s']:.0f} s of traffic in {found['wall_s']:.1f} s: "
        f"{found['times_real_time']:.0f} times real time\n"
        f"  {found['us_per_request']:.0f} us a request, {found['us_per_step']:.1f} us a step; the last tenth took "
        f"{found['last_tenth_over_first']:.2f} times as long as the first; peak {found['peak_rss_mib']:.0f} MiB"
    )


def _hours(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= 24 * 365:
        raise argparse.ArgumentTypeError(f"must be hours over 0, not {text!r}")
    return value


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hours", type=_hours, default=1.0, help="of traffic (default 1)")
    parser.add_argument("--requests", type=positive, help="number of requests, in place of hours")


BENCHMARK = Benchmark(NAME, "how much faster than real time is the simulator?", _add_options, _run, _describe)
