"""The interface of devices: everything device-specific is behind it. It says what a device's errors mean."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Literal, Protocol

import torch
from torch import Tensor

from executor_svc.config import ExecutorConfig
from executor_svc.device.kernels import Embedding, Kernels, Linear, WeightRows
from executor_svc.device.kv_cache import DraftLayers, KVCache
from executor_svc.device.stored_linear import FewBits, StoredLinear
from executor_svc.errors import StartError
from executor_svc.plan.description import ModelGeometry
from executor_svc.sampling.functions import RowFunctions

Numerics = Literal["exact", "fast"]
_OUT_OF_MEMORY = (
    "DefaultCPUAllocator",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "Triton Error [CUDA]: out of memory",
)
_DEVICE_LOST = (
    "illegal memory access",
    "illegal instruction",
    "misaligned address",
    "unspecified launch failure",
    "device-side assert",
    "launch timed out",
)


class DeviceError(StartError):
    """The device does not support an option's value; the message names the option."""


class NumericsError(DeviceError):
    """The device cannot guarantee `--numerics exact`; the message names the shape."""


class Device(Protocol):
    """A device as the executor uses it. It is also the `models.base.Builder` that loads models."""

    name: str
    torch_device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    matrix_dtype: torch.dtype
    """Of dense matrices: `dtype`, or a narrower one."""
    numerics: Numerics
    few_bits: FewBits
    """Of the weights prepared so far."""

    @property
    def kernels(self) -> Kernels: ...

    @property
    def functions(self) -> RowFunctions:
        """Functions for sampling."""
        ...

    @property
    def isa(self) -> str:
        """The instruction set and the chip, as far as the choice of kernels depends on them."""
        ...

    @property
    def isa_of_libraries(self) -> str:
        """The same for a model that also runs kernels of libraries, such as PyTorch's."""
        ...

    @property
    def num_threads(self) -> int: ...

    @property
    def versions(self) -> tuple[str, ...]:
        """The libraries whose version may change the bits of a result, as `name version`."""
        ...

    def adopt_dtype(self, checkpoint_dtype: str, fp8_cache: bool = False, few_bits: bool = False) -> None:
        """Set `dtype` and `kv_dtype` from the options and, where these are auto, from the checkpoint.

        fp8_cache: the checkpoint specifies keys and values in fp8. few_bits: it has weights in few bits that may be
        multiplied with activations in int8. Raises DeviceError for an unsupported option.
        """
        ...

    def loading(self) -> AbstractContextManager[None]:
        """Inside, weights that are not tensors may be read later than they are prepared; at its end all are in memory.

        The end raises LoaderError if one cannot be read. After another error, nothing further is read.
        """
        ...

    def prepare_linear(
        self, name: str, weight: Tensor | WeightRows | StoredLinear, bias: Tensor | None = None
    ) -> Linear:
        """Prepare weight [out_features, in_features] and bias for use; a tensor may be freed afterwards.

        Weights that are not read yet are possible inside `loading` only.
        """
        ...

    def prepare_embedding(self, name: str, weight: WeightRows | StoredLinear) -> Embedding:
        """Prepare a weight [vocabulary, hidden] as a table of embeddings; as above."""
        ...

    def prepare_tied(
        self, name: str, weight: Tensor | WeightRows | StoredLinear, bias: Tensor | None = None
    ) -> tuple[Embedding, Linear]:
        """Prepare a weight [vocabulary, hidden] as a table of embeddings and as a linear, held once; as above."""
        ...

    def new_kv_cache(
        self,
        geometry: ModelGeometry,
        config: ExecutorConfig,
        step_bytes: int = 0,
        draft: DraftLayers | None = None,
        num_pages: int | None = None,
    ) -> KVCache:
        """Reserve the KV pools, sized by the options or by free memory; raises DeviceError if not one block fits.

        step_bytes: memory that steps will need beside everything loaded now; it is left free. draft: of a draft model
        or head, whose layers are in the same blocks. num_pages: of the device pool, in place of what options say.
        """
        ...

    def free_memory_bytes(self) -> int:
        """Return the bytes that this process can still allocate on the device."""
        ...

    def choose_kernels(self, max_rows: int) -> None:
        """Choose, for steps of up to max_rows rows, among kernels that prepared layers may use on this machine.

        Raises DeviceError naming a layer for which no kernel is right.
        """
        ...

    def probe_numerics(self, max_rows: int) -> None:
        """Check, for every shape of prepared linears, that a row's bits do not depend on its batch.

        Raises NumericsError naming the shape that fails the check.
        """
        ...


def has_fp8_cache(device: Device) -> bool:
    """Return whether keys and values are in fp8; the device's dtypes are set."""
    return device.kv_dtype == torch.float8_e4m3fn


def is_interpreted() -> bool:
    """Return whether Triton's interpreter, on the CPU, stands in for a GPU: for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def cores() -> int:
    """Return the number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_out_of_memory(exc: Exception) -> bool:
    """Return whether a step failed for lack of memory. Only one allocator has an error class of its own for this."""
    return isinstance(exc, MemoryError | torch.OutOfMemoryError) or _mentions(exc, _OUT_OF_MEMORY)


def is_device_lost(exc: Exception) -> bool:
    """Return whether this process has lost the device, as after an illegal access on a GPU.

    Triton has no error class for this.
    """
    return isinstance(exc, torch.AcceleratorError) or _mentions(exc, _DEVICE_LOST)


def _mentions(exc: Exception, phrases: tuple[str, ...]) -> bool:
    return any(phrase in str(exc) for phrase in phrases)
