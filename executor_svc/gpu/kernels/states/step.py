"""What the kernels of recurrent states read of a step, on the device, and the headers of states before and after it.

Context lengths are the device's own: with accepted drafts the host does not know them when it enqueues a step. So a
first kernel reads where each state stands (`folded`) from the header in its pages, and a last one writes where it
stands after the step, also into the states that the step has saved. Between them, the layers' kernels find rows, pages
and saves of a sequence by the same few loads (`sequence_of`, `page_of`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from executor_svc.gpu.kernels.rows import check
from executor_svc.gpu.kernels.slots.slots import PROMPT_FAILED, STATE_FAILED
from executor_svc.gpu.kernels.slots.step_inputs import owner_of
from executor_svc.gpu.kernels.variant import Variant

LINE_BYTES = 64
"""Pages are whole lines, and units begin at one; places are counted in lines."""
_TOKENS = 128
_WARPS = 4
_STEP = {
    "starts": "*i32", "lens": "*i32", "slots": "*i32", "folded": "*i32", "tables": "*i32",
    "save_starts": "*i32", "save_positions": "*i32", "save_tables": "*i32",
}  # fmt: skip
STEP_POINTERS = {**_STEP, "owners": "*i32"}
"""Types of the tensors of `StateStep`, as arguments of kernels."""


@dataclass(slots=True)
class StepTensors:
    """A step's sequences, S of them, as kernels read them; all int32."""

    starts: Tensor
    """[S + 1]: query_start_loc."""
    lens: Tensor
    """[S]: context length and rows of the step; 0 for a sequence that is padding or has no rows."""
    slots: Tensor
    """[S]: the row of `tables` with the pages of the sequence's state; of padding without meaning."""
    folded: Tensor
    """[S]: where each state stands before the step."""
    owners: Tensor
    """[T]: the sequence of each token, -1 for padding."""
    tables: Tensor
    """[any, P]: pages of states."""
    save_starts: Tensor
    """[S + 1]: where each sequence's saves begin."""
    save_positions: Tensor
    """[V], ascending in each sequence; those that the state does not stand at in this step have no effect."""
    save_tables: Tensor
    """[V, P]: pages that get the state as it stands at the position."""

    def step_arguments(self) -> tuple[Tensor, ...]:
        """Return all but `owners`, in the order of the kernels' arguments."""
        return (
            self.starts, self.lens, self.slots, self.folded, self.tables, self.save_starts, self.save_positions,
            self.save_tables,
        )  # fmt: skip


@triton.jit
def sequence_of(sequence, starts, lens):
    """Return a sequence's first row of the step, number of rows, and context length; without a state to change, no
    rows and -1."""
    start = tl.load(starts + sequence)
    rows = tl.load(starts + sequence + 1) - start
    length = tl.load(lens + sequence)
    live = (length > 0) & (rows > 0)
    return start, tl.where(live, rows, 0), tl.where(live, length - rows, -1)


@triton.jit
def line_of(tables, row, pages, units, unit, page_lines):
    """Return the line of the pool at which a unit begins, in the state with these pages: row `row` of tables."""
    page = tl.load(tables + pages.to(tl.int64) * row + tl.load(units + 2 * unit))
    return page.to(tl.int64) * page_lines + tl.load(units + 2 * unit + 1)


@triton.jit
def first_save(sequence, folded, save_starts, save_positions):
    """Return the first of a sequence's saves that the state has not passed, and their end."""
    first = tl.load(save_starts + sequence)
    end = tl.load(save_starts + sequence + 1)
    passed = first * 0
    for at in range(first, end):
        passed += (tl.load(save_positions + at) < folded).to(tl.int32)
    return first + passed, end


@triton.jit(do_not_specialize=["num_tokens", "num_seqs", "pages", "page_words", "number_stride", "search_steps"])
def _begin_states(
    starts, lens, slots, folded, owners, tables, pool, numbers, num_tokens, num_seqs, token_programs, pages, page_words,
    number_stride, search_steps, TAIL: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    at = program * TOKENS + tl.arange(0, TOKENS)
    if program < token_programs:
        owner = owner_of(starts, at, num_seqs, search_steps)
        length = tl.load(lens + owner, (at < num_tokens) & (owner < num_seqs), other=0)
        tl.store(owners + at, tl.where(length > 0, owner, -1), at < num_tokens)
    else:
        at -= token_programs * TOKENS
        within = at < num_seqs
        rows = tl.load(starts + at + 1, within, other=0) - tl.load(starts + at, within, other=0)
        length = tl.load(lens + at, within, other=0)
        context = tl.where((length > 0) & (rows > 0), length - rows, 0)
        slot = tl.load(slots + at, context > 0, other=0).to(tl.int64)
        page = tl.load(tables + slot * pages, context > 0, other=0).to(tl.int64)
        stands = tl.load(pool + page * page_words, context > 0, other=0)
        # A state of another sequence or position: what is computed from it must not be served.
        wrong = (stands > context) | (context > stands + TAIL) | (stands < 0)
        failed = tl.full((TOKENS,), STATE_FAILED, tl.int32)
        tl.store(numbers + PROMPT_FAILED * number_stride + slot, failed, wrong & (context > 0))
        tl.store(folded + at, tl.where(wrong, context, stands), within)


@triton.jit(do_not_specialize=["pages", "page_words"])
def _end_states(
    starts, lens, slots, folded, tables, save_starts, save_positions, save_tables, pool, pages, page_words,
    TAIL: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    _start, rows, context = sequence_of(sequence, starts, lens)
    if rows > 0:
        after = context + tl.maximum(rows - TAIL, 0)
        slot = tl.load(slots + sequence).to(tl.int64)
        tl.store(pool + tl.load(tables + slot * pages).to(tl.int64) * page_words, after)
        stood = tl.load(folded + sequence)
        for save in range(tl.load(save_starts + sequence), tl.load(save_starts + sequence + 1)):
            position = tl.load(save_positions + save)
            page = tl.load(save_tables + pages.to(tl.int64) * save).to(tl.int64)
            tl.store(pool + page * page_words, position, (position >= stood) & (position <= after))


def begin_states(step: StepTensors, num_seqs: int, num_tokens: int, tail: int, pool: Tensor, numbers: Tensor) -> None:
    """Write `folded` and `owners` of a step; its other tensors are there.

    A state that does not stand within `tail` tokens before its context fails its slot, with WRONG_STATE.

    Args:
        step: of at least these sizes.
        tail: rows of a tail.
        pool: [pages, bytes of a page] uint8.
        numbers: the numbers of slots, as in `SlotState`.
    """
    words = _words(pool)
    check("tables", step.tables, tuple(step.tables.shape), torch.int32)
    token_programs = -(-num_tokens // _TOKENS)
    programs = token_programs - (-num_seqs // _TOKENS)
    if programs:
        _begin_states[programs,](
            step.starts, step.lens, step.slots, step.folded, step.owners, step.tables, words, numbers, num_tokens,
            num_seqs, token_programs, step.tables.shape[1], words.stride(0), numbers.stride(0), num_seqs.bit_length(),
            TAIL=tail, TOKENS=_TOKENS, num_warps=_WARPS, num_stages=1, enable_fp_fusion=False,
        )  # fmt: skip


def end_states(step: StepTensors, num_seqs: int, tail: int, pool: Tensor) -> None:
    """Write the headers of a step's states, and of those that it has saved; arguments as of `begin_states`."""
    words = _words(pool)
    if num_seqs:
        _end_states[num_seqs,](
            *step.step_arguments(), words, step.tables.shape[1], words.stride(0),
            TAIL=tail, num_warps=1, num_stages=1, enable_fp_fusion=False,
        )  # fmt: skip


def _words(pool: Tensor) -> Tensor:
    """View a pool as [pages, words of 4 bytes]."""
    if pool.dim() != 2 or pool.dtype != torch.uint8 or pool.shape[1] % LINE_BYTES or not pool.is_contiguous():
        raise ValueError(f"pool: must be contiguous [pages, a multiple of {LINE_BYTES} bytes] uint8")
    return pool.view(torch.int32)


def variants() -> list[Variant]:
    """Return the variants of both, for a tail of one row and of four."""
    return [each for tail in (1, 4) for each in (_begin_variant(tail), _end_variant(tail))]


def _begin_variant(tail: int) -> Variant:
    names = ("starts", "lens", "slots", "folded", "owners", "tables", "pool", "numbers")
    integers = (
        "num_tokens", "num_seqs", "token_programs", "pages", "page_words", "number_stride", "search_steps",
    )  # fmt: skip
    return _variant(f"begin_states tail{tail}", _begin_states, names, integers, {"TAIL": tail, "TOKENS": _TOKENS}, 4)


def _end_variant(tail: int) -> Variant:
    return _variant(f"end_states tail{tail}", _end_states, (*_STEP, "pool"), ("pages", "page_words"), {"TAIL": tail}, 1)


def _variant(
    name: str,
    kernel: object,
    pointers: tuple[str, ...],
    integers: tuple[str, ...],
    constants: dict[str, int],
    warps: int,
) -> Variant:
    kinds = dict.fromkeys(pointers, "*i32") | dict.fromkeys(integers, "i32") | dict.fromkeys(constants, "constexpr")
    return Variant(
        name=name,
        kernel=kernel,
        signature=kinds,
        constants=constants,
        divisible=pointers,
        num_warps=warps,
        num_stages=1,
        fp_fusion=False,
        no_spills=True,
        quick=(kernel, constants["TAIL"]) == (_begin_states, 1),
    )
