"""Drafts from a slot's own tokens: what followed the last ones where they were before (prompt lookup).

The drafts of `speculation.ngram.NgramSource` with all tokens indexed, without a table: a program reads the slot's
tokens from the end, so that the most recent of the longest matches comes first.
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
    NUM_TOKENS,
    STOPPED,
    SlotState,
    StepSizes,
)
from executor_svc.gpu.kernels.variant import Variant

LARGEST_MATCH = 7
"""The longest match that keys of `_best_match` hold."""
_MAX_TOKENS = 1 << 28
_KEY = tl.constexpr(_MAX_TOKENS)
_PLACE = tl.constexpr(_MAX_TOKENS - 1)
_TILE = 2048
_MOST = 64
"""The most drafts: the limit of --num-speculative-tokens."""
_WARPS = 8
_INTEGERS = ("token_stride", "number_stride", "num_seqs", "limit_place")
_POINTERS = {"staging": "*i32", "token_ids": "*i32", "numbers": "*i32"}


@triton.jit
def _best_match(text, last, SHORTEST: tl.constexpr, LONGEST: tl.constexpr, TILE: tl.constexpr):
    """Return (length << 28) + place of the last token of the longest match of a text's end, the most recent; 0: none.

    last: the place of the text's last token.
    """
    best = last * 0
    # A match of the whole text, if it is short, is the longest possible.
    full = tl.minimum(last + 1, LONGEST) * _KEY
    first = (last - 1) // TILE * TILE
    first = tl.where(last > 0, first, -1)
    while (first >= 0) & (best < full):
        at = first + tl.arange(0, TILE)
        same = at < last
        length = tl.zeros((TILE,), tl.int32)
        for back in tl.static_range(LONGEST):
            same = same & (at >= back)
            token = tl.load(text + at - back, same, other=-1)
            same = same & (token == tl.load(text + last - back, last >= back, other=-2))
            length += same.to(tl.int32)
        key = tl.where(length >= SHORTEST, length * _KEY + at, 0)
        best = tl.maximum(best, tl.max(key, axis=0))
        first -= TILE
    return best


@triton.jit(do_not_specialize=_INTEGERS)
def _draft_ngrams(
    staging, token_ids, numbers, token_stride, number_stride, num_seqs, limit_place, SHORTEST: tl.constexpr,
    LONGEST: tl.constexpr, TILE: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    slot = tl.load(staging + sequence).to(tl.int64)
    if slot >= 0:
        number = numbers + slot
        known = tl.load(number + NUM_TOKENS * number_stride)
        missing = known - tl.load(number + NUM_COMPUTED_TOKENS * number_stride)
        starts = staging + num_seqs + sequence
        places = tl.load(starts + 1) - tl.load(starts) - missing
        room = tl.load(number + DRAFTS_END * number_stride) - known
        most = tl.minimum(tl.load(staging + limit_place), tl.load(number + MAX_DRAFTS * number_stride))
        most = tl.minimum(most, tl.minimum(places, room))
        most = tl.where(tl.load(number + STOPPED * number_stride) == 0, most, 0)
        count = known * 0
        if most > 0:
            text = token_ids + slot * token_stride
            best = _best_match(text, known - 1, SHORTEST, LONGEST, TILE)
            if best > 0:
                count = most
                begin = (best & _PLACE) + 1
                ahead = tl.arange(0, MOST)
                # Behind the end of the text come the first drafts again.
                draft = tl.load(text + begin + ahead % (known - begin), ahead < count)
                tl.store(text + known + ahead, draft, ahead < count)
        tl.store(number + NUM_DRAFTS * number_stride, count)


def draft_ngrams(staging: Tensor, state: SlotState, sizes: StepSizes, shortest: int = 2, longest: int = 4) -> None:
    """Write drafts behind the known tokens of a step's slots, and their number to `num_drafts`, 0 without a match.

    A slot has as many as the step has places for it behind its tokens that are not computed, and not more than the
    step's most, its own most, and the end of its drafts allow. Slots that have stopped have none.

    Args:
        staging: the words of a step with drafts, as `step_inputs.build_step` reads them; the most drafts of a slot
            behind them.
        state: by slot.
        sizes: of the step.
        shortest, longest: length of a match in tokens.

    Raises ValueError naming the argument.
    """
    check("staging", staging, (staging.numel(),), torch.int32)
    if staging.numel() < sizes.num_words:
        raise ValueError(f"staging has {staging.numel()} words, not the {sizes.num_words} of {sizes}")
    if not 1 <= shortest <= longest <= LARGEST_MATCH:
        raise ValueError(f"shortest {shortest} and longest {longest} are not 1 to {LARGEST_MATCH}, in this order")
    if not 0 <= sizes.num_drafts <= _MOST:
        raise ValueError(f"sizes: {sizes.num_drafts} drafts are not 0 to {_MOST}")
    if state.token_ids.shape[1] > _MAX_TOKENS:
        raise ValueError(f"state has {state.token_ids.shape[1]} tokens of a slot, over {_MAX_TOKENS}")
    if sizes.num_seqs:
        _draft_ngrams[(sizes.num_seqs,)](
            staging, state.token_ids, state.numbers, state.token_ids.stride(0), state.numbers.stride(0),
            sizes.num_seqs, sizes.num_words - 1, SHORTEST=shortest, LONGEST=longest, TILE=_TILE, MOST=_MOST,
            num_warps=_WARPS, num_stages=1, enable_fp_fusion=False,
        )  # fmt: skip


def variants() -> list[Variant]:
    """Return the variant of `draft_ngrams`."""
    constants = {"SHORTEST": 2, "LONGEST": 4, "TILE": _TILE, "MOST": _MOST}
    return [
        Variant(
            name="ngram_drafts",
            kernel=_draft_ngrams,
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
