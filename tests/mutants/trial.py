"""A mutant on trial: its text in place, its tests in forks, until one of them fails."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings

from tests.mutants.draw import Mutant
from tests.mutants.forks import Event, in_fork
from tests.mutants.recording import options
from tests.mutants.seeing import Map, Portion, batches

SERVICE_TESTS = re.compile(
    r"tests/service/test_whole_service\.py::.*two processes"
    r"|tests/service/recorded/test_replay\.py::test_both_programs_as_they_are_called.*simulated"
)
"""Tests that run the services as processes of their own, which coverage does not see: for what survives all else."""

_START = 120.0
"""Seconds until the first test begins, on a busy machine: imports and collection."""
_LEAST, _TIMES = 30.0, 10.0
"""A test is killed after so many seconds, or so many times what the map has measured, if that is more."""


def rounds(mutant: Mutant, rows: Map, cap: float) -> list[list[Portion]]:
    """What a mutant must survive, batch by batch; the last one are the SERVICE_TESTS that pass without a mutant."""
    passed = {file: [name for name in row["tests"] if SERVICE_TESTS.match(name)] for file, row in rows.items()}
    return [*batches(mutant, rows, cap), [Portion(file, names, 0.0) for file, names in passed.items() if names]]


def try_mutant(mutant: Mutant, index: int, batch: list[Portion], rows: Map, scratch: Path) -> dict[str, Any]:
    """The row of one of the mutant's rounds: killed, timeout or survived, through which test, after how long."""
    begun = time.monotonic()
    with in_place(mutant):
        outcome, killer, count = run_tests(batch, seconds_of(batch, rows), scratch)
    return {
        "number": mutant.number, "round": index, "outcome": outcome, "by": killer, "tests": count,
        "seconds": round(time.monotonic() - begun, 1),
    }  # fmt: skip


def seconds_of(batch: list[Portion], rows: Map) -> dict[str, float]:
    """What each test of the batch may need, with shared fixtures, as the map has measured."""
    found = {}
    for portion in batch:
        row = rows[portion.file]
        shared = sum(fixture["seconds"] for fixture in row["fixtures"].values())
        found.update({name: row["tests"][name]["seconds"] + shared for name in portion.tests})
    return found


@contextmanager
def in_place(mutant: Mutant) -> Iterator[None]:
    """The mutant's text in this copy of the tree."""
    path = Path(mutant.module)
    text = path.read_text(encoding="utf-8")
    path.write_text(mutant.applied_to(text), encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(text, encoding="utf-8")


def run_tests(batch: list[Portion], seconds: dict[str, float], scratch: Path) -> tuple[str, str, int]:
    """How the tests ended, the one that failed, and how many began."""
    files = list(dict.fromkeys(portion.file for portion in batch))
    if not files:
        return "survived", "", 0
    chosen = _Chosen([name for portion in batch for name in portion.tests])

    def work(send: Any) -> None:
        chosen.send = send
        code = pytest.main([*files, "-x", *options(scratch)], plugins=[chosen])
        if code in (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR):
            send({"failed": "collection"})

    def allowed(event: Event) -> float:
        return max(_LEAST, _TIMES * seconds.get(event["test"], 0.0)) if "test" in event else _START

    events, killed = in_fork(work, scratch / "trial.log", allowed)
    begun = [event["test"] for event in events if "test" in event]
    failed = next((event["failed"] for event in events if "failed" in event), "")
    if failed:
        return "killed", failed, len(begun)
    if killed:
        return "timeout", begun[-1] if begun else "collection", len(begun)
    if not any("finished" in event for event in events):
        return "killed", f"{begun[-1] if begun else 'collection'} (the process ended)", len(begun)
    return "survived", "", len(begun)


class _Chosen:
    """A plugin that runs the chosen tests alone, in their order, and says which one begins and fails."""

    def __init__(self, names: list[str]) -> None:
        self._names = names
        self.send: Any = None

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self) -> None:
        # A failing example is enough: nobody reads a smaller one.
        quick = settings(settings.default, phases=[Phase.explicit, Phase.generate], report_multiple_bugs=False)
        settings.register_profile("mutants", quick)
        settings.load_profile("mutants")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        order = {name: index for index, name in enumerate(self._names)}
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in order])
        items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.send({"test": nodeid})

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.send({"failed": report.nodeid})

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.send({"failed": f"collection of {report.nodeid}"})

    def pytest_sessionfinish(self) -> None:
        self.send({"finished": True})
