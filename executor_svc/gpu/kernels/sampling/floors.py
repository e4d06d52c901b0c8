"""Floors of drawn rows: the smallest scaled logit that is kept, as in `sampling.floors`.

Deviations are summed in float64, tile by tile of the vocabulary, in an order that depends only on its size.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from executor_svc.gpu.kernels.sampling.arithmetic import as_float, edited_row, joined_key, key_value
from executor_svc.gpu.kernels.sampling.state import (
    RECORD_WORDS,
    VOCABS,
    SamplingState,
    SamplingWorkspace,
    field,
    num_chunks,
)
from executor_svc.gpu.kernels.variant import Variant

_RECORD_WORDS = tl.constexpr(RECORD_WORDS)
_HAS_FLOOR = tl.constexpr(field("has_floor"))
_LOG_MIN_P = tl.constexpr(field("log_min_p"))
_TOP_N_SIGMA = tl.constexpr(field("top_n_sigma"))
_TEMPERATURE = tl.constexpr(field("temperature"))
_TILE = 4096
_NUM_WARPS = 8


@triton.jit
def row_floor(record, floors, row):
    """Return the floor of a row, -inf if it has none."""
    return tl.load(floors + row, tl.load(record + _HAS_FLOOR) != 0, other=float("-inf"))


@triton.jit
def _floors(
    logits, logits_stride, rows, sources, records, edited, edited_stride, edited_rows, best, floors, vocab, num_chunks,
    EDITS: tl.constexpr, CHUNKS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows + row).to(tl.int64)
    if slot >= 0:
        record = records + slot * _RECORD_WORDS
        temperature = as_float(record + _TEMPERATURE)
        if (tl.load(record + _HAS_FLOOR) != 0) & (temperature > 0):
            floor = as_float(record + _LOG_MIN_P)
            num_deviations = as_float(record + _TOP_N_SIGMA)
            if num_deviations > 0:
                x_row, joined = edited_row(
                    logits, logits_stride, sources, edited, edited_stride, edited_rows, best, row, num_chunks, EDITS,
                    CHUNKS,
                )  # fmt: skip
                deviation = _deviation(x_row, key_value(joined_key(joined)), vocab, TILE)
                width = (num_deviations.to(tl.float64) * deviation).to(tl.float32)
                floor = tl.maximum(floor, tl.div_rn(-width, temperature))
            tl.store(floors + row, floor)


@triton.jit
def _deviation(x_row, peak, vocab, TILE: tl.constexpr):
    """Return the standard deviation in float64 of a row's logits above -inf."""
    number = tl.full((), 0, tl.int32)
    total = tl.full((), 0.0, tl.float64)
    start = tl.full((), 0, tl.int32)
    while start < vocab:
        below, kept = _below(x_row, peak, start, vocab, TILE)
        number += tl.sum(kept.to(tl.int32), axis=0)
        total += tl.sum(tl.where(kept, below, 0.0), axis=0)
        start += TILE
    mean = total / tl.maximum(number, 1)
    total = tl.full((), 0.0, tl.float64)
    start = tl.full((), 0, tl.int32)
    while start < vocab:
        below, kept = _below(x_row, peak, start, vocab, TILE)
        total += tl.sum(tl.where(kept, (below - mean) * (below - mean), 0.0), axis=0)
        start += TILE
    return tl.sqrt(total / tl.maximum(number, 1))


@triton.jit
def _below(x_row, peak, start, vocab, TILE: tl.constexpr):
    """Return (logits minus the peak in float64, whether they are above -inf) [TILE] from a token id on."""
    ids = start + tl.arange(0, TILE)
    x = tl.load(x_row + ids, ids < vocab, other=float("-inf"))
    return x.to(tl.float64) - peak.to(tl.float64), x > float("-inf")


def find_floors(
    logits: Tensor, rows: Tensor, sources: Tensor, state: SamplingState, workspace: SamplingWorkspace, *, edited: bool
) -> None:
    """Write the floors of rows that have one to `workspace.floors`; arguments as in `sampling.sample`."""
    vocab, w = logits.shape[1], workspace
    _floors[(rows.shape[0],)](
        logits, logits.stride(0), rows, sources, state.records, w.edited, w.edited.stride(0), w.edited_rows, w.best,
        w.floors, vocab, num_chunks(vocab), **_constants(vocab, edited), num_warps=_NUM_WARPS, num_stages=1,
        enable_fp_fusion=False,
    )  # fmt: skip


def _constants(vocab: int, edited: bool) -> dict[str, Any]:
    return {"EDITS": edited, "CHUNKS": triton.next_power_of_2(num_chunks(vocab)), "TILE": _TILE}


def variants() -> list[Variant]:
    """Return the configurations compiled ahead of time: for vocabularies up to each of some powers of two."""
    shapes = [(vocab, True) for vocab in VOCABS] + [(VOCABS[1], False)]
    return [_variant(vocab, divisible, edited) for vocab, divisible in shapes for edited in (False, True)]


def _variant(vocab: int, divisible: bool, edited: bool) -> Variant:
    signature = {
        "logits": "*fp32", "logits_stride": "i32", "rows": "*i32", "sources": "*i32", "records": "*i32",
        "edited": "*fp32", "edited_stride": "i32", "edited_rows": "*i32", "best": "*i64", "floors": "*fp32",
        "vocab": "i32", "num_chunks": "i32",
    }  # fmt: skip
    constants = _constants(vocab, edited)
    sizes = ("logits_stride", "vocab", "edited_stride") if divisible else ("edited_stride",)
    return Variant(
        name=f"floors vocab{vocab}" + " edits" * edited + " odd" * (not divisible),
        kernel=_floors,
        signature={**signature, **dict.fromkeys(constants, "constexpr")},
        constants=constants,
        divisible=tuple(name for name, kind in signature.items() if kind[0] == "*" or name in sizes),
        num_warps=_NUM_WARPS,
        num_stages=1,
        fp_fusion=False,
        no_spills=True,
        quick=edited and divisible and vocab == 131072,
    )
