"""What a start on a GPU says of its memory and its seconds, from the numbers of a stand-in for PyTorch's."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cadenza_common.plan.memory import MemoryPart
from executor_svc.config import ExecutorConfig
from executor_svc.gpu.device import BYTES_FOR_GRAPHS
from executor_svc.startup.gpu_report import StartReport

GIB = 1 << 30
GPU: Any = SimpleNamespace(torch_device=torch.device("cuda"))


class Memory:
    """A device of 80 GiB, of which another process has 2."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.used, self.cached = 2 * GIB, 0
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80 * GIB - self.used - self.cached, 80 * GIB))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        monkeypatch.setattr(torch.cuda, "empty_cache", self.give_back)

    def give_back(self) -> None:
        self.cached = 0


def started(memory: Memory, graphs: float) -> StartReport:
    report = StartReport(GPU)
    for part, taken in (("loading", 16.0), ("largest steps", 0.0), ("graphs", graphs)):
        with report.part(part):
            memory.used += int(taken * GIB)
            memory.cached += GIB
        if part == "loading":
            report.takes("weights", 15 * GIB)
        if part == "largest steps":
            memory.used += 50 * GIB
            report.takes("KV blocks", 50 * GIB)
    return report


def test_computed_stands_beside_measured(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    report = started(Memory(monkeypatch), 1.5)
    with caplog.at_level(logging.INFO):
        report.ends(ExecutorConfig(model="m"), step_bytes=GIB // 2)
    assert report.memory == [
        MemoryPart("weights", 15 * GIB, 16 * GIB),
        MemoryPart("KV blocks", 50 * GIB, 50 * GIB),
        MemoryPart("steps and graphs", GIB // 2 + BYTES_FOR_GRAPHS, 3 * GIB // 2),
    ]
    times, memory = (each.getMessage() for each in caplog.records)
    assert times.startswith("ready ")
    assert "s after the start of the process (loading 0.0, largest steps 0.0, graphs 0.0); " in times
    assert "kernels compiled in" in times
    assert memory == (
        "memory of the GPU: weights 15.00 computed, 16.00 measured; KV blocks 50.00 computed, 50.00 measured; steps "
        "and graphs 1.50 computed, 1.50 measured; in all 66.50 computed, the device reports 69.50 of 80.00 GiB in use; "
        "at most 72.00 are wanted"
    )
    assert caplog.records[1].levelname == "INFO"


def test_more_than_is_wanted_is_a_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    started(Memory(monkeypatch), 5).ends(ExecutorConfig(model="m"), step_bytes=0)
    assert [each.levelname for each in caplog.records] == ["WARNING"]
    assert "the device reports 73.00 of 80.00 GiB" in caplog.text


def test_a_cpu_has_nothing_to_say(caplog: pytest.LogCaptureFixture) -> None:
    report = StartReport(SimpleNamespace(torch_device=torch.device("cpu")))  # type: ignore[arg-type]
    with caplog.at_level(logging.INFO), report.part("loading"):
        report.takes("weights", 5)
    report.ends(ExecutorConfig(model="m"), step_bytes=0)
    assert report.memory == []
    assert caplog.records == []
