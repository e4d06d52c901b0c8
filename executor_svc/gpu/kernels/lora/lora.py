"""LoRA beside a linear, for a step whose rows have different adapters or none: two launches, `shrink` and `expand`."""

from __future__ import annotations

import torch
from torch import Tensor

from executor_svc.gpu.kernels.lora.expand import expand
from executor_svc.gpu.kernels.lora.places import RANKS, LoraPlaces, LoraShape
from executor_svc.gpu.kernels.lora.shrink import num_sums, shrink
from executor_svc.gpu.kernels.lora.tables import FEW_ROWS, RowTable
from executor_svc.gpu.kernels.rows import check_rows


def workspace_size(shape: LoraShape, max_rank: int, max_rows: int) -> int:
    """Return the float32 numbers that `add_lora` needs as workspace, for any number of rows up to max_rows."""
    ranks = len(shape.parts) * -(-max_rank // RANKS) * RANKS
    counts = (max_rows, min(max_rows, FEW_ROWS))
    return max(num_sums(rows, shape.in_features) * rows * ranks for rows in counts)


def add_lora(x: Tensor, places: LoraPlaces, table: RowTable, workspace: Tensor, y: Tensor) -> None:
    """Add scale * (x @ a.T @ b.T) of each row's adapter to y, summed in float32 and rounded once to the dtype of x.

    Rows without an adapter, and parts that a row's adapter does not have, are untouched. The bits of a row depend on
    its own x, y and adapter only: neither on other rows and their number, nor on places or the largest rank.

    Args:
        x: [R, in_features] in the dtype of the places, columns adjacent.
        places: of this linear.
        table: of these R rows, sorted for exactly as many.
        workspace: float32, `workspace_size` or more numbers, with any content. Other work on the same stream may
        share it.
        y: [R, out_features] in the dtype of x or float32, columns adjacent.

    Raises ValueError naming the argument.
    """
    num_rows, shape = x.shape[0], places.shape
    check_rows("x", x, places.a.dtype)
    check_rows("y", y, x.dtype, torch.float32)
    if x.shape[1] != shape.in_features or tuple(y.shape) != (num_rows, shape.out_features):
        raise ValueError(f"x {list(x.shape)}, y {list(y.shape)}: must be [R, in] and [R, out] of {shape}")
    places.check_table(table, num_rows)
    sums = num_sums(num_rows, shape.in_features)
    needed = sums * num_rows * places.num_parts * places.blocks * RANKS
    if workspace.dtype != torch.float32 or workspace.numel() < needed or not workspace.is_contiguous():
        raise ValueError(f"workspace: must be {needed} float32")
    if num_rows:
        shrink(x, places, table, workspace)
        expand(workspace, sums, places, table, y)
