"""Which kernels a start compares, as docs/kernel-checks.md says, and which a comparison launches; for tests only."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from triton.runtime.interpreter import InterpretedFunction

from executor_svc.gpu.choices.ways import KernelChecks
from executor_svc.gpu.kernels.compile.registry import PACKAGE, kernel_modules
from tests.helpers.paths import ROOT

PAGE = ROOT / "docs" / "kernel-checks.md"
_ROW = re.compile(r"^\| ((?:`[^`]+` ?)+) ?\| (.+) \|$", re.M)


def rows(page: str) -> dict[str, str]:
    """Return how each file of kernels is compared, as a page's table says it; a file twice is refused."""
    found: dict[str, str] = {}
    for files, how in _ROW.findall(page):
        for file in re.findall(r"`([^`]+)`", files):
            assert file not in found, f"{file}: two rows"
            found[file] = how
    return found


def operations_of(how: str) -> list[str]:
    """Return the operations of a row; none for other rows."""
    kind, _, rest = how.partition(": ")
    return re.findall(r"`([^`]+)`", rest.partition(";")[0]) if kind == "operations" else []


def kernel_files() -> list[str]:
    return [f"{module.removeprefix(f'{PACKAGE}.').replace('.', '/')}.py" for module in kernel_modules()]


@contextmanager
def launched_by_comparisons(patch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Yield the modules below the package of kernels whose kernels were launched to be compared."""
    found, inside = set[str](), [False]
    run, tried = InterpretedFunction.run, KernelChecks.tried

    def counted(self: InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
        if inside[0]:
            found.add(self.fn.__module__.removeprefix(f"{PACKAGE}."))
        return run(self, *args, **kwargs)

    def comparing(self: KernelChecks, name: str, way: str, compare: Callable[[], str | None]) -> str | None:
        inside[0] = True
        try:
            return tried(self, name, way, compare)
        finally:
            inside[0] = False

    patch.setattr(InterpretedFunction, "run", counted)
    patch.setattr(KernelChecks, "tried", comparing)
    yield found
