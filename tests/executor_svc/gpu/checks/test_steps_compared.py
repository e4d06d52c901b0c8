"""Slots, sampling and moves beside the host's at the start, and what takes the place of a kernel that is off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from executor_svc.config import ExecutorConfig
from executor_svc.gpu.checks.model_check import ModelCheck, compare_models
from executor_svc.gpu.checks.steps import moves
from executor_svc.gpu.checks.steps.step_check import StepCheck
from executor_svc.gpu.choices.store import CheckStore
from executor_svc.gpu.choices.ways import KernelChecks, KernelError
from executor_svc.models.adapters.places import AdapterSizes
from tests.checkpoints import make_checkpoint
from tests.executor_svc.driver import Model
from tests.executor_svc.gpu.checks.checked import loaded


def step_check(model: Model, folder: Path | None = None, reports: bool = False) -> StepCheck:
    checks = KernelChecks(model.device.torch_device, CheckStore(folder, {"gpu": "none"}), reports=reports)
    return StepCheck(model.loaded, model.device, ExecutorConfig(**model.options), checks)


def compared(check: StepCheck) -> dict[str, str]:
    from executor_svc.gpu.checks.fallbacks import Fallbacks

    fallbacks = Fallbacks(check.device.kernels, check.checks)
    check.run(fallbacks)
    return fallbacks.reasons


def test_steps_agree(folder: Path) -> None:
    check = step_check(loaded(folder))
    assert compared(check) == {}
    print(check.checks.num_compared)
