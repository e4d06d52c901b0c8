"""Products with weights in few bits whose rows have the same bits beside any other rows: of `--numerics exact`.

The weight's numbers are rounded to 16 bits, whatever the number of rows, and multiplied as in `product`: the weight's
rows are the M of the instruction, columns are added in ascending order, in parts by the weight's shape. So rows that
are many may be multiplied with the widened weight by `product`, where `gpu.exact.probe` has found that this gives the
same bits. Products of codes, scaled group by group, are not for this: they are not rounded to 16 bits.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from executor_svc.gpu.kernels.exact.tiles import EXPERT_ROWS, REFERENCE_ROWS, num_parts
from executor_svc.gpu.kernels.experts.blocks import RowBlocks
from executor_svc.gpu.kernels.few_bits.layout import FewBitsWeight
from executor_svc.gpu.kernels.few_bits.linear import COMMON, FewBitsTile, check_arguments, launch, variant_of
from executor_svc.gpu.kernels.variant import Variant

_TILES = tuple(
    FewBitsTile(rows=rows, num_warps=4, num_stages=3, programs_per_sm=0) for rows in (16, REFERENCE_ROWS, 128)
)


def few_bits_tiles() -> tuple[FewBitsTile, ...]:
    """Return the tiles, by rows, ascending."""
    return _TILES


def few_bits_parts(weight: FewBitsWeight) -> tuple[int, int]:
    """Return the number of parts of a product's columns, by the weight's shape, and the columns of all but the last."""
    layout = weight.layout
    part_steps = -(-layout.steps // num_parts(weight.rows, weight.columns))
    return -(-layout.steps // part_steps), part_steps * 2 * layout.half


def few_bits_sums_size(weight: FewBitsWeight) -> int:
    """Return the float32 numbers that `exact_few_bits` needs as workspace."""
    parts, _ = few_bits_parts(weight)
    return parts * _TILES[-1].rows * weight.rows if parts > 1 else 0


def exact_few_bits(
    x: Tensor, weight: FewBitsWeight, bias: Tensor, out: Tensor, workspace: Tensor | None, tile: FewBitsTile
) -> None:
    """Write x @ weight.T + bias into out, summed in float32 and rounded once, as many rows at a time as a tile has.

    Arguments as of `linear_few_bits`, but of any number of rows and with `few_bits_sums_size` numbers of workspace;
    tile: of `few_bits_tiles`. Raises ValueError naming the argument.
    """
    check_arguments(x, weight, bias, out)
    parts, _ = few_bits_parts(weight)
    needed = few_bits_sums_size(weight)
    if needed and (workspace is None or workspace.dtype != torch.float32 or workspace.numel() < needed):
        raise ValueError(f"workspace: must be {needed} float32")
    for first in range(0, len(x), tile.rows):
        rows = slice(first, first + tile.rows)
        launch(x[rows], weight, bias, out[rows], workspace, tile, parts)


def exact_few_bits_of_experts(x: Tensor, weight: FewBitsWeight, bias: Tensor, out: Tensor, blocks: RowBlocks) -> None:
    """Write x @ weight[expert].T + bias[expert] into out for the rows of each block, of EXPERT_ROWS at most.

    Arguments as of `few_bits_of_experts`. Raises ValueError naming the argument.
    """
    check_arguments(x, weight, bias, out, weight.num_experts)
    if blocks.rows != EXPERT_ROWS:
        raise ValueError(f"blocks: must have up to {EXPERT_ROWS} rows, not {blocks.rows}")
    if len(x):
        tile = next(tile for tile in _TILES if tile.rows == EXPERT_ROWS)
        launch(x, weight, bias, out, None, tile, 1, blocks)


def variants() -> list[Variant]:
    """Return common formats with every tile, whole and in parts."""
    found = []
    for kind, tile, partial in product(COMMON, _TILES, (False, True)):
        variant = variant_of(kind, tile, "bf16", "fp32" if partial else "bf16", partial=partial)
        found.append(
            replace(
                variant,
                name=f"exact {variant.name}",
                products={90: frozenset({f"wgmma m64n{tile.rows}k16"}), 80: frozenset({"mma m16n8k16"})},
                quick=False,
            )
        )
    return [replace(found[2], quick=True), *found[:2], *found[3:]]
