"""Copies of KV pages within the device pool, into a staging buffer and out of it, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from executor_svc.gpu.kernels.variant import Variant

_WORDS = 4096
"""Words of 4 bytes that a program copies: 16 KiB, four independent 16-byte accesses per thread."""
_WARPS, _STAGES = 8, 2


@triton.jit(do_not_specialize=["num_words"])
def _copy_pages(
    source,
    target,
    source_ids,
    target_ids,
    num_words,
    HAS_SOURCE_IDS: tl.constexpr,
    HAS_TARGET_IDS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Copy up to WORDS words of one page, of num_words each."""
    num_pieces = tl.cdiv(num_words, WORDS)
    program = tl.program_id(0)
    piece = program % num_pieces
    pair = program // num_pieces
    # Without ids, pair i is page i of that side.
    read = pair.to(tl.int64)
    written = read
    if HAS_SOURCE_IDS:
        read = tl.load(source_ids + pair)
    if HAS_TARGET_IDS:
        written = tl.load(target_ids + pair)
    # Pages of a multiple of 16 bytes: every offset is a multiple of 4 words, hence accesses of 16 bytes.
    from_start = tl.multiple_of(read * num_words, 4)
    to_start = tl.multiple_of(written * num_words, 4)
    words = piece * WORDS + tl.arange(0, WORDS)
    inside = words < tl.multiple_of(num_words, 4)
    moved = tl.load(source + from_start + words, mask=inside)
    tl.store(target + to_start + words, moved, mask=inside)


def copy_pages(
    source: Tensor, target: Tensor, source_ids: Tensor | None, target_ids: Tensor | None, num_pairs: int
) -> None:
    """Copy page source_ids[i] of source to page target_ids[i] of target, for i below num_pairs.

    All pairs are copied concurrently: no page of target may occur twice, or be a source of this call.

    Args:
        source: [pages, bytes of a page] uint8, contiguous.
        target: as source, with pages of the same size; may share the source's memory.
        source_ids: [num_pairs or more] int64 on the device; None: 0, 1, 2 ...
        target_ids: as source_ids, of target.
        num_pairs: 0 or more.

    Raises ValueError naming the argument.
    """
    read, written = _words(source, "source"), _words(target, "target")
    num_words = read.shape[1]
    if written.shape[1] != num_words:
        raise ValueError(f"target: {written.shape[1]} words of a page are not source's {num_words}")
    _check_ids(source_ids, num_pairs, len(read), "source_ids")
    _check_ids(target_ids, num_pairs, len(written), "target_ids")
    programs = num_pairs * -(-num_words // _WORDS)
    if not programs:
        return
    _copy_pages[(programs,)](
        read,
        written,
        source_ids,
        target_ids,
        num_words,
        HAS_SOURCE_IDS=source_ids is not None,
        HAS_TARGET_IDS=target_ids is not None,
        WORDS=_WORDS,
        num_warps=_WARPS,
        num_stages=_STAGES,
        enable_fp_fusion=False,
    )


def copy_pages_by_torch(
    source: Tensor, target: Tensor, source_ids: Tensor | None, target_ids: Tensor | None, num_pairs: int
) -> None:
    """As `copy_pages`, by PyTorch, which holds all of the pages once more meanwhile."""
    pages = source[:num_pairs] if source_ids is None else source.index_select(0, source_ids[:num_pairs])
    if target_ids is None:
        target[:num_pairs].copy_(pages)
    else:
        target.index_copy_(0, target_ids[:num_pairs], pages)


def _words(pool: Tensor, name: str) -> Tensor:
    """View a pool as [pages, words of 4 bytes]."""
    if pool.dim() != 2 or pool.dtype != torch.uint8 or not pool.is_contiguous():
        raise ValueError(f"{name}: must be contiguous [pages, bytes] uint8")
    if pool.shape[1] % 16 or pool.data_ptr() % 16:
        raise ValueError(f"{name}: a page must be a multiple of 16 bytes, at a multiple of 16")
    return pool.view(torch.int32)


def _check_ids(ids: Tensor | None, num_pairs: int, num_pages: int, name: str) -> None:
    if ids is None:
        if num_pairs > num_pages:
            raise ValueError(f"{name}: {num_pairs} pairs for {num_pages} pages")
    elif ids.dtype != torch.int64 or not ids.is_contiguous() or ids.numel() < num_pairs:
        raise ValueError(f"{name}: must be {num_pairs} contiguous int64")


def variants() -> list[Variant]:
    """Return the variants of `copy_pages`: within the pool, into a staging buffer, out of it."""
    return [_variant("pool", True, True), _variant("gather", True, False), _variant("scatter", False, True)]


def _variant(name: str, has_source_ids: bool, has_target_ids: bool) -> Variant:
    signature = {
        "source": "*i32",
        "target": "*i32",
        "source_ids": "*i64" if has_source_ids else "constexpr",
        "target_ids": "*i64" if has_target_ids else "constexpr",
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
        name=f"copy_pages {name}",
        kernel=_copy_pages,
        signature=signature,
        constants=constants | absent,
        divisible=("source", "target", *present),
        num_warps=_WARPS,
        num_stages=_STAGES,
        fp_fusion=False,
        no_spills=True,
        quick=name == "pool",
    )
