"""Draws from the tokens that top_k and top_p leave, without a sort.

The tokens left are those above a threshold on the ordered key of their logit, and the lowest ids at the threshold. The
search narrows an interval of keys with several pivots at a time, like the sorting-free samplers of FlashInfer (Ye et
al., 2025) and vLLM. Only the blocks of ids with the largest logits are read: the k best tokens are in the k blocks with
the largest maxima.
"""

from __future__ import annotations

import triton
import triton.language as tl

from executor_svc.gpu.kernels.sampling.arithmetic import (
    NEG_INF_KEY,
    NO_ID,
    NO_KEY,
    key_value,
    listed_tile,
    mass,
    ordered_key,
    race_value,
)

# Blocks that a search for a nucleus reads first, and the growth factor while their mass is too small.
_FIRST_BLOCKS = tl.constexpr(64)
_GROWTH = tl.constexpr(16)


@triton.jit
def draw_from_best(
    x_row, vocab, tops_row, blocks, num_blocks, peak_key, temperature, floor, limited, top_k, nucleus, top_p, whole,
    noise, BLOCKS: tl.constexpr, TILE: tl.constexpr, SUB: tl.constexpr, PIVOTS: tl.constexpr,
):  # fmt: skip
    """Return the token that wins the race among those left by top_k (if limited) and top_p (if nucleus).

    All arguments are scalars. whole: float64 mass of the vocabulary, if not limited; top_p: float64.
    """
    peak = key_value(peak_key)
    num_listed, low = _list_blocks(
        x_row, vocab, tops_row, blocks, num_blocks, peak_key, temperature, floor, limited, top_k, top_p * whole,
        BLOCKS, TILE, SUB, PIVOTS,
    )  # fmt: skip
    cut = low
    # The number of tokens left at the threshold, lowest ids first.
    num_ties = vocab
    if limited:
        cut = _threshold(
            x_row, vocab, blocks, num_listed, low, peak_key, top_k.to(tl.float64), peak, temperature, floor,
            False, TILE, SUB, PIVOTS,
        )  # fmt: skip
        above, above_mass = _above(
            x_row, vocab, blocks, num_listed, cut, peak, temperature, floor, TILE, SUB
        )  # fmt: skip
        num_ties = top_k - above
        whole = above_mass + num_ties.to(tl.float64) * mass(key_value(cut), peak, temperature, floor).to(tl.float64)
    if nucleus:
        target = top_p * whole
        limit, cut = cut, _threshold(
            x_row, vocab, blocks, num_listed, cut, peak_key, target, peak, temperature, floor,
            True, TILE, SUB, PIVOTS,
        )  # fmt: skip
        _, above_mass = _above(x_row, vocab, blocks, num_listed, cut, peak, temperature, floor, TILE, SUB)
        each = mass(key_value(cut), peak, temperature, floor).to(tl.float64)
        # The nucleus keeps every token with less than the target mass before it.
        needed = tl.ceil(tl.minimum((target - above_mass) / tl.maximum(each, 1e-300), 1e9)).to(tl.int32)
        needed = tl.maximum(needed, 1)
        num_ties = tl.where(cut == limit, tl.minimum(needed, num_ties), needed)
    return _race(
        x_row, vocab, blocks, num_listed, cut, num_ties, peak, temperature, floor, noise, TILE, SUB
    )  # fmt: skip


@triton.jit
def _list_blocks(
    x_row, vocab, tops_row, blocks, num_blocks, peak_key, temperature, floor, limited, top_k, target,
    BLOCKS: tl.constexpr, TILE: tl.constexpr, SUB: tl.constexpr, PIVOTS: tl.constexpr,
):  # fmt: skip
    """Write the blocks with all tokens left to `blocks`, ascending; return their number, and a key that excludes none.

    Without top_k there are enough blocks to hold more than the target mass above the lowest of their maxima.
    """
    peak = key_value(peak_key)
    index = tl.arange(0, BLOCKS)
    tops = tl.load(tops_row + index, index < num_blocks, other=NO_KEY)
    num_listed = tl.minimum(tl.where(limited, top_k, _FIRST_BLOCKS), num_blocks)
    low = tl.full((), NEG_INF_KEY, tl.int32)
    listing = True
    while listing:
        low = _kth_largest(tops, num_listed, peak_key, PIVOTS)
        tied = tops == low
        num_above = tl.sum((tops > low).to(tl.int32), axis=0)
        listed = (tops > low) | (tied & (tl.cumsum(tied.to(tl.int32), axis=0) <= num_listed - num_above))
        tl.debug_barrier()
        tl.store(blocks + tl.cumsum(listed.to(tl.int32), axis=0) - 1, index, listed)
        tl.debug_barrier()
        low = tl.where(num_listed == num_blocks, NEG_INF_KEY, low)
        listing = ~limited & (num_listed < num_blocks)
        if listing:
            _, above_mass = _above(x_row, vocab, blocks, num_listed, low, peak, temperature, floor, TILE, SUB)
            rest = mass(key_value(low), peak, temperature, floor)
            listing = (above_mass < target) & (rest > 0)
            num_listed = tl.where(listing, tl.minimum(num_listed * _GROWTH, num_blocks), num_listed)
    return num_listed, low


@triton.jit
def _kth_largest(keys, k, highest, PIVOTS: tl.constexpr):
    """Return the k-th largest of int32 keys in registers, none above `highest`."""
    low, high = tl.full((), NEG_INF_KEY, tl.int64), highest.to(tl.int64)
    while low < high:
        pivots = low + 1 + tl.arange(0, PIVOTS) * (high - low) // PIVOTS
        reached = tl.sum((keys[:, None] >= pivots.to(tl.int32)[None, :]).to(tl.int32), axis=0)
        enough = reached >= k
        low = tl.max(tl.where(enough, pivots, low), axis=0)
        high = tl.min(tl.where(enough, high, pivots - 1), axis=0)
    return low.to(tl.int32)


@triton.jit
def _threshold(
    x_row, vocab, blocks, num_listed, lowest, highest, target, peak, temperature, floor,
    BY_MASS: tl.constexpr, TILE: tl.constexpr, SUB: tl.constexpr, PIVOTS: tl.constexpr,
):  # fmt: skip
    """Return the largest key from which on there is the target mass (or number of tokens); `lowest` without one."""
    low, high = lowest.to(tl.int64), highest.to(tl.int64)
    while low < high:
        pivots = low + 1 + tl.arange(0, PIVOTS) * (high - low) // PIVOTS
        reached = tl.zeros((PIVOTS,), tl.float64)
        start = tl.full((), 0, tl.int32)
        while start < num_listed:
            _, x, there = listed_tile(x_row, vocab, blocks, num_listed, start, TILE, SUB)
            if BY_MASS:
                weight = mass(x, peak, temperature, floor)
            else:
                weight = tl.full((TILE,), 1.0, tl.float32)
            key = tl.where(there, ordered_key(x), NO_KEY)
            counted = tl.where(key[:, None] >= pivots.to(tl.int32)[None, :], weight[:, None], 0.0)
            reached += tl.sum(counted, axis=0).to(tl.float64)
            start += TILE // SUB
        enough = reached >= target
        low = tl.max(tl.where(enough, pivots, low), axis=0)
        high = tl.min(tl.where(enough, high, pivots - 1), axis=0)
    return low.to(tl.int32)


@triton.jit
def _above(x_row, vocab, blocks, num_listed, cut, peak, temperature, floor, TILE: tl.constexpr, SUB: tl.constexpr):
    """Return (number, mass in float64) of listed tokens with a key above the threshold `cut`."""
    number = tl.full((), 0, tl.int32)
    gathered = tl.full((), 0.0, tl.float64)
    start = tl.full((), 0, tl.int32)
    while start < num_listed:
        _, x, there = listed_tile(x_row, vocab, blocks, num_listed, start, TILE, SUB)
        counted = there & (ordered_key(x) > cut)
        number += tl.sum(counted.to(tl.int32), axis=0)
        gathered += tl.sum(tl.where(counted, mass(x, peak, temperature, floor), 0.0), axis=0).to(tl.float64)
        start += TILE // SUB
    return number, gathered


@triton.jit
def _race(
    x_row, vocab, blocks, num_listed, cut, num_ties, peak, temperature, floor, noise,
    TILE: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """Return the winner among listed tokens above the threshold `cut` and the first `num_ties` at it."""
    winner = tl.full((), NO_ID, tl.int32)
    best = tl.full((), float("inf"), tl.float32)
    tied_before = tl.full((), 0, tl.int32)
    start = tl.full((), 0, tl.int32)
    while start < num_listed:
        ids, x, there = listed_tile(x_row, vocab, blocks, num_listed, start, TILE, SUB)
        key = ordered_key(x)
        tied = there & (key == cut)
        place = tied_before + tl.cumsum(tied.to(tl.int32), axis=0)
        left = (there & (key > cut)) | (tied & (place <= num_ties))
        value = tl.where(left, race_value(x, ids, peak, temperature, floor, noise), float("inf"))
        lowest = tl.min(value, axis=0)
        first = tl.min(tl.where(left & (value == lowest), ids, NO_ID), axis=0)
        # Strictly better, so that ties stay with the lower id.
        winner = tl.where(lowest < best, first, winner)
        best = tl.minimum(lowest, best)
        tied_before += tl.sum(tied.to(tl.int32), axis=0)
        start += TILE // SUB
    return winner
