"""The launches of a linear whose weight is in parts: each writes its columns of the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from executor_svc.cpu.kernels.codegen.emit import Dtype
from executor_svc.cpu.kernels.codegen.team import KernelLaunch
from executor_svc.cpu.kernels.codegen.tiles import TILE_ROWS
from executor_svc.cpu.kernels.dense_launches import DTYPES, Host, RowForms, launch_product, row_forms
from executor_svc.cpu.kernels.matmul_tiles import Output, has_pairs
from executor_svc.cpu.kernels.panel_layout import ROWS_AT_ONCE, coming_of
from executor_svc.cpu.kernels.quantized import int8_product, products, rows_of_x
from executor_svc.cpu.kernels.quantized.files.panels import FilePanels
from executor_svc.cpu.kernels.quantized.layout import STEP, PackedLayout
from executor_svc.cpu.kernels.quantized.row_steps import RowSteps, quantize_rows, row_items
from executor_svc.cpu.kernels.rows import arrange
from executor_svc.device.kernels import GatedActivation


@dataclass(frozen=True, slots=True)
class PackedWeightPart:
    """Rows of a weight in few bits."""

    layout: PackedLayout
    packed: Tensor
    rows: int
    order: Tensor | None
    """[K] int64: the column of x for each column of the weight; None: the same."""
    int8: RowSteps | None = None
    """The int8 form of rows of x; None: they are multiplied as they are."""
    file: FilePanels | None = None
    """Of a weight in a file: `packed` has its address there, and nothing else of it."""
    file_scales: Tensor | None = None
    """Likewise, of scales that have a place of their own."""


@dataclass(frozen=True, slots=True)
class DensePart:
    """Rows of a weight in panels of the model's dtype, or of bfloat16 in a model of float32."""

    panels: Tensor
    rows: int
    file: FilePanels | None = None
    """As of `PackedWeightPart`."""
    file_dtype: torch.dtype | None = None
    """Of its numbers, where they are in a file."""

    @property
    def dtype(self) -> torch.dtype:
        return self.file_dtype or self.panels.dtype


Part = PackedWeightPart | DensePart


def part_streams(part: Part, num_threads: int) -> int:
    """Return the streams of a part's panels: one where each is made of a file for the item with its number."""
    return num_threads if part.file is None else 1


def may_be_gated(parts: Sequence[Part]) -> bool:
    """Return whether a linear reads rows as int8 numbers alone, in their order: it can make them of gate and up."""
    return all(
        isinstance(part, PackedWeightPart) and part.int8 is not None and part.order is None and not part.int8.whole_row
        for part in parts
    )


class PartLaunches:
    """One call of a linear: rows of x in the forms that its parts need are made once each, then all parts are products.

    Products run together, and so do conversions of x itself: a thread that has no more of one goes on with the next.
    """

    def __init__(
        self,
        host: Host,
        x: Tensor,
        bias: Tensor | None,
        y: Tensor,
        activation: GatedActivation | None = None,
    ) -> None:
        """activation: x has gate and up, of which it makes the rows; for parts that `may_be_gated` alone."""
        self._activation = activation
        self._host, self._x, self._bias, self._y = host, x, bias, y
        self._dtype = DTYPES[x.dtype]
        self._arranged: dict[tuple[int, Dtype, int], Tensor] = {}
        self._int8_rows: dict[tuple[RowSteps, int], tuple[Tensor, Tensor | None]] = {}
        self._sums: dict[tuple[int, int], Tensor] = {}
        self._forms: dict[torch.dtype, RowForms] = {}
        self._last: Literal["int8", "product"] | None = None
        """The last launch, if one that reads nothing of it may join it."""

    def run(self, parts: Sequence[Part]) -> None:
        """Launch all parts, which compute the columns of y in this order."""
        for part in parts:
            self._make_rows(part)
        first = 0
        for part in parts:
            if isinstance(part, PackedWeightPart) and part.int8 is not None:
                self._int8(part, part.int8, first)
            elif isinstance(part, PackedWeightPart):
                self._packed(part, first)
            else:
                self._dense(part, first)
            first += part.rows

    def _make_rows(self, part: Part) -> None:
        """Launch what makes the rows of x that a part's product reads, unless another part's has."""
        if not isinstance(part, PackedWeightPart):
            self._row_forms(part.dtype)
        elif part.int8 is not None:
            self._quantize(part.layout.columns, part.int8, part.order)
        else:
            x = self._arrange(part.layout, part.order)
            if part.layout.kind.offsets == "minimum":
                self._group_sums(part.layout, x, part.order)

    def _packed(self, part: PackedWeightPart, first: int) -> None:
        host, layout, y = self._host, part.layout, self._y
        code = host.code
        output = Output(self._dtype, DTYPES[y.dtype], self._bias is not None)
        x = self._arrange(layout, part.order)
        sums = self._group_sums(layout, x, part.order).data_ptr() if layout.kind.offsets == "minimum" else 0
        scratch = host.scratch(products.scratch_bytes(code, layout, self._dtype))
        kernel = products.product(code, layout, output)
        sizes = (layout.steps, part.rows, y.shape[1])
        places = (x.data_ptr(), part.packed.data_ptr(), y.data_ptr() + first * y.element_size())
        arguments = (*places, *sizes, self._bias_at(first), sums, scratch.data_ptr())
        self._product(kernel, arguments, part)

    def _int8(self, part: PackedWeightPart, steps: RowSteps, first: int) -> None:
        host, layout, y = self._host, part.layout, self._y
        output = Output(self._dtype, DTYPES[y.dtype], self._bias is not None)
        kernel = int8_product.int8_product(host.code, layout, steps, output)
        x, by_blocks = self._quantize(layout.columns, steps, part.order)
        num_bytes = int8_product.scratch_bytes(host.code, layout, steps)
        scratch = host.scratch(num_bytes).data_ptr() if num_bytes else 0
        places = (x.data_ptr(), part.packed.data_ptr(), y.data_ptr() + first * y.element_size())
        sizes = (y.shape[1] * y.element_size(), part.rows)
        blocks = (layout.num_blocks, layout.steps_per_block)
        beside = (0 if by_blocks is None else by_blocks.data_ptr(), scratch)
        self._product(kernel, (*places, *sizes, self._bias_at(first), *blocks, *beside), part)

    def _product(self, kernel: str, arguments: tuple[int, ...], part: PackedWeightPart) -> None:
        """Launch a product with a part in panels."""
        streams, panels = part_streams(part, self._host.num_threads), part.packed
        launch = KernelLaunch(kernel, "rows", ROWS_AT_ONCE, len(panels), (*arguments, streams))
        launch = replace(launch, joins=self._joins("product"))
        self._host.launch_product(launch, self._x.shape[0], coming_of(panels, streams))

    def _joins(self, kind: Literal["int8", "product"] | None) -> bool:
        """Return whether a launch joins the last one."""
        joins, self._last = kind is not None and kind == self._last, kind
        return joins

    def _launch(self, launch: KernelLaunch) -> None:
        self._joins(None)
        self._host.launch(launch, self._x.shape[0])

    def _quantize(self, columns: int, steps: RowSteps, order: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return rows of x as int8 numbers, in a part's order; [T, bytes of a row] uint8, and by blocks for tiles."""
        host = self._host
        key = steps, 0 if order is None else order.data_ptr()
        if key not in self._int8_rows:
            x = self._x if order is None else self._in_order(self._dtype, columns, order)
            name, rows = f"{len(self._int8_rows)}_{columns}", x.shape[0]
            y, by_blocks = host.new(f"int8_{name}", (rows, steps.row_bytes(columns)), torch.uint8), None
            if steps.tiled:
                shape = (-(-rows // TILE_ROWS), steps.block_bytes(columns))
                by_blocks = host.new(f"int8_blocks_{name}", shape, torch.uint8)
            kernel = quantize_rows(host.code, self._dtype, steps, self._activation)
            arguments = (x.data_ptr(), y.data_ptr(), columns, 0 if by_blocks is None else by_blocks.data_ptr())
            items = steps.rows_of_item, row_items(steps, columns)
            joins = self._joins("int8")
            host.launch(KernelLaunch(kernel, "rows", *items, arguments, joins=joins), x.shape[0])
            self._int8_rows[key] = y, by_blocks
        return self._int8_rows[key]

    def _dense(self, part: DensePart, first: int) -> None:
        host, x, y = self._host, self._x, self._y
        alone = part.rows == y.shape[1]
        into = y if alone else host.new(f"part_{first}_{part.rows}", (x.shape[0], part.rows), y.dtype)
        bias = None if self._bias is None else self._bias[first : first + part.rows]
        streams = part_streams(part, host.num_threads)
        rows = self._row_forms(part.dtype)
        launch_product(host, rows, part.panels, bias, into, streams, self._joins("product"))
        if not alone:
            target = y.data_ptr() + first * y.element_size()
            copied = (into.data_ptr(), target, part.rows, y.shape[1])
            kernel = rows_of_x.place_columns(host.code, DTYPES[y.dtype])
            self._launch(KernelLaunch(kernel, "rows", 1, 1, copied))

    def _row_forms(self, dtype: torch.dtype) -> RowForms:
        if dtype not in self._forms:
            self._forms[dtype] = row_forms(self._host, self._x, dtype)
            self._joins(None)
        return self._forms[dtype]

    def _bias_at(self, first: int) -> int:
        return 0 if self._bias is None else self._bias.data_ptr() + first * self._bias.element_size()

    def _arrange(self, layout: PackedLayout, order: Tensor | None) -> Tensor:
        """Return rows of x as a part's kernel reads them: in its order, with zeros up to whole steps."""
        host, x = self._host, self._x
        pairs, wide = has_pairs(host.code.isa, self._dtype), layout.steps * STEP
        out: Dtype = self._dtype if pairs else "float32"
        if order is None and out == self._dtype and wide == layout.columns:
            return x
        return self._in_order(out, wide, order)

    def _in_order(self, out: Dtype, wide: int, order: Tensor | None) -> Tensor:
        key = 0 if order is None else order.data_ptr(), out, wide
        if key not in self._arranged:
            self._arranged[key] = self._copied(out, wide, order)
        return self._arranged[key]

    def _copied(self, out: Dtype, wide: int, order: Tensor | None) -> Tensor:
        host, x = self._host, self._x
        dtype = torch.float32 if out == "float32" else x.dtype
        y = host.new(f"arranged_{len(self._arranged)}_{wide}", (x.shape[0], wide), dtype)
        kernel = arrange(host.code, self._dtype, out, order is not None)
        places = (x.data_ptr(), y.data_ptr(), 0 if order is None else order.data_ptr())
        self._launch(KernelLaunch(kernel, "rows", 1, 1, (*places, x.shape[1], wide)))
        return y

    def _group_sums(self, layout: PackedLayout, x: Tensor, order: Tensor | None) -> Tensor:
        """Return sums of rows of x, as `_arrange` leaves them, by group."""
        columns = x.shape[1] if layout.whole_row else layout.kind.group
        key = columns, 0 if order is None else order.data_ptr()
        if key not in self._sums:
            self._sums[key] = self._summed(x, columns)
        return self._sums[key]

    def _summed(self, x: Tensor, columns: int) -> Tensor:
        groups = x.shape[1] // columns
        sums = self._host.new(f"group_sums_{len(self._sums)}_{groups}", (x.shape[0], groups), torch.float32)
        kernel = rows_of_x.group_sums(self._host.code, DTYPES[x.dtype])
        arguments = (x.data_ptr(), sums.data_ptr(), groups, columns)
        self._launch(KernelLaunch(kernel, "rows", 1, 1, arguments))
        return sums
