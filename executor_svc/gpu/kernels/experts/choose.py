"""The experts that rows choose, as `device.experts.Router` says, and their routed rows in the order of experts.

Up to `rows_at_once` rows are one program's, which also sorts them. More rows are chunks of so many: each counts its
experts (`_choose`), the counts are summed in the order of chunks (`_sum_counts`), and each writes where its routed rows
are (`_place`). Nothing returns to the host.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from executor_svc.device.experts import Router
from executor_svc.gpu.kernels.experts.blocks import WORDS, RowBlocks
from executor_svc.gpu.kernels.rows import DTYPES, check
from executor_svc.gpu.kernels.variant import Variant

_WARPS, _STAGES = 4, 1
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
        found = tl.div_rn(logits * 0.0 + 1.0, tl.exp(-logits) + 1.0)
    else:
        found = logits
    return found.to(DTYPE).to(tl.float32) if ROUNDED else found


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
def _choose(
    logits, bias, scales, ids, weights, counts, places, sources, blocks, num_blocks,
    rows, block, epsilon, least_sum, factor,
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
        _, at = _first_of_highest(choices, there & (taken == 0), index, EXPERTS - 1)
        hot = index[None, :] == at[:, None]
        taken += hot.to(tl.int32)
        score = tl.sum(tl.where(hot, scores, 0.0), 1)
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
def _sum_counts(counts, totals, chunks, LANES: tl.constexpr, CHUNKS: tl.constexpr, COLUMNS: tl.constexpr):
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
def _place(
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
    return max(1, min(_MOST_ROWS, _LANES // _lanes(num_experts)))


def scratch_size(num_rows: int, num_experts: int) -> int:
    """Return the int32 numbers that `choose` needs as scratch for so many rows."""
    return (1 + -(-num_rows // rows_at_once(num_experts))) * _lanes(num_experts)


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
    if not rows:
        return
    chunks, lanes = -(-rows // rows_at_once(experts)), _lanes(experts)
    one = chunks == 1
    counts = scratch[: chunks * lanes]
    totals = scratch[chunks * lanes :]
    written = places, sources, blocks.table, blocks.count
    numbers = float(router.epsilon), float(router.least_sum), float(router.factor)
    _choose[(chunks,)](
        logits, bias, scales, ids, weights, None if one else counts, *written, rows, blocks.rows, *numbers,
        **_constants(router, dtype), **_OPTIONS,
    )  # fmt: skip
    if not one:
        sizes = _summed(lanes)
        _sum_counts[(lanes // sizes["COLUMNS"],)](counts, totals, chunks, **sizes, **_OPTIONS)
        _place[(chunks,)](ids, counts, totals, *written, rows, blocks.rows, **_placing(router), **_OPTIONS)


_OPTIONS: dict[str, Any] = {"num_warps": _WARPS, "num_stages": _STAGES, "enable_fp_fusion": False}


def _lanes(num_experts: int) -> int:
    return max(16, int(triton.next_power_of_2(num_experts)))


def _summed(lanes: int) -> dict[str, int]:
    return {"LANES": lanes, "CHUNKS": _CHUNKS, "COLUMNS": min(_COLUMNS, lanes)}


def _placing(router: Router) -> dict[str, Any]:
    slots = int(triton.next_power_of_2(router.num_chosen))
    sizes = {"ROWS": rows_at_once(router.num_experts), "LANES": _lanes(router.num_experts), "SLOTS": slots}
    return {"CHOSEN": router.num_chosen} | sizes


def _constants(router: Router, dtype: torch.dtype) -> dict[str, Any]:
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
    } | _placing(router)


_ROUTERS = {
    "qwen3": (Router(128, 8), False),
    "gpt-oss": (Router(32, 4, scores="logits", weighing="softmax"), False),
    "deepseek": (
        Router(256, 8, scores="sigmoid", groups=8, kept_groups=4, epsilon=1e-20, factor=2.5, rounded=False), True,
    ),
    "qwen3.5": (Router(512, 10), False),
}  # fmt: skip
"""Of the variants compiled ahead of time, and whether they have a bias of the choice."""


def variants() -> list[Variant]:
    """Return some routers, for few rows and for many."""
    found = []
    for name, (router, biased) in _ROUTERS.items():
        for logits in ("bf16", "fp32"):
            found += [_choosing(name, router, biased, logits, one=one) for one in (True, False)]
        found += [_summing(name, router), _placing_rows(name, router)]
    return found


_WRITTEN = {"places": "*i64", "sources": "*i64", "blocks": "*i32", "num_blocks": "*i32"}


def _choosing(name: str, router: Router, biased: bool, logits: str, *, one: bool) -> Variant:
    pointers = {"logits": f"*{logits}", "ids": "*i64", "weights": "*fp32", **_WRITTEN}
    constants = _constants(router, torch.bfloat16) | {"scales": None}
    for optional, there, kind in (("bias", biased, "*fp32"), ("counts", not one, "*i32")):
        if there:
            pointers[optional] = kind
        else:
            constants[optional] = None
    sizes = {"rows": "i32", "block": "i32"} | dict.fromkeys(("epsilon", "least_sum", "factor"), "fp32")
    title = f"choose_experts {name} {logits} {'few' if one else 'many'}"
    return _variant(title, _choose, pointers, sizes, constants, quick=(name, logits, one) == ("qwen3", "bf16", True))


def _summing(name: str, router: Router) -> Variant:
    constants = _summed(_lanes(router.num_experts))
    return _variant(
        f"sum_experts {name}", _sum_counts, dict.fromkeys(("counts", "totals"), "*i32"), {"chunks": "i32"}, constants
    )


def _placing_rows(name: str, router: Router) -> Variant:
    pointers = {"ids": "*i64", "counts": "*i32", "totals": "*i32", **_WRITTEN}
    return _variant(f"place_experts {name}", _place, pointers, {"rows": "i32", "block": "i32"}, _placing(router))


def _variant(
    name: str,
    kernel: Any,
    pointers: dict[str, str],
    sizes: dict[str, str],
    constants: dict[str, Any],
    quick: bool = False,
) -> Variant:
    return Variant(
        name=name,
        kernel=kernel,
        signature={**pointers, **sizes, **dict.fromkeys(constants, "constexpr")},
        constants=constants,
        divisible=tuple(pointers),
        num_warps=_WARPS,
        num_stages=_STAGES,
        fp_fusion=False,
        no_spills=True,
        quick=quick,
    )
