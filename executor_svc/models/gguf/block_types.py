"""The blocks of GGUF's quantized types, unpacked: one code in a byte, scales and minimums beside them.

Layouts: github.com/ggml-org/llama.cpp, ggml/src/ggml-common.h (block_q4_0 and so on). Numbers are little endian.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cadenza_common.gguf.file import TENSOR_TYPES
from executor_svc.device.stored_linear import QuantBlock, QuantFormat, ScaleType
from executor_svc.models.gguf import grid_types
from executor_svc.models.gguf.grid_types import IQ1_EIGHTHS, signed_table

_SUPER = 256
"""Columns of a block of the K types."""
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_IQ2 = signed_table(8, 25, 43)
_MINUS_ZERO = 8
"""A code of e2m1 that ggml reads as 0."""


@dataclass(frozen=True, slots=True)
class BlockType:
    """A quantized type of GGUF that can be read."""

    format: QuantFormat
    unpack: Callable[[Tensor], QuantBlock]
    """Of rows [R, blocks, bytes of a block] uint8; the result may share their memory."""


def _q8_0(rows: Tensor) -> QuantBlock:
    return QuantBlock(codes=(rows[:, :, 2:] ^ 0x80).flatten(1), scales=_halves(rows, 0))


def _q4_0(rows: Tensor) -> QuantBlock:
    return QuantBlock(codes=_nibbles(rows[:, :, 2:]).flatten(1), scales=_halves(rows, 0))


def _q4_1(rows: Tensor) -> QuantBlock:
    return QuantBlock(codes=_nibbles(rows[:, :, 4:]).flatten(1), scales=_halves(rows, 0), minimums=_halves(rows, 2))


def _q5_0(rows: Tensor) -> QuantBlock:
    codes = _nibbles(rows[:, :, 6:]) | _fifth_bits(rows[:, :, 2:6])
    return QuantBlock(codes=codes.flatten(1), scales=_halves(rows, 0))


def _q5_1(rows: Tensor) -> QuantBlock:
    codes = _nibbles(rows[:, :, 8:]) | _fifth_bits(rows[:, :, 4:8])
    return QuantBlock(codes=codes.flatten(1), scales=_halves(rows, 0), minimums=_halves(rows, 2))


def _q4_k(rows: Tensor) -> QuantBlock:
    return _with_sub_scales(rows, _group_nibbles(rows[:, :, 16:]))


def _q5_k(rows: Tensor) -> QuantBlock:
    high = rows[:, :, None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1  # bit g: of group g
    return _with_sub_scales(rows, _group_nibbles(rows[:, :, 48:]) | high << 4)


def _q6_k(rows: Tensor) -> QuantBlock:
    low, high = rows[:, :, :128].unflatten(2, (2, 1, 64)), rows[:, :, 128:192].unflatten(2, (2, 1, 32))
    low = torch.cat([low & 0x0F, low >> 4], 3).flatten(3)  # of a half: columns 0 to 63, 64 to 127
    high = (high >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None] & 3).flatten(3)
    return QuantBlock(
        codes=(low.flatten(2) | high.flatten(2) << 4).flatten(1),
        scales=rows[:, :, 192:208].contiguous().view(torch.int8).flatten(1),
        super_scales=_halves(rows, 208),
    )


def _q2_k(rows: Tensor) -> QuantBlock:
    numbers = rows[:, :, :16].flatten(1)
    return QuantBlock(
        codes=_quarters(rows[:, :, 16:80]).flatten(1),
        scales=(numbers & 0x0F).view(torch.int8),
        super_scales=_halves(rows, 80),
        minimums=(numbers >> 4).view(torch.int8),
        super_minimums=-_halves(rows, 82),
    )


def _q3_k(rows: Tensor) -> QuantBlock:
    """12 bytes hold 16 scales of 6 bits: the low 4 bits of all in 8 bytes, the upper 2 bits in the last four."""
    third = rows[:, :, None, :32] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
    low, high = rows[:, :, None, 96:104], rows[:, :, None, 104:108]
    low = (low >> torch.tensor([0, 4], dtype=torch.uint8)[:, None] & 0x0F).flatten(2)
    high = (high >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None] & 3).flatten(2)
    return QuantBlock(
        codes=(_quarters(rows[:, :, 32:96]) | third.flatten(2) << 2).flatten(1),
        scales=((low | high << 4).view(torch.int8) - 32).flatten(1),
        super_scales=_halves(rows, 108),
    )


def _iq4_xs(rows: Tensor) -> QuantBlock:
    low, high = rows[:, :, 4:8, None], rows[:, :, 2:4, None]
    low = (low >> torch.tensor([0, 4], dtype=torch.uint8) & 0x0F).flatten(2)
    high = (high >> torch.arange(0, 8, 2, dtype=torch.uint8) & 3).flatten(2)
    codes = rows[:, :, 8:].unflatten(2, (8, 16))
    return QuantBlock(
        codes=torch.cat([codes & 0x0F, codes >> 4], 3).flatten(1),
        scales=((low | high << 4).view(torch.int8) - 32).flatten(1),
        super_scales=_halves(rows, 0),
    )


def _mxfp4(rows: Tensor) -> QuantBlock:
    codes = _nibbles(rows[:, :, 1:]).flatten(1)
    return QuantBlock(codes=codes.masked_fill_(codes == _MINUS_ZERO, 0), scales=rows[:, :, 0])


def _tq1_0(rows: Tensor) -> QuantBlock:
    """A byte is a fraction of 256 in base 3: each product with a power of 3 brings the next digit to the front."""
    powers, parts = torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8)[:, None], []
    for start, stop, count in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        parts.append((rows[:, :, None, start:stop] * powers[:count]).flatten(2))
    return QuantBlock(codes=(torch.cat(parts, 2).short() * 3 >> 8).to(torch.uint8).flatten(1), scales=_halves(rows, 52))


def _tq2_0(rows: Tensor) -> QuantBlock:
    return QuantBlock(codes=_quarters(rows[:, :, :64]).flatten(1), scales=_halves(rows, 64))


def _halves(rows: Tensor, first: int) -> Tensor:
    """Return the float16 numbers at byte `first` of each block, [R, blocks]."""
    return rows[:, :, first : first + 2].contiguous().view(torch.float16).squeeze(2)


def _quarters(packed: Tensor) -> Tensor:
    """Return [R, blocks, 256] of [R, blocks, 64]: 32 bytes have four times 32 columns, the lowest bits the first."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    parts: Tensor = packed.unflatten(2, (2, 1, 32)) >> shifts & 3
    return parts.flatten(2)


def _nibbles(packed: Tensor) -> Tensor:
    """Return [R, blocks, 32] of [R, blocks, 16]: the low bits are the first half of the columns."""
    return torch.cat([packed & 0x0F, packed >> 4], 2)


def _fifth_bits(packed: Tensor) -> Tensor:
    """Return [R, blocks, 32] of [R, blocks, 4], a bit for each column from the lowest on: 0 or 16."""
    return (packed[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(2) << 4


def _group_nibbles(packed: Tensor) -> Tensor:
    """Return [R, blocks, 8, 32] of [R, blocks, 128]: 32 bytes have two groups, the low bits the first."""
    pairs = packed.unflatten(2, (4, 32))
    return torch.stack([pairs & 0x0F, pairs >> 4], 3).flatten(2, 3)


def _with_sub_scales(rows: Tensor, codes: Tensor) -> QuantBlock:
    """Return the block of Q4_K and Q5_K; codes: [R, blocks, 8, 32].

    12 bytes hold 8 scales and 8 minimums of 6 bits: the first four of each in the low 6 bits of bytes 0 to 3 and 4 to
    7, the last four with 4 bits in bytes 8 to 11, scales low, and their upper 2 bits in the upper ones of the others.
    """
    first, second, last = rows[:, :, 4:16].unflatten(2, (3, 4)).unbind(2)
    scales = torch.cat([first & 0x3F, last & 0x0F | first >> 6 << 4], 2)
    minimums = torch.cat([second & 0x3F, last >> 4 | second >> 6 << 4], 2)
    return QuantBlock(
        codes=codes.flatten(1),
        scales=scales.view(torch.int8).flatten(1),
        super_scales=_halves(rows, 0),
        minimums=minimums.view(torch.int8).flatten(1),
        super_minimums=-_halves(rows, 2),
    )


def _in_grid(
    name: str, group: int, table: tuple[int, ...], unpack: Callable[[Tensor], QuantBlock], scale: ScaleType = "float32"
) -> BlockType:
    return BlockType(QuantFormat(name, 4, group, "table", scale=scale, super_group=_SUPER, table=table), unpack)


_FILE_BITS = {each.name: 8 * each.block_bytes / each.block_columns for each in TENSOR_TYPES.values()}

BLOCK_TYPES = {
    kind.format.name: replace(kind, format=replace(kind.format, file_bits=_FILE_BITS[kind.format.name]))
    for kind in (
        BlockType(QuantFormat("Q8_0", 8, 32, zero=128), _q8_0),
        BlockType(QuantFormat("Q4_0", 4, 32, zero=8), _q4_0),
        BlockType(QuantFormat("Q4_1", 4, 32, offsets="minimum"), _q4_1),
        BlockType(QuantFormat("Q5_0", 5, 32, zero=16), _q5_0),
        BlockType(QuantFormat("Q5_1", 5, 32, offsets="minimum"), _q5_1),
        BlockType(QuantFormat("Q4_K", 4, 32, super_group=_SUPER, offsets="minimum"), _q4_k),
        BlockType(QuantFormat("Q5_K", 5, 32, super_group=_SUPER, offsets="minimum"), _q5_k),
        BlockType(QuantFormat("Q6_K", 6, 16, zero=32, super_group=_SUPER), _q6_k),
        BlockType(QuantFormat("Q2_K", 2, 16, super_group=_SUPER, offsets="minimum"), _q2_k),
        BlockType(QuantFormat("Q3_K", 3, 16, zero=4, super_group=_SUPER), _q3_k),
        BlockType(QuantFormat("IQ4_NL", 4, 32, "table", table=_IQ4), _q4_0),
        _in_grid("IQ4_XS", 32, _IQ4, _iq4_xs, "float16"),
        BlockType(QuantFormat("MXFP4", 4, 32, "e2m1", scale="e8m0"), _mxfp4),
        BlockType(QuantFormat("TQ1_0", 2, 256, zero=1), _tq1_0),
        BlockType(QuantFormat("TQ2_0", 2, 256, zero=1), _tq2_0),
        _in_grid("IQ3_S", 32, signed_table(1, 3, 5, 7, 9, 11, 13, 15), grid_types.iq3_s),
        _in_grid("IQ3_XXS", 32, signed_table(4, 12, 20, 28, 36, 44, 52, 62), grid_types.iq3_xxs),
        _in_grid("IQ2_S", 16, _IQ2, grid_types.iq2_s),
        _in_grid("IQ2_XS", 16, _IQ2, grid_types.iq2_xs),
        _in_grid("IQ2_XXS", 32, _IQ2, grid_types.iq2_xxs),
        _in_grid("IQ1_M", 16, IQ1_EIGHTHS, grid_types.iq1_m),
        _in_grid("IQ1_S", 32, IQ1_EIGHTHS, grid_types.iq1_s),
    )
}
"""By their names in GGUF."""

DENSE_TYPES = ("F32", "F16", "BF16")
