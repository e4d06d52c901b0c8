"""Places for adapters and their memory from the options, and the feature that an executor describes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cadenza.v1 import execution_pb2 as pb
from executor_svc.config import ExecutorConfig
from executor_svc.cpu.device import CpuDevice
from executor_svc.device.interface import DeviceError
from executor_svc.service.description import description_to_wire
from executor_svc.startup.build import build_model
from executor_svc.worker.worker import Executor
from tests.checkpoints import make_checkpoint, make_llama
from tests.executor_svc.driver import NUM_THREADS


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("model"))


def build(model: Path, **options: Any) -> tuple[Executor, pb.DescribeResponse]:
    executor, description = build_model(ExecutorConfig(model=str(model), num_threads=NUM_THREADS, **options))
    return executor, description_to_wire(description)


def test_a_model_has_places_by_default(llama: Path) -> None:
    executor, described = build(llama, num_gpu_blocks=10)
    assert executor.adapters is not None
    assert pb.EXECUTOR_FEATURE_ADAPTERS in described.features
    assert (described.limits.max_loras, described.limits.max_cpu_loras) == (8, 64)


@pytest.mark.parametrize("reason", ["option", "transformers"])
def test_without_places_the_feature_is_absent(llama: Path, reason: str, tmp_path: Path) -> None:
    model, options = llama, {"max_loras": 0}
    if reason == "transformers":
        model, options = make_checkpoint(tmp_path, "gptj"), {}
    executor, described = build(model, num_gpu_blocks=10, **options)
    assert executor.adapters is None
    assert pb.EXECUTOR_FEATURE_ADAPTERS not in described.features
    assert not described.limits.max_loras


def test_kv_blocks_leave_the_memory_of_adapters(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default a tenth of what is free at most; as much as an option says, if that fits."""
    monkeypatch.setattr(CpuDevice, "free_memory_bytes", lambda _: 8 << 20)
    sizes = {"max_num_seqs": 400, "max_num_batched_tokens": 400, "gpu_memory_utilization": 0.5}
    _, without = build(llama, max_loras=0, **sizes)
    executor, described = build(llama, **sizes)
    assert executor.adapters is not None
    each = executor.adapters.max_bytes // executor.adapters.max_loaded  # type: ignore[attr-defined]
    assert described.limits.max_cpu_loras == max(8, (8 << 20) // 10 // each) < 64
    _, chosen = build(llama, max_cpu_loras=9, **sizes)
    assert chosen.limits.max_cpu_loras == 9
    block = without.kv.bytes_per_block
    for some in (described, chosen):
        share = 0.5 * some.limits.max_cpu_loras * each / block
        assert abs(without.kv.num_device_blocks - some.kv.num_device_blocks - share) < 2
    with pytest.raises(DeviceError, match=r"--max-cpu-loras 1000 adapters of --max-lora-rank 64 take \d+ bytes"):
        build(llama, max_cpu_loras=1000, **sizes)
    _, small = build(llama, max_cpu_loras=30, max_lora_rank=1, **sizes)
    assert small.limits.max_cpu_loras == 30


def test_the_fingerprint_does_not_depend_on_places(llama: Path) -> None:
    prints = {build(llama, num_gpu_blocks=10, **each)[1].fingerprint.digest for each in (
        {"max_loras": 0}, {"max_loras": 2, "max_lora_rank": 8}, {},
    )}  # fmt: skip
    assert len(prints) == 1
