"""Draws tokens: races over whole rows in chunks, and a token for each row from the results of its chunks."""

from __future__ import annotations

import triton
import triton.language as tl

from cadenza_common.plan.result import SlotError
from executor_svc.gpu.kernels.sampling.arithmetic import (
    NEG_INF_KEY,
    NO_ID,
    as_float,
    best_of_row,
    edited_row,
    is_finite_key,
    joined_id,
    joined_key,
    key_value,
    mass,
    race_winner,
)
from executor_svc.gpu.kernels.sampling.floors import row_floor
from executor_svc.gpu.kernels.sampling.noise import row_key
from executor_svc.gpu.kernels.sampling.search import draw_from_best
from executor_svc.gpu.kernels.sampling.state import RECORD_WORDS, field
from executor_svc.sampling.noise import DrawPurpose

_RECORD_WORDS = tl.constexpr(RECORD_WORDS)
_SEED = tl.constexpr(field("seed"))
_SAMPLE_INDEX = tl.constexpr(field("sample_index"))
_TEMPERATURE = tl.constexpr(field("temperature"))
_TOP_P = tl.constexpr(field("top_p"))
_TOP_K = tl.constexpr(field("top_k"))
_SAMPLE = tl.constexpr(int(DrawPurpose.SAMPLE))
_NON_FINITE_LOGITS = tl.constexpr(int(SlotError.NON_FINITE_LOGITS))
_NO_ALLOWED_TOKEN = tl.constexpr(int(SlotError.NO_ALLOWED_TOKEN))


@triton.jit
def race(
    logits, logits_stride, rows, sources, records, num_tokens, edited, edited_stride, edited_rows, best,
    floors, race_values, race_ids, sums, vocab, num_chunks,
    EDITS: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """For a chunk of each drawn row: the winner without top_k and top_p; the mass with top_p but without top_k."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(rows + row).to(tl.int64)
    if slot >= 0:
        record = records + slot * _RECORD_WORDS
        temperature = as_float(record + _TEMPERATURE)
        limited, nucleus = _filters(record, vocab)
        if (temperature > 0) & ~limited:
            x_row, joined = edited_row(
                logits, logits_stride, sources, edited, edited_stride, edited_rows, best, row, num_chunks, EDITS, CHUNKS
            )
            key = joined_key(joined)
            if is_finite_key(key):
                peak, floor = key_value(key), row_floor(record, floors, row)
                ids = chunk * CHUNK + tl.arange(0, CHUNK)
                x = tl.load(x_row + ids, ids < vocab, other=float("-inf"))
                at = row * num_chunks + chunk
                if nucleus:
                    tl.store(sums + at, tl.sum(mass(x, peak, temperature, floor), axis=0))
                else:
                    noise = _noise_key(record, num_tokens, slot)
                    value, token = race_winner(x, ids, ids < vocab, peak, temperature, floor, noise)
                    tl.store(race_values + at, value)
                    tl.store(race_ids + at, token)


@triton.jit
def finish(
    logits, logits_stride, rows, sources, records, num_tokens, edited, edited_stride, edited_rows, best,
    floors, tops, blocks, race_values, race_ids, sums, out_tokens, out_errors, vocab, num_chunks, num_blocks,
    EDITS: tl.constexpr, DRAWN: tl.constexpr, FILTERED: tl.constexpr, CHUNKS: tl.constexpr, BLOCKS: tl.constexpr,
    TILE: tl.constexpr, SUB: tl.constexpr, PIVOTS: tl.constexpr,
):  # fmt: skip
    """Write each row's token and error; the token has the highest logit, won the race, or is a filtered draw."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows + row).to(tl.int64)
    if slot >= 0:
        raw = joined_key(best_of_row(best, row, 0, num_chunks, CHUNKS))
        x_row, joined = edited_row(
            logits, logits_stride, sources, edited, edited_stride, edited_rows, best, row, num_chunks, EDITS, CHUNKS
        )
        key, token = joined_key(joined), joined_id(joined)
        error = tl.where(key > NEG_INF_KEY, 0, _NO_ALLOWED_TOKEN)
        error = tl.where(is_finite_key(raw), error, _NON_FINITE_LOGITS)
        if DRAWN:
            record = records + slot * _RECORD_WORDS
            temperature = as_float(record + _TEMPERATURE)
            if (error == 0) & (temperature > 0):
                limited, nucleus = _filters(record, vocab)
                chunk = tl.arange(0, CHUNKS)
                at = row * num_chunks + chunk
                if limited | nucleus:
                    if FILTERED:
                        # If top_k is on too, the mass is that of the best k, which the search computes.
                        whole = tl.sum(
                            tl.load(sums + at, (chunk < num_chunks) & ~limited, other=0.0).to(tl.float64), axis=0
                        )
                        token = draw_from_best(
                            x_row, vocab, tops + row * num_blocks, blocks + row * num_blocks, num_blocks, key,
                            temperature, row_floor(record, floors, row), limited, tl.load(record + _TOP_K), nucleus,
                            as_float(record + _TOP_P).to(tl.float64), whole, _noise_key(record, num_tokens, slot),
                            BLOCKS, TILE, SUB, PIVOTS,
                        )  # fmt: skip
                else:
                    value = tl.load(race_values + at, chunk < num_chunks, other=float("inf"))
                    ids = tl.load(race_ids + at, chunk < num_chunks, other=NO_ID)
                    token = tl.min(tl.where(value == tl.min(value, axis=0), ids, NO_ID), axis=0)
        tl.store(out_tokens + row, tl.where(error == 0, token, -1))
        tl.store(out_errors + row, error)


@triton.jit
def _filters(record, vocab):
    """Return (whether top_k is on, whether top_p is on)."""
    top_k = tl.load(record + _TOP_K)
    return (top_k > 0) & (top_k < vocab), as_float(record + _TOP_P) < 1.0


@triton.jit
def _noise_key(record, num_tokens, slot):
    return row_key(
        tl.load(record + _SEED), tl.load(record + _SEED + 1), tl.load(record + _SAMPLE_INDEX),
        tl.load(num_tokens + slot), _SAMPLE,
    )  # fmt: skip
