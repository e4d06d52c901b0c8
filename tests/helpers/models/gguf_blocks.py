"""Rows of numbers in GGUF's types: quantized by gguf, or any bytes with scales of a chosen size; needs gguf."""

from __future__ import annotations

import math
from typing import Any
from zlib import crc32

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

Floats = NDArray[np.float32]

SCALES = {"Q6_K": (208,), "Q2_K": (80, 82), "Q3_K": (108,), "TQ1_0": (52,), "TQ2_0": (64,)}
"""Bytes of a block where its float16 numbers are; of other types at 0, of those in `_TWO` at 2 too. IQ1_M's is in the
upper four bits of each of its last four words."""
_TWO = ("Q4_1", "Q5_1", "Q4_K", "Q5_K")


def places_of_scales(kind: Type) -> tuple[int, ...]:
    return SCALES.get(kind.name, (0, 2) if kind.name in _TWO else (0,))


def set_scale(blocks: NDArray[np.uint8], kind: Type, place: int, number: float) -> None:
    """Set one number of `places_of_scales` in each of the blocks [..., bytes]; of MXFP4 an exponent, 255 for NaN."""
    bits = int(np.float16(number).view(np.uint16))
    if kind == Type.MXFP4:
        blocks[..., 0] = 127 + round(math.log2(number)) if 0 < number < math.inf else 255
    elif kind == Type.IQ1_M:
        for index in range(4):
            blocks[..., 49 + 2 * index] &= 0x0F
            blocks[..., 49 + 2 * index] |= (bits >> 4 * index & 0xF) << 4
    else:
        blocks[..., place], blocks[..., place + 1] = bits & 0xFF, bits >> 8


def random_blocks(kind: Type, rows: int, columns: int, seed: int, scale: float = 1.0) -> NDArray[np.uint8]:
    """Return rows of any bytes but for their scales, [rows, bytes]; those of a second place are half as large again.

    So the numbers of Q2_K have a mean of 0: 1.5 of 3 for a code.
    """
    per_block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(seed).integers(0, 256, (rows, columns // per_block, size), np.uint8)
    for place, factor in zip(places_of_scales(kind), (1.0, 1.5), strict=False):
        set_scale(blocks, kind, place, scale * factor)
    return blocks.reshape(rows, -1)


def quantized(values: Floats, kind: Type) -> Any:
    """Return rows in a type; where gguf has no quantizer, any bytes with numbers about as large as a row's."""
    if kind.name in _BY_GGUF:
        return gguf.quantize(values, kind)
    if values.ndim == 3:
        return np.stack([quantized(each, kind) for each in values])
    columns = values.shape[1]
    usual = float(np.abs(gguf.dequantize(random_blocks(kind, 16, columns, seed=0), kind)).mean())
    return np.concatenate(
        [random_blocks(kind, 1, columns, crc32(row), float(np.abs(row).mean()) / usual) for row in values]
    )


_BY_GGUF = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", "TQ1_0", "TQ2_0")
