"""Random numbers as pure functions: Philox4x32-10 returns a key for each row, splitmix64 spreads it over token ids.

Philox: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC'11; constants and known answers
from the authors' Random123 library.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from executor_svc.sampling import splitmix64

_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], np.uint64)
_WEYL = np.array([[0x9E3779B9], [0xBB67AE85]], np.uint64)
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)

_FEW_ROWS = 8

# The largest float32 below 1: -log1p of its negative is finite.
BELOW_ONE = 1.0 - 2.0**-24


def _signed(value: int) -> int:
    """Return the int64 with the bits of this uint64."""
    return value - (1 << 64) if value >> 63 else value


GOLDEN_GAMMA = _signed(splitmix64.GAMMA)
MIX_1 = _signed(splitmix64.MIX_1)
MIX_2 = _signed(splitmix64.MIX_2)


class DrawPurpose(IntEnum):
    """The purpose of a draw: draws for different purposes are independent."""

    SAMPLE = 0


def philox4x32(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Ten rounds of Philox4x32: counter [4, n] and key [2, n] of 32-bit words in uint64 -> [4, n] of 32-bit words."""
    even, odd = counter[0::2], counter[1::2]
    for _ in range(10):
        product = even * _MULTIPLIERS
        even = (product >> _32)[::-1] ^ odd ^ key
        odd = (product & _LOW)[::-1]
        key = (key + _WEYL) & _LOW
    out = np.empty_like(counter)
    out[0::2], out[1::2] = even, odd
    return out


def philox_of_one(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """`philox4x32` of one counter and key: for a few of them integers are quicker than arrays."""
    (a, b, c, d), (low, high) = counter, key
    for _ in range(10):
        even, odd = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = odd >> 32 ^ b ^ low, odd & 0xFFFFFFFF, even >> 32 ^ d ^ high, even & 0xFFFFFFFF
        low, high = low + 0x9E3779B9 & 0xFFFFFFFF, high + 0xBB67AE85 & 0xFFFFFFFF
    return a, b, c, d


def row_keys(
    seeds: NDArray[np.uint64], sample_indices: NDArray[np.int64], positions: NDArray[np.int64], purpose: DrawPurpose
) -> NDArray[np.int64]:
    """Return a 64-bit key per row, [n] int64, of seed, sample index, the new token's absolute position and purpose."""
    if len(seeds) <= _FEW_ROWS:
        return _keys_of_few(seeds, sample_indices, positions, purpose)
    counter = np.zeros((4, len(seeds)), np.uint64)
    counter[0] = positions
    counter[1] = sample_indices
    counter[2] = int(purpose)
    words = philox4x32(counter, np.stack((seeds & _LOW, seeds >> _32)))
    keys: NDArray[np.int64] = (words[0] | (words[1] << _32)).view(np.int64)
    return keys


def _keys_of_few(
    seeds: NDArray[np.uint64], sample_indices: NDArray[np.int64], positions: NDArray[np.int64], purpose: DrawPurpose
) -> NDArray[np.int64]:
    words = [
        philox_of_one((position, index, int(purpose), 0), (seed & 0xFFFFFFFF, seed >> 32))
        for seed, index, position in zip(seeds.tolist(), sample_indices.tolist(), positions.tolist(), strict=True)
    ]
    return np.array([first | second << 32 for first, second, _, _ in words], np.uint64).view(np.int64)


def uniform(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Return uniform noise in (0, 1), float32, for each (key, token id): int64, which broadcast against each other.

    A value depends only on its key and its id: all steps are elementwise, and exact but for the last rounding.
    """
    z = keys + token_ids * GOLDEN_GAMMA
    # >> is arithmetic: the mask makes it logical.
    z ^= (z >> 30) & ((1 << 34) - 1)
    z *= MIX_1
    z ^= (z >> 27) & ((1 << 37) - 1)
    z *= MIX_2
    z ^= (z >> 31) & ((1 << 33) - 1)
    # The high 52 bits plus a half: with 53 the largest would round to 1.
    wide = ((z >> 12) & ((1 << 52) - 1)).to(torch.float64).add_(0.5).mul_(2.0**-52)
    return wide.to(torch.float32).clamp_(max=BELOW_ONE)
