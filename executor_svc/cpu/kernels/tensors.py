"""Tensors as arguments of launches: their types and addresses."""

from __future__ import annotations

from torch import Tensor

from executor_svc.cpu.kernels.codegen.emit import Dtype
from executor_svc.cpu.kernels.dense_launches import DTYPES


def dtype_of(x: Tensor) -> Dtype:
    return DTYPES[x.dtype]


def cache_arguments(kv_layer: Tensor) -> tuple[int, int, int]:
    """Return a layer's address, and the bytes from a block to the next and from keys to values.

    Raises AssertionError for a layer whose keys or values of a block are not contiguous.
    """
    assert kv_layer[0, 0].is_contiguous(), "the keys of a block are not contiguous"
    size = kv_layer.element_size()
    return kv_layer.data_ptr(), kv_layer.stride(0) * size, kv_layer.stride(1) * size


def addresses(*tensors: Tensor) -> tuple[int, ...]:
    """Return the address of a contiguous tensor; raises AssertionError for another one."""
    assert all(tensor.is_contiguous() for tensor in tensors)
    return tuple(tensor.data_ptr() for tensor in tensors)
