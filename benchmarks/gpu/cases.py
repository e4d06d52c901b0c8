"""What a group of measurements is: cases in the order of their importance, each a few numbers or an error."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

    from benchmarks.gpu.timing import Clock

T = TypeVar("T")
Metrics = dict[str, float]


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the hardware gives at most: bytes and operations a second."""

    copy: float = 4.3e12
    """Device to device, bytes read and bytes written both counted."""
    read: float = 4.3e12
    matmul: float = 790e12
    measured: bool = False
    """Else these are what one H200 of this kind once gave (KINDS.md)."""


@dataclass
class Bench:
    """What cases are run with."""

    device: torch.device
    clock: Clock
    ceilings: Ceilings = field(default_factory=Ceilings)
    tiny: bool = False
    """Sizes for trying things out: their times mean nothing."""
    _kept: dict[str, Any] = field(default_factory=dict)

    def keep(self, name: str, make: Callable[[], T]) -> T:
        """Return what was made under this name before, or make it; what could not be made is not tried again."""
        if name not in self._kept:
            try:
                self._kept[name] = make()
            except Exception as error:
                self._kept[name] = error
        found = self._kept[name]
        if isinstance(found, Exception):
            raise found
        return found  # type: ignore[no-any-return]

    def forget(self) -> None:
        """Let go of everything that is kept."""
        self._kept.clear()


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement."""

    name: str
    params: Mapping[str, Any]
    run: Callable[[Bench], Metrics]
    estimate_s: float = 3.0
    """What it takes, compiling included: it is not begun with less time left."""
    goal: Goal | None = None


@dataclass(frozen=True, slots=True)
class Goal:
    """What a metric is to reach: `at_least` or `at_most`."""

    metric: str
    at_least: float | None = None
    at_most: float | None = None

    def judge(self, metrics: Mapping[str, float]) -> str:
        """`met`, `missed`, or nothing where the metric is not there."""
        if self.metric not in metrics:
            return ""
        value = metrics[self.metric]
        reached = (self.at_least is None or value >= self.at_least) and (self.at_most is None or value <= self.at_most)
        return "met" if reached else "missed"


@dataclass(frozen=True, slots=True)
class Group:
    """Cases that are run one after the other in a process of their own."""

    name: str
    title: str
    cases: Callable[[bool], Sequence[Case]]
    """Given whether they are to be tiny. Nothing is computed, and no kernel imported, before a case is run."""
    limit_s: float
    """Seconds that the group may take altogether."""
    preload: Callable[[Bench], None] | None = None
    """What takes long and disturbs nobody: begun before it is the group's turn."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a case: metrics, or why there are none."""

    group: str
    case: str
    params: Mapping[str, Any]
    metrics: Metrics = field(default_factory=dict)
    error: str = ""
    skipped: str = ""
    ends_group: bool = False
    """Its other cases would come to the same: nothing is to be said of them."""


class NotHere(Exception):
    """What all cases of a group need is not there: raised by the first, it ends the group."""


def run_cases(
    group: Group, bench: Bench, start: int, end_at: float, every: int = 1
) -> Iterator[tuple[int, Outcome | None]]:
    """Run cases from `start` on, or every so manyth: (index, None) before each, then its outcome.

    None is begun that would not end before time.monotonic() says `end_at`. After an error that leaves the device
    unusable the rest is for another process, and after NotHere for none: no more is given.
    """
    # Only here: the process that shows the outcomes has no torch.
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
        except NotHere as error:
            yield index, Outcome(group.name, case.name, case.params, skipped=str(error), ends_group=True)
            return
        except Exception as error:
            yield index, Outcome(group.name, case.name, case.params, error=one_line(error))
            if is_device_lost(error):
                return
            _let_go()
        else:
            yield index, Outcome(group.name, case.name, case.params, metrics)


def one_line(error: BaseException) -> str:
    """An error's name and the beginning of what it says."""
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said}"[:300]


def _let_go() -> None:
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
