"""Which tests see a mutant, and in which order they run: batches, the quick and near ones first, up to a cap."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.mutants.draw import Mutant

_BATCHES = (4.0, 12.0, 24.0)
"""Seconds of tests in the first batches; the last one takes the rest. Each has a process of its own."""
_TURN = 3.0
"""Seconds of tests taken from a file before the next file has its turn."""

STATEMENT, SCOPE, MODULE, IMPORTED = range(4)
"""How near a test comes: it runs the changed statement; where no test does that, or where the statement runs at import,
what is around it; at import also something of the module, or it only imports the module."""

Lines = dict[str, str]
"""By module: bit n for line n, in hexadecimal."""
Map = dict[str, dict[str, Any]]
"""Rows of recording.map_file by file."""


@dataclass(frozen=True)
class SeeingTest:
    """A test that may fail through the mutant."""

    file: str
    name: str
    near: int
    seconds: float
    """Of the test alone, without its file's collection and the fixtures that it shares."""


@dataclass
class Portion:
    """Some tests of a file, which run one after another."""

    file: str
    tests: list[str]
    seconds: float
    """With their shared fixtures, without the file's collection."""


def read_map(path: Path) -> Map:
    """The rows of a map by file."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {row["file"]: row for row in rows}


def batches(mutant: Mutant, rows: Map, cap: float) -> list[list[Portion]]:
    """The tests to run, at most `cap` seconds of them, as the map has measured; the first batches are short."""
    made: list[list[Portion]] = [[]]
    limits = [*_BATCHES, float("inf")]
    filled, total = 0.0, 0.0
    for portion in _portions(seeing_tests(mutant, rows), rows):
        collected = any(other.file == portion.file for other in made[-1])
        seconds = portion.seconds + (0.0 if collected else rows[portion.file]["collect"])
        if total and total + seconds > cap:
            continue
        if made[-1] and filled + seconds > limits[len(made) - 1]:
            made.append([])
            filled = 0.0
        made[-1].append(portion)
        filled += seconds
        total += seconds
    return made if made[0] else []


def seeing_tests(mutant: Mutant, rows: Map) -> list[SeeingTest]:
    """Every test of the map that sees the mutant, in no order."""
    at_import = any(_hits(row["import"], mutant.module, mutant.statement) for row in rows.values())
    found = []
    for file, row in rows.items():
        imported = at_import and _hits(row["import"], mutant.module, mutant.statement)
        for name, test in row["tests"].items():
            lines = [test["lines"], *(row["fixtures"][fixture]["lines"] for fixture in test["fixtures"])]
            near = _near(mutant, lines, imported)
            if near is not None:
                found.append(SeeingTest(file, name, near, test["seconds"]))
    if at_import or all(test.near == SCOPE for test in found):  # none: a `continue` has no line of its own at times
        return found
    return [test for test in found if test.near == STATEMENT]


def _near(mutant: Mutant, lines: list[Lines], imported: bool) -> int | None:
    if any(_hits(each, mutant.module, mutant.statement) for each in lines):
        return STATEMENT
    if any(_hits(each, mutant.module, mutant.scope) for each in lines):
        return SCOPE
    if imported and any(mutant.module in each for each in lines):
        return MODULE
    return IMPORTED if imported else None


def _hits(lines: Lines, module: str, span: tuple[int, int]) -> bool:
    mask = int(lines.get(module, "0"), 16)
    first, last = span
    return mask >> first & ((1 << (last - first + 1)) - 1) != 0


def _portions(tests: list[SeeingTest], rows: Map) -> list[Portion]:
    """By turns some tests of each file: nearest first, then those of files whose first test is quick."""
    by_file: dict[tuple[int, str], list[SeeingTest]] = defaultdict(list)
    for test in sorted(tests, key=lambda test: (test.seconds, test.name)):
        by_file[test.near, test.file].append(test)
    made: list[tuple[tuple[int, int, float], Portion]] = []
    for (near, file), ordered in by_file.items():
        fixtures: set[str] = set()
        turn, portion = 0, Portion(file, [], 0.0)
        for test in ordered:
            new = set(rows[file]["tests"][test.name]["fixtures"]) - fixtures
            fixtures |= new
            seconds = test.seconds + sum(rows[file]["fixtures"][name]["seconds"] for name in new)
            if portion.tests and portion.seconds + seconds > _TURN:
                turn, portion = turn + 1, Portion(file, [], 0.0)
            if not portion.tests:
                made.append(((near, turn, seconds), portion))
            portion.tests.append(test.name)
            portion.seconds += seconds
    return [portion for _, portion in sorted(made, key=lambda pair: pair[0])]
