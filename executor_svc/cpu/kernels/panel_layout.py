"""The layout of a weight's panels (`panels`): their sizes, and how kernels read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from executor_svc.cpu.kernels.codegen.emit import LANES, Dtype, Emitter, Int, Vec

PANEL = 2 * LANES
"""Columns of the result that are computed together; rows of a panel of the weight."""

ROWS_AT_ONCE = 96
"""Rows of an item: their part of x stays in the L2 cache while panels are read."""

UNIT_BYTES = 4
"""Bytes of a unit: the numbers of one row that one operation multiplies (`inner_step`), in every dtype."""

_I32 = ir.IntType(32)
_VI32, _VF32 = ir.VectorType(_I32, LANES), ir.VectorType(ir.FloatType(), LANES)


def inner_step(dtype: Dtype) -> int:
    """Return the numbers of a row of x that one operation multiplies."""
    return 2 if dtype == "bfloat16" else 1


@dataclass(frozen=True, slots=True)
class PanelItem:
    """What an item of a product computes: some rows of x times a panel."""

    panels: Int
    """Of the weight."""
    panel: Int
    first: Int
    """Row of x."""
    here: Int
    """Rows of x, at most ROWS_AT_ONCE."""
    left: Int
    """Columns of the result, PANEL but for a last panel that is not whole."""


def panel_item(item: Int, rows: Int, columns: Int) -> PanelItem:
    """Return the work of an item: those of the first ROWS_AT_ONCE rows come first, one for each panel."""
    panels = (columns + (PANEL - 1)) // PANEL
    panel, first = item % panels, item // panels * ROWS_AT_ONCE
    here, left = (rows - first).least(ROWS_AT_ONCE), (columns - panel * PANEL).least(PANEL)
    return PanelItem(panels, panel, first, here, left)


def coming_panel(item: Int, ahead: Int, panels: Int, rows: Int, weight: Int, following: Int, panel_bytes: Int) -> Int:
    """Return the memory that a thread will probably need soon, which it prefetches while it computes an item.

    That is the panel of the item that is `ahead` items further. The last items have the beginning of the following
    product's weight, so that it does not begin with a cold cache.
    """
    place = item + ahead
    wrapped = (place % panels) * panel_bytes
    items = (rows + (ROWS_AT_ONCE - 1)) // ROWS_AT_ONCE * panels
    return wrapped + weight.where(place.less(items), following)


def load_weights(emit: Emitter, address: Int, dtype: Dtype) -> Any:
    """Load the weights of 16 columns for one step of K: floats, or pairs of bfloat16."""
    kind = _VF32 if dtype == "float32" else _VI32
    loaded = emit.builder.load(emit.pointer(address, kind))
    loaded.align = 4
    return loaded


def widened_weights(emit: Emitter, weights: Any, dtype: Dtype) -> list[Vec]:
    """Return loaded weights as floats: one vector, or those of a pair's first and second numbers."""
    if dtype == "float32":
        return [Vec(emit, weights)]
    shifted = emit.builder.shl(weights, ir.Constant(_VI32, [16] * LANES))
    masked = emit.builder.and_(weights, ir.Constant(_VI32, [0xFFFF0000] * LANES))
    return [Vec(emit, emit.builder.bitcast(each, _VF32)) for each in (shifted, masked)]
