"""A step of 32 columns of a product with int8 activations: integer sums, and their floats added to the totals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from executor_svc.cpu.kernels.codegen.emit import Int
from executor_svc.cpu.kernels.codegen.isa import Isa
from executor_svc.cpu.kernels.quantized.int8_codes import PanelCodes, PanelStep, byte_kind, most_code, zero_of
from executor_svc.cpu.kernels.quantized.int8_dots import Dots, Method, method
from executor_svc.cpu.kernels.quantized.layout import STEP, WORD_BYTES, PackedLayout
from executor_svc.cpu.kernels.quantized.row_steps import RowSteps
from executor_svc.cpu.kernels.quantized.vectors import Vectors
from executor_svc.device.stored_linear import QuantFormat

_ORDERS = {2: (0, 2, 1, 3), 4: (0, 4, 1, 5, 2, 6, 3, 7), 8: (0, 1, 2, 3)}
"""Of the columns of x, as the codes' bytes have them, by the low bits of a code."""
_ORDERS_IN_PAIRS = {4: (0, 1, 4, 5, 2, 3, 6, 7), 8: (0, 2, 1, 3)}
"""As the even bytes, then the odd ones have them."""


def has_int8(kind: QuantFormat, whole_row: bool) -> bool:
    """Return whether a format that the layout has is multiplied with int8 activations."""
    if kind.values == "e4m3" or (kind.offsets == "minimum" and kind.zero):
        return False
    return not whole_row or (kind.group >= STEP and kind.super_group is None)


def row_steps(isa: Isa, layout: PackedLayout, whole_row: bool) -> RowSteps:
    """Return the form of the rows of x that a packed weight multiplies."""
    kind = layout.kind
    how = method(isa, most_code(kind))
    order = (_ORDERS_IN_PAIRS if how == "pairs" else _ORDERS)[layout.low_bits]
    sum_of = min(kind.group, STEP)
    if whole_row:
        sum_of = 0 if layout.whole_row else kind.group
    tiled = _has_tiles(isa, layout, whole_row)
    if kind.offsets == "minimum":
        return RowSteps(order, 8, "scaled_sum", 1, sum_of, whole_row, tiled)
    zero = 1 if kind.offsets == "zero_point" else zero_of(kind)
    return RowSteps(order, 16 if how == "pairs" else 8, "sum", -zero, sum_of, whole_row, tiled)


def _has_tiles(isa: Isa, layout: PackedLayout, whole_row: bool) -> bool:
    """Return whether many rows go through tiles (`int8_tiles`)."""
    kind = layout.kind
    if not isa.has("amx-int8") or method(isa, most_code(kind)) == "pairs" or byte_kind(kind) is None:
        return False
    return not (whole_row and kind.offsets == "minimum") or layout.whole_row


class Totals:
    """The floats that become elements of the result: in registers, or in memory where those are too few."""

    def __init__(self, vectors: Vectors, values: list[Any], places: Sequence[Int] | None) -> None:
        """places: where the values are then."""
        self.values = list(values)
        self._vectors = vectors
        self._places = places

    def get(self, which: int) -> Any:
        if self._places is None:
            return self.values[which]
        return self._vectors.load(self._places[which], self._vectors.floats)

    def put(self, which: int, value: Any) -> None:
        if self._places is None:
            self.values[which] = value
        else:
            self._vectors.store(value, self._places[which])


class StepCodes(Protocol):
    """Emits the loads of a step's numbers, as `PanelCodes` does."""

    def words(self, place: PanelStep, word: int, at: int) -> tuple[Any, Any]: ...

    def codes(self, words: tuple[Any, Any], word: int, part: int) -> Any: ...

    def numbers(self, place: PanelStep, name: str, group: int, at: int) -> Any: ...

    def zero_points(self, place: PanelStep, group: int, at: int) -> Any: ...


class StepEmitter:
    """Emits the steps of a tile: some rows of x, and some vectors of a panel's columns.

    Sums and totals are in the order of rows, and of vectors within a row.
    """

    def __init__(
        self,
        vectors: Vectors,
        isa: Isa,
        layout: PackedLayout,
        steps: RowSteps,
        which: range,
        codes: StepCodes | None = None,
    ) -> None:
        """which: the vectors of the panel that the tile computes; codes: None: those of a packed panel."""
        self._vectors = vectors
        self._builder = vectors.emit.builder
        self._layout = layout
        self._kind = layout.kind
        self._steps = steps
        self._which = which
        self._how: Method = method(isa, most_code(layout.kind))
        self._codes: StepCodes = codes or PanelCodes(vectors, layout, self._how)

    def starts(self, place: PanelStep, group: int) -> list[Callable[[], Any]]:
        """Return functions that emit the initial values of a group's sums: minus the zero point times the sum of x."""
        vectors, kind = self._vectors, self._kind
        if kind.offsets == "minimum" or (kind.offsets == "none" and self._steps.times == 0):
            return [vectors.zeros] * (len(place.rows) * len(self._which))

        def start(row: Int, at: int) -> Any:
            offset = vectors.load_all(row + self._offset_at(group))
            if kind.offsets == "none":
                return offset
            return self._builder.mul(self._codes.zero_points(place, group, at), offset)

        return [partial(start, row, at) for row in place.rows for at in self._which]

    def products(self, place: PanelStep, group: int, starts: Sequence[Callable[[], Any]]) -> Dots:
        """Emit the integer products of a group's columns of the step."""
        dots = Dots(self._vectors, self._how, most_code(self._kind), starts)
        layout = self._layout
        count = layout.low_words // layout.groups_per_step
        size = STEP // layout.low_words * self._steps.bits // 8
        for word in range(group * count, (group + 1) * count):
            loaded = [self._codes.words(place, word, at) for at in self._which]
            for part in range(size // WORD_BYTES):
                codes = [self._codes.codes(words, word, part) for words in loaded]
                for row, address in enumerate(place.rows):
                    numbers = self._vectors.load_all(address + (word * size + part * WORD_BYTES))
                    for index, each in enumerate(codes):
                        dots.add(row * len(codes) + index, each, numbers)
        return dots

    def add_to_totals(self, place: PanelStep, group: int, sums: Callable[[int], Any], totals: Totals) -> None:
        """Add a group: its scale and the row's times the sums, and its minimum times the row's sum."""
        vectors, builder, minimums = self._vectors, self._builder, self._kind.offsets == "minimum"
        scales = [self._codes.numbers(place, "scales", group, at) for at in self._which]
        least = [self._codes.numbers(place, "minimums", group, at) for at in self._which] if minimums else []
        for row, address in enumerate(place.rows):
            scale = vectors.load_float(address + self._steps.scale_at)
            offset = vectors.load_float(address + self._offset_at(group)) if minimums else None
            for index in range(len(self._which)):
                which = row * len(self._which) + index
                wide = builder.sitofp(sums(which), vectors.floats)
                total = vectors.fused(builder.fmul(scales[index], scale), wide, totals.get(which))
                totals.put(which, vectors.fused(least[index], offset, total) if minimums else total)

    # ------------------------------------------------------------------

    def _offset_at(self, group: int) -> int:
        return self._steps.scale_at + 4 + 4 * (group if self._steps.num_offsets == 2 else 0)
