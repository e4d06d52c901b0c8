"""Applies a plan's changes to the state of the slots: runs of words, single words and given tokens, in one launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from executor_svc.gpu.kernels.rows import check
from executor_svc.gpu.kernels.slots.slots import SlotState
from executor_svc.gpu.kernels.variant import Variant

RUN_WORDS = 1024
"""Maximum words of a run, which one program writes; longer runs are split."""
_SINGLES = 256
_WARPS = 4
_INTEGERS = (
    "first", "num_runs", "num_words", "num_given", "word_programs", "tokens_place", "token_stride", "counts_place",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class UpdateCounts:
    """The contents of the staging buffer from word `first` on: columns, one after the other.

    Runs of at most RUN_WORDS words: place in the state, place in the staging buffer, length. Single words: place in the
    state, value. Given tokens: slot, token id.
    """

    first: int
    num_runs: int
    num_words: int
    num_given: int

    @property
    def end(self) -> int:
        """The end of the columns; the runs' words may begin here."""
        return self.first + 3 * self.num_runs + 2 * self.num_words + 2 * self.num_given


@triton.jit
def _write_run(run, staging, words, first, num_runs, RUN: tl.constexpr):
    columns = staging + first + run
    target, source, length = tl.load(columns), tl.load(columns + num_runs), tl.load(columns + 2 * num_runs)
    at = tl.arange(0, RUN)
    tl.store(words + target.to(tl.int64) + at, tl.load(staging + source + at, at < length), at < length)


@triton.jit
def _write_words(at, columns, words, num_words):
    place = tl.load(columns + at, at < num_words, other=0).to(tl.int64)
    tl.store(words + place, tl.load(columns + num_words + at, at < num_words), at < num_words)


@triton.jit
def _append_given(at, columns, words, num_given, tokens_place, token_stride, counts_place):
    slot = tl.load(columns + at, at < num_given, other=0).to(tl.int64)
    counts = words + counts_place.to(tl.int64) + slot
    known = tl.load(counts, at < num_given, other=0)
    there = (at < num_given) & (known < token_stride)
    token = tl.load(columns + num_given + at, there, other=0)
    tl.store(words + tokens_place.to(tl.int64) + slot * token_stride + known, token, there)
    tl.store(counts, known + 1, there)


@triton.jit(do_not_specialize=_INTEGERS)
def _apply_updates(
    staging, words, first, num_runs, num_words, num_given, word_programs, tokens_place, token_stride, counts_place,
    RUN: tl.constexpr, SINGLES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    singles = staging + first + 3 * num_runs
    single = (program - num_runs) * SINGLES + tl.arange(0, SINGLES)
    if program < num_runs:
        _write_run(program, staging, words, first, num_runs, RUN)
    elif program < num_runs + word_programs:
        _write_words(single, singles, words, num_words)
    else:
        given = singles + 2 * num_words
        _append_given(
            single - word_programs * SINGLES, given, words, num_given, tokens_place, token_stride, counts_place
        )


def apply_updates(staging: Tensor, counts: UpdateCounts, state: SlotState) -> None:
    """Apply the changes in the staging buffer to the state.

    All changes apply concurrently: no word may be written twice, and a slot with a given token may not have another one
    or be admitted. Places, slots and lengths are not checked.

    Args:
        staging: int32, contiguous.
        counts: its contents.
        state: by slot.

    Raises ValueError naming the argument.
    """
    check("staging", staging, (staging.numel(),), torch.int32)
    if min(counts.first, counts.num_runs, counts.num_words, counts.num_given) < 0 or counts.end > staging.numel():
        raise ValueError(f"counts: {counts} do not fit a staging buffer of {staging.numel()} words")
    word_programs = -(-counts.num_words // _SINGLES)
    programs = counts.num_runs + word_programs - (-counts.num_given // _SINGLES)
    if programs:
        _apply_updates[(programs,)](
            staging, state.words, counts.first, counts.num_runs, counts.num_words, counts.num_given, word_programs,
            state.token_ids.storage_offset(), state.token_ids.stride(0),
            state.num_tokens.storage_offset(), RUN=RUN_WORDS, SINGLES=_SINGLES, num_warps=_WARPS, num_stages=1,
            enable_fp_fusion=False,
        )  # fmt: skip


def variants() -> list[Variant]:
    """Return the variants of `apply_updates`."""
    constants = {"RUN": RUN_WORDS, "SINGLES": _SINGLES}
    pointers = {"staging": "*i32", "words": "*i32"}
    return [
        Variant(
            name="slot_updates",
            kernel=_apply_updates,
            signature={**pointers, **dict.fromkeys(_INTEGERS, "i32"), **dict.fromkeys(constants, "constexpr")},
            constants=constants,
            divisible=tuple(pointers),
            num_warps=_WARPS,
            num_stages=1,
            fp_fusion=False,
            no_spills=True,
            quick=True,
        )
    ]
