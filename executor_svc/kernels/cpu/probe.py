"""Checks, on this very machine, of what same-row-same-bits rests on. Each returns what went wrong, or None.

Libraries choose code by processor, thread count and version, so what holds on one machine is measured on each.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from executor_svc.kernels.cpu import elementwise
from executor_svc.kernels.cpu.attention_plan import tile_rows
from executor_svc.kernels.cpu.linear import CpuLinear
from executor_svc.kernels.interface import KEY_TILE, MIN_ROWS, AttentionShape

_ROW_COUNTS = (2, 3, 16, 17, 64, 129)
_BATCHES = (2, 3, 8, 17)
_MOST_ROWS = 129


def _random(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator)


def _same(left: Tensor, right: Tensor) -> bool:
    """Return whether bits are equal (no NaN here, and -0 against 0 may differ without harm: they compare equal)."""
    return bool(torch.equal(left, right))


def probe_linear(linear: CpuLinear, max_rows: int) -> str | None:
    """Compare rows computed among few others, at other places, with the same rows among max_rows."""
    generator = torch.Generator().manual_seed(0)
    most = max(MIN_ROWS, min(max_rows, linear.row_tile))
    x = _random(generator, most, linear.in_features).to(linear.dtype)
    expected = linear(x)
    for count in sorted({count for count in _ROW_COUNTS if count < most}):
        for start in (0, most - count):
            if not _same(linear(x[start : start + count]), expected[start : start + count]):
                return f"a row has other bits among {count} rows than among {most}"
    return None


def probe_attention(shape: AttentionShape, query_tiles: tuple[int, ...]) -> str | None:
    """Compare the products of attention's tiles among tile sizes and numbers of tiles."""
    generator = torch.Generator().manual_seed(0)
    sizes = [tile_rows(shape, size) for size in query_tiles]
    most = max(sizes)
    queries = _random(generator, max(_BATCHES), most, shape.padded_head_size)
    keys = _random(generator, max(_BATCHES), KEY_TILE, shape.padded_head_size)
    weights = _random(generator, max(_BATCHES), most, KEY_TILE)
    scores, values = torch.bmm(queries, keys.transpose(1, 2)), torch.bmm(weights, keys)
    for rows in sizes:
        for batch in _BATCHES:
            for start in {0, most - rows}:
                part = slice(start, start + rows)
                q, w = queries[:batch, part].contiguous(), weights[:batch, part].contiguous()
                same = _same(torch.bmm(q, keys[:batch].transpose(1, 2)), scores[:batch, part])
                if not same or not _same(torch.bmm(w, keys[:batch]), values[:batch, part]):
                    return (
                        f"attention (head size {shape.padded_head_size}): a row has other bits in {batch} matrices of "
                        f"{rows} rows than in {max(_BATCHES)} of {most}"
                    )
    return None


def probe_elementwise(hidden_size: int) -> str | None:
    """Compare exp, tanh, norms and sums of few elements or rows with those of the whole, at many places."""
    generator = torch.Generator().manual_seed(0)
    flat = _random(generator, 1 << 16) * 8
    for name, function in (("exp", torch.exp), ("tanh", torch.tanh)):
        for dtype in (torch.float32, torch.bfloat16):
            found = _probe_elements(function, flat.to(dtype))
            if found is not None:
                return f"{name} in {dtype}: {found}"
    rows, weight = _random(generator, _MOST_ROWS, hidden_size), _random(generator, hidden_size)
    found = _probe_rows(lambda part: elementwise.rms_norm(part, weight, 1e-6), rows)
    if found is not None:
        return f"rms_norm (hidden size {hidden_size}): {found}"
    found = _probe_rows(lambda part: part.sum(-1), _random(generator, _MOST_ROWS, KEY_TILE))
    return None if found is None else f"sum: {found}"


def probe_norm_heads(shape: AttentionShape) -> str | None:
    """Compare norms of the heads of tokens among few others with those among many."""
    generator = torch.Generator().manual_seed(0)
    heads = shape.num_heads + 2 * shape.num_kv_heads
    qkv, weight = _random(generator, _MOST_ROWS, heads * shape.padded_head_size), _random(generator, shape.head_size)
    found = _probe_rows(lambda part: elementwise.norm_heads(part.clone(), weight, weight, 1e-6, shape), qkv)
    return None if found is None else f"norm_heads (head size {shape.head_size}): {found}"


def _probe_elements(function: Callable[[Tensor], Tensor], flat: Tensor) -> str | None:
    """Compare function of short stretches of flat, at any alignment, with those parts of its whole."""
    expected = function(flat)
    for length in (1, 3, 7, 15, 17, 31, 33, 100):
        for start in range(length, 2000, 211):
            part = slice(start, start + length)
            for few in (flat[part], flat[part].clone()):
                if not _same(function(few), expected[part]):
                    return f"an element has other bits among {length} than among {flat.numel()}"
    return None


def _probe_rows(function: Callable[[Tensor], Tensor], rows: Tensor) -> str | None:
    """Compare function of few rows with those rows of function of all."""
    expected, most = function(rows), rows.shape[0]
    for count in (2, 3, 16, 65):
        for start in (0, most - count):
            part = slice(start, start + count)
            if not _same(function(rows[part]), expected[part]):
                return f"a row has other bits among {count} rows than among {most}"
    return None
