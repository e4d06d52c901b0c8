"""Tiles of prompts for a Hopper GPU whose warps have roles: what the Gluon kernel and its twin in Triton share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from executor_svc.gpu.kernels.attention.config import BLOCK_SIZES, AttentionKind

ARCH = 90
"""The compute capability that it is for."""
ROWS_OF_CONSUMER = 64
"""Rows of a warpgroup's products."""
CONSUMERS = 2
BLOCKS = tuple(size for size in BLOCK_SIZES if size >= 16)
"""Block sizes: of smaller blocks a tile has more than the producer's registers hold the places of."""
_REGISTERS_OF_BLOCK = 504
"""Registers of a thread in each of the three warpgroups, together: 65,536 by 128 threads, in whole eights by group."""


@dataclass(frozen=True, slots=True)
class PromptTiles:
    """Tiles of one head size."""

    tile: int
    """Keys of a tile: whole blocks, which the copy engine fetches one by one."""
    stages: int
    """Tiles of keys, and as many of values, that are loading or in use at once."""
    producer_registers: int = 40
    """Registers of a thread of the producer's warpgroup."""

    @property
    def rows(self) -> int:
        """Rows of a query tile: tokens times query heads of a KV head."""
        return ROWS_OF_CONSUMER * CONSUMERS

    @property
    def consumer_registers(self) -> int:
        """Registers of a thread of each consumer: all that the producer leaves."""
        return (_REGISTERS_OF_BLOCK - self.producer_registers) // CONSUMERS // 8 * 8


TILES = {64: PromptTiles(128, 3), 128: PromptTiles(128, 2)}
"""By head size; computed, not measured: no GPU has run them."""


def why_not(kind: AttentionKind) -> str | None:
    """Return what of this kind of attention the kernel does not have; None: nothing."""
    for lacks, what in (
        (kind.more > 0, "latents"),
        (kind.head_size not in TILES, f"heads of {kind.head_size} numbers"),
        (kind.dtype.itemsize != 2, "32-bit queries"),
        (kind.scales, "a cache in fp8"),
        (kind.window, "a window or chunks"),
        (kind.block_size not in BLOCKS, f"blocks of {kind.block_size} tokens"),
        (not kind.countable, "pools of 2^31 keys and values or more"),
        (kind.group > ROWS_OF_CONSUMER * CONSUMERS, f"{kind.group} query heads for each KV head"),
    ):
        if lacks:
            return what
    return None


def tiles_of(kind: AttentionKind) -> PromptTiles:
    """Return the tiles for a kind of attention; raises ValueError, with what is missing."""
    lacking = why_not(kind)
    if lacking is not None:
        raise ValueError(f"the Gluon kernel does not have {lacking}")
    return TILES[kind.head_size]


def tile_constants(kind: AttentionKind, tiles: PromptTiles) -> dict[str, Any]:
    """Return the constants of both kernels."""
    return {
        "HEAD_SIZE": kind.head_size,
        "ROWS": tiles.rows,
        "TILE": tiles.tile,
        "BLOCK": kind.block_size,
        "STAGES": tiles.stages,
        "PRODUCER_REGISTERS": tiles.producer_registers,
        "CONSUMER_REGISTERS": tiles.consumer_registers,
        "HAS_SOFTCAP": kind.softcap,
        "HAS_SINKS": kind.sinks,
    }


def kind_of(
    head_size: int, dtype: torch.dtype, block_size: int, *, softcap: bool = False, sinks: bool = False
) -> AttentionKind:
    """Return a kind that the kernel has."""
    return AttentionKind(head_size, dtype, dtype, block_size, softcap=softcap, sinks=sinks)
