"""The most likely token of each row of logits: a maximum of each chunk of a row, then of these; and choosing it."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cadenza_common.plan.result import SlotError
from executor_svc.gpu.kernels.rows import check, check_rows, chunks, options, variant
from executor_svc.gpu.kernels.variant import Variant

VOCAB_SIZES = (32000, 49152, 128256, 151936, 256000)
"""Widths of the variants that are compiled ahead of time; the launchers accept any width."""

_CHUNKS = 64
"""Approximate number of programs that share a row, so that half of a GPU's processors read a single row."""
_SMALLEST_CHUNK = 1024
_LARGEST_CHUNK = 4096
_ROWS = 128
_NOWHERE = tl.constexpr(2**31 - 1)
_NON_FINITE = tl.constexpr(int(SlotError.NON_FINITE_LOGITS))


@triton.jit
def _largest(values, ids):
    """Return the largest of values and the lowest id with it; +inf if a value is NaN."""
    values = tl.where(values == values, values, float("inf"))
    best = tl.max(values, 0)
    return best, tl.min(tl.where(values == best, ids, _NOWHERE), 0)


@triton.jit
def _argmax_chunks(logits, scratch, WIDTH: tl.constexpr, STRIDE: tl.constexpr, CHUNK: tl.constexpr):
    parts: tl.constexpr = (WIDTH + CHUNK - 1) // CHUNK
    program = tl.program_id(0)
    columns = program % parts * CHUNK + tl.arange(0, CHUNK)
    places = logits + (program // parts).to(tl.int64) * STRIDE + columns
    best, where = _largest(tl.load(places, columns < WIDTH, other=float("-inf")), columns)
    tl.store(scratch + 2 * program, best.to(tl.int32, bitcast=True))
    tl.store(scratch + 2 * program + 1, where)


@triton.jit
def _argmax_rows(scratch, out, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    part = tl.arange(0, BLOCK)
    places = scratch + row * (2 * PARTS) + 2 * part
    bits = tl.load(places, part < PARTS, other=-8388608)  # the bits of -inf
    best, where = _largest(bits.to(tl.float32, bitcast=True), tl.load(places + 1, part < PARTS, other=_NOWHERE))
    finite = (best > float("-inf")) & (best < float("inf"))
    tl.store(out + row, tl.where(finite, where, -1).to(tl.int64))


@triton.jit(do_not_specialize=["num_rows"])
def _take_best(best, rows, sources, tokens, errors, num_rows, ROWS: tl.constexpr):
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = tl.load(rows + at, at < num_rows, other=-1) >= 0
    token = tl.load(best + tl.load(sources + at, there, other=0), there, other=-1)
    tl.store(tokens + at, token, there)
    tl.store(errors + at, tl.where(token < 0, _NON_FINITE, 0), there)


def argmax(logits: Tensor, scratch: Tensor, out: Tensor) -> None:
    """Write the lowest id of the maximum of each row of logits [R, vocab] float32 to out [R] int64.

    The id is -1 if the row's maximum is not finite: NaN, which counts as the largest, +inf, or only -inf. Rows may
    have a stride.

    Args:
        scratch: int32, at least `argmax_scratch(R, vocab)` numbers with any content.
    """
    check_rows("logits", logits, torch.float32)
    rows, vocab = logits.shape
    if not 0 < vocab < 1 << 30:
        raise ValueError(f"logits must have 1 to 2^30 columns, has {vocab}")
    check("out", out, (rows,), torch.int64)
    needed = argmax_scratch(rows, vocab)
    if scratch.numel() < needed:
        raise ValueError(f"scratch must have {needed} numbers, has {scratch.numel()}")
    check("scratch", scratch, tuple(scratch.shape), torch.int32)
    if rows:
        first, second = chunk_constants(vocab, logits.stride(0)), row_constants(vocab)
        _argmax_chunks[needed // 2,](logits, scratch, **first, **_chunk_options(first))
        _argmax_rows[rows,](scratch, out, **second, **_row_options(second))


def take_best(best: Tensor, rows: Tensor, sources: Tensor, out_tokens: Tensor, out_errors: Tensor) -> None:
    """Choose for each of R rows the most likely token of the logits that it reads: complete greedy decoding.

    Args:
        best: [L] int64, as `argmax` writes it.
        rows: [R] int32; -1: padding, for which nothing is written.
        sources: [R] int32, the logits row that each row reads.
        out_tokens: [R] int64; -1 where there is an error.
        out_errors: [R] int32: 0, or the SlotError.
    """
    num_rows = rows.shape[0]
    check("best", best, (best.shape[0],), torch.int64)
    check("rows", rows, (num_rows,), torch.int32)
    check("sources", sources, (num_rows,), torch.int32)
    check("out_tokens", out_tokens, (num_rows,), torch.int64)
    check("out_errors", out_errors, (num_rows,), torch.int32)
    if num_rows:
        _take_best[triton.cdiv(num_rows, _ROWS),](
            best, rows, sources, out_tokens, out_errors, num_rows, ROWS=_ROWS, **options(_ROWS)
        )


def argmax_scratch(rows: int, vocab: int) -> int:
    """Return the number of int32 in the scratch of `argmax`."""
    return 2 * rows * chunks(vocab, _chunk(vocab))


def chunk_constants(vocab: int, stride: int) -> dict[str, int]:
    """Return the compile-time constants for the maxima of chunks, for rows of vocab logits, `stride` apart."""
    return {"WIDTH": vocab, "STRIDE": stride, "CHUNK": _chunk(vocab)}


def row_constants(vocab: int) -> dict[str, int]:
    """Return the compile-time constants for the maxima of rows."""
    parts = chunks(vocab, _chunk(vocab))
    return {"PARTS": parts, "BLOCK": triton.next_power_of_2(parts)}


def _chunk(vocab: int) -> int:
    return min(_LARGEST_CHUNK, max(_SMALLEST_CHUNK, int(triton.next_power_of_2(-(-vocab // _CHUNKS)))))


def _chunk_options(constants: dict[str, int]) -> dict[str, Any]:
    return options(constants["CHUNK"] // 2)


def _row_options(constants: dict[str, int]) -> dict[str, Any]:
    return options(constants["BLOCK"])


def variants() -> list[Variant]:
    """Return the configurations compiled ahead of time."""
    taken = {"best": "*i64", "rows": "*i32", "sources": "*i32", "tokens": "*i64", "errors": "*i32", "num_rows": "i32"}
    found = [variant("take_best", _take_best, taken, {"ROWS": _ROWS}, options(_ROWS))]
    for vocab in VOCAB_SIZES:
        quick = vocab == 128256
        constants, arguments = chunk_constants(vocab, vocab), {"logits": "*fp32", "scratch": "*i32"}
        launched = _chunk_options(constants)
        found.append(variant(f"argmax_chunks vocab{vocab}", _argmax_chunks, arguments, constants, launched, quick))
        constants, arguments = row_constants(vocab), {"scratch": "*i32", "out": "*i64"}
        launched = _row_options(constants)
        found.append(variant(f"argmax_rows vocab{vocab}", _argmax_rows, arguments, constants, launched))
    return found
