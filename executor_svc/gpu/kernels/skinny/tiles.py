"""Tiles and parts of skinny products: by the weight's shape and the GPU, never by the number of rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

ROWS = 16
"""Rows of x that a tile holds: the least of tensor cores' products. Fewer are filled up with zeros."""

_PROGRAMS_PER_SM = 2
"""Programs that run at once: their stages take at most 103 KiB of shared memory each."""
_LEAST_PART = 256
"""Columns of a part at least: two steps of the inner loop."""
_PARTS = (1, 2, 4, 8, 16)
_LEAST_SHARE = 0.7
"""Of the multiprocessors, that have a program: so many, with 64 KiB that load at once, can saturate the memory."""


@dataclass(frozen=True, slots=True)
class SkinnyTile:
    """A tile of the weight, and how a kernel with it is launched."""

    features: int
    """Rows of the weight; with a gate, of gate and of up each."""
    inner: int
    """Columns that are loading or multiplied at once, by stage."""
    num_warps: int
    num_stages: int


NARROW = SkinnyTile(features=32, inner=128, num_warps=4, num_stages=6)
WIDE = SkinnyTile(features=64, inner=128, num_warps=4, num_stages=6)
GATED_NARROW = SkinnyTile(features=32, inner=128, num_warps=4, num_stages=5)
GATED_WIDE = SkinnyTile(features=64, inner=64, num_warps=4, num_stages=5)


@dataclass(frozen=True, slots=True)
class SkinnyPlan:
    """How a weight is shared among a GPU's programs."""

    tile: SkinnyTile
    num_tiles: int
    parts: int
    """Programs that share a tile's columns; a power of 2."""
    part: int
    """Columns of each, in whole steps; the last may have fewer."""

    @classmethod
    def candidates(cls, out_features: int, in_features: int, gated: bool, num_sms: int) -> list[Self]:
        """Return all plans of a weight [out_features, in_features], with a gate [2 * out_features, in_features]."""
        found = []
        for tile in (GATED_WIDE, GATED_NARROW) if gated else (WIDE, NARROW):
            num_tiles, steps = -(-out_features // tile.features), -(-in_features // tile.inner)
            most = min(in_features // _LEAST_PART, _PROGRAMS_PER_SM * num_sms // num_tiles)
            for parts in (count for count in _PARTS if count <= max(1, most)):
                found.append(cls(tile, num_tiles, parts, -(-steps // parts) * tile.inner))
        return found

    @classmethod
    def of(cls, out_features: int, in_features: int, gated: bool, num_sms: int) -> Self:
        """Return the plan of a weight: of those that give most multiprocessors a program the one with least traffic."""

        def cost(plan: Self) -> tuple[float, int, int]:
            missing = max(0.0, _LEAST_SHARE * num_sms - plan.num_tiles * plan.parts)
            return missing, plan.traffic(in_features, gated), plan.parts

        return min(cls.candidates(out_features, in_features, gated, num_sms), key=cost)

    def traffic(self, in_features: int, gated: bool) -> int:
        """Return bytes beside the weight for each row: of x, which all tiles read, and three times those of sums.

        Sums are written and read, and may reach the memory; x stays in the L2 cache.
        """
        return 2 * self.num_tiles * in_features + 3 * 2 * 4 * self.sums_size(gated) // ROWS

    def sums_size(self, gated: bool) -> int:
        """Return the float32 numbers that the parts leave for the last of them."""
        return 0 if self.parts == 1 else (1 + gated) * self.num_tiles * self.parts * ROWS * self.tile.features


@dataclass(frozen=True, slots=True)
class SkinnyScratch:
    """Memory of skinny products, in use only until the next kernel of the stream."""

    sums: Tensor
    """Float32, of any contents."""
    counters: Tensor
    """Int32, 0 before and after each launch: of the parts of a tile that have ended."""

    @classmethod
    def of(cls, num_sums: int, num_tiles: int, device: torch.device) -> Self:
        """Allocate what products need that leave so many sums, of so many tiles."""
        return cls(
            torch.empty(max(1, num_sums), dtype=torch.float32, device=device),
            torch.zeros(max(1, num_tiles), dtype=torch.int32, device=device),
        )
