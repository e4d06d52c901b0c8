"""One name, one class: a reader who meets a name in two rooms need not ask which one it is. And no room is too long."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from tests.helpers.paths import PACKAGES, ROOT

MOST_LINES, MOST_OF_FUNCTION = 400, 60
LONG_FUNCTIONS = {
    "executor_svc/gpu/kernels/attention/attention.py": {"attention_kernel": 62},
    "executor_svc/gpu/kernels/attention/split.py": {"split_kernel": 77},
    "executor_svc/gpu/kernels/experts/choose.py": {"choose_kernel": 69},
    "executor_svc/gpu/kernels/states/recurrence.py": {"_recur": 114},
}
"""Kernels in one piece, and their lines: this list may only shrink."""


@cache
def modules() -> dict[Path, ast.Module]:
    """The product's modules by path; generated ones are left out."""
    found = {}
    for package, folder in PACKAGES.items():
        for path in (folder / package).rglob("*.py"):
            if not path.name.endswith(("_pb2.py", "_pb2_grpc.py")) and path.name != "llm_options.py":
                found[path.relative_to(ROOT)] = ast.parse(path.read_text(encoding="utf-8"))
    return found


@pytest.mark.slow
def test_no_two_classes_of_the_product_have_one_name() -> None:
    found = defaultdict(list)
    for path, module in modules().items():
        for node in ast.walk(module):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(f"{path}:{node.lineno}")
    assert len(found) > 1000
    assert {name: places for name, places in found.items() if len(places) > 1} == {}


@pytest.mark.slow
def test_no_function_of_the_product_is_longer_than_a_screen() -> None:
    found = defaultdict(dict)
    for path, module in modules().items():
        for node in ast.walk(module):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                lines = node.end_lineno - node.lineno + 1
                if lines > MOST_OF_FUNCTION:
                    found[str(path)][node.name] = lines
    assert dict(found) == LONG_FUNCTIONS


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
