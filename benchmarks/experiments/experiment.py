"""What an experiment is, and what it leaves: a file with numbers, from which the page and its figures are made."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from benchmarks.common.rows import ROOT
from cadenza.loadtest.facts import ClientFacts, client_facts

RESULTS = ROOT / "benchmarks" / "results" / "experiments"
Place = Literal["simulate", "cpu"]
"""simulate: the real core in virtual time with a published cost model; cpu: the real services on this machine."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="null")


class Series(_Frozen):
    """One line, or one group of bars. [n] each; None: nothing was measured there."""

    label: str
    x: list[float | str]
    y: list[float | None]
    low: list[float | None] | None = None
    high: list[float | None] | None = None


class Figure(_Frozen):
    """A figure's data; `page` draws it. Labels have units."""

    name: str
    """Of its file, unique within the experiment; letters, digits, dashes."""
    title: str
    x_label: str
    y_label: str
    series: list[Series]
    kind: Literal["line", "step", "bar"] = "line"
    log_x: bool = False
    log_y: bool = False
    caption: str = ""
    """What one sees, a sentence."""


class Table(_Frozen):
    """Numbers as they stand on the page, already formatted."""

    title: str
    columns: list[str]
    rows: list[list[str]]


class Finding(_Frozen):
    """A claim of the literature against what came out here."""

    claim: str
    """With its source as a Markdown link."""
    held: bool
    evidence: str
    """The numbers, made from the results."""


class ExperimentResult(_Frozen):
    """All that one experiment gave in one place."""

    experiment: str
    place: Place
    created: datetime = Field(default_factory=lambda: datetime.now(UTC))
    machine: ClientFacts = Field(default_factory=client_facts)
    seed: int
    setup: dict[str, Any]
    """Model, costs, limits, workload: what one needs to know to make it again."""
    wall_s: float = 0.0
    """Seconds that it took."""
    findings: list[Finding]
    figures: list[Figure]
    tables: list[Table] = Field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RunSettings:
    """How an experiment is to be run."""

    place: Place
    seed: int
    quick: bool = False
    """A small version of the same, for the tests: its numbers mean nothing."""


@dataclass(frozen=True, slots=True)
class Experiment:
    """One question, and how it is answered."""

    name: str
    """As 1-variance: its number and a word."""
    title: str
    hypothesis: str
    """What the literature claims, in Markdown with its sources, and what is expected here."""
    run: Callable[[RunSettings], ExperimentResult]
    places: tuple[Place, ...] = ("simulate",)
    notes: str = ""
    """Where it came out otherwise: why. Markdown, written by hand, after looking at the results."""


def result_path(name: str, place: Place) -> Path:
    """Where a result lies."""
    return RESULTS / f"{name}-{place}.json"


def save(result: ExperimentResult) -> Path:
    """Write a result in place of the one before."""
    path = result_path(result.experiment, result.place)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result.model_dump(mode="json"), indent=1) + "\n", encoding="utf-8")
    return path


def load(name: str, place: Place) -> ExperimentResult | None:
    """The result that lies there, if any."""
    path = result_path(name, place)
    return ExperimentResult.model_validate_json(path.read_bytes()) if path.exists() else None
