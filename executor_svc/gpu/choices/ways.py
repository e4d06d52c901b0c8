"""Ways to compute one thing on the GPU at hand: the first that agrees with a reference is used, or the fastest one.

A kernel with several tiles, or with an operation of PyTorch's beside it, asks `KernelChecks.choose` at the start.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from executor_svc.device.interface import DeviceError, is_device_lost
from executor_svc.gpu.choices.store import ENDED, CheckStore

_log = logging.getLogger(__name__)
_RUNS, _REPEATS = 10, 7
"""Of a way that is timed: in a graph, and replays of it."""
_MOST_REASON = 200
_REPORT = "--kernel-checks report computes with it all the same"


class KernelError(DeviceError):
    """No way to compute something gives right results on this GPU; the message names it."""


class Agreement(Protocol):
    """How a result is compared with what is expected."""

    def reason_against(self, found: Tensor, expected: Tensor) -> str | None:
        """Return how a result differs from what is expected, if it does; both of one shape, on any device."""
        ...


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far results may be from a reference, as shares of it."""

    each: float
    """Of each number and of the root mean square of all together: the error of one number."""
    all: float
    """Of the norm of all numbers: that of their errors."""

    @classmethod
    def of(cls, dtype: torch.dtype, operands: torch.dtype | None = None) -> Tolerance:
        """Return that of results of one rounding to dtype, of operands that were rounded to theirs."""
        if not dtype.is_floating_point:
            return cls(0.0, 0.0)
        eps = max(torch.finfo(each).eps for each in (dtype, operands or dtype))
        # Sums in float32 of some thousand products, in any order.
        return cls(max(6 * eps, 2e-5), max(eps, 5e-6))

    def reason_against(self, found: Tensor, expected: Tensor) -> str | None:
        """As in `Agreement`."""
        have, want = found.detach().double().cpu(), expected.double().cpu()
        if have.shape != want.shape:
            return f"has the shape {tuple(have.shape)}, not {tuple(want.shape)}"
        usual = want.isfinite()
        if (
            not torch.equal(have[~usual].nan_to_num(1.0), want[~usual].nan_to_num(1.0))
            or not have[usual].isfinite().all()
        ):
            return "is not finite where it must be, or the other way round"
        if not (error := (have - want)[usual].abs()).numel():
            return None
        size = want[usual].square().mean().sqrt()
        least = 1e-30
        if (error > self.each * (want[usual].abs() + size) + least).any():
            worst = float((error / (want[usual].abs() + size + least)).max())
            return f"one number is off by {worst:.3g} of its size, {self.each:.3g} is allowed"
        share = float(error.square().mean().sqrt() / (size + least))
        if share > self.all and float(error.max()) > least:
            return f"numbers are off by {share:.3g} of their size together, {self.all:.3g} is allowed"
        return None


@dataclass(frozen=True, slots=True)
class Way:
    """One of several ways to compute the same."""

    name: str
    run: Callable[[], Tensor]
    """Computes the result anew, on the device; may be called many times."""


@dataclass(frozen=True, slots=True)
class KernelCheck:
    """What is computed, and by which ways."""

    name: str
    """Unique: operation, shapes, dtypes and numbers of rows, such as "linear_w8 4096 x 4096 bf16, 16 rows"."""
    ways: Sequence[Way]
    """The preferred one first; the last should be an operation of PyTorch's, where there is one."""
    expected: Callable[[], Tensor]
    """Computes the right result, on any device, in float64 or float32."""
    tolerance: Agreement
    timed: bool = False
    """Whether the fastest of all that agree is used, on a GPU; else the first one."""


@dataclass(slots=True)
class KernelChecks:
    """The checks of one start."""

    device: torch.device
    store: CheckStore = field(default_factory=lambda: CheckStore(None, {}))
    reports: bool = False
    """Whether what is off is computed all the same, and only reported; what does not run is never used."""
    compares: bool = True
    """Whether what is used anyway is compared; what an option has the start choose is, in any case."""
    fallen: list[str] = field(default_factory=list)
    """What is not computed in its preferred way: a line each, which says why."""
    num_compared: int = 0
    """Results that were compared in this start."""
    num_known: int = 0
    """Choices that an earlier start has made."""
    kept: list[str] = field(default_factory=list)
    """What is off and computed all the same: a line each."""
    _broken: set[tuple[str, str]] = field(default_factory=set)
    """What did not run, and the way."""

    def runs(self, name: str, way: str) -> bool:
        """Return whether a way that `tried` has found wrong gives results at all."""
        return (name, way) not in self._broken

    def hint(self, name: str, reasons: Mapping[str, str]) -> str:
        """Return what a refusal says of the option by which the start goes on; nothing if no way runs."""
        return f"; {_REPORT}" if any(self.runs(name, way) for way in reasons) else ""

    def choose(self, check: KernelCheck) -> str:
        """Return the name of the way to use; an earlier start's, if it is known.

        Raises KernelError, naming the check, if no way gives right results.
        """
        names = [way.name for way in check.ways]
        known = self.store.known(check.name)
        if known is not None and known["way"] in names:
            self.num_known += 1
            self._note(check.name, known)
            return str(known["way"])
        expected, reasons = check.expected(), dict[str, str]()
        agreeing: dict[str, float] = {}
        for way in check.ways:
            reason = self.reason_against(check.name, way, expected, check.tolerance)
            if reason is not None:
                reasons[way.name] = reason
                continue
            agreeing[way.name] = self._seconds(way) if check.timed and self.device.type == "cuda" else 0.0
            if not check.timed:
                break
        if not agreeing:
            return self._all_the_same(check, reasons)
        chosen = min(agreeing, key=lambda name: agreeing[name])
        us = {name: round(1e6 * seconds, 2) for name, seconds in agreeing.items() if seconds}
        found = {"way": chosen, "reasons": reasons, "us": us}
        self.store.keep(check.name, found)
        self._note(check.name, found)
        return chosen

    def _all_the_same(self, check: KernelCheck, reasons: dict[str, str]) -> str:
        """Return the first way that gives results, none of which is right, if that is to be reported alone."""
        way = next((each.name for each in check.ways if self.runs(check.name, each.name)), None)
        if way is None or not self.reports:
            hint = self.hint(check.name, reasons)
            raise KernelError(f"{check.name}: no way is right on this GPU: {_joined(reasons)}{hint}")
        self.kept.append(f"{check.name}: {_joined(reasons)}")
        return way

    def reason_against(self, name: str, way: Way, expected: Tensor, tolerance: Agreement) -> str | None:
        """Try a way; return why it cannot be used, or None.

        Raises KernelError if the device is lost: then the next start does not try this way.
        """

        def compared() -> str | None:
            return tolerance.reason_against(way.run(), expected)

        return self.tried(name, way.name, compared)

    def tried(self, name: str, way: str, compare: Callable[[], str | None]) -> str | None:
        """Return what `compare` returns, or why it failed; `compare` runs the way `way` of what `name` names."""
        if self.store.has_ended(name, way):
            self._broken.add((name, way))
            return ENDED
        self.store.begin(name, way)
        try:
            reason = compare()
            self.wait()
        except Exception as error:
            if is_device_lost(error):
                self.store.lose()
                raise KernelError(
                    f"{name}: {way} has broken the GPU's context ({short_reason(error)}); start again: the next start "
                    "does not use it"
                ) from error
            reason = short_reason(error)
            self._broken.add((name, way))
        self.num_compared += 1
        self.store.end()
        return reason

    def log(self, seconds: float) -> None:
        """Say in a line how many agree and what does not, with the reasons."""
        known = f", {self.num_known} known from an earlier start" if self.num_known else ""
        if self.kept:
            _log.warning("kernels: NOT RIGHT on this GPU, and computed all the same (--kernel-checks report): %s",
                         "; ".join(self.kept))  # fmt: skip
        if self.fallen:
            text = "; ".join(self.fallen)
            _log.warning("kernels: %d results compared%s in %.1f s; fallen back: %s",
                         self.num_compared, known, seconds, text)  # fmt: skip
        elif not self.kept:
            _log.info("kernels: %d results compared%s in %.1f s, all agree", self.num_compared, known, seconds)

    def _note(self, name: str, found: dict[str, Any]) -> None:
        if found["reasons"]:
            self.fallen.append(f"{name}: {found['way']}, as {_joined(found['reasons'])}")

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _seconds(self, way: Way) -> float:
        """Return the median seconds of a way on the device, of runs in a CUDA graph: without what a launch takes."""
        way.run()
        self.wait()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(_RUNS):
                way.run()
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(_REPEATS)]
        for start, end in events:
            start.record()
            graph.replay()
            end.record()
        self.wait()
        times: list[float] = [start.elapsed_time(end) for start, end in events]
        return statistics.median(times) / 1e3 / _RUNS


def short_reason(error: BaseException) -> str:
    """Return an error's name and message as one short line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= _MOST_REASON else f"{text[:_MOST_REASON]}…"


def _joined(reasons: dict[str, str]) -> str:
    return ", ".join(f"{way} {reason}" for way, reason in reasons.items())
