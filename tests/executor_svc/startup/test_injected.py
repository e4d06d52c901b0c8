"""Faults for tests are for the CPU: a GPU's executor has no place for them, and must not ignore them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from executor_svc.simulated.injection import InjectionError
from executor_svc.startup.executors import make_executor


def test_faults_on_a_gpu_are_refused() -> None:
    nothing: Any = None
    device: Any = SimpleNamespace(name="cuda")
    with pytest.raises(InjectionError, match=r"^--inject oom@3: only with --simulate, or with a model on the CPU$"):
        make_executor(nothing, device, nothing, nothing, inject="oom@3")
