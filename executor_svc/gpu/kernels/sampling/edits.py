"""Computes the peaks of logits rows after edits: allowed tokens, bad words, min_tokens, bias, penalties.

The operations are those of `logits_processors`, in the same order in fp32, so edited logits have the CPU's bits. Each
program processes a chunk of one row: dense steps first, then the slot's list entries in the chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from executor_svc.gpu.kernels.sampling.arithmetic import NO_ID, NO_KEY, join, ordered_key
from executor_svc.gpu.kernels.sampling.state import RECORD_WORDS, field

_RECORD_WORDS = tl.constexpr(RECORD_WORDS)
_REPETITION = tl.constexpr(field("repetition_penalty"))
_FREQUENCY = tl.constexpr(field("frequency_penalty"))
_PRESENCE = tl.constexpr(field("presence_penalty"))
_PENALISED = tl.constexpr(field("penalised"))
_HAS_ALLOWED = tl.constexpr(field("has_allowed"))
_BIAS_START = tl.constexpr(field("bias_start"))
_BIAS_LENGTH = tl.constexpr(field("bias_length"))
_WORD_START = tl.constexpr(field("word_start"))
_WORD_LENGTH = tl.constexpr(field("word_length"))
_STOP_START = tl.constexpr(field("stop_start"))
_STOP_LENGTH = tl.constexpr(field("stop_length"))
_MIN_TOKENS = tl.constexpr(field("min_tokens"))
_LARGEST = tl.constexpr(float(2.0**128 - 2.0**104))
_RULED_OUT = tl.constexpr(float("-inf"))


@triton.jit
def find_peaks(
    logits, logits_stride, rows, sources, best, tops, vocab, num_chunks, num_blocks,
    TOPS: tl.constexpr, CHUNK: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """Write the best joined key of each chunk of the rows' raw logits; with TOPS also the largest key of each block."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if tl.load(rows + row) >= 0:
        ids = _chunk_ids(chunk, CHUNK, SUB)
        x_row = logits + tl.load(sources + row).to(tl.int64) * logits_stride
        x = tl.load(x_row + ids, ids < vocab, other=_RULED_OUT)
        _store_peaks(x, ids, row, 0, chunk, best, tops, vocab, num_chunks, num_blocks, TOPS, CHUNK, SUB)


@triton.jit
def edit(
    logits, logits_stride, rows, sources, best, tops, vocab, num_chunks, num_blocks,
    records, token_ids, tokens_stride, num_tokens, num_prompt_tokens, counts, allowed_bits, num_words,
    bias_ids, biases, word_ids, word_following, stop_ids, edited, edited_stride, edited_rows,
    TOPS: tl.constexpr, CHUNK: tl.constexpr, SUB: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """As `find_peaks`, for raw and for edited logits; edited logits are written for slots with edits."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(rows + row).to(tl.int64)
    if slot >= 0:
        record = records + slot * _RECORD_WORDS
        known, prompt = tl.load(num_tokens + slot), tl.load(num_prompt_tokens + slot)
        penalised, has_allowed = tl.load(record + _PENALISED), tl.load(record + _HAS_ALLOWED)
        num_biases, num_words_of_slot = tl.load(record + _BIAS_LENGTH), tl.load(record + _WORD_LENGTH)
        early = known - prompt < tl.load(record + _MIN_TOKENS)
        num_stops = tl.where(early, tl.load(record + _STOP_LENGTH), 0)
        is_edited = (penalised | has_allowed | num_biases | num_words_of_slot | num_stops) != 0
        if chunk == 0:
            tl.store(edited_rows + row, is_edited.to(tl.int32))
        ids = _chunk_ids(chunk, CHUNK, SUB)
        x_row = logits + tl.load(sources + row).to(tl.int64) * logits_stride
        x = tl.load(x_row + ids, ids < vocab, other=_RULED_OUT)
        if is_edited:
            _store_peaks(x, ids, row, 0, chunk, best, tops, vocab, num_chunks, num_blocks, False, CHUNK, SUB)
            count_row = counts + slot * vocab
            bits_row = allowed_bits + slot * num_words
            out_row = edited + row * edited_stride
            x = _penalise(x, ids, ids < vocab, record, count_row, penalised)
            x = _mask_others(x, ids, ids < vocab, bits_row, has_allowed)
            tl.store(out_row + ids, x, ids < vocab)
            first = chunk * CHUNK
            last = tl.minimum(first + CHUNK, vocab)
            tl.debug_barrier()
            start = tl.load(record + _BIAS_START)
            _write_biased(
                x_row, out_row, bias_ids + start, biases + start, num_biases, first, last,
                record, count_row, penalised, bits_row, has_allowed, LANES,
            )  # fmt: skip
            tl.debug_barrier()
            start = tl.load(record + _WORD_START)
            history = token_ids + slot * tokens_stride
            _rule_out_words(
                out_row, word_ids + start, word_following + start, num_words_of_slot, first, last,
                history, known, prompt, LANES,
            )  # fmt: skip
            _rule_out(out_row, stop_ids + tl.load(record + _STOP_START), num_stops, first, last, LANES)
            tl.debug_barrier()
            x = tl.load(out_row + ids, ids < vocab, other=_RULED_OUT)
            _store_peaks(x, ids, row, 1, chunk, best, tops, vocab, num_chunks, num_blocks, TOPS, CHUNK, SUB)
        else:
            _store_peaks(x, ids, row, 0, chunk, best, tops, vocab, num_chunks, num_blocks, TOPS, CHUNK, SUB)


@triton.jit
def _chunk_ids(chunk, CHUNK: tl.constexpr, SUB: tl.constexpr):
    return chunk * CHUNK + tl.arange(0, CHUNK // SUB)[:, None] * SUB + tl.arange(0, SUB)[None, :]


@triton.jit
def _store_peaks(
    x, ids, row, which, chunk, best, tops, vocab, num_chunks, num_blocks,
    TOPS: tl.constexpr, CHUNK: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    key = tl.where(ids < vocab, ordered_key(x), NO_KEY)
    of_blocks = tl.max(key, axis=1)
    if TOPS:
        block = chunk * (CHUNK // SUB) + tl.arange(0, CHUNK // SUB)
        tl.store(tops + row * num_blocks + block, of_blocks, block < num_blocks)
    highest = tl.max(of_blocks, axis=0)
    token = tl.min(tl.min(tl.where(key == highest, ids, NO_ID), axis=1), axis=0)
    tl.store(best + (row * 2 + which) * num_chunks + chunk, join(highest, token))


@triton.jit
def _write_biased(
    x_row, out_row, bias_ids, biases, length, first, last,
    record, count_row, penalised, bits_row, has_allowed, LANES: tl.constexpr,
):  # fmt: skip
    """Write the logits of the slot's tokens with a bias between first and last: bias, penalties, allowed tokens."""
    at = tl.full((), 0, tl.int32)
    while at < length:
        lane = at + tl.arange(0, LANES)
        token = tl.load(bias_ids + lane, lane < length, other=-1)
        in_chunk = (token >= first) & (token < last)
        raw = tl.load(x_row + token, in_chunk, other=0.0)
        biased = _bounded(raw, raw + tl.load(biases + lane, in_chunk, other=0.0))
        biased = _penalise(biased, token, in_chunk, record, count_row, penalised)
        tl.store(out_row + token, _mask_others(biased, token, in_chunk, bits_row, has_allowed), in_chunk)
        at += LANES


@triton.jit
def _rule_out_words(
    out_row, ids, following, length, first, last, history, known, prompt, LANES: tl.constexpr
):  # fmt: skip
    """Write -inf for tokens between first and last that would complete a bad word."""
    at = tl.full((), 0, tl.int32)
    while at < length:
        lane = at + tl.arange(0, LANES)
        fits = _completed_words(lane, length, ids, following, history, known, prompt)
        token = tl.load(ids + lane, fits, other=-1)
        tl.store(out_row + token, _RULED_OUT, (token >= first) & (token < last))
        at += LANES


@triton.jit
def _rule_out(out_row, ids, length, first, last, LANES: tl.constexpr):
    """Write -inf for listed tokens between first and last."""
    at = tl.full((), 0, tl.int32)
    while at < length:
        lane = at + tl.arange(0, LANES)
        token = tl.load(ids + lane, lane < length, other=-1)
        tl.store(out_row + token, _RULED_OUT, (token >= first) & (token < last))
        at += LANES


@triton.jit
def _bounded(before, after):
    """`logits_processors._bounded`."""
    return tl.where(before == _RULED_OUT, before, tl.minimum(tl.maximum(after, -_LARGEST), _LARGEST))


@triton.jit
def _penalise(x, ids, there, record, count_row, penalised):
    """As `logits_processors._penalise`, for tokens with counts."""
    count = tl.load(count_row + ids, there & (penalised != 0), other=0)
    number = (count >> 1).to(tl.float32)
    repetition = tl.load(record + _REPETITION).to(tl.float32, bitcast=True)
    frequency = tl.load(record + _FREQUENCY).to(tl.float32, bitcast=True)
    presence = tl.load(record + _PRESENCE).to(tl.float32, bitcast=True)
    y = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
    y = _bounded(x, y) - frequency * number
    y = _bounded(x, y) - presence * (number > 0).to(tl.float32)
    return tl.where(count != 0, _bounded(x, y), x)


@triton.jit
def _mask_others(x, ids, there, bits_row, has_allowed):
    """Return x with -inf for tokens that are not allowed, if has_allowed."""
    word = tl.load(bits_row + (ids >> 5), there & (has_allowed != 0), other=-1)
    return tl.where((word >> (ids & 31)) & 1 != 0, x, _RULED_OUT)


@triton.jit
def _completed_words(lane, length, ids, following, history, known, prompt):
    """Return [lanes]: whether this entry is the last token of a bad word whose other tokens end the output."""
    fits = tl.load(following + lane, lane < length, other=-1) == 0
    walking = fits
    back = 1
    while tl.max(walking.to(tl.int32), axis=0) > 0:
        before = lane - back
        inside = walking & (before >= 0)
        # Entries of the preceding word have other distances to their end.
        walking = inside & (tl.load(following + before, inside, other=-1) == back)
        position = known - back
        token = tl.load(ids + before, walking, other=-1)
        held = tl.load(history + position, (position >= prompt) & (position >= 0), other=-2)
        fits = fits & ((token == held) | ~walking)
        walking = walking & fits
        back += 1
    return fits
