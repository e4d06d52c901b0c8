"""The weighted sum of what a token's experts returned."""

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
    WIDTH: tl.constexpr, CHOSEN: tl.constexpr, ROUNDED: tl.constexpr, CHUNK: tl.constexpr,
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
        share = tl.load(weights + token * CHOSEN + number)
        product = tl.load(rows + place * WIDTH + columns, mask, other=0.0).to(tl.float32) * share
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


def combine(
    rows: Tensor,
    places: Tensor,
    weights: Tensor,
    rounded: bool,
    beside: Tensor | None,
    gate: Tensor | None,
    out: Tensor,
) -> None:
    """Write the sum of each token's rows times their weights to out [T, hidden], rounded once.

    Args:
        rows: [T * K, hidden] in the dtype of out.
        places, weights: [T, K] int64 and float32, of each token's rows.
        rounded: each product is rounded first.
        beside: [T, hidden], added to the rounded sum; gate: [T, 1], whose sigmoid multiplies it first, both rounded.

    Raises ValueError naming the argument.
    """
    tokens, width = out.shape
    num_chosen = places.shape[1]
    check("out", out, (tokens, width), *DTYPES)
    check("rows", rows, (tokens * num_chosen, width), out.dtype)
    check("places", places, (tokens, num_chosen), torch.int64)
    check("weights", weights, (tokens, num_chosen), torch.float32)
    for name, tensor, columns in (("beside", beside, width), ("gate", gate, 1)):
        if tensor is not None:
            check(name, tensor, (tokens, columns), out.dtype)
    constants = _constants(width, num_chosen, rounded)
    programs = tokens * chunks(width, constants["CHUNK"])
    if programs:
        _combine[programs,](rows, places, weights, beside, gate, out, **constants, **options(constants["CHUNK"]))


def _constants(width: int, num_chosen: int, rounded: bool) -> dict[str, Any]:
    return {"WIDTH": width, "CHOSEN": num_chosen, "ROUNDED": rounded, "CHUNK": chunk_size(width)}


def variants() -> list[Variant]:
    """Return the sum alone, and beside a shared expert without and with a gate."""
    return [
        _variant(hidden, dtype, beside, gate)
        for hidden, dtype in [(2048, "bf16"), *((4096, dtype) for dtype in DTYPES.values())]
        for beside, gate in ((False, False), (True, False), (True, True))
    ]


def _variant(hidden: int, dtype: str, beside: bool, gate: bool) -> Variant:
    optional = {"beside": beside, "gate": gate}
    arguments = {"rows": f"*{dtype}", "places": "*i64", "weights": "*fp32", "out": f"*{dtype}"}
    arguments |= {name: f"*{dtype}" for name in optional if optional[name]}
    constants = _constants(hidden, 8, rounded=True)
    launched = options(constants["CHUNK"])
    constants |= {name: None for name in optional if not optional[name]}
    name = f"combine_experts hidden{hidden} {dtype}{' beside' if beside else ''}{' gate' if gate else ''}"
    return variant(name, _combine, arguments, constants, launched, (hidden, dtype, gate) == (4096, "bf16", True))
