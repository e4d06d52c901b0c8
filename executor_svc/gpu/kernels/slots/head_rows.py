"""A head's rows behind a step: the tokens that they read, and the results from which the next drafts begin.

Row p of a sequence reads the target's states at position p and the token at p + 1. So behind a step's commit the head
computes a row for each of the step's tokens, at their places. The token behind a refused draft is not known, and is 0:
such a row is computed again with the step that has its token, before anything reads it.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from executor_svc.gpu.kernels.rows import (
    DTYPES,
    HIDDEN_SIZES,
    check,
    chunks,
    options,
    scaling_constants,
    variant,
)
from executor_svc.gpu.kernels.slots.slots import (
    NUM_TOKENS,
    POSITIONS,
    QUERY_START_LOC,
    SEQ_LENS,
    SEQ_SLOTS,
    TOKEN_IDS,
    SlotState,
    StepBuffers,
    StepSizes,
)
from executor_svc.gpu.kernels.slots.step_inputs import owner_of
from executor_svc.gpu.kernels.variant import Variant

_LISTED = 128
_WARPS = 4
_TOKEN_POINTERS = {"token_ids": "*i32", "numbers": "*i32", "by_token": "*i64", "by_seq": "*i32"}
_TOKEN_INTEGERS = (
    "token_stride", "number_stride", "by_token_stride", "by_seq_stride", "num_tokens", "num_seqs", "search_steps",
)  # fmt: skip
_RESULT_INTEGERS = ("number_stride", "by_seq_stride")


@triton.jit(do_not_specialize=_TOKEN_INTEGERS)
def _read_next_tokens(
    token_ids, numbers, by_token, by_seq, token_stride, number_stride, by_token_stride, by_seq_stride, num_tokens,
    num_seqs, search_steps, LISTED: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * LISTED + tl.arange(0, LISTED)
    within = at < num_tokens
    sequence = owner_of(by_seq + QUERY_START_LOC * by_seq_stride, at, num_seqs, search_steps)
    owned = within & (sequence < num_seqs)
    computed = tl.load(by_seq + SEQ_LENS * by_seq_stride + sequence, owned, other=0) > 0
    slot = tl.load(by_seq + SEQ_SLOTS * by_seq_stride + sequence, computed, other=0).to(tl.int64)
    behind = tl.load(by_token + POSITIONS * by_token_stride + at, computed, other=0) + 1
    known = computed & (behind < tl.load(numbers + NUM_TOKENS * number_stride + slot, computed, other=0))
    token = tl.load(token_ids + slot * token_stride + behind, known, other=0)
    tl.store(by_token + TOKEN_IDS * by_token_stride + at, token.to(tl.int64), within)


@triton.jit(do_not_specialize=_RESULT_INTEGERS)
def _keep_results(
    rows, results, numbers, by_seq, number_stride, by_seq_stride, WIDTH: tl.constexpr, CHUNK: tl.constexpr
):
    parts: tl.constexpr = (WIDTH + CHUNK - 1) // CHUNK
    program = tl.program_id(0)
    sequence = program // parts
    length = tl.load(by_seq + SEQ_LENS * by_seq_stride + sequence)
    slot = tl.load(by_seq + SEQ_SLOTS * by_seq_stride + sequence, length > 0, other=0).to(tl.int64)
    starts = by_seq + QUERY_START_LOC * by_seq_stride + sequence
    end = tl.load(starts + 1)
    position = tl.load(numbers + NUM_TOKENS * number_stride + slot, length > 0, other=0) - 2
    row = (end - length + position).to(tl.int64)
    kept = (position < length) & (row >= tl.load(starts)) & (length > 0)
    columns = program % parts * CHUNK + tl.arange(0, CHUNK)
    mask = (columns < WIDTH) & kept
    tl.store(results + slot * WIDTH + columns, tl.load(rows + row * WIDTH + columns, mask), mask)


def read_next_tokens(state: SlotState, buffers: StepBuffers, sizes: StepSizes) -> None:
    """Write the token behind each of a step's tokens in place of its own; 0 where none is known, and for padding.

    Args:
        state: by slot, after the step's commit.
        buffers: of the step; its positions, sequences and their slots must be there.
        sizes: of the step.

    Raises ValueError naming the argument.
    """
    _check_sizes(buffers, sizes)
    if sizes.num_tokens:
        _read_next_tokens[(-(-sizes.num_tokens // _LISTED),)](
            state.token_ids, state.numbers, buffers.by_token, buffers.by_seq, state.token_ids.stride(0),
            state.numbers.stride(0), buffers.by_token.stride(0), buffers.by_seq.stride(0), sizes.num_tokens,
            sizes.num_seqs, sizes.num_seqs.bit_length(), LISTED=_LISTED, num_warps=_WARPS, num_stages=1,
            enable_fp_fusion=False,
        )  # fmt: skip


def keep_results(rows: Tensor, results: Tensor, state: SlotState, buffers: StepBuffers, sizes: StepSizes) -> None:
    """Copy the head's row before the last token of each of a step's sequences to the results of its slot.

    Nothing is copied for a sequence whose row the step does not have: one in the midst of its prompt, or without a new
    token.

    Args:
        rows: [T, hidden], contiguous: what the head has made of the step's tokens.
        results: [num_slots, hidden], contiguous, of the same type.
        state: by slot, after the step's commit.
        buffers: of the step.
        sizes: of the step.

    Raises ValueError naming the argument.
    """
    _check_sizes(buffers, sizes)
    check("rows", rows, (sizes.num_tokens, results.shape[-1]), results.dtype)
    check("results", results, (state.num_slots, results.shape[-1]), *DTYPES)
    constants = scaling_constants(results.shape[1])
    programs = sizes.num_seqs * chunks(results.shape[1], constants["CHUNK"])
    if programs and sizes.num_tokens:
        _keep_results[(programs,)](
            rows, results, state.numbers, buffers.by_seq, state.numbers.stride(0), buffers.by_seq.stride(0),
            **constants, **options(constants["CHUNK"]),
        )  # fmt: skip


def _check_sizes(buffers: StepBuffers, sizes: StepSizes) -> None:
    if not sizes.within(buffers.most):
        raise ValueError(f"sizes: {sizes} are not within those of the buffers, {buffers.most}")


def variants() -> list[Variant]:
    """Return the variants of `read_next_tokens` and `keep_results`."""
    tokens = Variant(
        name="head_rows tokens",
        kernel=_read_next_tokens,
        signature={**_TOKEN_POINTERS, **dict.fromkeys(_TOKEN_INTEGERS, "i32"), "LISTED": "constexpr"},
        constants={"LISTED": _LISTED},
        divisible=tuple(_TOKEN_POINTERS),
        num_warps=_WARPS,
        num_stages=1,
        fp_fusion=False,
        no_spills=True,
        quick=True,
    )
    return [tokens, *(_of_results(hidden, dtype) for hidden in HIDDEN_SIZES for dtype in DTYPES.values())]


def _of_results(hidden: int, dtype: str) -> Variant:
    constants: dict[str, Any] = scaling_constants(hidden)
    pointers = {"rows": f"*{dtype}", "results": f"*{dtype}", "numbers": "*i32", "by_seq": "*i32"}
    return variant(
        f"head_rows results hidden{hidden} {dtype}",
        _keep_results,
        pointers | dict.fromkeys(_RESULT_INTEGERS, "i32"),
        constants,
        options(constants["CHUNK"]),
    )
