"""Types of experiments and of their results: files with numbers, from which the page and its figures are made."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

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
