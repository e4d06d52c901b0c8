"""How much memory models take: what is free, what one needs at least, and what its processes have."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from cadenza.v1 import execution_pb2, execution_pb2_grpc
from cadenza_common.hub.download import cached_model
from cadenza_common.hub.names import HubError, models_in, parse
from cadenza_common.wire.transport import sync_channel
from cadenza_launcher.local import LocalServices
from cadenza_launcher.pool.specs import ModelSpec

GIB = 2**30
_OF_PROCESSES = 600 * 2**20
"""Python, PyTorch, tokenizers and what a step computes, of an executor and its scheduler."""
_OF_SIMULATED = 100 * 2**20
_LEAST_KV = 64 * 2**20
_WEIGHTS = ("*.safetensors", "*.gguf", "*.bin")
_KV_OPTIONS = ("num_gpu_blocks", "gpu_memory_utilization")
_TIMEOUT_S = 5.0
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Allowance:
    """What one model may take, in bytes; `kv_share`: as --gpu-memory-utilization, None: an option says it."""

    bytes: int
    kv_share: float | None = None


def allowances(
    specs: Sequence[ModelSpec], common: Mapping[str, Any], budget_bytes: int, free_bytes: int
) -> dict[str, Allowance]:
    """By name: an equal part of the budget, or what a model needs at least if that is more.

    A model that has been given the size of its KV cache is measured once it is loaded; before that it counts as what
    it needs at least.
    """
    found = {}
    for spec in specs:
        options = {**common, **spec.options}
        weights = 0 if options.get("simulate") is not None else weight_bytes(spec.model)
        processes = _OF_PROCESSES if options.get("simulate") is None else _OF_SIMULATED
        least = weights + processes + _LEAST_KV
        if any(options.get(name) is not None for name in _KV_OPTIONS) or options.get("simulate") is not None:
            found[spec.name] = Allowance(least)
            continue
        given = max(budget_bytes // len(specs), least)
        # Half of the machine at most, as a model alone has by default.
        for_kv = min(given - processes, free_bytes // 2)
        found[spec.name] = Allowance(given, max(for_kv, weights + _LEAST_KV) / free_bytes)
    return found


def weight_bytes(model: str) -> int:
    """The size of a model's files; 0: not known, as it is not on this machine yet."""
    path = Path(model)
    if not path.exists() and (name := parse(model)) is not None:
        with contextlib.suppress(HubError):  # the cache has another quantization
            path = cached_model(name) or path
    if path.is_file():
        parts = models_in([each.name for each in path.parent.glob("*.gguf")]).get(path.name, (path.name,))
        return sum((path.parent / part).stat().st_size for part in parts)
    for pattern in _WEIGHTS:
        if sizes := [each.stat().st_size for each in path.glob(pattern)]:
            return sum(sizes)
    return 0


def free_memory(root: Path = _CGROUP) -> int:
    """What this machine, or its container, has free, in bytes."""
    free = 0
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    with contextlib.suppress(OSError, ValueError):
        limit, used = ((root / name).read_text().strip() for name in ("memory.max", "memory.current"))
        free = min(free, max(0, int(limit) - int(used)))
    return free


def memory_of(pids: Iterable[int]) -> int:
    """What processes and their children have of the machine, in bytes: what they share is divided by those who do."""
    todo, total = list(pids), 0
    while todo:
        pid = todo.pop()
        with contextlib.suppress(OSError, ValueError, IndexError, StopIteration):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(OSError, ValueError):
                todo += map(int, task.read_text().split())
    return total


def kv_bytes(services: LocalServices) -> int:
    """The size of the KV caches of a model's executors; 0: one does not say."""
    total = 0
    for name in services.executors:
        with (
            contextlib.suppress(grpc.RpcError),
            sync_channel(services.addresses[name], services.executor_tls) as channel,
        ):
            stub = execution_pb2_grpc.ExecutionServiceStub(channel)
            kv = stub.Describe(execution_pb2.DescribeRequest(), timeout=_TIMEOUT_S).kv
            total += kv.num_device_blocks * kv.bytes_per_block
    return total
