"""Tile sizes of the attention kernels: chosen at start by GPU, head size, dtypes and phase, not by what a step holds.

Each was compiled for its arch and does not spill. Keys are tiled from position 0 on, whatever the block size.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch

HEAD_SIZES = (64, 80, 96, 128, 256)
BLOCK_SIZES = (8, 16, 32, 64)
DECODE_ROWS = 16
"""The least that tensor cores multiply: up to so many query heads of a KV head, decodes have a tile of their own."""


class Phase(StrEnum):
    """What the tiles of a launch are made for."""

    PREFILL = "prefill"
    """Any mixture: many query tokens in a tile."""
    DECODE = "decode"
    """Batches of one token per sequence."""


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """How one kernel is tiled and launched."""

    rows: int
    """Of a query tile: tokens times query heads of a KV head."""
    tile: int
    """Keys of a tile."""
    num_warps: int
    num_stages: int
    """Tiles of keys and values on their way or in use at once."""


_HOPPER = {
    ("16", 64): AttentionConfig(128, 128, 8, 3),
    ("16", 128): AttentionConfig(128, 128, 8, 2),
    ("16", 256): AttentionConfig(128, 32, 8, 3),
    ("fp8", 64): AttentionConfig(128, 128, 8, 3),
    ("fp8", 128): AttentionConfig(128, 64, 8, 3),
    ("fp8", 256): AttentionConfig(64, 64, 8, 2),
    ("32", 64): AttentionConfig(64, 32, 8, 2),
    ("32", 128): AttentionConfig(32, 16, 4, 2),
    ("32", 256): AttentionConfig(32, 16, 8, 2),
}
_HOPPER_FEATURES = _HOPPER | {("16", 128): AttentionConfig(128, 64, 8, 3)}
"""A window and a softcap take registers of their own."""
_AMPERE = _HOPPER | {
    ("16", 64): AttentionConfig(128, 64, 8, 3),
    ("16", 128): AttentionConfig(128, 32, 8, 3),
    ("16", 256): AttentionConfig(64, 32, 8, 3),
}
_DECODE = {
    ("16", 64): AttentionConfig(DECODE_ROWS, 64, 4, 3),
    ("16", 128): AttentionConfig(DECODE_ROWS, 64, 4, 3),
    ("16", 256): AttentionConfig(DECODE_ROWS, 32, 4, 3),
    ("fp8", 64): AttentionConfig(DECODE_ROWS, 64, 4, 4),
    ("fp8", 128): AttentionConfig(DECODE_ROWS, 64, 4, 4),
    ("fp8", 256): AttentionConfig(DECODE_ROWS, 32, 4, 4),
    ("32", 64): AttentionConfig(DECODE_ROWS, 32, 8, 2),
    ("32", 128): AttentionConfig(DECODE_ROWS, 32, 8, 2),
    ("32", 256): AttentionConfig(DECODE_ROWS, 16, 4, 2),
}
_HOPPER_WIDE = _HOPPER | {
    ("16", 64): AttentionConfig(128, 64, 8, 3),
    ("16", 128): AttentionConfig(128, 64, 8, 3),
    ("16", 256): AttentionConfig(64, 64, 8, 2),
    ("fp8", 64): AttentionConfig(128, 64, 8, 3),
    ("fp8", 128): AttentionConfig(64, 64, 8, 3),
    ("fp8", 256): AttentionConfig(32, 32, 8, 3),
    ("32", 256): AttentionConfig(32, 16, 16, 3),
}
"""For decodes of more query heads to a KV head than a decode tile has rows: the split kernel takes more registers."""


def padded(head_size: int) -> int:
    """Return the head size that tiles have: the next power of 2."""
    return 1 << (head_size - 1).bit_length()


def attention_config(
    phase: Phase, head_size: int, dtype: torch.dtype, kv_dtype: torch.dtype, group: int, features: bool, arch: int
) -> AttentionConfig:
    """Return the tiles for `group` query heads of each KV head on a GPU of compute capability `arch`, such as 90.

    With `features` there is a window or a softcap. Raises: ValueError if that many heads do not fit a tile, or if the
    GPU does not know the cache's dtype.
    """
    if kv_dtype == torch.float8_e4m3fn and arch < 90:
        raise ValueError("kv_layer must not be in float8_e4m3fn below compute capability 90")
    kind = "32" if dtype == torch.float32 else "fp8" if kv_dtype.itemsize == 1 else "16"
    key = kind, padded(head_size)
    if phase is Phase.DECODE and group <= DECODE_ROWS:
        return _DECODE[key]
    hopper = _HOPPER_WIDE if phase is Phase.DECODE else _HOPPER_FEATURES if features else _HOPPER
    table = _AMPERE if arch < 90 else hopper
    if group > table[key].rows:
        raise ValueError(f"q has {group} query heads for each KV head, at most {table[key].rows} fit a tile")
    return table[key]


def constants(
    config: AttentionConfig, head_size: int, block_size: int, window: bool, softcap: bool, scales: bool
) -> dict[str, Any]:
    """Return what both attention kernels are compiled for; window, softcap, scales: are there such."""
    return {
        "HEAD_SIZE": head_size,
        "PADDED": padded(head_size),
        "BLOCK_SIZE": block_size,
        "ROWS": config.rows,
        "TILE": config.tile,
        "HAS_WINDOW": window,
        "HAS_SOFTCAP": softcap,
        "HAS_SCALES": scales,
        "STAGES": config.num_stages,
    }
