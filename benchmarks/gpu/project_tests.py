"""A pytest plugin: `tests` is this project's folder, even where an installed package brings a `tests` of its own."""

from __future__ import annotations

import sys
from types import ModuleType

from benchmarks.common.rows import ROOT

_package = ModuleType("tests")
_package.__path__ = [str(ROOT / "tests")]
sys.modules["tests"] = _package
