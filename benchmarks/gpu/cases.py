"""Groups of measurements: cases in order of importance, each with metrics, an error, or a reason for skipping it.

Durations of GPU work are medians by CUDA events, with an L2 cache that holds none of the data; the device's busy and
idle time comes from a trace of torch.profiler (Chrome's format).
"""

from __future__ import annotations

import gc
import gzip
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch

T = TypeVar("T")
Metrics = dict[str, float]


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Limits of the hardware, in bytes and operations per second."""

    copy: float = 4.3e12
    """Copy from device to device; bytes read and bytes written both count."""
    read: float = 4.3e12
    matmul: float = 790e12
    measured: bool = False
    """False: at least one limit is the default, about an H200's, not measured in this run."""


@dataclass
class Bench:
    """What cases run with."""

    device: torch.device
    clock: Clock
    ceilings: Ceilings = field(default_factory=Ceilings)
    tiny: bool = False
    """Tiny sizes, for a trial without a GPU: times mean nothing."""
    _cached: dict[str, Any] = field(default_factory=dict)

    def cached(self, name: str, make: Callable[[], T]) -> T:
        """Return the object of this name, made by the first call; later calls raise that call's error again."""
        if name not in self._cached:
            try:
                self._cached[name] = make()
            except Exception as error:
                self._cached[name] = error
        found = self._cached[name]
        if isinstance(found, Exception):
            raise found
        return found  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement."""

    name: str
    params: Mapping[str, Any]
    run: Callable[[Bench], Metrics]
    estimate_s: float = 3.0
    """Expected duration, compilation included: the case is skipped if less time is left."""
    goal: Goal | None = None


@dataclass(frozen=True, slots=True)
class Goal:
    """The bound that a metric has to reach: `at_least` or `at_most`."""

    metric: str
    at_least: float | None = None
    at_most: float | None = None

    def judge(self, metrics: Mapping[str, float]) -> str:
        """`met`, `missed`, or an empty string without this metric."""
        if self.metric not in metrics:
            return ""
        value = metrics[self.metric]
        reached = (self.at_least is None or value >= self.at_least) and (self.at_most is None or value <= self.at_most)
        return "met" if reached else "missed"


@dataclass(frozen=True, slots=True)
class Group:
    """Cases that run one after the other in one process."""

    name: str
    title: str
    cases: Callable[[bool], Sequence[Case]]
    """Argument: whether sizes are tiny. Lists only: it computes nothing and imports no kernel."""
    limit_s: float
    """Time limit of the whole group in seconds."""
    preload: Callable[[Bench], None] | None = None
    """Slow loading that disturbs no other measurement: it starts before the group's turn."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a case: metrics, or why there are none."""

    group: str
    case: str
    params: Mapping[str, Any]
    metrics: Metrics = field(default_factory=dict)
    error: str = ""
    skipped: str = ""
    ends_group: bool = False
    """The remaining cases would end the same way and are not run."""


class Unavailable(Exception):
    """Something that every case of a group needs is missing: raised by the first case, it ends the group."""


def run_cases(
    group: Group, bench: Bench, start: int, end_at: float, every: int = 1
) -> Iterator[tuple[int, Outcome | None]]:
    """Run the cases from `start` on, one in `every`; yields (index, None) before each case, then its outcome.

    Skips cases that would run past `end_at` (time.monotonic()). Stops after an error that leaves the device unusable,
    so that another process can run the rest, and after Unavailable.
    """
    # Imported here: the parent process lists cases and needs no executor.
    from executor_svc.device.interface import is_device_lost

    cases = group.cases(bench.tiny)
    for index in range(start, len(cases), every):
        case = cases[index]
        yield index, None
        left = end_at - time.monotonic()
        if left < case.estimate_s:
            skipped = f"{max(left, 0):.0f} s were left, it takes {case.estimate_s:.0f}"
            yield index, Outcome(group.name, case.name, case.params, skipped=skipped)
            continue
        try:
            metrics = case.run(bench)
        except Unavailable as error:
            yield index, Outcome(group.name, case.name, case.params, skipped=str(error), ends_group=True)
            return
        except Exception as error:
            yield index, Outcome(group.name, case.name, case.params, error=one_line(error))
            if is_device_lost(error):
                return
            _free_memory()
        else:
            yield index, Outcome(group.name, case.name, case.params, metrics)


def one_line(error: BaseException) -> str:
    """The name and the message of an error, at most 300 characters."""
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message}"[:300]


def _free_memory() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


_FLUSH_BYTES = 256 << 20
"""Several times the largest L2."""
_CYCLES_PER_S = 2e9
_LEAST_REPEATS, _MOST_REPEATS = 5, 40
_MAX_AHEAD_S = 2e-3


class Clock(Protocol):
    """Measures launches."""

    def seconds(self, work: Callable[[], object]) -> float:
        """Seconds of the work on the device: the median of several runs, after a first one that is discarded."""
        ...


class GpuClock:
    """CUDA events around the work alone: the device sleeps until the host has enqueued all of it."""

    def __init__(self, device: torch.device, budget_s: float = 0.25) -> None:
        """Repeat each work for about `budget_s` seconds."""
        self._budget_s = budget_s
        self._flushed = torch.ones(_FLUSH_BYTES // 4, dtype=torch.float32, device=device)
        self._sum = torch.empty((), dtype=torch.float32, device=device)

    def seconds(self, work: Callable[[], object]) -> float:
        work()
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        enqueued_s = time.perf_counter() - began
        torch.cuda.synchronize()
        first_s = self._times(work, 1, enqueued_s)[0]
        repeats = int(self._budget_s / max(first_s + enqueued_s, 1e-6))
        return statistics.median(self._times(work, max(_LEAST_REPEATS, min(_MOST_REPEATS, repeats)), enqueued_s))

    def _times(self, work: Callable[[], object], repeats: int, enqueued_s: float) -> list[float]:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        ahead = int(min(_MAX_AHEAD_S, 2 * enqueued_s + 5e-5) * _CYCLES_PER_S)
        for start, end in events:
            # Read, not written: writing back dirty lines would take bandwidth from the measured work.
            torch.sum(self._flushed, 0, out=self._sum)
            torch.cuda._sleep(ahead)
            start.record()
            work()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in events]


class HostClock:
    """The host's clock, one run: for Triton's interpreter in place of a GPU, where times mean nothing."""

    def seconds(self, work: Callable[[], object]) -> float:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began


_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_LEFT_OUT = 0.2
"""Share of the time left out at the beginning, while the profiler starts."""


@dataclass(frozen=True, slots=True)
class DeviceTime:
    """Time of a device from the start of its first kernel or copy to the end of its last."""

    span_s: float
    busy_s: float
    num_kernels: int

    @property
    def idle_share(self) -> float:
        """Share of the span in which nothing ran."""
        return 1 - self.busy_s / self.span_s


def read_trace(content: bytes) -> list[dict[str, Any]]:
    """The events of a trace, gzip or not."""
    text = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    events: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    return events


def device_time(events: Iterable[dict[str, Any]], left_out: float = _LEFT_OUT) -> DeviceTime | None:
    """Device time after the `left_out` share at the beginning; None if the trace has no work of a device."""
    work = sorted(
        (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        for event in events
        if event.get("ph") == "X" and event.get("cat") in _ON_DEVICE
    )
    if not work:
        return None
    last = max(end for _, end in work)
    begin = work[0][0] + left_out * (last - work[0][0])
    work = [(start, end) for start, end in work if start >= begin]
    if not work or last <= work[0][0]:
        return None
    busy, reached = 0.0, work[0][0]
    for start, end in work:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return DeviceTime((last - work[0][0]) / 1e6, busy / 1e6, len(work))
