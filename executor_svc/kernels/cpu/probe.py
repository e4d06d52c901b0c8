"""Checks, on this very machine, of what same-row-same-bits rests on. Each returns what went wrong, or None.

Libraries choose code by processor, thread count and version, so what holds on one machine is measured on each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from executor_svc.kernels.cpu import elementwise
from executor_svc.kernels.cpu.attention_plan import tile_rows
from executor_svc.kernels.cpu.linear import CpuLinear
from executor_svc.kernels.interface import KEY_TILE, MIN_ROWS, AttentionShape

_ROW_COUNTS = (2, 3, 16, 17, 64, 129)
_BATCHES = (2, 3, 8, 17)


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
    """Compare exp, silu and norms of single elements and rows with those of the whole, at many places and lengths."""
    generator = torch.Generator().manual_seed(0)
    flat = _random(generator, 1 << 16) * 8
    expected = flat.exp()
    for length in (1, 3, 7, 15, 17, 31, 33, 100):
        for start in range(length, 2000, 211):
            if not _same(flat[start : start + length].clone().exp_(), expected[start : start + length]):
                return f"exp: an element has other bits among {length} than among {flat.numel()}"
    most = 129
    rows, weight = _random(generator, most, hidden_size), _random(generator, hidden_size)
    normed, summed = elementwise.rms_norm(rows, weight, 1e-6), rows[:, :KEY_TILE].contiguous().sum(-1)
    for count in (2, 3, 16, 65):
        for start in (0, most - count):
            part = rows[start : start + count].contiguous()
            if not _same(elementwise.rms_norm(part, weight, 1e-6), normed[start : start + count]):
                return (
                    f"rms_norm (hidden size {hidden_size}): a row has other bits among {count} rows than among {most}"
                )
            if not _same(part[:, :KEY_TILE].contiguous().sum(-1), summed[start : start + count]):
                return f"sum: a row has other bits among {count} rows than among {most}"
    return None
