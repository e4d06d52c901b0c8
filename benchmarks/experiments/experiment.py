"""Types of experiments and of their results: files with numbers, from which the page and its figures are made.

Quantities are repeated with several seeds: means, minima and maxima. The batching policies that the first experiments
compare are options of the scheduler.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from benchmarks.common.rows import ROOT
from cadenza_loadtest.results.facts import ClientFacts, client_facts

RESULTS = ROOT / "benchmarks" / "results" / "experiments"
Place = Literal["simulate", "cpu"]
"""simulate: the real core in virtual time with a published cost model; cpu: the real services on this machine."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="null")


class Series(_Frozen):
    """One line, or one group of bars. [n] each; None: not measured."""

    label: str
    x: list[float | str]
    y: list[float | None]
    low: list[float | None] | None = None
    high: list[float | None] | None = None


class Figure(_Frozen):
    """A figure's data; `page` draws it. Labels have units."""

    name: str
    """Name of its file, unique within the experiment; letters, digits, dashes."""
    title: str
    x_label: str
    y_label: str
    series: list[Series]
    kind: Literal["line", "step", "bar"] = "line"
    log_x: bool = False
    log_y: bool = False
    caption: str = ""
    """A sentence that explains the figure."""


class Table(_Frozen):
    """A table of the page, with formatted numbers."""

    title: str
    columns: list[str]
    rows: list[list[str]]


class Finding(_Frozen):
    """A claim of the literature and the result here."""

    claim: str
    """The claim, with its source as a Markdown link."""
    held: bool
    evidence: str
    """The numbers, made from the results."""


class ExperimentResult(_Frozen):
    """All results of one experiment at one place."""

    experiment: str
    place: Place
    created: datetime = Field(default_factory=lambda: datetime.now(UTC))
    machine: ClientFacts = Field(default_factory=client_facts)
    seed: int
    setup: dict[str, Any]
    """Model, costs, limits, workload: everything needed to repeat it."""
    wall_s: float = 0.0
    """Duration of the experiment in seconds."""
    findings: list[Finding]
    figures: list[Figure]
    tables: list[Table] = Field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RunSettings:
    """How to run an experiment."""

    place: Place
    seed: int
    quick: bool = False
    """A small version for the tests, with meaningless numbers."""


@dataclass(frozen=True, slots=True)
class Experiment:
    """One question and the code that answers it."""

    name: str
    """Its number and a word, such as 1-variance."""
    title: str
    hypothesis: str
    """The claims of the literature, in Markdown with sources, and the expectation here."""
    run: Callable[[RunSettings], ExperimentResult]
    places: tuple[Place, ...] = ("simulate",)
    notes: str = ""
    """Explanations of differing results, in Markdown, written by hand from the results."""


def result_path(name: str, place: Place) -> Path:
    """The path of a result."""
    return RESULTS / f"{name}-{place}.json"


def save(result: ExperimentResult) -> Path:
    """Write a result, replacing the previous one."""
    path = result_path(result.experiment, result.place)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result.model_dump(mode="json"), indent=1) + "\n", encoding="utf-8")
    return path


def load(name: str, place: Place) -> ExperimentResult | None:
    """The stored result; None if there is none."""
    path = result_path(name, place)
    return ExperimentResult.model_validate_json(path.read_bytes()) if path.exists() else None


@dataclass(frozen=True, slots=True)
class Repeated:
    """One quantity over the seeds."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The mean."""
        return float(np.mean(self.values))

    @property
    def low(self) -> float:
        """The smallest."""
        return min(self.values)

    @property
    def high(self) -> float:
        """The largest."""
        return max(self.values)

    def text(self, form: str = ".1f", unit: str = "", scale: float = 1.0) -> str:
        """Mean and range, such as 3.1 (2.9 to 3.4); only the mean if the range rounds to it."""
        mean, low, high = (format(scale * each, form) for each in (self.mean, self.low, self.high))
        return f"{mean}{unit}" if low == mean == high else f"{mean}{unit} ({low} to {high})"


def ratio(above: Repeated, below: Repeated) -> Repeated:
    """The ratio seed by seed, so that a seed's effect on both cancels."""
    return Repeated(tuple(a / b for a, b in zip(above.values, below.values, strict=True)))


def percent_more(above: Repeated, below: Repeated) -> Repeated:
    """The difference in percent, seed by seed."""
    return Repeated(tuple(100 * (share - 1) for share in ratio(above, below).values))


def series(label: str, x: Sequence[float | str], y: Sequence[Repeated], *, scale: float = 1.0) -> Series:
    """A line or a group of bars, with ranges if there are several seeds."""
    repeated = any(len(each.values) > 1 for each in y)
    return Series(
        label=label,
        x=list(x),
        y=[scale * each.mean for each in y],
        low=[scale * each.low for each in y] if repeated else None,
        high=[scale * each.high for each in y] if repeated else None,
    )


STATIC = "static"
DYNAMIC = "dynamic"
RESERVED = "continuous, memory reserved"
PAGED = "continuous, paged"


def policies(num_reserved: int) -> dict[str, dict[str, Any]]:
    """Options by policy; memory for `num_reserved` sequences can be reserved up to their greatest length.

    static and dynamic use batches of that size; continuous without paging is limited to as many sequences at once;
    paged runs as many as there are blocks for.
    """
    return {
        STATIC: {"batching": "static", "batch_size": num_reserved},
        DYNAMIC: {"batching": "dynamic", "batch_size": num_reserved},
        RESERVED: {"batching": "continuous", "max_num_seqs": num_reserved},
        PAGED: {"batching": "continuous"},
    }
