"""The blocks of GGUF's IQ1, IQ2 and IQ3 types, unpacked: points of grids with signs become codes of 4 bits.

A code is a place among the magnitudes of the type, and 8 more where the number is negative; of IQ1, which moves its
-1, 0 and 1 by an eighth up or down, 8 more where that is down.
"""

from __future__ import annotations

import torch
from torch import Tensor

from executor_svc.device.stored_linear import QuantBlock
from executor_svc.models.gguf.grids import grid


def signed_table(*magnitudes: int) -> tuple[int, ...]:
    """Return the integers of codes."""
    rest = (0,) * (8 - len(magnitudes))
    return (*magnitudes, *rest, *(-each for each in magnitudes), *rest)


IQ1_EIGHTHS = (-7, 1, 9, 0, 0, 0, 0, 0, -9, -1, 7, 0, 0, 0, 0, 0)
"""Eight times the numbers of IQ1's codes."""


def iq2_xxs(rows: Tensor) -> QuantBlock:
    points, words = rows[:, :, 2:].unflatten(2, (8, 8))[..., :4], _integers(rows[:, :, 2:], torch.int32)[:, :, 1::2]
    return _block(rows, _signed(grid("IQ2_XXS"), points, _signs_of_words(words)), words >> 28 & 0xF, 8)


def iq2_xs(rows: Tensor) -> QuantBlock:
    words = _integers(rows[:, :, 2:66], torch.int16)
    codes = _signed(grid("IQ2_XS"), words & 0x1FF, _even_signs(words >> 9 & 0x7F))
    return _block(rows, codes, _nibbles(rows[:, :, 66:]), 8)


def iq2_s(rows: Tensor) -> QuantBlock:
    points = rows[:, :, 2:34].int() | _parts(rows[:, :, 66:74], 2, 4).int() << 8
    return _block(rows, _signed(grid("IQ2_S"), points, rows[:, :, 34:66]), _nibbles(rows[:, :, 74:]), 8)


def iq3_xxs(rows: Tensor) -> QuantBlock:
    words = _integers(rows[:, :, 66:], torch.int32)
    codes = _signed(grid("IQ3_XXS"), rows[:, :, 2:66], _signs_of_words(words))
    return _block(rows, codes, words >> 28 & 0xF, 4)


def iq3_s(rows: Tensor) -> QuantBlock:
    points = rows[:, :, 2:66].int() | _parts(rows[:, :, 66:74], 1, 8).int() << 8
    return _block(rows, _signed(grid("IQ3_S"), points, rows[:, :, 74:106]), _nibbles(rows[:, :, 106:]), 1)


def iq1_s(rows: Tensor) -> QuantBlock:
    words = _integers(rows[:, :, 34:], torch.int16)
    points = rows[:, :, 2:34].int() | _parts(words, 3, 4) << 8
    down = (words >> 15 & 1).repeat_interleave(4, dim=2) * 0xFF
    return _block(rows, _signed(grid("IQ1_S"), points, down), words >> 12 & 7, 8)


def iq1_m(rows: Tensor) -> QuantBlock:
    """The four upper bits of each number of the scales are a part of the super scale."""
    words, parts = _integers(rows[:, :, 48:], torch.int16), _parts(rows[:, :, 32:48], 4, 2)
    points, down = rows[:, :, :32].int() | (parts & 7).int() << 8, (parts >> 3) * 0xFF
    above = ((words >> 12 & 0xF) << torch.tensor([0, 4, 8, 12])).sum(2)
    super_scales = above.to(torch.int16).view(torch.float16)
    return _scaled(_signed(grid("IQ1_S"), points, down), _parts(words, 3, 4) & 7, super_scales, 8)


def _integers(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the little-endian numbers of bytes [R, blocks, bytes] as int32; their upper bits are the sign's."""
    return rows.clone(memory_format=torch.contiguous_format).view(dtype).int()


def _parts(numbers: Tensor, width: int, count: int) -> Tensor:
    """Return so many parts of so many bits of each number, from the lowest on: [R, blocks, numbers * count]."""
    shifts = torch.arange(0, width * count, width, dtype=numbers.dtype)
    parts: Tensor = numbers[..., None] >> shifts & (2**width - 1)
    return parts.flatten(2)


def _nibbles(numbers: Tensor) -> Tensor:
    return _parts(numbers, 4, 2)


def _signs_of_words(words: Tensor) -> Tensor:
    """Return the signs of four times 8 numbers that each word has in its lower 28 bits."""
    return _even_signs(_parts(words, 7, 4))


def _even_signs(seven: Tensor) -> Tensor:
    """Return 8 signs, evenly many of them minus, of which the lower 7 bits are given."""
    odd = seven
    for distance in (4, 2, 1):
        odd = odd ^ odd >> distance
    return seven | (odd & 1) << 7


def _signed(points_of_grid: Tensor, points: Tensor, signs: Tensor) -> Tensor:
    """Return codes [R, K] of points; signs: [R, blocks, 32], a bit for each number from the lowest on."""
    codes = points_of_grid[points.int()].flatten(2)
    minus = _parts(signs.flatten(2).to(torch.uint8), 1, 8) << 3
    return (codes | minus).flatten(1)


def _block(rows: Tensor, codes: Tensor, scales: Tensor, divisor: int) -> QuantBlock:
    """Return a block whose first number is the super scale."""
    super_scales = rows[:, :, :2].clone(memory_format=torch.contiguous_format).view(torch.float16).squeeze(2)
    return _scaled(codes, scales, super_scales, divisor)


def _scaled(codes: Tensor, scales: Tensor, super_scales: Tensor, divisor: int) -> QuantBlock:
    """Return a block with scales of 2 * scale + 1, [R, blocks, groups], and exact super scales over the divisor."""
    return QuantBlock(codes, (2 * scales + 1).to(torch.int8).flatten(1), super_scales.float() / divisor)
