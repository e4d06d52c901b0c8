"""The measured systems: each serves each job once per repeat, in turns, while the others are idle."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import psutil

from benchmarks.common.burst_client import StreamTimes, generate_burst, latencies, stream_burst
from benchmarks.common.rows import OtherLoad, note_on, wait_quiet
from benchmarks.common.workload import Request
from benchmarks.peers.process import PeerProcess
from cadenza import LocalServices

Arrivals = Sequence[float] | None
"""Arrival times in seconds since the start; None: all at once."""


@dataclass(frozen=True, slots=True)
class Served:
    """The result of serving some requests."""

    wall_s: float  # from the first request sent to the last one ended
    times: list[StreamTimes] | None = None  # of each request, from systems that stream tokens


class System(Protocol):
    """One way of serving, in child processes."""

    @property
    def name(self) -> str:
        """Name in rows."""

    @property
    def about(self) -> Mapping[str, Any]:
        """Version and settings, for rows."""

    @property
    def pids(self) -> Mapping[str, int]:
        """Process ids by their names in rows; the processes may have children."""

    def serve(self, requests: Sequence[Request], arrivals: Arrivals = None) -> Served:
        """Serve all requests, greedy and ignoring EOS; raises BenchmarkError if an output has the wrong length."""


@dataclass(frozen=True, slots=True)
class Cadenza:
    """Both services, with one session for all requests that returns finished results, or with a stream for each."""

    services: LocalServices
    streams: bool
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """`cadenza`, or `cadenza-stream`."""
        return "cadenza-stream" if self.streams else "cadenza"

    @property
    def pids(self) -> Mapping[str, int]:
        """Process ids of scheduler and executor."""
        return self.services.pids()

    def serve(self, requests: Sequence[Request], arrivals: Arrivals = None) -> Served:
        """Serve all requests; with arrival times, each on its own stream."""
        if self.streams or arrivals is not None:
            times, wall_s = asyncio.run(stream_burst(self.services.target, requests, arrivals))
            return Served(wall_s, times)
        _, wall_s = asyncio.run(generate_burst(self.services.target, requests))
        return Served(wall_s)


@dataclass(frozen=True, slots=True)
class Peer:
    """A driver of benchmarks/peers in its own process; times are by its clock."""

    name: str
    process: PeerProcess
    settings: Mapping[str, Any] = field(default_factory=dict)  # part of each question

    @property
    def about(self) -> Mapping[str, Any]:
        """The driver's facts and the settings."""
        return {**self.process.about, **self.settings}

    @property
    def pids(self) -> Mapping[str, int]:
        """Process id of the driver; processes that it started are its children."""
        return {"driver": self.process.pid}

    def serve(self, requests: Sequence[Request], arrivals: Arrivals = None) -> Served:
        """Seconds and, from drivers that have them, times of each request: [first, last, tokens, due]."""
        question = [{"prompt": each.prompt, "output_len": each.output_len} for each in requests]
        found = self.process.call({"requests": question, "arrivals": arrivals, **self.settings})
        times = found.get("times")
        return Served(found["wall_s"], [StreamTimes(*each) for each in times] if times else None)


def resident_mb(pid: int) -> float:
    """Resident memory of a process and its descendants, in MB (1e6 bytes); shared pages count for each."""
    total = 0
    root = psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total / 1e6


_WARM_UP_REQUESTS = 16
_WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Job:
    """The requests of one measurement, the same for every system."""

    measure: str
    requests: Sequence[Request]
    arrivals: Arrivals = None
    rate: float | None = None  # requests per second, of arrivals


@dataclass(frozen=True, slots=True)
class Run:
    """One system, one measurement, one repeat."""

    measure: str
    system: str
    about: dict[str, Any]
    repeat: int  # from 0
    metrics: dict[str, float]
    other_cores: float  # used by everything but this system and its client, including idle systems


def measure_all(systems: Sequence[System], jobs: Sequence[Job], repeats: int, quiet_wait_s: float) -> Iterator[Run]:
    """All runs, after a warm-up of every system with every job."""
    for system in systems:
        for job in jobs:
            system.serve(warm_up(job.requests))
    for repeat in range(repeats):
        # The order alternates, so that no system always follows the same one.
        order = systems if repeat % 2 == 0 else systems[::-1]
        for job in jobs:
            for system in serving(job, order):
                yield _measure(system, job, repeat, _others(system, systems), quiet_wait_s)


def serving(job: Job, systems: Sequence[System]) -> list[System]:
    """The systems that serve a job: all of them for a burst; otherwise, of several batch sizes only the largest."""
    sizes = {system.about["batch_size"] for system in systems if "batch_size" in system.about}
    if job.measure == "burst":
        return list(systems)
    return [system for system in systems if system.about.get("batch_size") in (None, max(sizes, default=None))]


def warm_up(requests: Sequence[Request]) -> list[Request]:
    """The first few requests, with short outputs."""
    few = requests[:_WARM_UP_REQUESTS]
    return [replace(request, output_len=min(request.output_len, _WARM_UP_TOKENS)) for request in few]


def timed(
    measure: str,
    system: str,
    repeat: int,
    others: Collection[int],
    quiet_wait_s: float,
    take: Callable[[], tuple[dict[str, float], dict[str, Any]]],
) -> Run:
    """One run: wait for a quiet machine, take metrics and the system's facts, and note the load of others."""
    wait_quiet(quiet_wait_s, others)
    with OtherLoad(others) as other:
        metrics, about = take()
    return Run(measure, system, about, repeat, metrics, other.cores)


def burst_rate(runs: Sequence[Run], system: str) -> float | None:
    """Median requests per second in the bursts of this system; None if it had none."""
    rates = [run.metrics["requests_per_s"] for run in runs if run.system == system and run.measure == "burst"]
    return statistics.median(rates) if rates else None


def _measure(system: System, job: Job, repeat: int, others: Collection[int], quiet_wait_s: float) -> Run:
    def take() -> tuple[dict[str, float], dict[str, Any]]:
        served = system.serve(job.requests, job.arrivals)
        return {**_metrics(job, served), **_memory(system)}, dict(system.about)

    return timed(job.measure, system.name, repeat, others, quiet_wait_s, take)


def _metrics(job: Job, served: Served) -> dict[str, float]:
    return {
        "tokens_per_s": sum(request.output_len for request in job.requests) / served.wall_s,
        "requests_per_s": len(job.requests) / served.wall_s,
        "wall_s": served.wall_s,
        **(latencies(served.times) if served.times else {}),
    }


def _memory(system: System) -> dict[str, float]:
    """`rss_mb`, or `NAME_rss_mb` of each of several processes."""
    memory = {name: resident_mb(pid) for name, pid in system.pids.items()}
    return (
        {"rss_mb": sum(memory.values())} if len(memory) == 1 else {f"{name}_rss_mb": mb for name, mb in memory.items()}
    )


def _others(system: System, systems: Sequence[System]) -> set[int]:
    """Processes of the systems that must be idle."""
    return {pid for each in systems for pid in each.pids.values()} - set(system.pids.values())


def run_text(run: Run) -> str:
    """A run as a line of text."""
    shown = {name: value for name, value in run.metrics.items() if name not in ("requests_per_s", "wall_s")}
    note = note_on(run.other_cores)
    return (
        f"{run.measure}, repeat {run.repeat + 1}, {run.system}: "
        + ", ".join(f"{name} {value:.4g}" for name, value in shown.items())
        + (f" ({note})" if note else "")
    )
