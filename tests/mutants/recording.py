"""Which lines of the packages each test runs: one test file at a time, in a fork, under coverage."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.mutants.draw import PACKAGES
from tests.mutants.forks import Event, in_fork

_SILENT_FOR = 400.0
"""Seconds that one test may take; the rest of its file is left out then."""

IMPORT = ""
"""Coverage's name for what runs before the first test: imports."""


def options(scratch: Path) -> list[str]:
    """Pytest's, for the map and for mutants."""
    plugins = ["-p", "no:xdist", "-p", "no:cacheprovider"]
    imported_before = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    return ["-q", "--tb=short", *plugins, *imported_before, f"--basetemp={scratch / 'tmp'}"]


def map_file(file: str, scratch: Path) -> dict[str, Any]:
    """The file's row of the map: seconds of collecting it; lines and seconds of its tests and wider fixtures.

    Lines are numbers by module, bit n for line n, in hexadecimal.
    """
    import coverage

    def work(send: Any) -> None:
        root = str(Path.cwd())
        include = [f"{root}/{package}/*" for package in PACKAGES]
        cover = coverage.Coverage(data_file=None, include=include, config_file=False, messages=False)
        recorder = _Recorder(cover, send)
        cover.start()
        pytest.main([file, *options(scratch)], plugins=[recorder])
        cover.stop()
        for context, lines in _lines(cover.get_data(), root):
            send({"context": context, "lines": lines})

    events, _ = in_fork(work, scratch / "map.log", lambda event: _SILENT_FOR)
    return _row(file, events)


def _lines(data: Any, root: str) -> Iterator[tuple[str, dict[str, str]]]:
    files = {path: os.path.relpath(path, root) for path in data.measured_files()}
    for context in sorted(data.measured_contexts()):
        data.set_query_context(context)
        masks = {module: sum(1 << line for line in data.lines(path) or ()) for path, module in files.items()}
        yield context, {module: f"{mask:x}" for module, mask in masks.items() if mask}


def _row(file: str, events: list[Event]) -> dict[str, Any]:
    lines = {event["context"]: event["lines"] for event in events if "context" in event}
    fixtures: dict[str, dict[str, Any]] = {}
    for event in events:
        if "fixture" in event:
            known = fixtures.setdefault(event["fixture"], {"seconds": 0.0, "lines": lines.get(event["fixture"], {})})
            known["seconds"] = round(known["seconds"] + event["seconds"], 3)
    tests, left_out = {}, []
    for event in events:
        if event.get("passed"):
            used = [name for name in event["fixtures"] if name in fixtures]
            tests[event["test"]] = {
                "seconds": event["seconds"], "fixtures": used, "lines": lines.get(event["test"], {}),
            }  # fmt: skip
        elif "passed" in event:
            left_out.append(event["test"])
    collect = next((event["collect"] for event in events if "collect" in event), 0.0)
    return {
        "file": file, "collect": collect, "import": lines.get(IMPORT, {}), "fixtures": fixtures, "tests": tests,
        "left_out": left_out, "complete": any("finished" in event for event in events),
    }  # fmt: skip


class _Recorder:
    """A plugin: a context for each test, and for each fixture that more than one test may share."""

    def __init__(self, cover: Any, send: Any) -> None:
        self._cover = cover
        self._send = send
        self._begun = time.monotonic()
        self._context = IMPORT
        self._fixtures = 0.0
        """Seconds that the present test has spent in fixtures it may share."""
        self._passed = True

    def _switch(self, context: str) -> str:
        before, self._context = self._context, context
        self._cover.switch_context(context)
        return before

    def pytest_collection_finish(self) -> None:
        self._send({"collect": round(time.monotonic() - self._begun, 3)})

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Iterator[None]:
        self._switch(item.nodeid)
        begun, self._fixtures, self._passed = time.monotonic(), 0.0, False
        result = yield
        seconds = round(time.monotonic() - begun - self._fixtures, 3)
        fixtures = [f"fixture {name}" for name in getattr(item, "fixturenames", ())]
        self._send({"test": item.nodeid, "passed": self._passed, "seconds": seconds, "fixtures": fixtures})
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        if fixturedef.scope == "function":
            return (yield)
        name = f"fixture {fixturedef.argname}"
        before, begun, inner = self._switch(name), time.monotonic(), self._fixtures
        try:
            return (yield)
        finally:
            own = time.monotonic() - begun - (self._fixtures - inner)
            self._fixtures += own
            self._send({"fixture": name, "seconds": round(own, 3)})
            self._switch(before)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call":
            self._passed = report.passed and not hasattr(report, "wasxfail")
        elif report.failed:
            self._passed = False

    def pytest_sessionfinish(self) -> None:
        self._send({"finished": True})
        sys.stdout.flush()
