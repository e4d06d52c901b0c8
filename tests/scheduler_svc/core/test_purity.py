"""scheduler_svc.core is pure: it imports the standard library's pure part, itself, and the types of plans, which are
pure too: nothing else.

Read from the syntax trees, so that an import inside a function or under `if` counts too.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT

CORE_PACKAGE = "scheduler_svc.core"
PURE = (CORE_PACKAGE, "cadenza_common.plan", "cadenza_common.grammar.spec")
"""Packages and modules that the core may import, and that this test holds to the same rules."""

# Clocks, randomness, input and output, threads, and what the engine does with events.
# fmt: off
IMPURE_MODULES = frozenset({
    "asyncio", "calendar", "concurrent", "datetime", "io", "logging", "multiprocessing", "os", "pathlib",
    "queue", "random", "sched", "secrets", "select", "selectors", "shutil", "signal", "socket", "ssl",
    "subprocess", "sys", "tempfile", "threading", "time", "uuid", "warnings",
})
# fmt: on
# Builtins that reach outside, or that import past this test.
IMPURE_CALLS = frozenset({"__import__", "breakpoint", "eval", "exec", "input", "open", "print"})


def imported_modules(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """Yields (line, absolute module name) of every import in `tree`, a module of `package`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            # `from scheduler_svc import core` names a module by its last part.
            for alias in node.names:
                yield node.lineno, base if base != "scheduler_svc" else f"{base}.{alias.name}"


def violations(source: str, package: str = CORE_PACKAGE) -> list[str]:
    """What in `source`, a module of `package`, is not pure: one line each."""
    tree = ast.parse(source)
    found = []
    for line, module in imported_modules(tree, package):
        top = module.split(".")[0]
        if any(module == pure or module.startswith(pure + ".") for pure in PURE):
            continue
        if top not in sys.stdlib_module_names:
            found.append(f"line {line}: imports {module}, which is not in the standard library")
        elif top in IMPURE_MODULES:
            found.append(f"line {line}: imports {module}, which is not pure")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in IMPURE_CALLS:
            found.append(f"line {node.lineno}: calls {node.func.id}()")
    return found


def files_of(package: str) -> list[Path]:
    path = ROOT.joinpath(*package.split("."))
    return sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]


def pure_files() -> list[Path]:
    return [path for package in PURE for path in files_of(package)]


@pytest.mark.parametrize("package", PURE)
def test_it_exists(package: str) -> None:
    assert all(path.is_file() for path in files_of(package)), (
        f"nothing in {package}: the test below would prove nothing"
    )
    assert files_of(package)


@pytest.mark.parametrize("path", pure_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_module_is_pure(path: Path) -> None:
    relative = path.relative_to(ROOT)
    package = ".".join(relative.parent.parts)
    assert not violations(path.read_text(), package), f"{relative}: {violations(path.read_text(), package)}"


@pytest.mark.parametrize(
    "source",
    [
        "import time",
        "import random as r",
        "import asyncio.tasks",
        "from datetime import datetime",
        "from logging import getLogger",
        "import numpy as np",
        "from torch import nn",
        "from scheduler_svc import engine",
        "from scheduler_svc.plan_loop.ports import Executor",
        "from .. import engine",
        "from ..ports import Executor",
        "from cadenza.v1 import types_pb2",
        "from cadenza_common import plan_wire",
        "from cadenza_common.plan_wire.writing import plan_to_wire",
        "from cadenza_common.grammar.wire import spec_from_wire",
        "def f():\n    import threading",
        "if False:\n    import grpc",
        "print('x')",
        "__import__('time')",
    ],
)
def test_checker_sees_violation(source: str) -> None:
    assert violations(source)


@pytest.mark.parametrize(
    "source",
    [
        "from __future__ import annotations",
        "import hashlib, heapq, struct",
        "from collections import deque",
        "import collections.abc",
        "from array import array",
        "from scheduler_svc import core",
        "from cadenza_common.plan.plan import StepPlan",
        "from scheduler_svc.core import types",
        "from scheduler_svc.core.types import RequestId",
        "from . import types",
        "from .types import RequestId",
    ],
)
def test_checker_passes_pure_code(source: str) -> None:
    assert violations(source) == []


def test_checker_resolves_relative_imports_in_subpackages() -> None:
    assert violations("from ..types import RequestId", "scheduler_svc.core.queues") == []
    assert violations("from ... import engine", "scheduler_svc.core.queues")
