"""Copies of KV blocks within the device pool, into a staging buffer and out of it: one launch for all layers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from executor_svc.gpu.kernels.variant import Variant

_WORDS = 4096
"""Words of 4 bytes that a program copies: 16 KiB, four independent 16-byte accesses per thread."""
_WARPS, _STAGES = 8, 2


_STRIDES = ("source_layer_stride", "source_block_stride", "target_layer_stride", "target_block_stride")


@triton.jit(do_not_specialize=[*_STRIDES, "num_layers", "num_words"])
def _copy_blocks(
    source,
    target,
    source_ids,
    target_ids,
    source_layer_stride: tl.int64,
    source_block_stride: tl.int64,
    target_layer_stride: tl.int64,
    target_block_stride: tl.int64,
    num_layers,
    num_words,
    HAS_SOURCE_IDS: tl.constexpr,
    HAS_TARGET_IDS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Copy up to WORDS words of one block's piece in one layer; strides are in words."""
    num_pieces = tl.cdiv(num_words, WORDS)
    program = tl.program_id(0)
    piece = program % num_pieces
    layer = (program // num_pieces % num_layers).to(tl.int64)
    pair = program // num_pieces // num_layers
    # Without ids, pair i is block i of that side.
    read = pair.to(tl.int64)
    written = read
    if HAS_SOURCE_IDS:
        read = tl.load(source_ids + pair)
    if HAS_TARGET_IDS:
        written = tl.load(target_ids + pair)
    # Pieces of a multiple of 16 bytes: every offset is a multiple of 4 words, hence accesses of 16 bytes.
    from_start = tl.multiple_of(layer * source_layer_stride + read * source_block_stride, 4)
    to_start = tl.multiple_of(layer * target_layer_stride + written * target_block_stride, 4)
    words = piece * WORDS + tl.arange(0, WORDS)
    inside = words < tl.multiple_of(num_words, 4)
    moved = tl.load(source + from_start + words, mask=inside)
    tl.store(target + to_start + words, moved, mask=inside)


def copy_blocks(
    source: Tensor, target: Tensor, source_ids: Tensor | None, target_ids: Tensor | None, num_pairs: int
) -> None:
    """Copy block source_ids[i] of source to block target_ids[i] of target in all layers, for i below num_pairs.

    All pairs are copied concurrently: no block of target may occur twice, or be a source of this call.

    Args:
        source: [layers, blocks, ...] of any dtype; a block of a layer is contiguous, layers and blocks may be strided.
        target: as source, with blocks of the same size; may share the source's memory.
        source_ids: [num_pairs or more] int64 on the device; None: 0, 1, 2 ...
        target_ids: as source_ids, of target.
        num_pairs: 0 or more.

    Raises ValueError naming the argument.
    """
    read, written = _words(source, "source"), _words(target, "target")
    if read.shape[0] != written.shape[0] or read.shape[2] != written.shape[2]:
        raise ValueError(
            f"target: layers and words of a block {list(written.shape)} are not source's {list(read.shape)}"
        )
    _check_ids(source_ids, num_pairs, read.shape[1], "source_ids")
    _check_ids(target_ids, num_pairs, written.shape[1], "target_ids")
    num_layers, _, num_words = read.shape
    programs = num_pairs * num_layers * -(-num_words // _WORDS)
    if not programs:
        return
    _copy_blocks[(programs,)](
        read,
        written,
        source_ids,
        target_ids,
        read.stride(0),
        read.stride(1),
        written.stride(0),
        written.stride(1),
        num_layers,
        num_words,
        HAS_SOURCE_IDS=source_ids is not None,
        HAS_TARGET_IDS=target_ids is not None,
        WORDS=_WORDS,
        num_warps=_WARPS,
        num_stages=_STAGES,
        enable_fp_fusion=False,
    )


def _words(pool: Tensor, name: str) -> Tensor:
    """View a pool as [layers, blocks, words of 4 bytes]."""
    if pool.dim() < 3:
        raise ValueError(f"{name}: not [layers, blocks, ...] but {list(pool.shape)}")
    if pool[0, 0].numel() * pool.element_size() % 16 or pool.data_ptr() % 16:
        raise ValueError(f"{name}: a block of a layer must be a multiple of 16 bytes, at a multiple of 16")
    try:
        return pool.view(*pool.shape[:2], -1).view(torch.int32)
    except RuntimeError as exc:
        raise ValueError(f"{name}: a block of a layer is not contiguous") from exc


def _check_ids(ids: Tensor | None, num_pairs: int, num_blocks: int, name: str) -> None:
    if ids is None:
        if num_pairs > num_blocks:
            raise ValueError(f"{name}: {num_pairs} pairs for {num_blocks} blocks")
    elif ids.dtype != torch.int64 or not ids.is_contiguous() or ids.numel() < num_pairs:
        raise ValueError(f"{name}: must be {num_pairs} contiguous int64")


def variants() -> list[Variant]:
    """Return the variants of `copy_blocks`: within the pool, into a staging buffer, out of it."""
    return [_variant("pool", True, True), _variant("gather", True, False), _variant("scatter", False, True)]


def _variant(name: str, has_source_ids: bool, has_target_ids: bool) -> Variant:
    signature = {
        "source": "*i32",
        "target": "*i32",
        "source_ids": "*i64" if has_source_ids else "constexpr",
        "target_ids": "*i64" if has_target_ids else "constexpr",
        **dict.fromkeys(_STRIDES, "i64"),
        "num_layers": "i32",
        "num_words": "i32",
        "HAS_SOURCE_IDS": "constexpr",
        "HAS_TARGET_IDS": "constexpr",
        "WORDS": "constexpr",
    }
    constants = {"HAS_SOURCE_IDS": has_source_ids, "HAS_TARGET_IDS": has_target_ids, "WORDS": _WORDS}
    absent = {
        f"{side}_ids": None for side, there in (("source", has_source_ids), ("target", has_target_ids)) if not there
    }
    present = [f"{side}_ids" for side, there in (("source", has_source_ids), ("target", has_target_ids)) if there]
    return Variant(
        name=f"copy_blocks {name}",
        kernel=_copy_blocks,
        signature=signature,
        constants=constants | absent,
        divisible=("source", "target", *present),
        num_warps=_WARPS,
        num_stages=_STAGES,
        fp_fusion=False,
        no_spills=True,
        quick=name == "pool",
    )
