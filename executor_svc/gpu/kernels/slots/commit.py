"""Commits a step: adds sampled tokens to their slots, as `Slots.commit` does, and writes the results for the host.

A step with drafts samples and commits in rounds of one token a slot: after each, a row goes on to the logits behind its
next draft if the token is that draft, and is padding if not. So a token is sampled from the state that it would have
been sampled from without drafts, by the same kernels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cadenza_common.plan.result import SlotError
from executor_svc.batch.step_result import LATE, NOT_ACCEPTED, WRONG_STATE
from executor_svc.gpu.kernels.rows import check
from executor_svc.gpu.kernels.slots.slots import (
    MAX_LEN,
    MIN_TOKENS,
    NUM_COMPUTED_TOKENS,
    NUM_DRAFTS,
    NUM_PROMPT_TOKENS,
    NUM_TOKENS,
    PROMPT_FAILED,
    ROW_SLOTS,
    ROW_WAITS,
    ROWS,
    SAMPLE_POSITIONS,
    SEQ_LENS,
    SEQ_SLOTS,
    SOURCES,
    STOPPED,
    SlotState,
    StepBuffers,
    StepSizes,
)
from executor_svc.gpu.kernels.variant import Variant

IDLE = NOT_ACCEPTED
"""In place of an error: the row gives no token, as its slot or its source had stopped before the step; or, in a later
round, as the slot takes no further token."""

_IDLE = tl.constexpr(IDLE)
_LATE = tl.constexpr(LATE)
_WRONG_STATE = tl.constexpr(WRONG_STATE)
_PROMPT_ERROR = tl.constexpr(int(SlotError.NON_FINITE_LOGITS))
_LISTED = 128
_WARPS = 4
_TOKEN_TYPES = {torch.int64: "i64", torch.int32: "i32"}
_POINTERS = {
    "token_ids": "*i32", "numbers": "*i32", "stop_bits": "*i32", "by_token": "*i64", "by_seq": "*i32",
    "by_row": "*i32", "logits_rows": "*i64", "tokens": "*i64", "errors": "*i32", "results": "*i32", "taken": "*i64",
}  # fmt: skip
_INTEGERS = (
    "token_stride", "number_stride", "stop_stride", "by_seq_stride", "by_row_stride", "num_seqs", "num_rows", "round",
    "num_rounds",
)  # fmt: skip


@triton.jit
def _is_stop_id(stop_bits, stop_stride, slot, token, mask):
    word = tl.load(stop_bits + slot * stop_stride + token // 32, mask, other=0)
    return mask & (((word >> (token % 32).to(tl.int32)) & 1) != 0)


@triton.jit
def _to_next_draft(
    at, slot, source, token, known, goes_on, by_token, by_row, logits_rows, by_row_stride, within
):  # fmt: skip
    """Let rows read the logits behind their next draft if it is their token, and be padding if not."""
    # The token whose logits the next row reads is the draft.
    place = tl.load(logits_rows + source + 1, goes_on, other=0)
    goes_on = goes_on & (tl.load(by_token + place, goes_on, other=-1) == token)
    tl.store(by_row + ROWS * by_row_stride + at, tl.where(goes_on, slot, -1).to(tl.int32), within)
    tl.store(by_row + SOURCES * by_row_stride + at, source + goes_on.to(tl.int32), within)
    tl.store(by_row + SAMPLE_POSITIONS * by_row_stride + at, tl.where(goes_on, known + 1, 0), within)


@triton.jit(do_not_specialize=_INTEGERS, do_not_specialize_on_alignment=["tokens", "errors"])
def _commit(
    token_ids, numbers, stop_bits, by_token, by_seq, by_row, logits_rows, tokens, errors, results, taken, token_stride,
    number_stride, stop_stride, by_seq_stride, by_row_stride, num_seqs, num_rows, round, num_rounds,
    DRAFTS: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * LISTED + tl.arange(0, LISTED)
    first = round == 0
    # A context length above 0 means that the sequence was computed; the slot's stopped flag may change below.
    length = tl.load(by_seq + SEQ_LENS * by_seq_stride + at, (at < num_seqs) & first, other=0)
    computed = tl.load(by_seq + SEQ_SLOTS * by_seq_stride + at, length > 0, other=0)
    if DRAFTS:
        # What drafts are worth, rows find out: here as below, the slot has all but its last token in the cache.
        context = length - tl.load(numbers + NUM_DRAFTS * number_stride + computed, length > 0, other=0)
        tl.store(numbers + NUM_COMPUTED_TOKENS * number_stride + computed, context, length > 0)
    else:
        tl.store(numbers + NUM_COMPUTED_TOKENS * number_stride + computed, length, length > 0)

    within = at < num_rows
    row_slot = tl.load(by_row + ROW_SLOTS * by_row_stride + at, within, other=-1)
    slot = tl.load(by_row + ROWS * by_row_stride + at, within, other=-1).to(tl.int64)
    live = slot >= 0
    known = tl.load(numbers + NUM_TOKENS * number_stride + slot, live, other=0)
    error = tl.load(errors + at, live, other=0)
    failed = tl.load(numbers + PROMPT_FAILED * number_stride + slot, live, other=0)
    error = tl.where((error == 0) & (failed != 0), _PROMPT_ERROR, error)
    error = tl.where(failed < 0, _WRONG_STATE, error)
    waits = tl.load(by_row + ROW_WAITS * by_row_stride + at, live, other=0) != 0
    takes = live & (error == 0) & ~waits & (known < token_stride)
    token = tl.load(tokens + at, takes, other=-1).to(tl.int64)
    tl.store(token_ids + slot * token_stride + known, token.to(tl.int32), takes)
    tl.store(numbers + NUM_TOKENS * number_stride + slot, known + 1, takes)
    # Also for a fork, which shares all computed tokens of its source. Not for a row that fails behind a draft: the slot
    # computes its last token again, and fails then.
    tl.store(numbers + NUM_COMPUTED_TOKENS * number_stride + slot, known, takes | (live & first))

    num_output = known + 1 - tl.load(numbers + NUM_PROMPT_TOKENS * number_stride + slot, takes, other=0)
    enough = num_output >= tl.load(numbers + MIN_TOKENS * number_stride + slot, takes, other=0)
    ends = enough & _is_stop_id(stop_bits, stop_stride, slot, token, takes)
    ends = ends | (takes & (known + 1 >= tl.load(numbers + MAX_LEN * number_stride + slot, takes, other=0)))
    # A fork of a stopped slot stops too.
    stops = ends | (first & ((live & (error != 0) & (error != _LATE)) | (~live & (row_slot >= 0))))
    tl.store(numbers + STOPPED * number_stride + row_slot, tl.full((LISTED,), 1, tl.int32), stops)
    into = results + 3 * round * num_rows + at
    tl.store(into, token.to(tl.int32), within)
    tl.store(into + num_rows, tl.where(takes | (live & first), error, _IDLE), within)
    tl.store(into + 2 * num_rows, known, within)
    tl.store(taken + at, token, within)
    if DRAFTS:
        drafts = tl.load(numbers + NUM_DRAFTS * number_stride + slot, live, other=0)
        tl.store(results + 3 * num_rounds * num_rows + at, drafts, within & first)
        source = tl.load(by_row + SOURCES * by_row_stride + at, within, other=0)
        goes_on = takes & ~ends & (round < drafts)
        _to_next_draft(at, slot, source, token, known, goes_on, by_token, by_row, logits_rows, by_row_stride, within)


def commit_step(
    tokens: Tensor, errors: Tensor, state: SlotState, buffers: StepBuffers, sizes: StepSizes, round: int = 0
) -> None:
    """Write the sampled tokens of the step in the buffers to the state, to `results` and to `taken`.

    Args:
        tokens: [R] int64 or int32, below the size of the vocabulary; not read for rows that are padding, wait for a
        given token or have an error.
        errors: [R] int32: 0, the SlotError, or LATE; not read for padding. A row with an error fails its slot in round
        0, and takes no token in later rounds; a late one takes no token, and its slot goes on.
        state: by slot.
        buffers: of the step; with drafts, rows and sources are set for the next round.
        sizes: of the step.
        round: the number of drafts that were accepted of each row that is not padding, at most sizes.num_drafts; in
        order.

    Raises ValueError naming the argument.
    """
    if not sizes.within(buffers.most):
        raise ValueError(f"sizes: {sizes} are not within those of the buffers, {buffers.most}")
    if not 0 <= round <= sizes.num_drafts:
        raise ValueError(f"round {round} is not 0 to {sizes.num_drafts}, the number of drafts")
    check("tokens", tokens, (sizes.num_rows,), *_TOKEN_TYPES)
    check("errors", errors, (sizes.num_rows,), torch.int32)
    programs = -(-max(0 if round else sizes.num_seqs, sizes.num_rows) // _LISTED)
    if programs:
        _commit[(programs,)](
            state.token_ids, state.numbers, state.stop_bits, buffers.by_token, buffers.by_seq, buffers.by_row,
            buffers.logits_rows, tokens, errors, buffers.results, buffers.taken, state.token_ids.stride(0),
            state.numbers.stride(0), state.stop_bits.stride(0), buffers.by_seq.stride(0), buffers.by_row.stride(0),
            sizes.num_seqs, sizes.num_rows, round, 1 + sizes.num_drafts, DRAFTS=sizes.num_drafts > 0, LISTED=_LISTED,
            num_warps=_WARPS, num_stages=1, enable_fp_fusion=False,
        )  # fmt: skip


def variants() -> list[Variant]:
    """Return the variants of `commit_step`."""
    return [_variant(kind, drafts) for kind in _TOKEN_TYPES.values() for drafts in (False, True)]


def _variant(kind: str, drafts: bool) -> Variant:
    integers = dict.fromkeys(_INTEGERS, "i32")
    constants = {"DRAFTS": drafts, "LISTED": _LISTED}
    return Variant(
        name=f"commit {kind}{' drafts' if drafts else ''}",
        kernel=_commit,
        signature={**_POINTERS, "tokens": f"*{kind}", **integers, **dict.fromkeys(constants, "constexpr")},
        constants=constants,
        divisible=tuple(name for name in _POINTERS if name not in ("tokens", "errors")),
        num_warps=_WARPS,
        num_stages=1,
        fp_fusion=False,
        no_spills=True,
        quick=kind == "i64" and drafts,
    )
