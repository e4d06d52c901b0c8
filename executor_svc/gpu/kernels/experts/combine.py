"""The weighted sum of what a token's experts returned, and what they read where weights multiply that."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from executor_svc.gpu.kernels.rows import DTYPES, check, chunk_size, chunks, options, variant
from executor_svc.gpu.kernels.variant import Variant


@triton.jit
def _combine(
    rows, places, weights, beside, gate, out,
    WIDTH: tl.constexpr, CHOSEN: tl.constexpr, WEIGHED: tl.constexpr, ROUNDED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Sum some columns of a token's rows, in the order of choice."""
    parts: tl.constexpr = (WIDTH + CHUNK - 1) // CHUNK
    dtype = out.dtype.element_ty
    program = tl.program_id(0)
    token = (program // parts).to(tl.int64)
    columns = program % parts * CHUNK + tl.arange(0, CHUNK)
    mask = columns < WIDTH
    total = tl.zeros((CHUNK,), tl.float32)
    for number in range(CHOSEN):
        place = tl.load(places + token * CHOSEN + number)
        product = tl.load(rows + place * WIDTH + columns, mask, other=0.0).to(tl.float32)
        if WEIGHED:
            product *= tl.load(weights + token * CHOSEN + number)
            if ROUNDED:
                product = product.to(dtype).to(tl.float32)
        total += product
    if beside is not None:
        more = tl.load(beside + token * WIDTH + columns, mask, other=0.0).to(tl.float32)
        if gate is not None:
            opened = tl.div_rn(1.0, tl.exp(-tl.load(gate + token).to(tl.float32)) + 1.0).to(dtype).to(tl.float32)
            more = (more * opened).to(dtype).to(tl.float32)
        total = total.to(dtype).to(tl.float32) + more
    tl.store(out + token * WIDTH + columns, total.to(dtype), mask)


@triton.jit
def _spread(x, places, weights, out, WIDTH: tl.constexpr, CHOSEN: tl.constexpr, CHUNK: tl.constexpr):
    """Write some columns of a choice's routed row."""
    parts: tl.constexpr = (WIDTH + CHUNK - 1) // CHUNK
    program = tl.program_id(0)
    choice = (program // parts).to(tl.int64)
    columns = program % parts * CHUNK + tl.arange(0, CHUNK)
    mask = columns < WIDTH
    value = tl.load(x + choice // CHOSEN * WIDTH + columns, mask, other=0.0).to(tl.float32)
    value *= tl.load(weights + choice)
    tl.store(out + tl.load(places + choice) * WIDTH + columns, value.to(out.dtype.element_ty), mask)


def spread(x: Tensor, places: Tensor, weights: Tensor, out: Tensor) -> None:
    """Write each token's row of x [T, hidden], times the weight of each choice, rounded, to its routed row of out.

    Args:
        places, weights: [T, K] int64 and float32.
        out: [T * K, hidden] in the dtype of x.

    Raises ValueError naming the argument.
    """
    tokens, width = x.shape
    check("x", x, (tokens, width), *DTYPES)
    _check_choices(tokens, places, weights)
    check("out", out, (places.numel(), width), x.dtype)
    constants = {"WIDTH": width, "CHOSEN": places.shape[1], "CHUNK": chunk_size(width)}
    programs = places.numel() * chunks(width, constants["CHUNK"])
    if programs:
        _spread[programs,](x, places, weights, out, **constants, **options(constants["CHUNK"]))


def _check_choices(tokens: int, places: Tensor, weights: Tensor) -> None:
    check("places", places, (tokens, places.shape[1]), torch.int64)
    check("weights", weights, (tokens, places.shape[1]), torch.float32)


def combine(
    rows: Tensor,
    places: Tensor,
    weights: Tensor,
    weighed: bool,
    rounded: bool,
    beside: Tensor | None,
    gate: Tensor | None,
    out: Tensor,
) -> None:
    """Write the sum of each token's rows times their weights to out [T, hidden], rounded once.

    Args:
        rows: [T * K, hidden] in the dtype of out.
        places, weights: [T, K] int64 and float32, of each token's rows.
        weighed: else all weights are 1.
        rounded: each product is rounded first.
        beside: [T, hidden], added to the rounded sum; gate: [T, 1], whose sigmoid multiplies it first, both rounded.

    Raises ValueError naming the argument.
    """
    tokens, width = out.shape
    num_chosen = places.shape[1]
    check("out", out, (tokens, width), *DTYPES)
    check("rows", rows, (tokens * num_chosen, width), out.dtype)
    _check_choices(tokens, places, weights)
    for name, tensor, columns in (("beside", beside, width), ("gate", gate, 1)):
        if tensor is not None:
            check(name, tensor, (tokens, columns), out.dtype)
    constants = _constants(width, num_chosen, weighed, rounded)
    programs = tokens * chunks(width, constants["CHUNK"])
    if programs:
        _combine[programs,](rows, places, weights, beside, gate, out, **constants, **options(constants["CHUNK"]))


def _constants(width: int, num_chosen: int, weighed: bool, rounded: bool) -> dict[str, Any]:
    flags = {"WEIGHED": weighed, "ROUNDED": rounded}
    return {"WIDTH": width, "CHOSEN": num_chosen, **flags, "CHUNK": chunk_size(width)}


def variants() -> list[Variant]:
    """Return the sum alone, and beside a shared expert without and with a gate; and rows of one choice (Llama 4)."""
    arguments = {"x": "*bf16", "places": "*i64", "weights": "*fp32", "out": "*bf16"}
    constants = {"WIDTH": 5120, "CHOSEN": 1, "CHUNK": chunk_size(5120)}
    spreading = variant("spread_experts hidden5120 bf16", _spread, arguments, constants, options(constants["CHUNK"]))
    return [
        spreading,
        *(
            _variant(hidden, dtype, beside, gate)
            for hidden, dtype in [(2048, "bf16"), *((4096, dtype) for dtype in DTYPES.values())]
            for beside, gate in ((False, False), (True, False), (True, True))
        ),
    ]


def _variant(hidden: int, dtype: str, beside: bool, gate: bool) -> Variant:
    optional = {"beside": beside, "gate": gate}
    arguments = {"rows": f"*{dtype}", "places": "*i64", "weights": "*fp32", "out": f"*{dtype}"}
    arguments |= {name: f"*{dtype}" for name in optional if optional[name]}
    constants = _constants(hidden, 8, weighed=True, rounded=True)
    launched = options(constants["CHUNK"])
    constants |= {name: None for name in optional if not optional[name]}
    name = f"combine_experts hidden{hidden} {dtype}{' beside' if beside else ''}{' gate' if gate else ''}"
    return variant(name, _combine, arguments, constants, launched, (hidden, dtype, gate) == (4096, "bf16", True))
