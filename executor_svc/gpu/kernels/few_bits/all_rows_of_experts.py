"""Products of routed rows with experts in few bits: a program has all rows of a block, as in `all_rows`.

Columns are in one part, so a row's bits depend on it, on its expert and on the rows that a block of the step may have.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from executor_svc.device.stored_linear import QuantFormat
from executor_svc.gpu.kernels.experts.blocks import RowBlocks, block_of
from executor_svc.gpu.kernels.few_bits.all_rows import constants_of, sums_of_steps, variant_of, write_sums
from executor_svc.gpu.kernels.few_bits.all_rows_tiles import AllRowsTile, all_rows_tile
from executor_svc.gpu.kernels.few_bits.layout import FewBitsLayout, FewBitsWeight
from executor_svc.gpu.kernels.few_bits.linear import COMMON, RARE, check_arguments
from executor_svc.gpu.kernels.variant import Variant


@triton.jit
def _experts_all_rows(
    x, codes, high, numbers, zeros, above, bias, out, blocks, num_blocks,
    out_features, in_features, out_stride, steps, span, super_span,
    BITS: tl.constexpr, VALUES: tl.constexpr, ZERO: tl.constexpr, OFFSETS: tl.constexpr, PAIRED: tl.constexpr,
    SUPERS: tl.constexpr, GROUPS: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr, PACKED: tl.constexpr,
    WHOLE: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Compute FEATURES features of a block of up to ROWS rows, in the weight of its expert."""
    block = tl.program_id(1)
    if block >= tl.load(num_blocks):
        return
    expert, start, rows = block_of(blocks, block)
    row, feature = tl.arange(0, ROWS), tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    total = sums_of_steps(
        x + start * in_features, codes, high, numbers, zeros, above, rows, out_features, in_features, steps, span,
        super_span, expert * tl.cdiv(out_features, TILE), feature, row, 0, steps,
        BITS, VALUES, ZERO, OFFSETS, PAIRED, SUPERS, GROUPS, HALF, TILE, PACKED, WHOLE,
    )  # fmt: skip
    at = out + start * out_stride
    write_sums(total, bias + expert * out_features, at, feature, row, out_features, rows, out_stride)


def experts_all_rows(x: Tensor, weight: FewBitsWeight, bias: Tensor, out: Tensor, blocks: RowBlocks) -> None:
    """Write x @ weight[expert].T + bias[expert] into out for the rows of each block.

    Arguments as of `linear.few_bits_of_experts`. Raises ValueError naming the argument.
    """
    check_arguments(x, weight, bias, out, weight.num_experts)
    if not len(x):
        return
    layout, tile = weight.layout, all_rows_tile(blocks.rows, weight.layout.kind)
    _experts_all_rows[(-(-weight.rows // tile.features), blocks.most)](
        x,
        *weight.planes,
        bias,
        out,
        blocks.table,
        blocks.count,
        weight.rows,
        weight.columns,
        out.stride(0),
        layout.steps,
        layout.span,
        layout.super_span,
        **constants_of(layout, tile),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        maxnreg=tile.max_registers,
        enable_fp_fusion=False,
    )


_COLUMNS = 2048
_KINDS = (*COMMON[:6], *(kind for kind in RARE if kind.name == "mxfp4"))


def variants() -> list[Variant]:
    """Return formats that experts have, in blocks of many rows."""
    return [_variant(kind, all_rows_tile(rows, kind)) for kind in _KINDS for rows in (32, 64, 128)]


def _variant(kind: QuantFormat, tile: AllRowsTile) -> Variant:
    return variant_of(
        f"experts_all_rows {kind.name} rows{tile.rows}",
        _experts_all_rows,
        FewBitsLayout(kind, _COLUMNS),
        tile,
        ("*bf16", "*bf16"),
        {"blocks": "*i32", "num_blocks": "*i32"},
        no_spills=True,
        quick=kind.name == "mxfp4" and tile.rows == 32,
    )
