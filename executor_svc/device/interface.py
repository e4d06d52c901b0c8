"""The one seam behind which everything device-specific sits."""

from __future__ import annotations

import os
from typing import Literal, Protocol

import torch
from torch import Tensor

from executor_svc.config import ExecutorConfig
from executor_svc.device.kernels import Kernels, Linear
from executor_svc.device.kv_cache import KVCache
from executor_svc.errors import StartError
from executor_svc.plan.description import ModelGeometry

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
    kv_dtype: torch.dtype
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

    def adopt_dtype(self, checkpoint_dtype: str, fp8_cache: bool = False) -> None:
        """Settle `dtype` and `kv_dtype` from the options and, where these are auto, from what the checkpoint names.

        fp8_cache: it says that its keys and values are for fp8. Raises DeviceError for an option that can not be.
        """
        ...

    def prepare_linear(self, name: str, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Make weight [out_features, in_features] and bias ready for use; the weight may be freed afterwards."""
        ...

    def new_kv_cache(self, geometry: ModelGeometry, config: ExecutorConfig, step_bytes: int = 0) -> KVCache:
        """Reserve the KV pools, sized by the options or by free memory; raises DeviceError if not one block fits.

        step_bytes: what steps will take beside what is in memory now, to be left free.
        """
        ...

    def free_memory_bytes(self) -> int:
        """Return the memory that this process could still take on the device."""
        ...

    def probe_numerics(self, max_rows: int) -> None:
        """Check that a row's bits do not depend on its batch for every shape of prepared linears.

        Raises NumericsError naming the shape that does not hold.
        """
        ...


def is_interpreted() -> bool:
    """Is a GPU's part played by Triton's interpreter, on the CPU: for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def cores() -> int:
    """Return the number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
