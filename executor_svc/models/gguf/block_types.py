"""The blocks of GGUF's quantized types, unpacked: one code in a byte, scales and minimums beside them.

Layouts: github.com/ggml-org/llama.cpp, ggml/src/ggml-common.h (block_q4_0 and so on). Numbers are little endian.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from executor_svc.device.stored_linear import QuantBlock, QuantFormat

_SUPER = 256
"""Columns of a block of the K types."""


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


def _halves(rows: Tensor, first: int) -> Tensor:
    """Return the float16 numbers at byte `first` of each block, [R, blocks]."""
    return rows[:, :, first : first + 2].contiguous().view(torch.float16).squeeze(2)


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


BLOCK_TYPES = {
    kind.format.name: kind
    for kind in (
        BlockType(QuantFormat("Q8_0", 8, 32, zero=128), _q8_0),
        BlockType(QuantFormat("Q4_0", 4, 32, zero=8), _q4_0),
        BlockType(QuantFormat("Q4_1", 4, 32, offsets="minimum"), _q4_1),
        BlockType(QuantFormat("Q5_0", 5, 32, zero=16), _q5_0),
        BlockType(QuantFormat("Q5_1", 5, 32, offsets="minimum"), _q5_1),
        BlockType(QuantFormat("Q4_K", 4, 32, super_group=_SUPER, offsets="minimum"), _q4_k),
        BlockType(QuantFormat("Q5_K", 5, 32, super_group=_SUPER, offsets="minimum"), _q5_k),
        BlockType(QuantFormat("Q6_K", 6, 16, zero=32, super_group=_SUPER), _q6_k),
    )
}
"""By their names in GGUF."""

DENSE_TYPES = ("F32", "F16", "BF16")
