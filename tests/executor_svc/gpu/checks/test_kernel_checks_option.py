"""`--kernel-checks`: a false alarm of a tolerance refuses no start of an operator who says so."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from executor_svc.config import ExecutorConfig
from executor_svc.gpu import experts
from executor_svc.gpu.checks import model_check as comparing
from executor_svc.gpu.checks.model_check import ModelCheck, compare_models
from executor_svc.gpu.checks.steps.step_check import StepCheck
from executor_svc.gpu.choices.ways import KernelChecks, KernelError
from executor_svc.gpu.kernels import norm
from executor_svc.models.heads.eagle3_loading import load_eagle3
from executor_svc.startup.gpu_report import ComparedKernels, check_kernels
from tests.checkpoints import make_checkpoint
from tests.executor_svc.driver import Model
from tests.executor_svc.gpu.checks.checked import HEADS, loaded, model_check, refused, scaled
from tests.helpers.models.agreeing_heads import make_agreeing

NORM = "rms_norm (x 64 bfloat16, weight 64 bfloat16)"


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    return make_checkpoint(folder, "qwen3_moe", vocab_size=131, dtype=torch.bfloat16, **HEADS)


def off_by_little(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = experts.combine

    def combine(*args: Any) -> None:
        launch(*args)
        out: Tensor = args[-1]
        out.mul_(1.03)

    monkeypatch.setattr(experts, "combine", combine)


def test_the_refusal_names_the_option(mixture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    off_by_little(monkeypatch)
    with pytest.raises(KernelError, match=r"^combine .* 0.00781 is allowed; --kernel-checks report computes with it"):
        compare_models([model_check(loaded(mixture, quantization="none"))])


def test_report_goes_on_with_what_is_off(
    mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    off_by_little(monkeypatch)
    model = loaded(mixture, quantization="none")
    usual = model.device.kernels.name
    for start in ("first", "next"):
        check = model_check(model, tmp_path, reports=True)
        caplog.clear()
        compare_models([check])
        assert (check.checks.fallen, check.checks.num_known) == ([], 0), "a start says it until it is right"
        (line,) = check.checks.kept
        assert line.startswith("combine (rows "), start
        (said,) = caplog.messages
        assert said == f"kernels: NOT RIGHT on this GPU, and computed all the same (--kernel-checks report): {line}"
    assert model.device.kernels.name == usual
    monkeypatch.undo()
    with caplog.at_level(logging.INFO):
        compare_models([model_check(model, tmp_path, reports=True)])
    assert caplog.messages[-1].endswith("all agree")
    again = model_check(model, tmp_path)
    compare_models([again])
    assert again.checks.num_known > 25, "where nothing was off, both options find the same"


def test_report_leaves_a_kernel_where_there_is_another_way(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm, "rms_norm", scaled(norm.rms_norm, 3))
    check = model_check(loaded(folder), reports=True)
    assert compare_models([check]).ways == {}
    assert [line.partition(":")[0] for line in check.checks.kept] == [NORM]


def test_what_does_not_run_falls_back_all_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm, "rms_norm", refused)
    check = model_check(loaded(folder), reports=True)
    assert compare_models([check]).ways == {NORM: "torch"}
    assert check.checks.kept == []


def test_what_runs_with_some_rows_alone_falls_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Off with a prompt, and with one row it does not run."""
    launch = scaled(norm.rms_norm, 3)
    monkeypatch.setattr(norm, "rms_norm", lambda *args: refused() if len(args[0]) == 1 else launch(*args))
    check = model_check(loaded(folder), reports=True)
    assert compare_models([check]).ways == {NORM: "torch"}
    assert check.checks.kept == []


def test_without_a_way_that_runs_there_is_no_start(mixture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "combine", refused)
    with pytest.raises(KernelError, match=r"^combine .*: kernel RuntimeError: PassManager::run failed$"):
        compare_models([model_check(loaded(mixture, quantization="none"), reports=True)])


@pytest.mark.parametrize(
    ("option", "reports", "compares"), [("on", False, True), ("report", True, True), ("off", True, False)]
)
def test_the_option_is_the_devices(option: Any, reports: bool, compares: bool, folder: Path) -> None:
    choices = loaded(folder, kernel_checks=option).device.choices  # type: ignore[attr-defined]
    assert isinstance(choices, KernelChecks)
    assert (choices.reports, choices.compares) == (reports, compares)


@pytest.mark.parametrize("option", ["on", "off"])
def test_a_start_compares_the_model_and_its_head(
    option: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target, head = make_agreeing(tmp_path)
    model = Model(target, device="cuda")
    config = ExecutorConfig(**model.options, kernel_checks=option)
    draft = load_eagle3(str(head), config, model.device, model.loaded)
    found: list[ModelCheck] = []

    def compared(models: list[ModelCheck], steps: StepCheck) -> SimpleNamespace:
        assert (steps.loaded, steps.draft_model) == (model.loaded, draft.model)
        found.extend(models)
        return SimpleNamespace(is_slow=True, has_passes=False)

    monkeypatch.setattr(comparing, "compare_models", compared)
    monkeypatch.setattr(model.device, "torch_device", torch.device("cuda"))
    found_out = check_kernels(config, model.device, model.loaded, draft)
    assert found_out == (ComparedKernels() if option == "off" else ComparedKernels(False, False))
    assert [each.draft_model for each in found] == ([None, draft.model] if option == "on" else [])
    assert ("not compared (--kernel-checks off)" in caplog.text) == (option == "off")
