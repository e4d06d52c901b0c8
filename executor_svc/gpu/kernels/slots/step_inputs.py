"""Builds a step's tensors on the device from the state of the slots and a few words per sequence, in one launch.

The result equals `forward_batch.build_batch` of the slots that have not stopped, some of which the host may not know
to have stopped.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from executor_svc.gpu.kernels.rows import check
from executor_svc.gpu.kernels.slots.slots import (
    NUM_COMPUTED_TOKENS,
    NUM_PROMPT_TOKENS,
    NUM_TOKENS,
    POSITIONS,
    QUERY_START_LOC,
    ROPE_LENS,
    ROW_SLOTS,
    ROW_WAITS,
    ROWS,
    SAMPLE_POSITIONS,
    SEQ_LENS,
    SEQ_SLOTS,
    SLOT_MAPPING,
    SOURCES,
    STOPPED,
    TOKEN_IDS,
    SlotState,
    StepBuffers,
    StepSizes,
)
from executor_svc.gpu.kernels.variant import Variant

_TOKENS = 128
_LISTED = 128
_TABLE = 1024
_MAX_TABLE_PROGRAMS = 256
"""Maximum programs for all block tables, at least one for each: two per multiprocessor of a Hopper GPU."""
_WARPS = 4
_POINTERS = {
    "staging": "*i32", "token_ids": "*i32", "block_tables": "*i32", "numbers": "*i32", "by_token": "*i64",
    "by_seq": "*i32", "by_row": "*i32", "logits_rows": "*i64", "tables": "*i32",
}  # fmt: skip
_STRIDES = (
    "token_stride", "table_stride", "number_stride", "by_token_stride", "by_seq_stride", "by_row_stride",
    "tables_stride", "table_words",
)  # fmt: skip
_SIZES = (
    "num_tokens", "num_seqs", "num_logits", "num_rows", "num_tables", "block_size", "token_programs", "parts",
    "search_steps",
)  # fmt: skip


@triton.jit
def is_live(numbers, number_stride, slot):
    """Return whether there is a slot that has not stopped."""
    return tl.load(numbers + STOPPED * number_stride + slot, slot >= 0, other=1) == 0


@triton.jit
def owner_of(starts, token, num_seqs, search_steps):
    """Return the sequence s with starts[s] <= token < starts[s + 1], num_seqs if there is none."""
    low = tl.zeros_like(token)
    high = low + num_seqs
    for _ in range(search_steps):
        searching = low < high
        middle = (low + high) // 2
        after = tl.load(starts + middle + 1, searching, other=0) > token
        high = tl.where(searching & after, middle, high)
        low = tl.where(searching & ~after, middle + 1, low)
    return low


@triton.jit
def write_places(
    at, slot, position, there, within, block_tables, table_stride, table_words, num_tables, by_token, by_token_stride,
    block_size,
):  # fmt: skip
    """Write where tokens of slots at these positions are written, by each of their block tables; -1 for padding."""
    entry = block_tables + slot * (table_stride * 16) + position // block_size
    for table in range(num_tables):
        block = tl.load(entry + table * (table_words * 16), there, other=0).to(tl.int64)
        written = tl.where(there, block * block_size + position % block_size, -1)
        tl.store(by_token + (SLOT_MAPPING + table) * by_token_stride + at, written, within)


@triton.jit
def _build_tokens(
    program, staging, token_ids, token_stride, block_tables, table_stride, numbers, number_stride, by_token,
    by_token_stride, num_tokens, num_seqs, num_tables, table_words, block_size, search_steps, ONE_EACH: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    token = program * TOKENS + tl.arange(0, TOKENS)
    within = token < num_tokens
    starts = staging + num_seqs
    if ONE_EACH:
        sequence = token
        start = token
    else:
        sequence = owner_of(starts, token, num_seqs, search_steps)
        start = tl.load(starts + sequence, within & (sequence < num_seqs), other=0)
    slot = tl.load(staging + sequence, within & (sequence < num_seqs), other=-1).to(tl.int64)
    live = is_live(numbers, number_stride, slot)
    computed = tl.load(numbers + NUM_COMPUTED_TOKENS * number_stride + slot, live, other=0)
    prompt = tl.load(numbers + NUM_PROMPT_TOKENS * number_stride + slot, live, other=0)
    position = tl.where(live, computed + token - start, 0)
    known = tl.load(token_ids + slot * token_stride + position, live, other=0)
    write_places(
        token, slot, position, live, within, block_tables, table_stride, table_words, num_tables, by_token,
        by_token_stride, block_size,
    )  # fmt: skip
    tl.store(by_token + TOKEN_IDS * by_token_stride + token, known.to(tl.int64), within)
    tl.store(by_token + POSITIONS * by_token_stride + token, position.to(tl.int64), within)
    tl.store(by_token + ROPE_LENS * by_token_stride + token, tl.maximum(prompt, position + 1).to(tl.int64), within)


@triton.jit
def _gather_table(
    program, staging, block_tables, table_stride, numbers, number_stride, tables, tables_stride, num_seqs, num_tables,
    table_words, block_size, parts, TABLE: tl.constexpr,
):  # fmt: skip
    """Copy every parts-th tile of the used part of one of a sequence's block tables."""
    sequence = program // (parts * num_tables)
    first_word = program // parts % num_tables * (table_words * 16)
    slot = tl.load(staging + sequence).to(tl.int64)
    if is_live(numbers, number_stride, slot):
        starts = staging + num_seqs + sequence
        computed = tl.load(numbers + NUM_COMPUTED_TOKENS * number_stride + slot)
        num_blocks = tl.cdiv(computed + tl.load(starts + 1) - tl.load(starts), block_size)
        # Rows are padded, so all accesses are of 16 bytes.
        num_blocks = tl.cdiv(num_blocks, 4) * 4
        source = block_tables + slot * (table_stride * 16) + first_word
        target = tables + sequence.to(tl.int64) * (tables_stride * 16) + first_word
        for first in range(program % parts * TABLE, num_blocks, parts * TABLE):
            at = first + tl.arange(0, TABLE)
            tl.store(target + at, tl.load(source + at, at < num_blocks), at < num_blocks)


@triton.jit
def _list_sequences(at, staging, numbers, number_stride, by_seq, by_seq_stride, num_seqs):
    within = at < num_seqs
    start = tl.load(staging + num_seqs + at, at <= num_seqs, other=0)
    end = tl.load(staging + num_seqs + at + 1, within, other=0)
    slot = tl.load(staging + at, within, other=-1)
    live = is_live(numbers, number_stride, slot)
    computed = tl.load(numbers + NUM_COMPUTED_TOKENS * number_stride + slot, live, other=0)
    tl.store(by_seq + QUERY_START_LOC * by_seq_stride + at, start, at <= num_seqs)
    tl.store(by_seq + SEQ_LENS * by_seq_stride + at, tl.where(live, computed + end - start, 0), within)
    tl.store(by_seq + SEQ_SLOTS * by_seq_stride + at, slot, within)


@triton.jit
def _list_rows(at, row_words, numbers, number_stride, by_row, by_row_stride, num_rows):
    within = at < num_rows
    slot = tl.load(row_words + at, within, other=-1)
    source_slot = tl.load(row_words + num_rows + at, within, other=-1)
    live = is_live(numbers, number_stride, slot) & is_live(numbers, number_stride, source_slot)
    position = tl.load(numbers + NUM_TOKENS * number_stride + slot, live, other=0)
    tl.store(by_row + ROWS * by_row_stride + at, tl.where(live, slot, -1), within)
    tl.store(by_row + SOURCES * by_row_stride + at, tl.load(row_words + 2 * num_rows + at, within), within)
    tl.store(by_row + SAMPLE_POSITIONS * by_row_stride + at, position, within)
    tl.store(by_row + ROW_SLOTS * by_row_stride + at, slot, within)
    tl.store(by_row + ROW_WAITS * by_row_stride + at, tl.load(row_words + 3 * num_rows + at, within), within)


@triton.jit(do_not_specialize=[*_STRIDES, *_SIZES])
def _build_step(
    staging, token_ids, block_tables, numbers, by_token, by_seq, by_row, logits_rows, tables, token_stride,
    table_stride, number_stride, by_token_stride, by_seq_stride, by_row_stride, tables_stride, table_words, num_tokens,
    num_seqs, num_logits, num_rows, num_tables, block_size, token_programs, parts, search_steps,
    ONE_EACH: tl.constexpr, TOKENS: tl.constexpr, TABLE: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """Build all tensors. Strides of block tables are in units of 16 words, so that Triton infers aligned rows."""
    program = tl.program_id(0)
    if program < token_programs:
        _build_tokens(
            program, staging, token_ids, token_stride, block_tables, table_stride, numbers, number_stride, by_token,
            by_token_stride, num_tokens, num_seqs, num_tables, table_words, block_size, search_steps, ONE_EACH, TOKENS,
        )  # fmt: skip
    elif program < token_programs + num_seqs * num_tables * parts:
        _gather_table(
            program - token_programs, staging, block_tables, table_stride, numbers, number_stride, tables,
            tables_stride, num_seqs, num_tables, table_words, block_size, parts, TABLE,
        )  # fmt: skip
    else:
        at = (program - token_programs - num_seqs * num_tables * parts) * LISTED + tl.arange(0, LISTED)
        _list_sequences(at, staging, numbers, number_stride, by_seq, by_seq_stride, num_seqs)
        row_words = staging + 2 * num_seqs + 1
        tl.store(logits_rows + at, tl.load(row_words + at, at < num_logits).to(tl.int64), at < num_logits)
        _list_rows(at, row_words + num_logits, numbers, number_stride, by_row, by_row_stride, num_rows)


def build_step(
    staging: Tensor, state: SlotState, buffers: StepBuffers, sizes: StepSizes, block_size: int, one_each: bool
) -> None:
    """Write a step's tensors to the buffers, for the views of `StepBuffers.inputs`.

    Args:
        staging: int32, contiguous; its first words are, in this order: slot of each sequence [S], -1 for padding;
            query_start_loc [S + 1]; logits rows [L]; slot of each sampling row [R], -1 for padding; slot whose logits
            the row reads [R], different only for a fork; index of that logits row [R], with drafts of its first one; 1
            if the row gets no token [R].
        state: by slot.
        buffers: for steps of at least these sizes.
        sizes: of the step.
        block_size: tokens of a KV block.
        one_each: whether every sequence, padding too, has one token.

    Raises ValueError naming the argument.
    """
    check("staging", staging, (staging.numel(),), torch.int32)
    if min(sizes.num_tokens, sizes.num_seqs, sizes.num_logits, sizes.num_rows) < 0 or not sizes.within(buffers.most):
        raise ValueError(f"sizes: {sizes} are not within those of the buffers, {buffers.most}")
    if staging.numel() < sizes.num_words:
        raise ValueError(f"staging has {staging.numel()} words, not the {sizes.num_words} of {sizes}")
    if one_each and sizes.num_tokens != sizes.num_seqs:
        raise ValueError(f"one_each: {sizes.num_seqs} sequences have {sizes.num_tokens} tokens")
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, is {block_size}")
    token_programs = -(-sizes.num_tokens // _TOKENS)
    num_tables, max_blocks = state.tables.shape[1:]
    parts = _table_parts(sizes.num_seqs * num_tables, max_blocks)
    listed = -(-max(sizes.num_seqs + 1, sizes.num_logits, sizes.num_rows) // _LISTED)
    _build_step[(token_programs + sizes.num_seqs * num_tables * parts + listed,)](
        staging, state.token_ids, state.tables, state.numbers, buffers.by_token, buffers.by_seq, buffers.by_row,
        buffers.logits_rows, buffers.tables, state.token_ids.stride(0), state.tables.stride(0) // 16,
        state.numbers.stride(0), buffers.by_token.stride(0), buffers.by_seq.stride(0), buffers.by_row.stride(0),
        buffers.tables.stride(0) // 16, state.tables.stride(1) // 16, sizes.num_tokens, sizes.num_seqs,
        sizes.num_logits, sizes.num_rows, num_tables, block_size, token_programs, parts, sizes.num_seqs.bit_length(),
        ONE_EACH=one_each, **_TILES, num_warps=_WARPS, num_stages=1, enable_fp_fusion=False,
    )  # fmt: skip


_TILES = {"TOKENS": _TOKENS, "TABLE": _TABLE, "LISTED": _LISTED}


def _table_parts(num_tables: int, max_blocks_per_seq: int) -> int:
    """Return the number of programs per block table, of all sequences' tables. Results do not depend on it."""
    return max(1, min(-(-max_blocks_per_seq // _TABLE), _MAX_TABLE_PROGRAMS // max(num_tables, 1)))


def variants() -> list[Variant]:
    """Return the variants of `build_step`."""
    return [_variant(one_each) for one_each in (False, True)]


def _variant(one_each: bool) -> Variant:
    constants = {"ONE_EACH": one_each, **_TILES}
    integers = dict.fromkeys((*_STRIDES, *_SIZES), "i32")
    return Variant(
        name=f"step_inputs {'decode' if one_each else 'mixed'}",
        kernel=_build_step,
        signature={**_POINTERS, **integers, **dict.fromkeys(constants, "constexpr")},
        constants=constants,
        divisible=tuple(_POINTERS),
        num_warps=_WARPS,
        num_stages=1,
        fp_fusion=False,
        no_spills=True,
        quick=not one_each,
    )
