"""One name, one class: a reader who meets a name in two rooms need not ask which one it is. And no room is too long."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.paths import PACKAGES, ROOT

MOST_LINES, MOST_OF_FUNCTION = 400, 60
LONG_FUNCTIONS = {
    "executor_svc/gpu/kernels/experts/choose.py": {"choose_kernel": 69},
    "executor_svc/gpu/kernels/states/recurrence.py": {"_recur": 114},
}
"""Kernels in one piece, and their lines: this list may only shrink."""


def modules() -> Iterator[tuple[Path, ast.Module]]:
    """The product's modules by path; generated ones are left out."""
    for package, folder in PACKAGES.items():
        for path in (folder / package).rglob("*.py"):
            if not path.name.endswith(("_pb2.py", "_pb2_grpc.py")) and path.name != "llm_options.py":
                yield path.relative_to(ROOT), ast.parse(path.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_every_class_has_a_name_of_its_own_and_every_function_fits_on_a_screen() -> None:
    """One test: reading all modules takes three seconds."""
    classes, long = defaultdict(list), defaultdict(dict)
    for path, module in modules():
        for node in ast.walk(module):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(f"{path}:{node.lineno}")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                lines = node.end_lineno - node.lineno + 1
                if lines > MOST_OF_FUNCTION:
                    long[str(path)][node.name] = lines
    assert len(classes) > 1000
    assert {name: places for name, places in classes.items() if len(places) > 1} == {}
    assert dict(long) == LONG_FUNCTIONS


def test_no_file_is_too_long() -> None:
    places = [*(root / name for name, root in PACKAGES.items()), ROOT / "benchmarks", ROOT / "tests"]
    files = [path for place in places for path in place.rglob("*.py")]
    generated = ("_pb2.py", "_pb2_grpc.py", "llm_options.py")
    lines = {
        str(path.relative_to(ROOT)): path.read_bytes().count(b"\n")
        for path in files
        if not path.name.endswith(generated)
    }
    assert len(lines) > 2000
    assert {name: count for name, count in lines.items() if count > MOST_LINES} == {}
