"""Outcomes of tests: read from pytest's JUnit files, summed up for people."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

_DEVICE_ERROR = re.compile(
    r"CUDA error|AcceleratorError|illegal memory access|unspecified launch failure|CUDA driver error"
)


@dataclass(frozen=True, slots=True)
class Test:
    """The outcome of one test."""

    file: str
    name: str
    status: str
    """passed, failed or skipped."""
    seconds: float
    text: str = ""
    """The failure or the reason for skipping."""

    @property
    def has_device_error(self) -> bool:
        """Whether a CUDA error failed it, maybe one that an earlier test caused."""
        return self.status == "failed" and _DEVICE_ERROR.search(self.text) is not None


def read_junit(path: Path, target: str) -> list[Test]:
    """The tests in a JUnit file of pytest, as tests of the file `target`."""
    tests = []
    for case in ElementTree.parse(path).iter("testcase"):
        status, text = "passed", ""
        for child in case:
            if child.tag in ("failure", "error"):
                status, text = "failed", f"{text}{child.get('message', '')}\n{child.text or ''}\n"
            elif child.tag == "skipped":
                status, text = "skipped", child.get("message", "")
        seconds = float(case.get("time", "0"))
        tests.append(Test(target.partition("::")[0], str(case.get("name")), status, seconds, text))
    return tests


def after_rerun(first: Test, alone: Test) -> Test:
    """The outcome of a test that failed beside others and then ran alone."""
    if alone.status == "passed":
        return Test(first.file, first.name, "passed", alone.seconds, "failed after another test, passed alone")
    return Test(first.file, first.name, alone.status, alone.seconds, f"(alone)\n{alone.text}")


def counts(tests: Iterable[Test]) -> dict[str, float]:
    """Numbers of tests by status."""
    found = Counter(test.status for test in tests)
    return {status: float(found[status]) for status in ("passed", "failed", "skipped")}


def counted(tests: Iterable[Test]) -> str:
    """`3 passed, 0 failed, 1 skipped`."""
    return ", ".join(f"{count:.0f} {status}" for status, count in counts(tests).items())


def summary(tests: Sequence[Test]) -> str:
    """Counts per file, the slowest tests, notes, and the names of the tests that failed."""
    lines = [
        f"{file}: {counted([test for test in tests if test.file == file])}"
        for file in dict.fromkeys(test.file for test in tests)
    ]
    slowest = sorted(tests, key=lambda test: -test.seconds)[:10]
    lines += ["== slowest", *(f"{test.seconds:.1f} s {test.file}::{test.name}" for test in slowest)]
    notes = [test for test in tests if test.status == "passed" and test.text]
    lines += [f"note: {test.file}::{test.name}: {test.text}" for test in notes]
    lines += [f"FAILED {test.file}::{test.name}: {_first_line(test.text)}" for test in _failed(tests)]
    return "\n".join([*lines, f"== all: {counted(tests)}"])


def write(tests: Sequence[Test], folder: Path) -> None:
    """Write summary.txt and failures.txt."""
    (folder / "summary.txt").write_text(summary(tests) + "\n", encoding="utf-8")
    text = "\n".join(f"==== {test.file}::{test.name}\n{test.text}" for test in _failed(tests))
    (folder / "failures.txt").write_text(text + "\n", encoding="utf-8")


def _failed(tests: Iterable[Test]) -> list[Test]:
    return [test for test in tests if test.status == "failed"]


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")[:200]
