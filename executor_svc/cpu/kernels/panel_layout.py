"""The layout of a weight's panels (`panels`): their sizes, and how kernels read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from llvmlite import ir
from torch import Tensor

from executor_svc.cpu.kernels.codegen.emit import LANES, Dtype, Emitter, Int, Vec

PANEL = 2 * LANES
"""Columns of the result that are computed together; rows of a panel of the weight."""

ROWS_AT_ONCE = 96
"""Rows of an item: their part of x stays in the L2 cache while panels are read."""

CACHE_LINE = 64
AHEAD = 4096
"""Bytes by which a thread prefetches ahead of what it reads: a page, where a processor's own reading ahead ends."""

FEW_ROWS = 2
"""Rows of an item, at most, for which memory sets the pace."""

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

    panel: Int
    """Of the weight."""
    first: Int
    """Row of x."""
    here: Int
    """Rows of x, at most ROWS_AT_ONCE."""
    left: Int
    """Columns of the result, PANEL but for a last panel that is not whole."""
    stream: Int
    is_last: Any
    """Condition: its stream has no further panel, and no further rows."""

    def coming(self, panel: Int, panel_bytes: Int, following: Int, stride: Int) -> Int:
        """Return what is prefetched while a panel is read, `prefetched` bytes for each step.

        For many rows that is the next panel: nothing else reads memory while tiles read this one from the cache. Few
        rows read on end, and so does the processor ahead of them; all that it needs is a line of the next page.

        following: where the weight of the following product begins, and stride: from the first panel of a stream there
        to that of the next, so that it does not begin with a cold cache.
        """
        place = following + self.stream * stride
        distance = panel.emit.integer(AHEAD).where(self.here.less(FEW_ROWS + 1), panel_bytes)
        return Int(panel.emit, panel.emit.builder.select(self.is_last, place.value, (panel + distance).value))


def panel_item(item: Int, rows: Int, columns: Int, streams: Int) -> PanelItem:
    """Return the work of an item: those of the first ROWS_AT_ONCE rows come first, one for each panel.

    Panels are divided into streams, one for each thread, which items take from in turn: what a thread reads probably
    goes on where it was, so that the processor reads ahead. With one stream, panel k is that of item k.
    """
    panels = (columns + (PANEL - 1)) // PANEL
    index, first = item % panels, item // panels * ROWS_AT_ONCE
    stream = streams - 1 - index % streams
    each, longer = panels // streams, streams - panels % streams  # from this one on streams have a panel more
    panel = stream * each + (stream - longer).most(0) + index // streams
    here, left = (rows - first).least(ROWS_AT_ONCE), (columns - panel * PANEL).least(PANEL)
    builder = item.emit.builder
    ends = builder.not_((index + streams).less(panels)), builder.not_((first + ROWS_AT_ONCE).less(rows))
    return PanelItem(panel, first, here, left, stream, builder.and_(*ends))


def prefetched(rows: int, step_bytes: int) -> int:
    """Return the bytes that a tile of so many rows prefetches beside a step."""
    return CACHE_LINE if rows <= FEW_ROWS else step_bytes


class Coming(NamedTuple):
    """What the product before it prefetches of a weight: `following` and `stride` of `PanelItem.coming`."""

    address: int
    stride: int


def coming_of(panels: Tensor, streams: int) -> Coming:
    """Return that of a weight in panels [panels, ...] that is read in streams."""
    return Coming(panels.data_ptr(), len(panels) // streams * panels.stride(0) * panels.element_size())


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
