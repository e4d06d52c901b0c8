"""The one seam behind which everything device-specific sits."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

import psutil
import torch
from torch import Tensor

from executor_svc.config import ExecutorConfig
from executor_svc.description import ModelGeometry
from executor_svc.errors import StartError
from executor_svc.kernels.cpu import QUERY_TILES, SMALL_TILE, CpuKernels, CpuLinear
from executor_svc.kernels.cpu.linear import packing_available
from executor_svc.kernels.cpu.probe import probe_attention, probe_elementwise, probe_linear, probe_norm_heads
from executor_svc.kernels.interface import AttentionShape, Kernels, Linear
from executor_svc.kv_cache import KVCache, block_bytes

Numerics = Literal["exact", "fast"]


class DeviceError(StartError):
    """The device can not do what the options ask; the message names the option."""


class NumericsError(DeviceError):
    """`--numerics exact` can not be held here; the message names the shape."""


class Device(Protocol):
    """What the executor needs from a kind of device. It also is the `models.base.Builder` that models load through."""

    name: str
    torch_device: torch.device
    dtype: torch.dtype
    numerics: Numerics

    @property
    def kernels(self) -> Kernels: ...

    @property
    def isa(self) -> str:
        """Names the instruction set and the chip, as far as they choose among kernels."""
        ...

    @property
    def num_threads(self) -> int: ...

    @property
    def versions(self) -> tuple[str, ...]:
        """Libraries whose version may change the bits of a result, as `name version`."""
        ...

    def adopt_dtype(self, checkpoint_dtype: str) -> None:
        """Settle `dtype` from the option and, where that is auto, from the dtype that the checkpoint names."""
        ...

    def prepare_linear(self, name: str, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Make weight [out_features, in_features] and bias ready for use; the weight may be freed afterwards."""
        ...

    def new_kv_cache(self, geometry: ModelGeometry, config: ExecutorConfig) -> KVCache:
        """Reserve the KV pools, sized by the options or by free memory; raises DeviceError if not one block fits."""
        ...

    def free_memory_bytes(self) -> int:
        """Return the memory that this process could still take on the device."""
        ...

    def probe_numerics(self, shapes: Sequence[AttentionShape], hidden_size: int, max_rows: int) -> None:
        """Check that a row's bits do not depend on its batch for every prepared linear, attention and elementwise code.

        Raises NumericsError naming the shape that does not hold.
        """
        ...


def _resolve_dtype(option: str, checkpoint: str) -> torch.dtype:
    """Return the dtype to run in on the CPU: float16 checkpoints run in float32, which holds their values exactly."""
    if option == "float16":
        raise DeviceError("--dtype float16 is not supported on the CPU: take float32 or bfloat16")
    chosen = checkpoint if option == "auto" else option
    return torch.bfloat16 if chosen == "bfloat16" else torch.float32


_CGROUP = Path("/sys/fs/cgroup")
_CGROUP_FILES = (
    ("memory.max", "memory.current"),  # cgroup v2
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),  # v1, whose "no limit" is a huge number
)


def _cgroup_free_bytes(root: Path = _CGROUP) -> int | None:
    """Return what a memory limit of the container leaves, or None without one."""
    for limit_file, used_file in _CGROUP_FILES:
        try:
            limit, used = (int((root / name).read_text()) for name in (limit_file, used_file))
        except (OSError, ValueError):  # "max" is no number
            continue
        return max(0, limit - used)
    return None


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    """Return the processor's model: libraries choose kernels by it."""
    wanted = ("vendor_id", "cpu family", "model", "model name", "CPU implementer", "CPU part")
    try:
        text = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0]
    except OSError:
        return "unknown"
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    named = {key.strip(): value.strip() for key, value in fields.items()}
    return " ".join(f"{key} {named[key]}" for key in wanted if key in named)


def _first_fault(probed: Iterable[str | None]) -> str | None:
    """Return the first fault that probes found, or None; those after it are not made."""
    return next((fault for fault in probed if fault is not None), None)


@dataclass(frozen=True, slots=True)
class _Budget:
    """KV blocks that fit into memory, and those that the limits on sequences could use."""

    fitting: int
    useful: int


class CpuDevice:
    """Runs a model on the CPU with PyTorch, oneDNN and MKL."""

    name = "cpu"

    def __init__(self, config: ExecutorConfig) -> None:
        self.torch_device = torch.device("cpu")
        self._dtype_option = config.dtype
        self.dtype = _resolve_dtype(config.dtype, "float32")
        self.numerics: Numerics = config.numerics
        self.num_threads = config.num_threads or _cores()
        torch.set_num_threads(self.num_threads)
        self._kernels = CpuKernels()
        self._linears: dict[tuple[int, int, bool], tuple[str, CpuLinear]] = {}

    @property
    def kernels(self) -> Kernels:
        return self._kernels

    @property
    def isa(self) -> str:
        return f"{torch.backends.cpu.get_cpu_capability()} {_processor()}"

    @property
    def versions(self) -> tuple[str, ...]:
        mkl = "mkl" if torch.backends.mkl.is_available() else "no mkl"
        onednn = "onednn" if torch.backends.mkldnn.is_available() else "no onednn"
        return (f"torch {torch.__version__}", mkl, onednn)

    def adopt_dtype(self, checkpoint_dtype: str) -> None:
        self.dtype = _resolve_dtype(self._dtype_option, checkpoint_dtype)

    def prepare_linear(self, name: str, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Pack a weight for oneDNN; without that, exact numerics raise NumericsError, fast ones use plain linears."""
        packed = packing_available(self.dtype)
        if not packed and self.numerics == "exact":
            raise NumericsError(
                f"linear {name} (in {weight.shape[1]}, out {weight.shape[0]}): oneDNN has no packed {self.dtype} "
                "linear on this CPU, without which exact numerics can not be held; use --numerics fast or another dtype"
            )
        linear = CpuLinear(weight, bias, packed)
        self._linears.setdefault((linear.in_features, linear.out_features, bias is not None), (name, linear))
        return linear

    def free_memory_bytes(self) -> int:
        available = int(psutil.virtual_memory().available)
        limited = _cgroup_free_bytes()
        return available if limited is None else min(available, limited)

    def new_kv_cache(self, geometry: ModelGeometry, config: ExecutorConfig) -> KVCache:
        """Size the pools: `num_gpu_blocks`, or what fits into the share of free memory that the options give.

        Never more than max_num_seqs sequences of max_model_len could use.
        """
        head_size = self._kernels.padded_head_size(geometry.head_size)
        size = block_bytes(geometry.num_layers, geometry.num_kv_heads, config.block_size, head_size, self.dtype)
        device_blocks = config.num_gpu_blocks
        host_bytes = config.num_cpu_blocks * size
        free = self.free_memory_bytes()
        if device_blocks is None:
            budget = self._budget(geometry, config, size, free - host_bytes)
            if budget.fitting < 1:
                raise DeviceError(
                    f"not one KV block of {size} bytes fits: {free} bytes of memory are free, and "
                    f"--gpu-memory-utilization {config.gpu_memory_utilization} and --num-cpu-blocks "
                    f"{config.num_cpu_blocks} leave {budget.fitting * size}"
                )
            device_blocks = min(budget.fitting, budget.useful)
        elif device_blocks * size + host_bytes > free:
            raise DeviceError(
                f"--num-gpu-blocks {device_blocks} and --num-cpu-blocks {config.num_cpu_blocks} need "
                f"{device_blocks * size + host_bytes} bytes, {free} are free"
            )
        return KVCache(
            geometry.num_layers,
            geometry.num_kv_heads,
            head_size,
            config.block_size,
            device_blocks,
            config.num_cpu_blocks,
            self.dtype,
            self.torch_device,
        )

    def _budget(self, geometry: ModelGeometry, config: ExecutorConfig, size: int, free: int) -> _Budget:
        """Weights are in memory already: the share is of what was free before them."""
        for_kv = config.gpu_memory_utilization * (free + geometry.weight_bytes) - geometry.weight_bytes
        useful = config.max_num_seqs * -(-geometry.max_model_len // config.block_size)
        return _Budget(max(0, int(for_kv // size)), useful)

    def probe_numerics(self, shapes: Sequence[AttentionShape], hidden_size: int, max_rows: int) -> None:
        for name, linear in self._linears.values():
            found = probe_linear(linear, max_rows)
            if found is not None:
                raise NumericsError(
                    f"linear {name} (in {linear.in_features}, out {linear.out_features}, {self.dtype}): {found}; "
                    "exact numerics can not be held on this CPU, use --numerics fast"
                )
        # Window and softcap change nothing that is probed: a model's shapes mostly differ in those alone.
        sizes = list(dict.fromkeys(replace(shape, window=None, softcap=None) for shape in shapes))
        found = probe_elementwise(hidden_size) or _first_fault(map(probe_norm_heads, sizes))
        found = found or self._choose_query_tiles(sizes)
        if found is not None:
            raise NumericsError(f"{found}; exact numerics can not be held on this CPU, use --numerics fast")

    def _choose_query_tiles(self, shapes: Sequence[AttentionShape]) -> str | None:
        """Keep the fast mix of query tiles if its bits agree here for all shapes, else take one size for everything."""
        found = None
        for tiles in (QUERY_TILES, (SMALL_TILE,)):
            found = _first_fault(probe_attention(shape, tiles) for shape in shapes)
            if found is None:
                self._kernels.use_query_tiles(tiles)
                break
        return found


def make_device(config: ExecutorConfig) -> Device:
    """Return the device that the options ask for; `auto` takes the CPU.

    Its dtype is settled when a model is loaded. Raises DeviceError for a device or dtype that is not there.
    """
    if config.device == "cuda":
        raise DeviceError("--device cuda: the GPU executor is not built yet; use --device cpu")
    return CpuDevice(config)
