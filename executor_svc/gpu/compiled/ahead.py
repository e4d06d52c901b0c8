"""Compiles kernels for a GPU that is not here: what would be launched is compiled, into Triton's cache.

The keys of that cache cover sources, constants, types, what is known of numbers and addresses, options, versions and
the GPU's compute capability, but nothing of the machine: a start on such a GPU finds the kernels there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from executor_svc.gpu.graphs import DirectReplayer

MULTIPROCESSORS = {80: 108, 90: 132, 100: 148}
"""Of the GPUs of these compute capabilities in servers: A100, H100 and H200, B200. Sizes of grids hang on them, and no
kernel."""
_PRODUCTS = ("mm", "addmm", "bmm", "_scaled_mm")


class AbsentDriver(DriverBase):  # type: ignore[misc]
    """Triton's driver of a GPU that is not here."""

    def __init__(self, arch: int) -> None:
        self._target = GPUTarget("cuda", arch, 32)

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_benchmarker(self) -> Any:
        raise RuntimeError("nothing is timed on a GPU that is not here")


class _NoProducts(TorchDispatchMode):
    """Leaves out PyTorch's products into given memory: they take the host long, and their numbers mean nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func.overloadpacket.__name__ in _PRODUCTS and "out" in named:
            return named["out"]
        return func(*args, **named)


@contextmanager
def compiling_for(arch: int) -> Iterator[None]:
    """Compile what is launched inside for GPUs of a compute capability such as 90, and launch nothing."""
    run, before = JITFunction.run, driver._active if hasattr(driver, "_active") else None

    def compiled(self: Any, *args: Any, warmup: bool, **named: Any) -> Any:
        return run(self, *args, warmup=True, **named)

    driver.set_active(AbsentDriver(arch))
    JITFunction.run, DirectReplayer.runs_at_once = compiled, True
    try:
        with _NoProducts():
            yield
    finally:
        JITFunction.run, DirectReplayer.runs_at_once = run, False
        if before is not None:
            driver.set_active(before)
