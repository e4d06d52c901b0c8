"""Commits a step: adds sampled tokens to their slots, as `Slots.commit` does, and writes the results for the host."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from executor_svc.gpu.kernels.rows import check
from executor_svc.gpu.kernels.slots.slots import (
    MIN_TOKENS,
    NUM_COMPUTED_TOKENS,
    NUM_PROMPT_TOKENS,
    NUM_TOKENS,
    PROMPT_FAILED,
    ROW_SLOTS,
    ROW_WAITS,
    ROWS,
    SEQ_LENS,
    SEQ_SLOTS,
    STOPPED,
    SlotState,
    StepBuffers,
    StepSizes,
)
from executor_svc.gpu.kernels.variant import Variant
from executor_svc.plan.plan import SlotError

IDLE = -1
"""Error of a row whose slot, or whose source, had stopped before the step."""

_IDLE = tl.constexpr(IDLE)
_PROMPT_ERROR = tl.constexpr(int(SlotError.NON_FINITE_LOGITS))
_LISTED = 128
_WARPS = 4
_TOKEN_TYPES = {torch.int64: "i64", torch.int32: "i32"}
_POINTERS = {
    "token_ids": "*i32", "numbers": "*i32", "stop_bits": "*i32", "by_seq": "*i32", "by_row": "*i32", "tokens": "*i64",
    "errors": "*i32", "results": "*i32", "taken": "*i64",
}  # fmt: skip
_INTEGERS = (
    "token_stride", "number_stride", "stop_stride", "by_seq_stride", "by_row_stride", "num_seqs", "num_rows",
)  # fmt: skip


@triton.jit
def _is_stop_id(stop_bits, stop_stride, slot, token, mask):
    word = tl.load(stop_bits + slot * stop_stride + token // 32, mask, other=0)
    return mask & (((word >> (token % 32).to(tl.int32)) & 1) != 0)


@triton.jit(do_not_specialize=_INTEGERS, do_not_specialize_on_alignment=["tokens", "errors"])
def _commit(
    token_ids, numbers, stop_bits, by_seq, by_row, tokens, errors, results, taken, token_stride, number_stride,
    stop_stride, by_seq_stride, by_row_stride, num_seqs, num_rows, LISTED: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * LISTED + tl.arange(0, LISTED)
    # A context length above 0 means that the sequence was computed; the slot's stopped flag may change below.
    length = tl.load(by_seq + SEQ_LENS * by_seq_stride + at, at < num_seqs, other=0)
    computed = tl.load(by_seq + SEQ_SLOTS * by_seq_stride + at, length > 0, other=0)
    tl.store(numbers + NUM_COMPUTED_TOKENS * number_stride + computed, length, length > 0)

    within = at < num_rows
    row_slot = tl.load(by_row + ROW_SLOTS * by_row_stride + at, within, other=-1)
    slot = tl.load(by_row + ROWS * by_row_stride + at, within, other=-1).to(tl.int64)
    live = slot >= 0
    known = tl.load(numbers + NUM_TOKENS * number_stride + slot, live, other=0)
    error = tl.load(errors + at, live, other=0)
    prompt_failed = tl.load(numbers + PROMPT_FAILED * number_stride + slot, live, other=0) != 0
    error = tl.where((error == 0) & prompt_failed, _PROMPT_ERROR, error)
    waits = tl.load(by_row + ROW_WAITS * by_row_stride + at, live, other=0) != 0
    takes = live & (error == 0) & ~waits & (known < token_stride)
    token = tl.load(tokens + at, takes, other=-1).to(tl.int64)
    tl.store(token_ids + slot * token_stride + known, token.to(tl.int32), takes)
    tl.store(numbers + NUM_TOKENS * number_stride + slot, known + 1, takes)
    # Also for a fork, which shares all computed tokens of its source.
    tl.store(numbers + NUM_COMPUTED_TOKENS * number_stride + slot, known, live)

    num_output = known + 1 - tl.load(numbers + NUM_PROMPT_TOKENS * number_stride + slot, takes, other=0)
    enough = num_output >= tl.load(numbers + MIN_TOKENS * number_stride + slot, takes, other=0)
    ends = enough & _is_stop_id(stop_bits, stop_stride, slot, token, takes)
    # A fork of a stopped slot stops too.
    stops = (live & (error != 0)) | ends | (~live & (row_slot >= 0))
    tl.store(numbers + STOPPED * number_stride + row_slot, tl.full((LISTED,), 1, tl.int32), stops)
    tl.store(results + at, token.to(tl.int32), within)
    tl.store(results + num_rows + at, tl.where(live, error, _IDLE), within)
    tl.store(results + 2 * num_rows + at, known, within)
    tl.store(taken + at, token, within)


def commit_step(tokens: Tensor, errors: Tensor, state: SlotState, buffers: StepBuffers, sizes: StepSizes) -> None:
    """Write the sampled tokens of the step in the buffers to the state, to `results` and to `taken`.

    Args:
        tokens: [R] int64 or int32, below the size of the vocabulary; not read for rows that are padding, wait for a
        given token or have an error.
        errors: [R] int32: 0, or the SlotError; not read for padding.
        state: by slot.
        buffers: of the step.
        sizes: of the step.

    Raises ValueError naming the argument.
    """
    if not sizes.within(buffers.most):
        raise ValueError(f"sizes: {sizes} are not within those of the buffers, {buffers.most}")
    check("tokens", tokens, (sizes.num_rows,), *_TOKEN_TYPES)
    check("errors", errors, (sizes.num_rows,), torch.int32)
    programs = -(-max(sizes.num_seqs, sizes.num_rows) // _LISTED)
    if programs:
        _commit[(programs,)](
            state.token_ids, state.numbers, state.stop_bits, buffers.by_seq, buffers.by_row, tokens, errors,
            buffers.results, buffers.taken, state.token_ids.stride(0), state.numbers.stride(0),
            state.stop_bits.stride(0), buffers.by_seq.stride(0), buffers.by_row.stride(0), sizes.num_seqs,
            sizes.num_rows, LISTED=_LISTED, num_warps=_WARPS, num_stages=1, enable_fp_fusion=False,
        )  # fmt: skip


def variants() -> list[Variant]:
    """Return the variants of `commit_step`."""
    return [_variant(kind) for kind in _TOKEN_TYPES.values()]


def _variant(kind: str) -> Variant:
    integers = dict.fromkeys(_INTEGERS, "i32")
    return Variant(
        name=f"commit {kind}",
        kernel=_commit,
        signature={**_POINTERS, "tokens": f"*{kind}", **integers, "LISTED": "constexpr"},
        constants={"LISTED": _LISTED},
        divisible=tuple(name for name in _POINTERS if name not in ("tokens", "errors")),
        num_warps=_WARPS,
        num_stages=1,
        fp_fusion=False,
        no_spills=True,
        quick=kind == "i64",
    )
