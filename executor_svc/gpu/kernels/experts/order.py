"""Columns of routed rows in the order of their expert's weight (GPTQ's act-order)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from executor_svc.gpu.kernels.experts.blocks import RowBlocks, block_of
from executor_svc.gpu.kernels.rows import DTYPES, check, chunk_size, chunks, options, variant
from executor_svc.gpu.kernels.variant import Variant


@triton.jit
def _order_columns(x, orders, out, blocks, num_blocks, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """Write some columns of the rows of a block."""
    block = tl.program_id(1)
    if block >= tl.load(num_blocks):
        return
    expert, start, rows = block_of(blocks, block)
    columns = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    mask = columns < WIDTH
    source = tl.load(orders + expert * WIDTH + columns, mask, other=0)
    for lane in range(rows):
        first = (start + lane) * WIDTH
        tl.store(out + first + columns, tl.load(x + first + source, mask, other=0.0), mask)


def order_columns(x: Tensor, orders: Tensor, out: Tensor, blocks: RowBlocks) -> None:
    """Write x[r, orders[expert of r, j]] to out[r, j], for routed rows x [R, columns] in blocks.

    orders: [E, columns] int64. Raises ValueError naming the argument.
    """
    rows, width = x.shape
    check("x", x, (rows, width), *DTYPES)
    check("out", out, (rows, width), x.dtype)
    check("orders", orders, (len(orders), width), torch.int64)
    chunk = chunk_size(width)
    if rows:
        grid = chunks(width, chunk), blocks.most
        _order_columns[grid](x, orders, out, blocks.table, blocks.count, WIDTH=width, CHUNK=chunk, **options(chunk))


def variants() -> list[Variant]:
    """Return one width for each dtype of 16 bits."""
    found = []
    for dtype in ("bf16", "fp16"):
        pointers = {"x": f"*{dtype}", "orders": "*i64", "out": f"*{dtype}", "blocks": "*i32", "num_blocks": "*i32"}
        constants = {"WIDTH": 2048, "CHUNK": chunk_size(2048)}
        title = f"order_columns of experts hidden2048 {dtype}"
        found.append(variant(title, _order_columns, pointers, constants, options(constants["CHUNK"]), dtype == "bf16"))
    return found
