"""The measured systems: each serves a list of requests and reports how long that took."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import psutil

from benchmarks.common.burst_client import StreamTimes, generate_burst, stream_burst
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
