"""Readers of weights that lie in rows [N, ...], as compressed-tensors and fp8 checkpoints store them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from executor_svc.device.dequantize import is_nan
from executor_svc.device.stored_linear import QuantBlock, QuantFormat, QuantRows
from executor_svc.models.folder import LoaderError
from executor_svc.models.quantized.group_numbers import (
    Grouping,
    RowBlocks,
    group_numbers,
    packed_zero_points,
    signed_zero_points,
)
from executor_svc.models.quantized.rows import LazyRows, in_order, sorted_columns, unpack_bytes, unpack_words
from executor_svc.models.quantized.tensors import (
    SCALE_TYPES,
    CheckpointTensors,
    check_columns,
    check_group,
    check_scales,
    checked,
)

_SCALES = list(SCALE_TYPES)
_MX_GROUP = 32


@dataclass(frozen=True, slots=True)
class Integers:
    """How a linear's integers are stored."""

    name: str
    """Of the format, for messages."""
    bits: Literal[4, 8]
    packed: bool
    """In int32 words, else each in an int8."""
    grouping: Grouping
    symmetric: bool
    whole_row_activations: bool = False


def open_integers(tensors: CheckpointTensors, prefix: str, shape: tuple[int, int], kind: Integers) -> QuantRows:
    """Return the weight of a linear of compressed-tensors, stored as weight_packed or weight; raises LoaderError."""
    name = f"{prefix}.weight_packed" if kind.packed else f"{prefix}.weight"
    bits = kind.bits if kind.packed else 8
    zero: int = 1 << (bits - 1)
    group = kind.grouping.columns(name, shape)
    if kind.packed:
        check_columns(name, shape[1], 32 // bits)
        checked(tensors, name, [(shape[0], shape[1] * bits // 32)], [torch.int32])
        _check_stored_shape(tensors, prefix, shape)
    else:
        checked(tensors, name, [shape], [torch.int8])
    scale_dtype, scales = _scales(tensors, f"{prefix}.weight_scale", shape, kind.grouping)
    zeros = None if kind.symmetric else _zero_points(tensors, prefix, shape, kind, zero)
    order = None
    if tensors.find(f"{prefix}.weight_g_idx") is not None:
        order = sorted_columns(tensors, f"{prefix}.weight_g_idx", shape[1], group)

    def codes(stored: Tensor) -> Tensor:
        unpacked = unpack_words(stored, bits) if kind.packed else stored.view(torch.uint8) ^ zero
        return in_order(unpacked, order)

    return LazyRows(
        shape,
        QuantFormat(
            name=kind.name,
            bits=bits,
            group=group,
            zero=zero if kind.symmetric else 0,
            scale=SCALE_TYPES[scale_dtype],
            offsets="none" if kind.symmetric else "zero_point",
        ),
        _reader(tensors, name, shape, codes, scales, zeros),
        column_order=order,
        whole_row_activations=kind.whole_row_activations,
        scale_rows=kind.grouping.rows,
    )


def _check_stored_shape(tensors: CheckpointTensors, prefix: str, shape: tuple[int, int]) -> None:
    """Check the tensor that holds the shape of a packed weight."""
    name = f"{prefix}.weight_shape"
    if tensors.find(name) is None:
        return
    stored = checked(tensors, name, [(2,)], [torch.int64, torch.int32])
    found = tensors.raw(name).tolist()
    if found != list(shape):
        raise LoaderError(f"{stored.path}: tensor {name} is {found}, config.json says {list(shape)}")


def _zero_points(
    tensors: CheckpointTensors, prefix: str, shape: tuple[int, int], kind: Integers, zero: int
) -> RowBlocks:
    name = f"{prefix}.weight_zero_point"
    if kind.packed and kind.grouping.strategy != "tensor":
        return packed_zero_points(tensors, name, shape, kind.grouping, kind.bits)
    return signed_zero_points(tensors, name, shape, kind.grouping, zero)


def open_fp8(
    tensors: CheckpointTensors, prefix: str, shape: tuple[int, int], grouping: Grouping, scale_name: str
) -> QuantRows:
    """Return the weight of a linear in e4m3, with scales that multiply; raises LoaderError."""
    name = f"{prefix}.weight"
    group = grouping.columns(name, shape)
    checked(tensors, name, [shape], [torch.float8_e4m3fn])
    scale_dtype, scales = _scales(tensors, f"{prefix}.{scale_name}", shape, grouping)
    kind = QuantFormat(name="fp8", bits=8, group=group, values="e4m3", scale=SCALE_TYPES[scale_dtype])

    def codes(stored: Tensor) -> Tensor:
        found = stored.view(torch.uint8)
        if is_nan(found).any():
            raise LoaderError(f"tensor {name} holds NaN: the checkpoint is damaged")
        return found

    return LazyRows(shape, kind, _reader(tensors, name, shape, codes, scales, None), scale_rows=grouping.rows)


def open_mxfp4(tensors: CheckpointTensors, prefix: str, shape: tuple[int, int]) -> QuantRows:
    """Return the weight of a linear in MXFP4 (OCP Microscaling Formats 1.0): e2m1 in groups of 32, scales e8m0.

    weight_packed [N, K / 2], the lower bits first; weight_scale [N, K / 32]. Raises LoaderError.
    """
    (rows, columns), codes, scales = shape, f"{prefix}.weight_packed", f"{prefix}.weight_scale"
    check_columns(codes, columns, _MX_GROUP)
    check_group(codes, _MX_GROUP, columns)
    checked(tensors, codes, [(rows, columns // 2)], [torch.uint8])
    checked(tensors, scales, [(rows, columns // _MX_GROUP)], [torch.uint8, torch.float8_e8m0fnu])

    def read_scales(count: int) -> Iterator[Tensor]:
        for block in tensors.raw_blocks(scales, count):
            check_scales(scales, block.view(torch.uint8))
            yield block.view(torch.uint8)

    def unpack(stored: Tensor) -> Tensor:
        return unpack_bytes(stored, 4)

    kind = QuantFormat(name="MXFP4", bits=4, group=_MX_GROUP, values="e2m1", scale="e8m0")
    return LazyRows(shape, kind, _reader(tensors, codes, shape, unpack, read_scales, None))


def _scales(
    tensors: CheckpointTensors, name: str, shape: tuple[int, int], grouping: Grouping
) -> tuple[torch.dtype, RowBlocks]:
    """As `group_numbers`, of finite floats: reading them raises LoaderError for others."""
    dtype, stored = group_numbers(tensors, name, shape, grouping, _SCALES)

    def read(rows: int) -> Iterator[Tensor]:
        for block in stored(rows):
            check_scales(name, block)
            yield block

    return dtype, read


def _reader(
    tensors: CheckpointTensors,
    name: str,
    shape: tuple[int, int],
    codes: Callable[[Tensor], Tensor],
    scales: RowBlocks,
    zeros: RowBlocks | None,
) -> Callable[[int], Iterator[QuantBlock]]:
    """Return the reader of a weight whose codes are rows of a tensor."""

    def read(rows: int) -> Iterator[QuantBlock]:
        stored = tensors.raw_blocks(name, rows, elements=shape[0] * shape[1])
        # strict: each tensor is read to its end, where its hash is known.
        if zeros is None:
            for block, scale in zip(stored, scales(rows), strict=True):
                yield QuantBlock(codes(block), scale)
        else:
            for block, scale, zero in zip(stored, scales(rows), zeros(rows), strict=True):
                yield QuantBlock(codes(block), scale, zero_points=zero)

    return read
