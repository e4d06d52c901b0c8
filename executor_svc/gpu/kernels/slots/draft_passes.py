"""The tensors of drafting passes: each computes a token of every sequence, from whose logits a draft is sampled.

A draft model's first pass computes two tokens of a sequence: the last one, which no pass has seen, and the one before
it. That may be an accepted draft that was the last of its step: sampled, but not computed. So passes alone keep the
draft's keys and values of a decode complete, whatever was accepted.

A head's first pass computes nothing: the result from which the first draft is sampled is there since the last step
(`head_rows`). In later ones it computes row p, which reads the token at position p + 1.

Passes use the buffers of the step for which they make drafts, which `step_inputs` fills after them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from executor_svc.gpu.kernels.rows import check
from executor_svc.gpu.kernels.slots.slots import (
    DRAFTS_END,
    MAX_DRAFTS,
    NUM_COMPUTED_TOKENS,
    NUM_DRAFTS,
    NUM_GUESSED,
    NUM_PROMPT_TOKENS,
    NUM_TOKENS,
    POSITIONS,
    QUERY_START_LOC,
    ROPE_LENS,
    ROWS,
    SEQ_LENS,
    SOURCES,
    TOKEN_IDS,
    SlotState,
    StepBuffers,
    StepSizes,
)
from executor_svc.gpu.kernels.slots.step_inputs import is_live, write_places
from executor_svc.gpu.kernels.variant import Variant

FIRST_TOKENS = 2
"""The tokens of a sequence in the first pass; 1 in later ones."""
_FIRST_TOKENS = tl.constexpr(FIRST_TOKENS)
_TABLE = 512
_LISTED = 128
_WARPS = 8
_STATE = {"token_ids": "*i32", "block_tables": "*i32", "numbers": "*i32"}
_BUFFERS = {"by_token": "*i64", "by_seq": "*i32", "by_row": "*i32", "logits_rows": "*i64"}
_STRIDES = ("token_stride", "table_stride", "number_stride", "by_token_stride", "by_seq_stride", "by_row_stride")
_FIRST_POINTERS = {"staging": "*i32", **_STATE, **_BUFFERS, "tables": "*i32"}
_FIRST_INTEGERS = (
    *_STRIDES, "tables_stride", "table_words", "num_tables", "starts_place", "limit_place", "block_size",
)  # fmt: skip
_NEXT_POINTERS = {**_STATE, **_BUFFERS, "tokens": "*i64", "errors": "*i32"}
_NEXT_INTEGERS = (*_STRIDES, "table_words", "num_tables", "num_seqs", "index", "behind", "block_size")


@triton.jit
def _write_tokens(
    at, slot, position, token, there, within, block_tables, table_stride, table_words, num_tables, numbers,
    number_stride, by_token, by_token_stride, block_size,
):  # fmt: skip
    """Write tokens of slots at these positions to places of the step; padding where nothing is there."""
    prompt = tl.load(numbers + NUM_PROMPT_TOKENS * number_stride + slot, there, other=0)
    position = tl.where(there, position, 0)
    write_places(
        at, slot, position, there, within, block_tables, table_stride, table_words, num_tables, by_token,
        by_token_stride, block_size,
    )  # fmt: skip
    tl.store(by_token + TOKEN_IDS * by_token_stride + at, tl.where(there, token, 0).to(tl.int64), within)
    tl.store(by_token + POSITIONS * by_token_stride + at, position.to(tl.int64), within)
    tl.store(by_token + ROPE_LENS * by_token_stride + at, tl.maximum(prompt, position + 1).to(tl.int64), within)


@triton.jit(do_not_specialize=_FIRST_INTEGERS)
def _first_pass(
    staging, token_ids, block_tables, numbers, by_token, by_seq, by_row, logits_rows, tables, token_stride,
    table_stride, number_stride, by_token_stride, by_seq_stride, by_row_stride, tables_stride, table_words, num_tables,
    starts_place, limit_place, block_size, HEAD: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """Strides of block tables are in units of 16 words, so that Triton infers aligned rows."""
    sequence = tl.program_id(0)
    slot = tl.load(staging + sequence).to(tl.int64)
    number = numbers + slot
    live = is_live(numbers, number_stride, slot)
    known = tl.load(number + NUM_TOKENS * number_stride, live, other=0)
    computed = tl.load(number + NUM_COMPUTED_TOKENS * number_stride, live, other=0)
    # Not in the midst of a prompt.
    there = live & (known - computed == 1) & (known >= _FIRST_TOKENS)

    starts = staging + starts_place + sequence
    places = tl.load(starts + 1) - tl.load(starts) - 1
    room = tl.load(number + DRAFTS_END * number_stride, there, other=0) - known
    most = tl.load(number + MAX_DRAFTS * number_stride, there, other=0)
    most = tl.minimum(most, tl.load(staging + limit_place, limit_place >= 0, other=0))
    count = tl.where(there, tl.maximum(tl.minimum(most, tl.minimum(places, room)), 0), 0)
    tl.store(number + NUM_DRAFTS * number_stride, count, slot >= 0)
    tl.store(number + NUM_GUESSED * number_stride, known, slot >= 0)

    tl.store(by_row + ROWS * by_row_stride + sequence, tl.where(count > 0, slot, -1).to(tl.int32))
    tl.store(by_row + SOURCES * by_row_stride + sequence, sequence)
    if HEAD:
        tl.store(logits_rows + sequence, tl.where(count > 0, slot, -1))
    else:
        ahead = tl.arange(0, _FIRST_TOKENS)
        position = known - _FIRST_TOKENS + ahead
        every = (ahead >= 0) & there
        token = tl.load(token_ids + slot * token_stride + position, every, other=0)
        _write_tokens(
            sequence * _FIRST_TOKENS + ahead, slot + tl.zeros_like(ahead), position, token, every, ahead >= 0,
            block_tables, table_stride, table_words, num_tables, numbers, number_stride, by_token, by_token_stride,
            block_size,
        )  # fmt: skip
        start = by_seq + QUERY_START_LOC * by_seq_stride + sequence
        tl.store(start, 0, sequence == 0)
        tl.store(start + 1, (sequence + 1) * _FIRST_TOKENS)
        tl.store(by_seq + SEQ_LENS * by_seq_stride + sequence, tl.where(there, known, 0))
        tl.store(logits_rows + sequence, ((sequence + 1) * _FIRST_TOKENS - 1).to(tl.int64))

    # For all passes, whose drafts have places in the table.
    num_blocks = tl.where(there, tl.cdiv(tl.cdiv(known + count, block_size), 4) * 4, 0)
    source = block_tables + slot * (table_stride * 16)
    target = tables + sequence.to(tl.int64) * (tables_stride * 16)
    for table in range(num_tables):
        for first in range(0, num_blocks, TABLE):
            at = first + tl.arange(0, TABLE)
            place = table * (table_words * 16) + at
            tl.store(target + place, tl.load(source + place, at < num_blocks), at < num_blocks)


@triton.jit(do_not_specialize=_NEXT_INTEGERS)
def _next_pass(
    token_ids, block_tables, numbers, by_token, by_seq, by_row, logits_rows, tokens, errors, token_stride,
    table_stride, number_stride, by_token_stride, by_seq_stride, by_row_stride, table_words, num_tables, num_seqs,
    index, behind, block_size, LISTED: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * LISTED + tl.arange(0, LISTED)
    within = at < num_seqs
    slot = tl.load(by_row + ROWS * by_row_stride + at, within, other=-1).to(tl.int64)
    live = slot >= 0
    sampled = live & (tl.load(errors + at, live, other=0) == 0)
    token = tl.load(tokens + at, sampled, other=-1)
    made = sampled & (token >= 0)
    known = tl.load(numbers + NUM_TOKENS * number_stride + slot, live, other=0)
    place = known + index - 1
    tl.store(token_ids + slot * token_stride + place, token.to(tl.int32), made)
    tl.store(numbers + NUM_DRAFTS * number_stride + slot, tl.zeros_like(known) + index - 1, live & ~made)
    there = made & (tl.load(numbers + NUM_DRAFTS * number_stride + slot, made, other=0) > index)
    tl.store(numbers + NUM_GUESSED * number_stride + slot, place + 1, there)
    position = place - behind
    _write_tokens(
        at, slot, position, token, there, within, block_tables, table_stride, table_words, num_tables, numbers,
        number_stride, by_token, by_token_stride, block_size,
    )  # fmt: skip
    tl.store(by_seq + QUERY_START_LOC * by_seq_stride + at, at, at <= num_seqs)
    tl.store(by_seq + SEQ_LENS * by_seq_stride + at, tl.where(there, position + 1, 0), within)
    tl.store(by_row + ROWS * by_row_stride + at, tl.where(there, slot, -1).to(tl.int32), within)
    tl.store(by_row + SOURCES * by_row_stride + at, at, within)
    tl.store(logits_rows + at, at.to(tl.int64), within)


def first_pass(
    staging: Tensor,
    state: SlotState,
    buffers: StepBuffers,
    sizes: StepSizes,
    num_seqs: int,
    block_size: int,
    *,
    head: bool = False,
) -> None:
    """Write the first pass over a step's first num_seqs sequences to the buffers: FIRST_TOKENS tokens of each.

    Only sequences whose tokens are all computed but the last take part, and slots that have not stopped; others are
    padding. Sets `num_drafts` of every slot, to what the step has places for behind the slot's last token, and not more
    than the step's most, its own most, and the end of its drafts allow; and `num_guessed` to its known tokens. Row i of
    logits is the last token of sequence i, and row i to sample from it is of the sequence's slot if it may have drafts.

    Args:
        staging: the words of a step, as `step_inputs.build_step` reads them; with drafts the most of a slot behind
            them.
        state: by slot.
        buffers: for steps of at least these sizes, and of FIRST_TOKENS tokens of num_seqs sequences.
        sizes: of the step; without drafts, keys and values are all that the pass is for.
        block_size: tokens of a KV block.
        head: whether a head drafts. Its first pass has no tokens: row i of logits is of the result of the sequence's
        slot, -1 where it may have no draft.

    Raises ValueError naming the argument.
    """
    check("staging", staging, (staging.numel(),), torch.int32)
    if staging.numel() < sizes.num_words:
        raise ValueError(f"staging has {staging.numel()} words, not the {sizes.num_words} of {sizes}")
    _check_buffers(buffers, num_seqs, 1 if head else FIRST_TOKENS)
    if not 0 <= num_seqs <= sizes.num_seqs:
        raise ValueError(f"num_seqs {num_seqs} is not 0 to {sizes.num_seqs}, the number of the step's sequences")
    if num_seqs:
        _first_pass[(num_seqs,)](
            staging, state.token_ids, state.tables, state.numbers, buffers.by_token, buffers.by_seq, buffers.by_row,
            buffers.logits_rows, buffers.tables, *_strides(state, buffers), buffers.tables.stride(0) // 16,
            *_tables(state), sizes.num_seqs, sizes.num_words - 1 if sizes.num_drafts else -1,
            block_size, HEAD=head, TABLE=_TABLE, num_warps=_WARPS, num_stages=1, enable_fp_fusion=False,
        )  # fmt: skip


def next_pass(
    tokens: Tensor,
    errors: Tensor,
    state: SlotState,
    buffers: StepBuffers,
    num_seqs: int,
    index: int,
    block_size: int,
    *,
    head: bool = False,
) -> None:
    """Write the drafts of pass index - 1 behind the tokens and drafts of their slots, and the next pass to the buffers.

    A slot takes part, with one token, while it may have more than `index` drafts. One whose row has failed has no
    further drafts. After the last pass all sequences are padding.

    Args:
        tokens: [num_seqs] int64, the drafts; not read for padding and rows with an error.
        errors: [num_seqs] int32: 0, or the SlotError; not read for padding.
        state: by slot.
        buffers: of the pass before; later passes read its block tables too.
        index: of the pass, at least 1.
        block_size: tokens of a KV block.
        head: whether a head drafts, whose rows are one position before their tokens.

    Raises ValueError naming the argument.
    """
    check("tokens", tokens, (num_seqs,), torch.int64)
    check("errors", errors, (num_seqs,), torch.int32)
    _check_buffers(buffers, num_seqs, 1)
    if index < 1:
        raise ValueError(f"index must be at least 1, is {index}")
    if num_seqs:
        _next_pass[(-(-(num_seqs + 1) // _LISTED),)](
            state.token_ids, state.tables, state.numbers, buffers.by_token, buffers.by_seq, buffers.by_row,
            buffers.logits_rows, tokens, errors, *_strides(state, buffers), *_tables(state), num_seqs, index,
            int(head), block_size, LISTED=_LISTED, num_warps=_WARPS, num_stages=1, enable_fp_fusion=False,
        )  # fmt: skip


def _check_buffers(buffers: StepBuffers, num_seqs: int, tokens_each: int) -> None:
    if not StepSizes(num_seqs * tokens_each, num_seqs, num_seqs, num_seqs).within(buffers.most):
        raise ValueError(f"num_seqs: {num_seqs} sequences of {tokens_each} tokens are not within {buffers.most}")


def _strides(state: SlotState, buffers: StepBuffers) -> tuple[int, ...]:
    """Return the values of _STRIDES."""
    return (
        state.token_ids.stride(0), state.tables.stride(0) // 16, state.numbers.stride(0),
        buffers.by_token.stride(0), buffers.by_seq.stride(0), buffers.by_row.stride(0),
    )  # fmt: skip


def _tables(state: SlotState) -> tuple[int, int]:
    """Return the values of table_words and num_tables."""
    return state.tables.stride(1) // 16, state.tables.shape[1]


def variants() -> list[Variant]:
    """Return the variants of `first_pass` and `next_pass`."""
    first = [_first_variant(head) for head in (False, True)]
    following = Variant(
        name="draft_passes next",
        kernel=_next_pass,
        signature={**_NEXT_POINTERS, **dict.fromkeys(_NEXT_INTEGERS, "i32"), "LISTED": "constexpr"},
        constants={"LISTED": _LISTED},
        divisible=tuple(_NEXT_POINTERS),
        num_warps=_WARPS,
        num_stages=1,
        fp_fusion=False,
        no_spills=True,
    )
    return [*first, following]


def _first_variant(head: bool) -> Variant:
    constants = {"HEAD": head, "TABLE": _TABLE}
    integers = dict.fromkeys(_FIRST_INTEGERS, "i32")
    return Variant(
        name=f"draft_passes first{' of a head' if head else ''}",
        kernel=_first_pass,
        signature={**_FIRST_POINTERS, **integers, **dict.fromkeys(constants, "constexpr")},
        constants=constants,
        divisible=tuple(_FIRST_POINTERS),
        num_warps=_WARPS,
        num_stages=1,
        fp_fusion=False,
        no_spills=True,
        quick=head,
    )
