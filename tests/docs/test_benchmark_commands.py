"""What the documents say to run of the benchmarks is there, and so are the rows that they name."""

from __future__ import annotations

import importlib.util
import re

from benchmarks.__main__ import BENCHMARKS
from tests.docs.test_docs import PAGES
from tests.helpers.paths import ROOT

TEXTS = {page: page.read_text(encoding="utf-8") for page in PAGES if page != ROOT / "docs" / "log.md"}
"""Without the log, which names what once was."""


def _named(pattern: str) -> set[str]:
    return {found for text in TEXTS.values() for found in re.findall(pattern, text)}


def test_every_benchmark_that_a_page_says_to_run_is_there() -> None:
    named = _named(r"python -m benchmarks ([a-z]\w*)")
    assert len(named) > 5
    assert named <= set(BENCHMARKS)
    assert _named(r"BENCH_ARGS='([a-z]\w*)") <= set(BENCHMARKS)


def test_every_module_that_a_page_says_to_run_is_there() -> None:
    modules = _named(r"python -m (benchmarks\.[\w.]*\w)")
    assert "benchmarks.common.random_adapters" in modules
    assert not [name for name in sorted(modules) if importlib.util.find_spec(name) is None]


def test_every_file_of_the_benchmarks_that_a_page_names_is_there() -> None:
    files = _named(r"(?<![\w/])(benchmarks/[\w./-]+\.(?:py|jsonl?))")
    assert len(files) > 10
    assert not [file for file in sorted(files) if not (ROOT / file).exists()]


def test_every_benchmark_is_in_the_table_of_questions() -> None:
    table = TEXTS[ROOT / "benchmarks" / "README.md"]
    rows = re.findall(r"^\| `([\w./]+)` \|", table, re.M)
    assert {name.rstrip("/").removesuffix(".py") for name in rows} >= set(BENCHMARKS)
