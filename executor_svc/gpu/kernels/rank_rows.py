"""What ranks make of each other's rows: sums in the order of ranks, and the rows of their owners."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from executor_svc.gpu.kernels.rows import DTYPES, HIDDEN_SIZES, check, chunk_size, chunks, options, variant
from executor_svc.gpu.kernels.variant import Variant

_SIZES = (2, 4, 8)
"""Numbers of ranks of the variants compiled ahead of time; the launchers accept any number."""
_LISTED = 256


@triton.jit
def _sum_parts(
    parts, bias, out, num_rows,
    WIDTH: tl.constexpr, SIZE: tl.constexpr, HAS_BIAS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    pieces: tl.constexpr = (WIDTH + CHUNK - 1) // CHUNK
    program = tl.program_id(0)
    row = (program // pieces).to(tl.int64)
    columns = program % pieces * CHUNK + tl.arange(0, CHUNK)
    mask = columns < WIDTH
    at = row * WIDTH + columns
    total = tl.load(parts + at, mask).to(tl.float32)
    for rank in tl.static_range(1, SIZE):
        total += tl.load(parts + rank * num_rows.to(tl.int64) * WIDTH + at, mask).to(tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + columns, mask).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask)


def sum_parts(parts: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write the sum of parts [N, T, columns], in their order and in float32, plus bias [columns], to out [T, columns].

    The sum is rounded once, to the dtype of out, which bias has, too.
    """
    size, num_rows, width = parts.shape
    check("parts", parts, (size, num_rows, width), *DTYPES)
    check("out", out, (num_rows, width), *DTYPES)
    if bias is not None:
        check("bias", bias, (width,), *DTYPES)
    constants = summing_constants(width, size, bias is not None)
    programs = num_rows * chunks(width, constants["CHUNK"])
    if programs:
        _sum_parts[programs,](parts, bias, out, num_rows, **constants, **options(constants["CHUNK"]))


@triton.jit
def _pick_rows(parts, token_ids, out, num_rows, each, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    pieces: tl.constexpr = (WIDTH + CHUNK - 1) // CHUNK
    program = tl.program_id(0)
    row = (program // pieces).to(tl.int64)
    columns = program % pieces * CHUNK + tl.arange(0, CHUNK)
    mask = columns < WIDTH
    owner = tl.load(token_ids + row) // each
    value = tl.load(parts + (owner * num_rows + row) * WIDTH + columns, mask)
    tl.store(out + row * WIDTH + columns, value, mask)


def pick_rows(parts: Tensor, token_ids: Tensor, each: int, out: Tensor) -> None:
    """Write each row of parts [N, T, columns] that the token's rank has given to out [T, columns].

    token_ids: [T] int64, of the first rank up to `each`, of the second up to twice as many, and so on.
    """
    size, num_rows, width = parts.shape
    check("parts", parts, (size, num_rows, width), *DTYPES)
    check("out", out, (num_rows, width), parts.dtype)
    check("token_ids", token_ids, (num_rows,), torch.int64)
    constants = picking_constants(width)
    programs = num_rows * chunks(width, constants["CHUNK"])
    if programs:
        _pick_rows[programs,](parts, token_ids, out, num_rows, each, **constants, **options(constants["CHUNK"]))


@triton.jit
def _own_ids(token_ids, out, num_rows, first, count, LISTED: tl.constexpr):
    at = tl.program_id(0) * LISTED + tl.arange(0, LISTED)
    own = tl.load(token_ids + at, at < num_rows, other=0) - first
    tl.store(out + at, tl.where((own >= 0) & (own < count), own, 0), at < num_rows)


def own_ids(token_ids: Tensor, first: int, count: int, out: Tensor) -> None:
    """Write the rows [T] int64 of token_ids [T] in a rank's table of `count` tokens from `first` on; 0 for others."""
    check("token_ids", token_ids, tuple(out.shape), torch.int64)
    check("out", out, tuple(token_ids.shape), torch.int64)
    programs = -(-len(out) // _LISTED)
    if programs:
        _own_ids[programs,](token_ids, out, len(out), first, count, LISTED=_LISTED, **options(_LISTED))


def summing_constants(width: int, size: int, has_bias: bool) -> dict[str, Any]:
    """Return the constants of the kernel for rows of this width from `size` ranks."""
    return {"WIDTH": width, "SIZE": size, "HAS_BIAS": has_bias, "CHUNK": chunk_size(width)}


def picking_constants(width: int) -> dict[str, Any]:
    """Return the constants of the kernel for rows of this width."""
    return {"WIDTH": width, "CHUNK": chunk_size(width)}


def variants() -> list[Variant]:
    """Return the configurations compiled ahead of time."""
    found = []
    for hidden in HIDDEN_SIZES:
        for dtype in DTYPES.values():
            for size in _SIZES:
                constants = summing_constants(hidden, size, has_bias=False)
                signature = {"parts": f"*{dtype}", "out": f"*{dtype}", "num_rows": "i32"}
                # Triton turns the absent bias into a constant.
                constants = {"bias": None, **constants}
                name = f"sum_parts hidden{hidden} of {size} {dtype}"
                quick = (hidden, dtype, size) == (4096, "bf16", 2)
                found.append(variant(name, _sum_parts, signature, constants, options(constants["CHUNK"]), quick))
            constants = picking_constants(hidden)
            signature = {
                "parts": f"*{dtype}", "token_ids": "*i64", "out": f"*{dtype}", "num_rows": "i32", "each": "i32",
            }  # fmt: skip
            name = f"pick_rows hidden{hidden} {dtype}"
            found.append(variant(name, _pick_rows, signature, constants, options(constants["CHUNK"])))
    signature = {"token_ids": "*i64", "out": "*i64", "num_rows": "i32", "first": "i32", "count": "i32"}
    found.append(variant("own_ids", _own_ids, signature, {"LISTED": _LISTED}, options(_LISTED)))
    return found
