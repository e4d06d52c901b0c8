"""Bytecode of the product and of all tests, made once in a run. In a fresh clone each worker would make all of it."""

from __future__ import annotations

import compileall
import multiprocessing
import sys
from pathlib import Path

import pytest
from _pytest.assertion import rewrite

from tests.helpers.paths import PACKAGES, ROOT

_TESTS = ROOT / "tests"


def make_bytecode(config: pytest.Config, processes: int) -> None:
    """Write what is missing or stale, as Python and pytest look for it, in so many processes.

    Called by the process that starts the workers, before it has threads. A file that does not compile is left to them.
    """
    if sys.dont_write_bytecode:
        return
    folders = [*(root / name for name, root in PACKAGES.items()), ROOT / "benchmarks", _TESTS]
    files = sorted(path for folder in folders for path in folder.rglob("*.py"))
    fork = multiprocessing.get_context("fork")
    shares = [fork.Process(target=_make, args=(config, files[index::processes])) for index in range(processes)]
    for share in shares:
        share.start()
    for share in shares:
        share.join()


def _make(config: pytest.Config, files: list[Path]) -> None:
    for path in files:
        if path.is_relative_to(_TESTS) and (path.name.startswith("test_") or path.name == "conftest.py"):
            _rewrite_asserts(config, path)
        else:
            compileall.compile_file(path, quiet=2)


def _rewrite_asserts(config: pytest.Config, path: Path) -> None:
    """As `rewrite.AssertionRewritingHook.exec_module` does before it runs a module."""
    folder = rewrite.get_cache_dir(path)
    cached = folder / (path.stem + rewrite.PYC_TAIL)
    if not rewrite.try_makedirs(folder) or rewrite._read_pyc(path, cached) is not None:
        return
    try:
        source, code = rewrite._rewrite_test(path, config)
    except SyntaxError:
        return
    rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source, cached)
