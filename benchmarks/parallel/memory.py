"""What a rank holds: the bytes of its weights, and how much its process grows while it loads them."""

from __future__ import annotations

import gc
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from executor_svc.config import ExecutorConfig
from executor_svc.cpu.kernels.cpu_kernels import CpuKernels
from executor_svc.cpu.kernels.ranks.launches import CpuRanks
from executor_svc.cpu.kernels.ranks.memory import ExchangeMemory, ExchangeSizes
from executor_svc.device.ranks import Share
from executor_svc.models.layers.rope import RotaryTables
from executor_svc.models.loading import load_model
from executor_svc.models.spec import DecoderSpec
from executor_svc.startup.device import make_device

_NOT_WEIGHTS = (CpuKernels, CpuRanks, RotaryTables, ModuleType, FunctionType, type)


def loaded_bytes(rank: int, size: int, options: dict[str, Any]) -> dict[str, float]:
    """Load a rank's part of a model, or with size 1 the model; return the bytes; for `on_processes`.

    weights: of all tensors that hold weights, as they are packed. grown: of the process, in resident memory, with its
    compiled kernels and rotary tables. options: of the executor.
    """
    config = ExecutorConfig(**options)
    device = make_device(config)
    process = psutil.Process()

    def join(spec: DecoderSpec) -> CpuRanks:
        sizes = ExchangeSizes(
            size, config.max_num_batched_tokens, spec.hidden_size, config.max_num_seqs, spec.vocab_size
        )
        kernels = device.kernels
        assert isinstance(kernels, CpuKernels)
        # Nothing is exchanged while weights are loaded: pages of this memory stay untouched.
        return CpuRanks(Share(rank, size), kernels, ExchangeMemory(np.zeros(sizes.num_bytes, np.uint8), sizes))

    gc.collect()
    before = process.memory_info().rss
    loaded = load_model(config, device, None, join if size > 1 else None)
    gc.collect()
    grown = process.memory_info().rss - before
    return {"weights": float(weight_bytes(loaded.model)), "grown": float(grown)}


def weight_bytes(model: object) -> int:
    """Return the bytes of all tensors and arrays that an object holds, each memory once; not those of kernels."""
    memories: dict[int, int] = {}
    seen: set[int] = set()
    waiting = [model]
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, _NOT_WEIGHTS):
            continue
        seen.add(id(each))
        if isinstance(each, Tensor):
            storage = each.untyped_storage()
            memories[storage.data_ptr()] = storage.nbytes()
        elif isinstance(each, np.ndarray):
            while isinstance(each.base, np.ndarray):
                each = each.base
            memories[each.ctypes.data] = each.nbytes
        elif not isinstance(each, torch.dtype | str | bytes | int | float):
            waiting += gc.get_referents(each)
    return sum(memories.values())
