"""What a start counts of a GPU's memory before KV pools are sized is what is taken afterwards: no less, and no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cadenza_common.plan.result import StepStatus
from cadenza_common.plan.sampling import SequenceSampling
from executor_svc.config import ExecutorConfig
from executor_svc.device.interface import DeviceError
from executor_svc.gpu import warm_up as gpu_warm_up
from executor_svc.gpu.device import GpuDevice
from executor_svc.gpu.kv_cache import STAGING_BYTES
from executor_svc.gpu.warm_up import run_largest_steps
from executor_svc.plan.description import ModelGeometry, limits_of
from executor_svc.startup.executors import make_executor, run_trial
from executor_svc.worker.worker import Executor
from tests.checkpoints import make_checkpoint
from tests.executor_svc.driver import Model
from tests.helpers.executor.allocations import taken_by
from tests.helpers.executor.plans import ints, plan, scheduled, sequence

SIZES: dict[str, Any] = {"max_num_seqs": 6, "max_num_batched_tokens": 16, "max_model_len": 96, "num_gpu_blocks": 64}
VOCAB = {"llama": 600, "gptj": 20000}
"""Large for gptj: sampling for all sequences at once then takes more than logprobs of prompts, computed in pieces."""
SHAPES: dict[str, dict[str, int]] = {
    "llama": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "head_dim": 64},
    "gptj": {"n_layer": 1, "n_head": 1},
}
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="counts what the interpreter takes, of the CPU")


def hosted_or_own(family: str, folder: Path, **options: Any) -> Model:
    checkpoint = make_checkpoint(folder, family, vocab_size=VOCAB[family], **SHAPES[family])
    return Model(checkpoint, device="cuda", block_size=8, **SIZES | options)


HUNGRY = (
    SequenceSampling(temperature=1.0, frequency_penalty=1.0, num_logprobs=1, num_prompt_logprobs=1),
    SequenceSampling(temperature=1.0, top_p=0.99, bias_token_ids=ints(3), biases=np.ones(1, np.float32)),
    SequenceSampling(temperature=0.5, min_p=0.01, min_tokens=2, stop_token_ids=ints(1, 2)),
    SequenceSampling(presence_penalty=1.0, num_candidates=2),
)


def run_hungry_steps(executor: Executor) -> None:
    """Full steps whose sequences request much."""
    for sampling in HUNGRY:
        lengths = (9, 1, 1, 1, 3, 1)
        admitted = (sequence(i, [7] * n, [2 * i, 2 * i + 1], sampling=sampling) for i, n in enumerate(lengths))
        rows = ((i, n, True) for i, n in enumerate(lengths))
        step = plan(admitted=tuple(admitted), scheduled=scheduled(*rows))
        assert executor.launch(step, 0).result().status == StepStatus.OK
        executor.clear()


@interpreted
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("family", "options"),
    [("llama", {"quantization": "fp8_w8a8", "dtype": "bfloat16"}), pytest.param("gptj", {}, marks=pytest.mark.long)],
)
def test_steps_take_what_the_trial_took(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = hosted_or_own(family, tmp_path, **options)
    config = ExecutorConfig(**model.options)
    trial = taken_by(lambda: run_trial(model.loaded, model.device, config))
    one = model.device.new_kv_cache(model.loaded.geometry, config).bytes_per_block

    def serve() -> Executor:
        pools = model.device.new_kv_cache(model.loaded.geometry, config)
        executor = make_executor(model.loaded, model.device, pools, limits_of(config, model.loaded.geometry, pools))
        run_hungry_steps(executor)
        run_largest_steps(executor)
        return executor

    assert taken_by(serve).most - config.num_gpu_blocks * one == trial.given_back - one


@interpreted
@pytest.mark.slow
def test_hosted_models_have_block_tables_by_sequence(tmp_path: Path) -> None:
    model = hosted_or_own("gptj", tmp_path)

    def kept(num_tokens: int) -> int:
        config = ExecutorConfig(**model.options | {"max_num_batched_tokens": num_tokens, "num_gpu_blocks": 1})
        pools = model.device.new_kv_cache(model.loaded.geometry, config)
        limits = limits_of(config, model.loaded.geometry, pools)
        return taken_by(lambda: make_executor(model.loaded, model.device, pools, limits)).kept

    assert kept(1024) - kept(512) == 512 * 2 * 8, "a position and a place in the cache of each token"


GEOMETRY = ModelGeometry("m", "LlamaForCausalLM", 100, 64, 2, 4, 2, 64, 4096, "bfloat16", 1000, 2000)
BLOCK = 2 * 2 * 2 * 16 * 64 * 2  # layers, K and V, heads, tokens, head size, bfloat16


def num_blocks(free: int, step_bytes: int, monkeypatch: pytest.MonkeyPatch, **options: Any) -> int:
    config = ExecutorConfig(model="m", device="cuda", num_threads=1, gpu_memory_utilization=1.0, **options)
    device = GpuDevice(config)
    monkeypatch.setattr(device, "_interpreted", True)
    monkeypatch.setattr(device, "free_memory_bytes", lambda: free)
    return device.new_kv_cache(GEOMETRY, config, step_bytes).num_device_blocks


def test_pool_is_what_steps_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    assert num_blocks(100 * BLOCK, 0, monkeypatch) == 100
    assert num_blocks(100 * BLOCK, 30 * BLOCK + 1, monkeypatch) == 69
    with pytest.raises(DeviceError, match="not one KV block"):
        num_blocks(100 * BLOCK, 99 * BLOCK + 1, monkeypatch)


def test_pool_leaves_room_for_swaps(monkeypatch: pytest.MonkeyPatch) -> None:
    assert num_blocks(100 * BLOCK, 0, monkeypatch, num_cpu_blocks=8) == 92
    assert num_blocks(100 * BLOCK, 0, monkeypatch, num_cpu_blocks=1) == 96, "a block for each of its four parts"
    staging = STAGING_BYTES // BLOCK
    assert num_blocks((staging + 7) * BLOCK, 0, monkeypatch, num_cpu_blocks=2 * staging) == 7


def test_more_blocks_than_steps_leave_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert num_blocks(100 * BLOCK, 30 * BLOCK, monkeypatch, num_gpu_blocks=70) == 70
    with pytest.raises(DeviceError, match=f"--num-gpu-blocks 71 needs {71 * BLOCK} bytes, steps and swaps"):
        num_blocks(100 * BLOCK, 30 * BLOCK, monkeypatch, num_gpu_blocks=71)


def test_steps_that_do_not_fit_name_the_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = hosted_or_own("llama", tmp_path)

    def refuse(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(gpu_warm_up, "run_largest_steps", refuse)
    with pytest.raises(DeviceError, match="--max-num-batched-tokens 16 and --max-num-seqs 6 do not fit"):
        run_trial(model.loaded, model.device, ExecutorConfig(**model.options))
