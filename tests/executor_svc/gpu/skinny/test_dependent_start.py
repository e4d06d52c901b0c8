"""Starts with --pdl auto: what they compare and measure, and when kernels are launched early from then on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from executor_svc.gpu import runner as gpu_runner
from executor_svc.gpu.skinny import dependent_probe
from executor_svc.gpu.skinny.decodes import ProbedDecodes, Replay
from tests.executor_svc.driver import Model
from tests.executor_svc.gpu import test_warm_up
from tests.executor_svc.gpu.skinny.test_skinny_start import kernels_of, made
from tests.helpers.executor.plans import scheduled, sequence
from tests.helpers.executor.stepping import Stepper

pytestmark = [
    *test_warm_up.pytestmark,
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU measures for itself"),
]

FUSED = {"skinny_kernel", "new_keys_kernel"}
USED = "programmatic dependent launches: the same bits in"
NOT_USED = "programmatic dependent launches are not used: "


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """Names of kernels of fused layers as they are launched, and whether they may begin early."""
    found: list[tuple[str, bool]] = []
    run = InterpretedFunction.run

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn.__name__ in FUSED:
            early = bool(kwargs.get("AHEAD", kwargs.get("DEPENDENT")))
            assert early == kwargs.get("launch_pdl", False)
            found.append((self.fn.__name__, early))
        return run(self, *args, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", noted)
    return found


def started(folder: Path, monkeypatch: pytest.MonkeyPatch, measure: Any, **options: Any) -> tuple[Model, Stepper]:
    """A start that measures decodes of 1 and 2 rows, in order and with early kernels each."""
    monkeypatch.setattr(gpu_runner, "probe_dependent", partial(dependent_probe.probe_dependent, measure=measure))
    monkeypatch.setattr(dependent_probe, "_ROUNDS", 1)
    model = Model(folder, device="cuda", **{"skinny_gemms": "on", "pdl": "auto"} | options)
    return model, Stepper(model, num_slots=2)


def timed(*seconds: float) -> Any:
    left = list(seconds)
    return lambda run: (run, left.pop(0))


def said(caplog: pytest.LogCaptureFixture) -> str:
    (line,) = (record.message for record in caplog.records if "programmatic" in record.message)
    return str(line)


def decode(stepper: Stepper) -> list[list[int]]:
    opening: dict[str, Any] = {"admitted": (sequence(0, [5, 9, 2], stepper.blocks(0)),)}
    opening["scheduled"] = scheduled((0, 3, True))
    return [stepper.step(**fields).token_ids.tolist() for fields in (opening, {"decode_ready": True})]


def test_early_kernels_are_launched_where_they_are_right_and_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, launches: list[tuple[str, bool]]
) -> None:
    folder = made(tmp_path)
    caplog.set_level(logging.INFO)
    _, stepper = started(folder, monkeypatch, timed(1.0, 0.7, 1.0, 0.9))
    assert said(caplog) == f"{USED} 0.80 of the time"
    launches.clear()
    found = decode(stepper)
    assert launches == [("skinny_kernel", True), ("new_keys_kernel", True), *[("skinny_kernel", True)] * 3]
    plain = Stepper(Model(folder, device="cuda", skinny_gemms="on"))
    launches.clear()
    assert decode(plain) == found, "what the probe wrote is gone"
    assert {early for _, early in launches} == {False}


@pytest.mark.parametrize("case", ["slower", "other bits", "an error"])
def test_they_are_not_launched_where_they_are_not(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The second measurement is that of early kernels; what it returns is run again."""
    calls: list[Callable[[], None]] = []

    def measure(run: Replay) -> tuple[Replay, float]:
        calls.append(run)
        early = len(calls) == 2
        if early and case == "an error":
            raise RuntimeError("no such launch")

        def spoiled() -> None:
            run()
            decodes.hidden[0, 0] += 1

        return spoiled if early and case == "other bits" else run, 1.0

    decodes: Any = None
    probe = dependent_probe.probe_dependent

    def probed(kernels: Any, given: Any, **named: Any) -> None:
        nonlocal decodes
        decodes = given
        probe(kernels, given, **named)

    monkeypatch.setattr(dependent_probe, "probe_dependent", probed)
    model, _ = started(made(tmp_path), monkeypatch, measure)
    reasons = {
        "slower": "they take 1.00 of the time",
        "other bits": "decodes of 1 rows have other bits",
        "an error": "RuntimeError: no such launch",
    }
    assert said(caplog) == NOT_USED + reasons[case]
    assert not kernels_of(model).dependent
    assert len(calls) == (4 if case == "slower" else 2)


def test_where_they_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = made(tmp_path)
    started(folder, monkeypatch, timed(), skinny_gemms="off")
    assert said(caplog).startswith(f"{NOT_USED}they are of fused layers")
    caplog.clear()
    monkeypatch.setattr("executor_svc.gpu.device._HOPPER", (80, 108))
    started(folder, monkeypatch, timed())
    assert said(caplog) == f"{NOT_USED}they need a GPU of compute capability 9.0, this has 8.0"


def test_without_room_for_a_decode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ProbedDecodes, "fill", lambda *_: False)
    started(made(tmp_path), monkeypatch, timed())
    assert said(caplog) == f"{NOT_USED}no block of keys and values is there to try them"


def test_nothing_is_said_or_tried_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started(made(tmp_path), monkeypatch, timed(), pdl="off")
    assert not [record for record in caplog.records if "programmatic" in record.message]
