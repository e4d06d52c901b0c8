"""Tile sizes of the attention kernels: chosen at start by GPU, model, cache and phase, not by the contents of a step.

Each was compiled for its arch without spills. Tiles of keys begin at position 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import torch

from executor_svc.device.latent import padded_latent

HEAD_SIZES = (64, 80, 96, 128, 256, 512)
BLOCK_SIZES = (8, 16, 32, 64)
"""Supported block sizes, powers of 2: arguments of a launch."""
COPIED_BLOCK = 64
"""Block size for which a Hopper GPU's copy engine loads keys and values: every tile is within one block."""
MOST_ROWS = 2**31
"""The copy engine counts rows in 32 bits."""
DRAFTS_ROWS = 32
"""Rows of the tile for all tokens of a sequence and the query heads of a KV head: 6 tokens of 4 heads, 4 of 8."""
DECODE_ROWS = 16
"""Minimum rows of tensor cores' products: decodes have tiles of this size for up to as many query heads per KV head."""


class Phase(StrEnum):
    """The kind of batch that the tiles of a launch are for."""

    PREFILL = "prefill"
    """Any mixture of sequences: many query tokens in a tile."""
    DECODE = "decode"
    """Batches of one token per sequence, where a program reads all keys of a sequence's KV head."""
    SPLIT = "split"
    """Batches of one token per sequence, where several programs share these keys."""
    DRAFTS = "drafts"
    """Batches of a few tokens per sequence, which fit a tile; 16-bit queries only."""


_DECODES = (Phase.DECODE, Phase.SPLIT)


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Tiles and launch options of one kernel."""

    rows: int
    """Rows of a query tile: tokens times query heads of a KV head."""
    tile: int
    """Keys of a tile."""
    num_warps: int
    num_stages: int
    """Tiles of keys and values that are loading or in use at once."""
    copies: bool = False
    """Whether a Hopper GPU's copy engine loads keys and values: requires tiles within one block, and no window."""


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """The properties that kernels are compiled for and tiles are chosen by."""

    head_size: int
    dtype: torch.dtype
    """Dtype of queries and results."""
    kv_dtype: torch.dtype
    block_size: int
    group: int = 1
    """Query heads that share a KV head."""
    window: bool = False
    """Whether tokens see a part of the positions before them: a window, or a chunk."""
    softcap: bool = False
    countable: bool = True
    """Whether the pool has fewer rows, those of other layers included, than MOST_ROWS."""
    sinks: bool = False
    chunked: bool = False
    more: int = 0
    """Columns that a key has beside its latent, which is its value too; 0: values are numbers of their own."""

    @property
    def scales(self) -> bool:
        """Whether the cache is in fp8."""
        return self.kv_dtype != self.dtype

    @property
    def width(self) -> int:
        """Columns of a query and of a row of the cache."""
        return padded_latent(self.head_size) + self.more if self.more else self.head_size

    @property
    def wide(self) -> bool:
        """Whether a KV head has more query heads than a decode tile has rows."""
        return self.group > DECODE_ROWS


_HOPPER = {
    ("16", 64): AttentionConfig(128, 128, 8, 3),
    ("16", 128): AttentionConfig(128, 64, 8, 3),
    ("16", 256): AttentionConfig(128, 32, 8, 3),
    ("fp8", 64): AttentionConfig(128, 128, 8, 3),
    ("fp8", 128): AttentionConfig(128, 64, 8, 3),
    ("fp8", 256): AttentionConfig(64, 64, 8, 2),
    ("32", 64): AttentionConfig(64, 32, 8, 2),
    ("32", 128): AttentionConfig(32, 16, 4, 2),
    ("32", 256): AttentionConfig(32, 16, 8, 2),
    ("16", 512): AttentionConfig(32, 32, 8, 2),
    ("fp8", 512): AttentionConfig(32, 32, 8, 2),
    ("32", 512): AttentionConfig(16, 16, 8, 2),
}
"""Heads of 512 numbers do not fit wgmma's registers: their tiles have less rows than it needs."""
_AMPERE = _HOPPER | {
    ("16", 64): AttentionConfig(128, 64, 8, 3),
    ("16", 128): AttentionConfig(128, 32, 8, 3),
    ("16", 256): AttentionConfig(64, 32, 8, 3),
    ("32", 256): AttentionConfig(32, 32, 8, 2),
}
_SMALL = _AMPERE | {
    ("16", 256): AttentionConfig(64, 32, 8, 2),
    ("fp8", 256): AttentionConfig(32, 32, 8, 3),
    ("16", 512): AttentionConfig(32, 16, 8, 2),
    ("fp8", 512): AttentionConfig(32, 16, 8, 2),
    ("32", 256): AttentionConfig(32, 16, 16, 2),
    ("32", 512): AttentionConfig(DECODE_ROWS, 16, 8, 1),
}
_SMALL_ARCHS = (86, 89, 120, 121)
"""GPUs with 99 KiB of shared memory per block, not 163 KiB or more."""
_DECODE = {
    ("16", 64): AttentionConfig(DECODE_ROWS, 64, 4, 3),
    ("16", 128): AttentionConfig(DECODE_ROWS, 64, 4, 3),
    ("16", 256): AttentionConfig(DECODE_ROWS, 32, 4, 3),
    ("fp8", 64): AttentionConfig(DECODE_ROWS, 64, 4, 4),
    ("fp8", 128): AttentionConfig(DECODE_ROWS, 64, 4, 4),
    ("fp8", 256): AttentionConfig(DECODE_ROWS, 32, 4, 4),
    ("32", 64): AttentionConfig(DECODE_ROWS, 32, 8, 2),
    ("32", 128): AttentionConfig(DECODE_ROWS, 32, 8, 2),
    ("32", 256): AttentionConfig(DECODE_ROWS, 32, 8, 2),
    ("16", 512): AttentionConfig(DECODE_ROWS, 32, 8, 2),
    ("fp8", 512): AttentionConfig(DECODE_ROWS, 32, 8, 2),
    ("32", 512): AttentionConfig(DECODE_ROWS, 16, 8, 2),
}
_DECODE_SMALL = {("32", 512): AttentionConfig(DECODE_ROWS, 16, 8, 1)}
"""For GPUs of `_SMALL_ARCHS`, whichever table is right else."""
_DECODE_SOFTCAP = _DECODE | {
    ("16", 64): AttentionConfig(DECODE_ROWS, 64, 8, 3),
    ("16", 128): AttentionConfig(DECODE_ROWS, 64, 8, 3),
}
"""With 4 warps, some kernels spill 4 bytes."""
_SPLIT_SOFTCAP = _DECODE_SOFTCAP | {
    ("fp8", 64): AttentionConfig(DECODE_ROWS, 64, 8, 3),
    ("fp8", 512): AttentionConfig(DECODE_ROWS, 16, 4, 2),
}
"""Split ones spill as many with such a cache, too."""
_OF_SINKS = {("32", size): AttentionConfig(DECODE_ROWS, 32, 4, 2) for size in (128, 256)}
"""With 8 warps ptxas keeps 64 registers, and spills the places of results and sinks while keys are read.

With 4 those spill that are not split and have no window.
"""
_HOPPER_DECODE_BF16 = _DECODE | {("fp8", 128): AttentionConfig(DECODE_ROWS, 32, 2, 4)}
"""Measured on an H100, as the next two: `tune-decode` in benchmarks/results/gpu_kernels.jsonl.

With a window or in float16 these tiles spill registers.
"""
_HOPPER_DECODE_COPIED = _DECODE | {
    ("fp8", 128): AttentionConfig(DECODE_ROWS, 64, 4, 3),
    ("fp8", 512): AttentionConfig(DECODE_ROWS, 16, 4, 2),
}
_COPIED_FP16 = {("fp8", 512): AttentionConfig(DECODE_ROWS, 16, 8, 2)}
"""For split decodes: in bfloat16 these spill, and in float16 those above."""
_HOPPER_UNSPLIT = {
    ("16", 128): AttentionConfig(DECODE_ROWS, 64, 4, 4),
    ("fp8", 512): AttentionConfig(DECODE_ROWS, 32, 8, 2),
}
"""For decodes that are not split: split ones were faster with 3 stages on an H200 (`tune-split` in the same rows)."""
_DRAFTS = {
    ("16", 64): AttentionConfig(DRAFTS_ROWS, 64, 8, 3),
    ("16", 128): AttentionConfig(DRAFTS_ROWS, 64, 8, 3),
    ("16", 256): AttentionConfig(DRAFTS_ROWS, 32, 8, 3),
    ("fp8", 64): AttentionConfig(DRAFTS_ROWS, 64, 8, 3),
    ("fp8", 128): AttentionConfig(DRAFTS_ROWS, 64, 8, 3),
    ("fp8", 256): AttentionConfig(DRAFTS_ROWS, 32, 8, 3),
    ("16", 512): AttentionConfig(DRAFTS_ROWS, 32, 8, 2),
    ("fp8", 512): AttentionConfig(DRAFTS_ROWS, 32, 8, 2),
}
"""With 4 warps, most of them spill."""
_DRAFTS_SMALL = dict.fromkeys((("16", 512), ("fp8", 512)), AttentionConfig(DRAFTS_ROWS, 16, 8, 2))
"""For GPUs of `_SMALL_ARCHS`."""
_DRAFTS_COPIED = _DRAFTS | {("fp8", 64): AttentionConfig(DRAFTS_ROWS, 64, 4, 3)}
"""With 8 warps, these spill."""
_DRAFTS_SINKS = _DRAFTS | {("16", 64): AttentionConfig(DRAFTS_ROWS, 32, 4, 3)}
"""With a window and longer tiles, these spill."""
_HOPPER_WIDE = _HOPPER | {
    ("16", 64): AttentionConfig(128, 64, 8, 3),
    ("16", 128): AttentionConfig(128, 64, 8, 2),
    ("16", 256): AttentionConfig(64, 64, 8, 2),
    ("fp8", 64): AttentionConfig(128, 64, 8, 3),
    ("fp8", 128): AttentionConfig(64, 64, 8, 3),
    ("fp8", 256): AttentionConfig(32, 32, 8, 3),
    ("32", 64): AttentionConfig(64, 16, 8, 2),
    ("32", 128): AttentionConfig(32, 16, 8, 2),
    ("32", 256): AttentionConfig(32, 16, 32, 2),
    ("16", 512): AttentionConfig(32, 32, 8, 2),
    ("fp8", 512): AttentionConfig(32, 32, 8, 2),
}
"""For decodes with more query heads per KV head than rows of a decode tile: the split kernel needs more registers."""
_SPLIT_WIDE = {("32", 128): AttentionConfig(32, 16, 8, 2)}
"""For split decodes of as many heads before Hopper: with 4 warps some kernels spill."""
_HOPPER_SPLIT_WIDE = _HOPPER_WIDE | {
    ("32", 64): AttentionConfig(64, 16, 16, 2),
    ("32", 128): AttentionConfig(32, 16, 16, 2),
}
"""With 8 warps some spill as in `_OF_SINKS`, with a window and sinks even where 128 registers are allowed."""
_HOPPER_COPIED = _HOPPER | {
    ("16", 64): AttentionConfig(128, 64, 8, 3),
    ("16", 128): AttentionConfig(64, 64, 4, 3),
    ("fp8", 64): AttentionConfig(128, 64, 8, 3),
    ("fp8", 512): AttentionConfig(32, 16, 8, 2),
}
"""Tiles for the copy engine, no longer than a block of COPIED_BLOCK tokens; that of ("16", 128) measured on an H100."""
_HOPPER_COPIED_MANY = _HOPPER_COPIED | {("16", 128): AttentionConfig(128, 64, 8, 3)}
"""For more query heads per KV head than 64 rows hold."""
_LATENT = {
    ("16", False): AttentionConfig(DECODE_ROWS, 64, 8, 3),
    ("fp8", False): AttentionConfig(DECODE_ROWS, 64, 8, 3),
    ("32", False): AttentionConfig(DECODE_ROWS, 32, 8, 2),
    ("16", True): AttentionConfig(DRAFTS_ROWS, 32, 8, 3),
    ("fp8", True): AttentionConfig(DRAFTS_ROWS, 16, 8, 3),
    ("32", True): AttentionConfig(DECODE_ROWS, 32, 8, 2),
}
"""Tiles among latents, by dtype and whether a tile has more rows than a decode needs; not measured.

Keys are their own values, so that a tile of 64 keys has the memory of two. Rows are few for the 512 columns of sums.
"""
_LATENT_AMPERE = _LATENT | {("16", False): AttentionConfig(DECODE_ROWS, 32, 8, 3)}
_LATENT_NARROW = {("16", False): AttentionConfig(DECODE_ROWS, 32, 4, 3)}
"""For up to 256 columns: with 8 warps split decodes spill."""
_LATENT_SMALL = {
    ("16", False): AttentionConfig(DECODE_ROWS, 16, 8, 3),
    ("fp8", False): AttentionConfig(DECODE_ROWS, 32, 8, 2),
    ("32", False): AttentionConfig(DECODE_ROWS, 16, 8, 2),
    ("16", True): AttentionConfig(DRAFTS_ROWS, 16, 8, 2),
    ("fp8", True): AttentionConfig(DRAFTS_ROWS, 16, 8, 2),
    ("32", True): AttentionConfig(DECODE_ROWS, 16, 8, 2),
}


def heads_of_block(num_heads: int, dtype: torch.dtype) -> int:
    """Return how many query heads a tile has among latents, which are the keys of all heads."""
    most = _LATENT["32" if dtype == torch.float32 else "16", True].rows
    return max(heads for heads in range(1, most + 1) if num_heads % heads == 0)


def padded(head_size: int) -> int:
    """Return the head size of tiles: the next power of 2."""
    return 1 << (head_size - 1).bit_length()


def attention_config(kind: AttentionKind, phase: Phase, arch: int) -> AttentionConfig:
    """Return the tiles for a GPU of compute capability `arch`, such as 90.

    Raises ValueError if the query heads of a KV head do not fit a tile, or if the GPU does not support the cache's
    dtype.
    """
    if kind.kv_dtype == torch.float8_e4m3fn and arch < 90:
        raise ValueError("kv_layer must not be in float8_e4m3fn below compute capability 90")
    width = "32" if kind.dtype == torch.float32 else "fp8" if kind.scales else "16"
    if kind.more:
        latents = _LATENT_SMALL if arch in _SMALL_ARCHS else _LATENT_AMPERE if arch < 90 else _LATENT
        latents = latents | _LATENT_NARROW if kind.head_size <= 256 else latents
        return latents[width, kind.wide or phase not in _DECODES]
    copies = _may_copy(kind, phase, arch)
    config = _table(kind, phase, arch, copies).get((width, padded(kind.head_size)))
    if config is None:
        raise ValueError(f"q must not be in {kind.dtype} for {phase.value}")
    if kind.group > config.rows:
        raise ValueError(f"q has {kind.group} query heads for each KV head, at most {config.rows} fit a tile")
    return replace(config, copies=copies)


def _may_copy(kind: AttentionKind, phase: Phase, arch: int) -> bool:
    """Return whether the copy engine loads tiles; not for wide decodes, which have few registers left."""
    fits = kind.block_size == COPIED_BLOCK and kind.dtype.itemsize == 2 and not kind.window and kind.countable
    return fits and arch // 10 == 9 and not (phase in _DECODES and kind.wide)


def _table(kind: AttentionKind, phase: Phase, arch: int, copies: bool) -> dict[tuple[str, int], AttentionConfig]:
    if phase is Phase.DRAFTS:
        table = _DRAFTS_COPIED if copies else _DRAFTS_SINKS if kind.sinks and kind.window else _DRAFTS
        return table | _DRAFTS_SMALL if arch in _SMALL_ARCHS else table
    if phase in _DECODES and not kind.wide:
        table = _decode_table(kind, phase, arch, copies)
        return table | _DECODE_SMALL if arch in _SMALL_ARCHS else table
    if arch in _SMALL_ARCHS or arch < 90:
        table = _SMALL if arch in _SMALL_ARCHS else _AMPERE
        return table | _SPLIT_WIDE if phase is Phase.SPLIT else table
    if phase in _DECODES:
        return _HOPPER_SPLIT_WIDE if phase is Phase.SPLIT else _HOPPER_WIDE
    if copies:
        return _HOPPER_COPIED_MANY if kind.group > _HOPPER_COPIED["16", 128].rows else _HOPPER_COPIED
    return _HOPPER


def _decode_table(kind: AttentionKind, phase: Phase, arch: int, copies: bool) -> dict[tuple[str, int], AttentionConfig]:
    """Of decodes whose KV heads have no more query heads than a decode tile has rows."""
    more = kind.softcap or kind.sinks
    copied = _COPIED_FP16 if copies and kind.dtype == torch.float16 else {}
    if arch // 10 == 9 and not more:
        spills = kind.window or kind.dtype != torch.bfloat16
        table = _HOPPER_DECODE_COPIED if copies else _DECODE if spills else _HOPPER_DECODE_BF16
        return table | copied if phase is Phase.SPLIT else table | _HOPPER_UNSPLIT
    if more:
        table = _SPLIT_SOFTCAP | copied if phase is Phase.SPLIT else _DECODE_SOFTCAP
        return table | _OF_SINKS if kind.sinks and (phase is Phase.SPLIT or kind.window) else table
    return _DECODE


def constants(kind: AttentionKind, config: AttentionConfig) -> dict[str, Any]:
    """Return the constants of both attention kernels with these tiles."""
    return {
        "HEAD_SIZE": kind.head_size,
        "PADDED": padded(kind.head_size),
        "WIDTH": kind.width,
        "MORE": kind.more,
        "MORE_PADDED": padded(kind.more) if kind.more else 0,
        "ROWS": config.rows,
        "TILE": config.tile,
        "HAS_WINDOW": 2 if kind.chunked else kind.window,
        "HAS_SOFTCAP": kind.softcap,
        "HAS_SCALES": kind.scales,
        "HAS_SINKS": kind.sinks,
        "COPIES": config.copies,
        "STAGES": config.num_stages,
    }
