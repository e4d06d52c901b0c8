"""A fleet from its options; each error names its option."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from typing import Any, Literal

from benchmarks.fleet.arrivals import MIXES, ChunkedTraffic, DrawnTraffic, read_mix
from benchmarks.fleet.caches import model_of
from benchmarks.fleet.engine import Fleet, FleetPlan, Split
from benchmarks.fleet.requests import FAILURES_PER_GPU_HOUR
from benchmarks.fleet.results import FleetResult, Objective
from benchmarks.fleet.routers import ROUTERS, RouterName, read_router
from benchmarks.fleet.traces import Trace, TraceTraffic, read_trace
from cadenza_loadtest.measures.slo import parse_slo
from cadenza_loadtest.requests import LoadTestError
from cadenza_simulator.executor_profiles import ExecutorProfile
from cadenza_simulator.options import find_profile

ONE_QUEUE = "one-queue"
"""In place of a router: one scheduler for all executors, whose work takes no time."""
DEFAULT_EXECUTOR, DEFAULT_TRAFFIC = "8xh200-llama-3.1-405b-fp8", "mooncake-conversation"
_MOST_EXECUTORS = 16_384
_COURSES = ("day", "flat")

Wanted = RouterName | Literal["one-queue"]


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """The options as they were given; times in seconds."""

    executor: str = DEFAULT_EXECUTOR
    schedulers: int = 1
    executors: int = 16
    """Of each scheduler."""
    routers: tuple[str, ...] = ("round-robin",)
    traffic: str = DEFAULT_TRAFFIC
    request_rate: float | None = None
    course: str | None = None
    duration_s: float = 86400.0
    slo: str = "ttft=10,tpot=0.1"
    gpus: int = 8
    failure_rate: float = FAILURES_PER_GPU_HOUR
    repair_s: float = 600.0
    price: float = 0.0
    prefill: int = 0
    kv_bytes: float | None = None
    link_gb_per_s: float = 50.0
    link_latency_s: float = 0.0
    slice_s: float = 0.25
    seed: int = 0
    limits: tuple[tuple[str, int], ...] = ()
    """Limits of executors in place of the profile's: block_size, num_gpu_blocks, max_…"""


class FleetCampaign:
    """The runs of a campaign: one for each router, with the same traffic and failures."""

    def __init__(self, options: FleetOptions) -> None:
        """Raises LoadTestError."""
        self.options = options
        self.routers: tuple[Wanted, ...] = tuple(map(_wanted, options.routers))
        self.profile: ExecutorProfile = find_profile(options.executor).changed(dict(options.limits))
        self._trace: Trace | None = None
        if options.traffic not in MIXES and (os.path.exists(options.traffic) or "." in options.traffic):
            self._trace = read_trace(options.traffic)
        self._plan = self._make_plan()
        self.source()

    @property
    def daily(self) -> bool:
        """Whether traffic follows a day's course: by default if it is drawn."""
        course = self.options.course
        if course is not None and course not in _COURSES:
            raise LoadTestError(f"--course {course}: must be one of {', '.join(_COURSES)}")
        return self._trace is None if course is None else course == "day"

    @property
    def request_rate(self) -> float:
        """Requests a second on average; of a trace without the option, its own."""
        rate = self.options.request_rate
        if rate is None:
            if self._trace is None:
                raise LoadTestError("--request-rate: is needed, as no trace is given that has one")
            return self._trace.per_s
        return _positive(rate, "--request-rate")

    @property
    def traffic(self) -> str:
        """What the traffic is, in a sentence."""
        course = "in a day's course (Azure's, 14 May 2024)" if self.daily else "at a steady rate"
        rate = f"{self.request_rate:,.4g} requests/s on average, {course}"
        if self._trace is None:
            return f"Traffic drawn from published statistics of {self.options.traffic}, no trace itself: {rate}."
        copies = self.request_rate / self._trace.per_s
        return f"Traffic: {copies:,.3g} copies side by side of {self.options.traffic}, repeated: {rate}."

    def source(self) -> ChunkedTraffic:
        """The traffic from its beginning; raises LoadTestError."""
        options = self.options
        if self._trace is not None:
            return TraceTraffic(self._trace, self.request_rate, options.seed, daily=self.daily)
        return DrawnTraffic(read_mix(options.traffic), self.request_rate, options.seed, daily=self.daily)

    def run(self, router: Wanted) -> FleetResult:
        """One run."""
        plan = self._plan
        if router == "one-queue":
            total = plan.num_schedulers * plan.num_executors
            return Fleet(replace(plan, num_schedulers=1, num_executors=total, ideal=True), self.source()).run()
        return Fleet(replace(plan, router=router), self.source()).run()

    def facts(self) -> dict[str, Any]:
        """The simulated system, for the file of results."""
        options = self.options
        return {
            "executor": self.profile.model_dump(mode="json"),
            "schedulers": options.schedulers,
            "executors_per_scheduler": options.executors,
            "traffic": self.traffic,
            "request_rate": self.request_rate,
            "duration_s": options.duration_s,
            "slo": options.slo,
            "failures_per_executor_hour": self._plan.failures_per_hour,
            "repair_s": options.repair_s,
            "price_per_executor_hour": options.price,
            "prefill": options.prefill,
            "slice_s": options.slice_s,
            "seed": options.seed,
        }

    def _make_plan(self) -> FleetPlan:
        options = self.options
        _count(options.schedulers, "--schedulers")
        _count(options.executors, "--executors")
        if options.schedulers * options.executors > _MOST_EXECUTORS:
            raise LoadTestError(
                f"--executors {options.executors}: with --schedulers {options.schedulers} there are over "
                f"{_MOST_EXECUTORS:,} executors"
            )
        if options.seed < 0:
            raise LoadTestError(f"--seed {options.seed}: must be 0 or more")
        return FleetPlan(
            model=model_of(self.profile),
            num_schedulers=options.schedulers,
            num_executors=options.executors,
            duration_s=_positive(options.duration_s, "--duration-s"),
            slice_s=_positive(options.slice_s, "--slice-s"),
            objectives=(_objective(options.slo),),
            failures_per_hour=_not_negative(options.failure_rate, "--failure-rate") * _count(options.gpus, "--gpus"),
            repair_s=_not_negative(options.repair_s, "--repair-s"),
            price=_not_negative(options.price, "--price"),
            split=self._split(),
            seed=options.seed,
        )

    def _split(self) -> Split | None:
        options = self.options
        if not options.prefill:
            return None
        if not 0 < options.prefill < options.executors:
            raise LoadTestError(f"--prefill {options.prefill}: must be from 1 to --executors less one")
        if options.schedulers > 1 or self.routers == (ONE_QUEUE,):
            raise LoadTestError(f"--prefill {options.prefill}: goes with one scheduler")
        if options.kv_bytes is None:
            raise LoadTestError("--kv-bytes: is needed with --prefill")
        return Split(
            options.prefill,
            _positive(options.kv_bytes, "--kv-bytes"),
            1e9 * _positive(options.link_gb_per_s, "--link-gb-per-s"),
            _not_negative(options.link_latency_s, "--link-latency-ms"),
        )


def _wanted(text: str) -> Wanted:
    if text == ONE_QUEUE:
        return "one-queue"
    if text not in ROUTERS:
        raise LoadTestError(f"--router {text}: must be one of {', '.join((*ROUTERS, ONE_QUEUE))}")
    return read_router(text)


def _objective(text: str) -> Objective:
    limits = parse_slo(text).limits
    for name in limits.keys() - {"ttft_s", "tpot_s"}:
        raise LoadTestError(f"--slo {text}: {name.removesuffix('_s')} is not simulated; there are ttft and tpot")
    return Objective(limits.get("ttft_s", math.inf), limits.get("tpot_s", math.inf))


def _count(value: int, option: str) -> int:
    if value < 1:
        raise LoadTestError(f"{option} {value}: must be 1 or more")
    return value


def _positive(value: float, option: str) -> float:
    if not 0 < value < math.inf:
        raise LoadTestError(f"{option} {value:g}: must be a number over 0")
    return value


def _not_negative(value: float, option: str) -> float:
    if not 0 <= value < math.inf:
        raise LoadTestError(f"{option} {value:g}: must be 0 or more")
    return value
