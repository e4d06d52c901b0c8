"""Tiles of exact attention: one number of keys for all batches, and segments at absolute positions."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch

from executor_svc.gpu.kernels.attention.config import AttentionConfig, AttentionKind, Phase, attention_config, padded

SEGMENT_KEYS = 256
"""Keys of a segment, which begins at a multiple of it: whole tiles and blocks."""
_ANY_BLOCK = 16
"""A block size for which threads load keys, as they do here for all."""
_WARP_GROUP_ROWS, _WARP_GROUP = 64, 4
"""Rows of wgmma's products, and the warps that multiply together."""
_WIDEST = 128
"""Columns of values up to which a thread holds the sums of a segment and of all before it."""


@lru_cache(maxsize=256)
def exact_config(kind: AttentionKind, one_tile: bool, arch: int) -> AttentionConfig:
    """Return the tiles for a GPU of compute capability `arch`, such as 90; raises ValueError as `attention_config`.

    one_tile: whether a sequence's tokens in the batch fit one tile, as in decodes; the others are for prompts. The two
    differ, on a Hopper GPU, in the number of warp groups alone: each has 64 rows and all keys and columns of its
    products, so that it executes the same instructions. Everywhere else, where more warps would share a row's keys in
    another way, they do not differ.
    """
    most = attention_config(replace(kind, block_size=_ANY_BLOCK), Phase.PREFILL, arch)
    if kind.dtype == torch.float32 and not kind.more:
        return _in_float32(most, kind)
    if kind.dtype.itemsize != 2 or kind.more or most.rows < _WARP_GROUP_ROWS or arch >= 100:
        return most
    least = replace(most, rows=_WARP_GROUP_ROWS, num_warps=_WARP_GROUP)
    if kind.head_size > _WIDEST:
        least = replace(least, tile=min(least.tile, 32), num_warps=2 * _WARP_GROUP, num_stages=2)
    elif kind.group > least.rows or (arch // 10 == 9 and not one_tile):
        return most
    elif arch // 10 == 9:
        # So that two programs have the shared memory of a multiprocessor.
        least = replace(least, num_stages=2)
    if kind.group > least.rows:
        raise ValueError(f"q has {kind.group} query heads for each KV head, at most {least.rows} fit a tile")
    return least


def _in_float32(config: AttentionConfig, kind: AttentionKind) -> AttentionConfig:
    """Return tiles that spill nothing beside records of segments; those of fast attention do, by some 200 bytes."""
    size = padded(kind.head_size)
    if size == _WIDEST and kind.softcap:
        return replace(config, num_warps=2 * _WARP_GROUP)
    return replace(config, tile=min(config.tile, 16)) if size == 2 * _WIDEST else config


def tile_tokens(kind: AttentionKind, arch: int) -> int:
    """Return the most tokens of a sequence that the tile of decodes holds."""
    return exact_config(kind, True, arch).rows // kind.group
