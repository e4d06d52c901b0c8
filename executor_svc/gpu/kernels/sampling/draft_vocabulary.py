"""Logits and tokens of a head with a smaller vocabulary, such as EAGLE-3's, by the ids of its target."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from executor_svc.gpu.kernels.rows import check, check_rows
from executor_svc.gpu.kernels.variant import Variant

_LISTED = 128
_TILE = 1024
_WARPS = 4
_IDS = {"ids": "*i64", "target_ids": "*i64", "num_rows": "i32"}
_SPREAD = {
    "logits": "*fp32", "logits_stride": "i32", "target_ids": "*i64", "wide": "*fp32", "wide_stride": "i32",
    "vocab": "i32", "tiles": "i32",
}  # fmt: skip
_SPREAD_INTEGERS = ("logits_stride", "wide_stride", "vocab", "tiles")


@triton.jit(do_not_specialize=("num_rows",))
def _to_target(ids, target_ids, num_rows, LISTED: tl.constexpr):
    at = tl.program_id(0) * LISTED + tl.arange(0, LISTED)
    own = tl.load(ids + at, at < num_rows, other=-1)
    tl.store(ids + at, tl.load(target_ids + own, own >= 0, other=-1), at < num_rows)


@triton.jit(do_not_specialize=_SPREAD_INTEGERS)
def _spread(logits, logits_stride, target_ids, wide, wide_stride, vocab, tiles, TILE: tl.constexpr):
    row = (tl.program_id(0) // tiles).to(tl.int64)
    own = tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)
    there = own < vocab
    value = tl.load(logits + row * logits_stride + own, there, other=0.0)
    tl.store(wide + row * wide_stride + tl.load(target_ids + own, there, other=0), value, there)


def to_target(ids: Tensor, target_ids: Tensor) -> None:
    """Replace a head's ids [R] int64 by those of its target; -1 stays.

    target_ids: [draft vocabulary] int64, the target's id of each id.
    """
    check("ids", ids, (ids.shape[0],), torch.int64)
    check("target_ids", target_ids, (target_ids.shape[0],), torch.int64)
    if len(ids):
        _to_target[(-(-len(ids) // _LISTED),)](
            ids, target_ids, len(ids), LISTED=_LISTED, num_warps=_WARPS, num_stages=1, enable_fp_fusion=False
        )


def spread(logits: Tensor, target_ids: Tensor, wide: Tensor) -> None:
    """Write a head's logits [R, draft vocabulary] float32 to the columns of wide [R, vocabulary] that have its ids.

    Other columns stay as they are: -inf, if they were never written. target_ids: as of `to_target`.
    """
    num_rows, vocab = logits.shape
    check_rows("logits", logits, torch.float32)
    check_rows("wide", wide, torch.float32)
    check("target_ids", target_ids, (vocab,), torch.int64)
    if wide.shape[0] != num_rows or wide.shape[1] < vocab:
        raise ValueError(f"wide is {list(wide.shape)}, too small for logits {list(logits.shape)}")
    tiles = -(-vocab // _TILE)
    if num_rows:
        _spread[(num_rows * tiles,)](
            logits, logits.stride(0), target_ids, wide, wide.stride(0), vocab, tiles, TILE=_TILE, num_warps=_WARPS,
            num_stages=1, enable_fp_fusion=False,
        )  # fmt: skip


def variants() -> list[Variant]:
    """Return the variants of `to_target` and `spread`."""
    kinds = (("ids", _to_target, _IDS, {"LISTED": _LISTED}), ("logits", _spread, _SPREAD, {"TILE": _TILE}))
    return [
        Variant(
            name=f"draft_vocabulary {name}",
            kernel=kernel,
            signature={**arguments, **dict.fromkeys(constants, "constexpr")},
            constants=constants,
            divisible=tuple(each for each, kind in arguments.items() if kind.startswith("*")),
            num_warps=_WARPS,
            num_stages=1,
            fp_fusion=False,
            no_spills=True,
            quick=name == "logits",
        )
        for name, kernel, arguments, constants in kinds
    ]
