"""The layout of a step with drafts: the host keeps places for the most drafts, the device leaves out those not made."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from executor_svc.gpu.kernels.rows import check
from executor_svc.gpu.kernels.slots.slots import (
    NUM_COMPUTED_TOKENS,
    NUM_DRAFTS,
    NUM_TOKENS,
    SlotState,
    StepBuffers,
    StepSizes,
)
from executor_svc.gpu.kernels.slots.step_inputs import owner_of
from executor_svc.gpu.kernels.variant import Variant

_LISTED = 64
_SEQS = 64
_WARPS = 4
_INTEGERS = ("number_stride", "num_seqs", "num_logits", "num_others", "search_steps")
_POINTERS = {"staging": "*i32", "numbers": "*i32", "words": "*i32"}


@triton.jit
def _num_tokens(staging, numbers, number_stride, sequence, num_seqs):
    """Return the tokens of these sequences in the step: those that are not computed, as far as planned, and drafts."""
    there = sequence < num_seqs
    starts = staging + num_seqs + sequence
    planned = tl.load(starts + 1, there, other=0) - tl.load(starts, there, other=0)
    slot = tl.load(staging + sequence, there, other=-1)
    taken = slot >= 0
    known = tl.load(numbers + NUM_TOKENS * number_stride + slot, taken, other=0)
    computed = tl.load(numbers + NUM_COMPUTED_TOKENS * number_stride + slot, taken, other=0)
    drafts = tl.load(numbers + NUM_DRAFTS * number_stride + slot, taken, other=0)
    # Slots that have stopped keep one token.
    found = tl.minimum(tl.maximum(known + drafts - computed, 1), planned)
    return tl.where(taken, found, planned)


@triton.jit
def _tokens_before(staging, numbers, number_stride, sequence, num_seqs, SEQS: tl.constexpr):
    """Return the tokens of all sequences before each of these."""
    before = tl.zeros_like(sequence)
    for first in range(0, num_seqs, SEQS):
        others = first + tl.arange(0, SEQS)
        counts = _num_tokens(staging, numbers, number_stride, others, num_seqs)
        before += tl.sum(tl.where(others[None, :] < sequence[:, None], counts[None, :], 0), axis=1)
    return before


@triton.jit(do_not_specialize=_INTEGERS)
def _lay_out(
    staging, numbers, words, number_stride, num_seqs, num_logits, num_others, search_steps, LISTED: tl.constexpr,
    SEQS: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * LISTED + tl.arange(0, LISTED)
    tl.store(words + at, tl.load(staging + at, at < num_seqs), at < num_seqs)
    starts = num_seqs + at
    before = _tokens_before(staging, numbers, number_stride, at, num_seqs, SEQS)
    tl.store(words + starts, before, at <= num_seqs)

    logits = 2 * num_seqs + 1 + at
    token = tl.load(staging + logits, at < num_logits, other=0)
    sequence = owner_of(staging + num_seqs, token, num_seqs, search_steps)
    there = (at < num_logits) & (sequence < num_seqs)
    ahead = token - tl.load(staging + num_seqs + sequence, there, other=0)
    last = _num_tokens(staging, numbers, number_stride, sequence, num_seqs) - 1
    before = _tokens_before(staging, numbers, number_stride, sequence, num_seqs, SEQS)
    tl.store(words + logits, tl.where(there, before + tl.minimum(ahead, last), 0), at < num_logits)

    others = 2 * num_seqs + 1 + num_logits + at
    tl.store(words + others, tl.load(staging + others, at < num_others), at < num_others)


def lay_out_drafts(staging: Tensor, state: SlotState, buffers: StepBuffers, sizes: StepSizes) -> None:
    """Write the words of a step to `buffers.words` without the places of drafts that were not made.

    So sequences follow each other without gaps, as attention needs them, and no token reads what was not written. Rows
    of logits stay where they are; those of drafts that were not made read the last token of their sequence.

    Args:
        staging: the words of the step, as `step_inputs.build_step` reads them, with k places for drafts at the end of
            the tokens of some sequences that compute all their known tokens.
        state: by slot; num_drafts of the slots of all sequences of the step must be set.
        buffers: for steps of at least these sizes.
        sizes: of the step.

    Raises ValueError naming the argument.
    """
    check("staging", staging, (staging.numel(),), torch.int32)
    if not sizes.within(buffers.most):
        raise ValueError(f"sizes: {sizes} are not within those of the buffers, {buffers.most}")
    if staging.numel() < sizes.num_words:
        raise ValueError(f"staging has {staging.numel()} words, not the {sizes.num_words} of {sizes}")
    num_others = 4 * sizes.num_rows
    programs = -(-max(sizes.num_seqs + 1, sizes.num_logits, num_others) // _LISTED)
    _lay_out[(programs,)](
        staging, state.numbers, buffers.words, state.numbers.stride(0), sizes.num_seqs, sizes.num_logits, num_others,
        sizes.num_seqs.bit_length(), LISTED=_LISTED, SEQS=_SEQS, num_warps=_WARPS, num_stages=1,
        enable_fp_fusion=False,
    )  # fmt: skip


def variants() -> list[Variant]:
    """Return the variant of `lay_out_drafts`."""
    constants = {"LISTED": _LISTED, "SEQS": _SEQS}
    return [
        Variant(
            name="draft_layout",
            kernel=_lay_out,
            signature={**_POINTERS, **dict.fromkeys(_INTEGERS, "i32"), **dict.fromkeys(constants, "constexpr")},
            constants=constants,
            divisible=tuple(_POINTERS),
            num_warps=_WARPS,
            num_stages=1,
            fp_fusion=False,
            no_spills=True,
            quick=True,
        )
    ]
