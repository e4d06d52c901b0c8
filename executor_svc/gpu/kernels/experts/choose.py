"""The experts that rows choose, as `device.experts.Router` says, and their routed rows in the order of experts.

Up to `rows_at_once` rows are one program's, which also sorts them. More rows are chunks of so many: each counts its
experts (`choose_kernel`), the counts are summed in the order of chunks (`sum_kernel`), and each writes where its routed
rows are (`place_kernel`). Nothing returns to the host.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from executor_svc.device.experts import Router
from executor_svc.gpu.kernels.experts.blocks import WORDS, RowBlocks
from executor_svc.gpu.kernels.rows import DTYPES, check

_WARPS, STAGES = 4, 1
_LANES = 2048
"""Scores of a program."""
_MOST_ROWS = 16
_CHUNKS, _COLUMNS = 64, 32
"""Counts that a program sums at a time: of chunks, and of experts."""
_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
_LOWEST = tl.constexpr(float("-inf"))


@triton.jit
def _softmax(values, inside):
    """Return the softmax of each row of values [R, N], and 0 outside; NaN in a row that is not finite."""
    peak = tl.max(tl.where(inside & (values == values), values, _LOWEST), 1)
    powers = tl.where(inside, tl.exp(values - peak[:, None]), 0.0)
    return tl.div_rn(powers, tl.broadcast_to(tl.sum(powers, 1)[:, None], powers.shape))


@triton.jit
def _scores(logits, inside, SCORES: tl.constexpr, DTYPE: tl.constexpr, ROUNDED: tl.constexpr):
    """Return the scores [R, E] float32 of logits; of experts that there are not, anything."""
    if SCORES == "softmax":
        found = _softmax(logits, inside)
    elif SCORES == "sigmoid":
        found = tl.div_rn(tl.full(logits.shape, 1.0, tl.float32), tl.exp(-logits) + 1.0)
    else:
        found = logits
    return found.to(DTYPE).to(tl.float32) if ROUNDED else found


@triton.jit
def _share(logits, best, free, near, DTYPE: tl.constexpr):
    """Return the shares [R] of the best logits among the free ones [R, E] near them, as `Router.weighing` says."""
    below = (best[:, None] - logits).to(DTYPE).to(tl.float32)
    larger = tl.maximum(tl.abs(logits), best[:, None])
    distance = tl.div_rn(below, tl.where(larger == 0.0, 1.0, larger)).to(DTYPE).to(tl.float32)
    powers = tl.where(free & (distance <= near), tl.exp(logits - best[:, None]), 0.0)
    return tl.div_rn(tl.full(best.shape, 1.0, tl.float32), tl.sum(powers, 1))


@triton.jit
def _first_of_highest(values, free, index, NONE: tl.constexpr):
    """Return the highest of the free values [R, E] of each row, and where it is first; NONE: nowhere."""
    best = tl.max(tl.where(free, values, _LOWEST), 1)
    return best, tl.min(tl.where(free & (values == best[:, None]), index[None, :], NONE), 1)


@triton.jit
def _kept(choices, inside, index, SIZE: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, TWO: tl.constexpr):
    """Return whether experts are in the best groups; of equal ones the first is better."""
    NONE: tl.constexpr = choices.shape[1]
    group = (index // SIZE)[None, :]
    worth = choices * 0.0 + _LOWEST
    for number in range(GROUPS):
        mine = inside & (group == number)
        best, at = _first_of_highest(choices, mine, index, NONE)
        if TWO:
            second, _ = _first_of_highest(choices, mine & (index[None, :] != at[:, None]), index, NONE)
            best += second
        worth = tl.where(mine, best[:, None], worth)
    kept = group < tl.zeros(choices.shape, tl.int32)
    for _ in range(KEPT):
        best, at = _first_of_highest(worth, inside & (kept == 0), index, NONE)
        kept = kept | (group == (at // SIZE)[:, None])
    return kept


@triton.jit
def _write_places(chosen, taken, before, row, inside, index, slot, places, sources, CHOSEN: tl.constexpr):
    """Write the routed row of each choice, and its token; before: [E], the first place of each expert's rows here."""
    place = before[None, :] + tl.cumsum(taken, 0) - taken
    for number in range(CHOSEN):
        at = tl.sum(tl.where(slot[None, :] == number, chosen, 0), 1)
        mine = tl.sum(tl.where(index[None, :] == at[:, None], place, 0), 1)
        tl.store(places + row * CHOSEN + number, mine.to(tl.int64), inside)
        tl.store(sources + mine, row.to(tl.int64), inside)


@triton.jit
def _write_blocks(total, index, blocks, num_blocks, block):
    """Write the blocks of all experts, of which `total` are the rows [E]."""
    count = tl.cdiv(total, block)
    at = blocks + (tl.cumsum(count, 0) - count) * WORDS
    first = tl.cumsum(total, 0) - total
    for number in range(tl.max(count, 0)):
        there = number < count
        tl.store(at + number * WORDS, index, there)
        tl.store(at + number * WORDS + 1, first + number * block, there)
        tl.store(at + number * WORDS + 2, tl.minimum(total - number * block, block), there)
    tl.store(num_blocks, tl.sum(count, 0))


@triton.jit(do_not_specialize=["rows", "block"])
def choose_kernel(
    logits, bias, scales, ids, weights, counts, places, sources, blocks, num_blocks,
    rows, block, epsilon, least_sum, factor, near,
    EXPERTS: tl.constexpr, CHOSEN: tl.constexpr, SCORES: tl.constexpr, ROUNDED_SCORES: tl.constexpr,
    GROUPS: tl.constexpr, KEPT: tl.constexpr, TWO: tl.constexpr, WEIGHING: tl.constexpr, ROUNDED: tl.constexpr,
    DTYPE: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Choose for ROWS rows. With counts: write how many chose each expert; without, for all rows, where they are."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    index, slot = tl.arange(0, LANES), tl.arange(0, SLOTS)
    row_inside = row < rows
    there = tl.broadcast_to((index < EXPERTS)[None, :], (ROWS, LANES))
    loaded = tl.load(logits + row[:, None] * EXPERTS + index[None, :], there & row_inside[:, None], other=0.0)
    scores = _scores(loaded.to(tl.float32), there, SCORES, DTYPE, ROUNDED_SCORES)
    choices = scores
    if bias is not None:
        choices += tl.load(bias + index, index < EXPERTS, other=0.0)[None, :]
    choices = tl.where(choices == choices, choices, _LOWEST)
    if GROUPS > 1:
        size: tl.constexpr = EXPERTS // GROUPS
        kept = _kept(choices, there, index, size, GROUPS, KEPT, TWO and size > 1)
        choices = tl.where(kept, choices, _LOWEST)
    if scales is not None:
        scale = tl.load(scales + index, index < EXPERTS, other=0.0)

    taken = tl.zeros((ROWS, LANES), tl.int32)
    chosen = tl.zeros((ROWS, SLOTS), tl.int32)
    found = tl.zeros((ROWS, SLOTS), tl.float32)
    scaled = tl.zeros((ROWS, SLOTS), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for number in range(CHOSEN):
        free = there & (taken == 0)
        _, at = _first_of_highest(choices, free, index, EXPERTS - 1)
        hot = index[None, :] == at[:, None]
        taken += hot.to(tl.int32)
        score = tl.sum(tl.where(hot, scores, 0.0), 1)
        if WEIGHING == "sparsemixer":
            score = _share(scores, score, free, near, DTYPE)
        total += score
        chosen = tl.where(slot[None, :] == number, at[:, None], chosen)
        found = tl.where(slot[None, :] == number, score[:, None], found)
        if scales is not None:
            own = tl.sum(tl.where(hot, scale[None, :], 0.0), 1)
            scaled = tl.where(slot[None, :] == number, own[:, None], scaled)
    used = (slot < CHOSEN)[None, :]
    if WEIGHING == "shares":
        divisor = tl.maximum(total + epsilon, least_sum)
        found = tl.div_rn(found, tl.broadcast_to(divisor[:, None], found.shape))
    elif WEIGHING == "softmax":
        found = _softmax(found, tl.broadcast_to(used, found.shape))
    elif WEIGHING == "sigmoid":
        found = _scores(found, used, "sigmoid", DTYPE, False)
    found = found * factor
    if scales is not None:
        found = found * scaled
    if ROUNDED:
        found = found.to(DTYPE).to(tl.float32)
    at_slot = row[:, None] * CHOSEN + slot[None, :]
    tl.store(ids + at_slot, chosen.to(tl.int64), used & row_inside[:, None])
    tl.store(weights + at_slot, found, used & row_inside[:, None])

    taken = tl.where(row_inside[:, None], taken, 0)
    mine = tl.sum(taken, 0)
    if counts is not None:
        tl.store(counts + tl.program_id(0).to(tl.int64) * LANES + index, mine)
    else:
        first = tl.cumsum(mine, 0) - mine
        _write_places(chosen, taken, first, row, row_inside, index, slot, places, sources, CHOSEN)
        _write_blocks(mine, index, blocks, num_blocks, block)


@triton.jit(do_not_specialize=["chunks"])
def sum_kernel(counts, totals, chunks, LANES: tl.constexpr, CHUNKS: tl.constexpr, COLUMNS: tl.constexpr):
    """Turn the counts [chunks, LANES] of some experts into those of the chunks before, and write those of all."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.int32)
    for start in range(0, chunks, CHUNKS):
        chunk = start + tl.arange(0, CHUNKS)
        at = counts + chunk.to(tl.int64)[:, None] * LANES + column[None, :]
        inside = tl.broadcast_to((chunk < chunks)[:, None], (CHUNKS, COLUMNS))
        mine = tl.load(at, inside, other=0)
        tl.store(at, total[None, :] + tl.cumsum(mine, 0) - mine, inside)
        total += tl.sum(mine, 0)
    tl.store(totals + column, total)


@triton.jit(do_not_specialize=["rows", "block"])
def place_kernel(
    ids, counts, totals, places, sources, blocks, num_blocks, rows, block,
    CHOSEN: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Write where the routed rows of a chunk are; the first program also writes the blocks."""
    program = tl.program_id(0)
    row = (program * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    index, slot = tl.arange(0, LANES), tl.arange(0, SLOTS)
    row_inside = row < rows
    used = (slot < CHOSEN)[None, :] & row_inside[:, None]
    chosen = tl.load(ids + row[:, None] * CHOSEN + slot[None, :], used, other=-1).to(tl.int32)
    taken = tl.zeros((ROWS, LANES), tl.int32)
    for number in range(CHOSEN):
        at = tl.sum(tl.where(slot[None, :] == number, chosen, 0), 1)
        taken += (index[None, :] == at[:, None]).to(tl.int32)
    total = tl.load(totals + index)
    before = tl.cumsum(total, 0) - total + tl.load(counts + program.to(tl.int64) * LANES + index)
    _write_places(chosen, taken, before, row, row_inside, index, slot, places, sources, CHOSEN)
    if program == 0:
        _write_blocks(total, index, blocks, num_blocks, block)


def rows_at_once(num_experts: int) -> int:
    """Return the rows of a chunk."""
    return max(1, min(_MOST_ROWS, _LANES // num_lanes(num_experts)))


def scratch_size(num_rows: int, num_experts: int) -> int:
    """Return the int32 numbers that `choose` needs as scratch for so many rows."""
    return (1 + -(-num_rows // rows_at_once(num_experts))) * num_lanes(num_experts)


def choose(
    logits: Tensor,
    router: Router,
    dtype: torch.dtype,
    bias: Tensor | None,
    scales: Tensor | None,
    scratch: Tensor,
    ids: Tensor,
    weights: Tensor,
    places: Tensor,
    sources: Tensor,
    blocks: RowBlocks,
) -> None:
    """Write what rows chose, and the order and the blocks of routed rows.

    Args:
        logits: [T, E], contiguous.
        router, dtype, bias, scales: as of `device.experts.ExpertKernels.route`.
        scratch: int32, `scratch_size` or more numbers, with any content.
        ids, weights: [T, K] int64 and float32, as of `device.experts.Routes`.
        places: [T, K] int64, the routed row of each choice.
        sources: [T * K] int64, the token of each routed row.
        blocks: of a step of T tokens.

    Raises ValueError naming the argument.
    """
    rows, experts = len(logits), router.num_experts
    _check(logits, router, bias, scales, scratch, ids, weights, places, sources)
    if not rows:
        return
    chunks, lanes = -(-rows // rows_at_once(experts)), num_lanes(experts)
    one = chunks == 1
    counts = scratch[: chunks * lanes]
    totals = scratch[chunks * lanes :]
    written = places, sources, blocks.table, blocks.count
    numbers = float(router.epsilon), float(router.least_sum), float(router.factor), _rounded(2 * router.jitter, dtype)
    choose_kernel[(chunks,)](
        logits, bias, scales, ids, weights, None if one else counts, *written, rows, blocks.rows, *numbers,
        **choosing_constants(router, dtype), **_options(lanes),
    )  # fmt: skip
    if not one:
        sizes = summing_constants(lanes)
        sum_kernel[(lanes // sizes["COLUMNS"],)](counts, totals, chunks, **sizes, **_options(lanes))
        place_kernel[(chunks,)](
            ids, counts, totals, *written, rows, blocks.rows, **placing_constants(router), **_options(lanes)
        )


@cache
def _rounded(number: float, dtype: torch.dtype) -> float:
    """Return a number as this type has it."""
    return float(torch.tensor(number).to(dtype))


def _check(
    logits: Tensor,
    router: Router,
    bias: Tensor | None,
    scales: Tensor | None,
    scratch: Tensor,
    ids: Tensor,
    weights: Tensor,
    places: Tensor,
    sources: Tensor,
) -> None:
    rows, experts = len(logits), router.num_experts
    check("logits", logits, (rows, experts), *DTYPES)
    for name, vector in (("bias", bias), ("scales", scales)):
        if vector is not None:
            check(name, vector, (experts,), torch.float32)
    for name, tensor, kind in (("ids", ids, torch.int64), ("weights", weights, torch.float32)):
        check(name, tensor, (rows, router.num_chosen), kind)
    check("places", places, (rows, router.num_chosen), torch.int64)
    check("sources", sources, (rows * router.num_chosen,), torch.int64)
    if scratch.numel() < scratch_size(rows, experts) or scratch.dtype != torch.int32:
        raise ValueError(f"scratch must be {scratch_size(rows, experts)} int32")


def _options(lanes: int) -> dict[str, Any]:
    return {"num_warps": num_warps(lanes), "num_stages": STAGES, "enable_fp_fusion": False}


def num_warps(lanes: int) -> int:
    """Return the warps of a program."""
    return max(_WARPS, lanes // 256)


def num_lanes(num_experts: int) -> int:
    """Return the lanes of a row: a power of two."""
    return max(16, int(triton.next_power_of_2(num_experts)))


def summing_constants(lanes: int) -> dict[str, int]:
    """Return the constants of `sum_kernel`."""
    return {"LANES": lanes, "CHUNKS": _CHUNKS, "COLUMNS": min(_COLUMNS, lanes)}


def placing_constants(router: Router) -> dict[str, Any]:
    """Return the constants of `place_kernel`."""
    slots = int(triton.next_power_of_2(router.num_chosen))
    sizes = {"ROWS": rows_at_once(router.num_experts), "LANES": num_lanes(router.num_experts), "SLOTS": slots}
    return {"CHOSEN": router.num_chosen} | sizes


def choosing_constants(router: Router, dtype: torch.dtype) -> dict[str, Any]:
    """Return the constants of `choose_kernel`."""
    return {
        "EXPERTS": router.num_experts,
        "SCORES": router.scores,
        "ROUNDED_SCORES": router.rounded_scores,
        "GROUPS": router.groups,
        "KEPT": router.kept_groups,
        "TWO": router.two_best,
        "WEIGHING": router.weighing,
        "ROUNDED": router.rounded,
        "DTYPE": _TYPES[dtype],
    } | placing_constants(router)
