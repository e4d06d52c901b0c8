"""Groups of measurements: cases in order of importance, each with metrics, an error, or a reason for skipping it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

    from benchmarks.gpu.common.timing import Clock

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
    from executor_svc.worker.device_errors import is_device_lost

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
