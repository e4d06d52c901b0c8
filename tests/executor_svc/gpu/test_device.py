"""What a GPU cannot do is reported at the start, by the option's name; a step that finds no memory fails alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cadenza_common.plan.result import StepStatus
from cadenza_common.plan.sampling import SequenceSampling
from executor_svc.config import ExecutorConfig
from executor_svc.device.interface import is_out_of_memory
from executor_svc.errors import StartError
from executor_svc.gpu import device as gpu_device
from executor_svc.gpu.sampling.sampler import GpuSampler
from tests.checkpoints import make_checkpoint
from tests.executor_svc.driver import Model
from tests.helpers.executor.plans import scheduled, sequence
from tests.helpers.executor.stepping import Stepper


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama", num_hidden_layers=1, dtype=torch.float16)


def new_pools(folder: Path, **options: Any) -> None:
    model = Model(folder, device="cuda", **options)
    model.device.new_kv_cache(model.loaded.geometry, ExecutorConfig(**model.options))


@pytest.mark.parametrize(
    ("options", "arch", "message"),
    [
        ({"kv_cache_dtype": "fp8"}, 80, "--kv-cache-dtype fp8: needs a GPU of compute capability 9.0 or later, .* 8.0"),
        ({"kv_cache_dtype": "fp8", "dtype": "float32"}, 90, "--kv-cache-dtype fp8: needs --dtype"),
        ({"num_cpu_blocks": 10**9}, 90, r"--num-cpu-blocks 1000000000 needs \d+ bytes of the host's memory, \d+ are"),
        ({"num_gpu_blocks": 10**9}, 90, r"--num-gpu-blocks 1000000000 needs \d+ bytes, .*; \d+ are free on the GPU"),
        ({"num_gpu_blocks": None, "gpu_memory_utilization": 1e-9}, 90, "--gpu-memory-utilization 1e-09 leaves"),
        ({"quantization": "int8", "dtype": "float32"}, 90, "--quantization int8: needs --dtype"),
    ],
)
def test_options_are_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], arch: int, message: str
) -> None:
    monkeypatch.setattr(gpu_device, "_HOPPER", (arch, 108))
    monkeypatch.setattr(gpu_device, "_properties", lambda _: (arch, 108))
    with pytest.raises(StartError, match=message):
        new_pools(folder, **options)


def test_heads_that_are_too_large(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="--device cuda: heads of 520 numbers, at most 512"):
        new_pools(make_checkpoint(tmp_path, "llama", num_hidden_layers=1, head_dim=520))


def test_after_a_step_without_memory_the_next_session_is_as_new(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails behind its forward pass, with more slots in use than the next session has."""
    drawn = SequenceSampling(temperature=0.8, seed=3, repetition_penalty=1.3)
    stepper = Stepper(Model(folder, device="cuda"))
    executor = stepper.executor

    def opening() -> dict[str, Any]:
        first = sequence(0, [5, 9, 2], stepper.blocks(0), sampling=drawn)
        return {"admitted": (first,), "scheduled": scheduled((0, 3, True))}

    def tokens() -> list[int]:
        results = [stepper.step(**opening()), *(stepper.step(decode_ready=True) for _ in range(4))]
        assert all(result.status == StepStatus.OK for result in results)
        return [int(token) for result in results for token in result.token_ids]

    expected = tokens()
    executor.clear()
    stepper.step(**opening())
    second = sequence(1, [7, 7], stepper.blocks(1))
    stepper.step(admitted=(second,), scheduled=scheduled((1, 2, True)), decode_ready=True)
    with monkeypatch.context() as patch:
        patch.setattr(GpuSampler, "choose", without_memory)
        with pytest.raises(torch.OutOfMemoryError) as raised:
            stepper.step(decode_ready=True)
    assert executor.is_out_of_memory(raised.value)
    executor.clear()
    assert tokens() == expected


def without_memory(*_: Any) -> None:
    raise torch.OutOfMemoryError("tried to allocate 2 GiB")


@pytest.mark.parametrize(
    "message",
    ["CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "CUDA error: out of memory"],
)
def test_other_words_for_want_of_memory(message: str) -> None:
    assert is_out_of_memory(RuntimeError(message))
