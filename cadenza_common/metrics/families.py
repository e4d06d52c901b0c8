"""Metric families: their definitions, and one scrape's values as prometheus_client's families."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from prometheus_client import Metric
from prometheus_client.samples import Sample

from cadenza_common.metrics.histogram import Histogram

Kind = Literal["counter", "gauge", "histogram"]
_SAMPLES_AT_ONCE = 100
_PAUSE_S = 0.0001
"""After so many samples the exporting thread releases the interpreter lock for so long, so that an event loop with work
takes it: a thread that computes keeps the lock for 5 ms (sys.getswitchinterval)."""


@dataclass(frozen=True, slots=True)
class Definition:
    """One metric family. docs/metrics.md is made from these."""

    name: str
    """As in queries: a counter's ends in `_total`; a histogram's series are `_bucket`, `_sum` and `_count`."""
    kind: Kind
    unit: str
    meaning: str
    labels: tuple[str, ...] = ()


class Scrape:
    """The values of one scrape. Each family of the definitions is exported, also one without a value."""

    def __init__(self, definitions: Sequence[Definition]) -> None:
        self._definitions = {each.name: each for each in definitions}
        self._samples: dict[str, list[Callable[[], Iterator[Sample]]]] = {each.name: [] for each in definitions}

    def add(self, name: str, value: float, *labels: str) -> None:
        """Add a value with these label values, in the order of the definition."""
        definition = self._definitions[name]
        sample = Sample(name, dict(zip(definition.labels, labels, strict=True)), value)
        self._samples[name].append(lambda: iter((sample,)))

    def add_histogram(
        self, name: str, histogram: Histogram, *labels: str, bounds: tuple[float, ...] | None = None
    ) -> None:
        """Add a histogram with these label values; `bounds`: of the exported buckets, if it has finer ones."""
        definition = self._definitions[name]
        named = dict(zip(definition.labels, labels, strict=True))
        exported = histogram.bounds if bounds is None else bounds
        self._samples[name].append(lambda: _histogram_samples(name, histogram, exported, named))

    def families(self) -> Iterator[Metric]:
        """The families in the order of their definitions."""
        pace = _Pace()
        for name, definition in self._definitions.items():
            base = name.removesuffix("_total") if definition.kind == "counter" else name
            family = Metric(base, definition.meaning, definition.kind)
            family.samples = _Samples(self._samples[name], pace)
            yield family


class _Pace:
    """Pauses now and then, over all families of a scrape."""

    def __init__(self) -> None:
        self._count = 0

    def step(self) -> None:
        """A sample has been written."""
        self._count += 1
        if self._count % _SAMPLES_AT_ONCE == 0:
            time.sleep(_PAUSE_S)


class _Samples(list[Sample]):
    """Samples that are made while they are written, with pauses in between."""

    def __init__(self, parts: list[Callable[[], Iterator[Sample]]], pace: _Pace) -> None:
        super().__init__()
        self._parts = parts
        self._pace = pace

    def __iter__(self) -> Iterator[Sample]:
        for part in self._parts:
            for sample in part():
                yield sample
                self._pace.step()


def _text(bound: float) -> str:
    return "+Inf" if bound == float("inf") else str(float(bound))


def _histogram_samples(
    name: str, histogram: Histogram, bounds: tuple[float, ...], labels: dict[str, str]
) -> Iterator[Sample]:
    numbers = histogram.cumulative(bounds)
    for bound, number in zip((*bounds, float("inf")), numbers, strict=True):
        yield Sample(f"{name}_bucket", {**labels, "le": _text(bound)}, number)
    yield Sample(f"{name}_count", labels, numbers[-1])
    yield Sample(f"{name}_sum", labels, histogram.total)
