"""The integers of a panel's codes in registers, as products with int8 activations read them, and numbers of groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from executor_svc.cpu.kernels.codegen.emit import Int
from executor_svc.cpu.kernels.quantized.int8_dots import Method
from executor_svc.cpu.kernels.quantized.layout import WORD_BYTES, WORD_PLANE_BYTES, PackedLayout
from executor_svc.cpu.kernels.quantized.vectors import Vectors
from executor_svc.device.stored_linear import QuantFormat

_TWICE_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_PAIR_MASK = 0x00FF00FF


def _table_of(kind: QuantFormat) -> tuple[int, ...]:
    """Return the integers of codes, none where the codes are integers."""
    return _TWICE_E2M1 if kind.values == "e2m1" else kind.table


def most_code(kind: QuantFormat) -> int:
    """Return the largest unsigned number that stands for a code."""
    table = _table_of(kind)
    return max(table) - min(table) if table else 2**kind.bits - 1


def zero_of(kind: QuantFormat) -> int:
    """Return the unsigned number that stands for 0, in a format without zero points."""
    table = _table_of(kind)
    return -min(table) if table else kind.zero


def byte_kind(kind: QuantFormat) -> Literal["signed", "unsigned"] | None:
    """Return the bytes that codes less their zeros are; None where they have more than 8 bits."""
    if kind.offsets == "zero_point":
        return "signed" if kind.bits < 8 else None
    least, most = -zero_of(kind), most_code(kind) - zero_of(kind)
    return "signed" if least >= -128 and most <= 127 else "unsigned" if least >= 0 else None


@dataclass(frozen=True, slots=True)
class PanelStep:
    """A step of a panel and the same step of some rows of x, by their addresses."""

    head: Int
    step: Int
    rows: list[Int]


class PanelCodes:
    """Emits the loads of a panel's numbers, for `vectors.lanes` columns at a time; `at` is the vector in the panel."""

    def __init__(self, vectors: Vectors, layout: PackedLayout, how: Method) -> None:
        self._vectors = vectors
        self._builder = vectors.emit.builder
        self._layout = layout
        self._kind = layout.kind
        self._how = how
        zero = zero_of(layout.kind)
        self._table = tuple(number + zero for number in _table_of(layout.kind))

    def words(self, place: PanelStep, word: int, at: int) -> tuple[Any, Any | None]:
        """Load a word of codes or low bits, and the word that has its high bits."""
        vectors, layout = self._vectors, self._layout
        lane = at * vectors.lanes * WORD_BYTES
        low = vectors.load(place.step + (layout.low_offset + word * WORD_PLANE_BYTES + lane))
        if not layout.high_words:
            return low, None
        which, _ = layout.high_shift(word)
        return low, vectors.load(place.step + (layout.high_offset + which * WORD_PLANE_BYTES + lane))

    def codes(self, words: tuple[Any, Any | None], word: int, part: int) -> Any:
        """Return four unsigned codes of each column as bytes, or two as 16-bit integers for `pairs`."""
        vectors, builder = self._vectors, self._builder
        if self._how != "pairs":
            return self._bytes(words, word, part)
        codes = self._bytes(words, word, part // 2)
        if part % 2:
            return builder.bitcast(self._shifted_shorts(codes), vectors.integers)
        return vectors.masked(codes, 0, _PAIR_MASK)

    def _bytes(self, words: tuple[Any, Any | None], word: int, part: int) -> Any:
        """Return the four unsigned codes in a part of each byte."""
        vectors, (low, high), low_bits = self._vectors, words, self._layout.low_bits
        if low_bits == 8:
            return low
        codes = vectors.masked(low, low_bits * part, 0x01010101 * (2**low_bits - 1))
        if high is not None:
            width = self._kind.bits - low_bits
            _, shift = self._layout.high_shift(word)
            mask = 0x01010101 * ((2**width - 1) << low_bits)
            codes = self._builder.or_(codes, vectors.masked(high, shift + width * part, mask))
        return vectors.looked_up(self._table, codes) if self._table else codes

    def numbers(self, place: PanelStep, name: str, group: int, at: int) -> Any:
        """Return the scales or minimums of a group as floats."""
        vectors, kind, builder = self._vectors, self._kind, self._builder
        address = self._plane(place, name, group, at)
        if kind.super_group is not None:
            numbers = builder.sitofp(vectors.load_bytes(address, signed=True), vectors.floats)
            return builder.fmul(numbers, vectors.load_scales(self._plane(place, f"super_{name}", 0, at), kind.scale))
        numbers = vectors.load_scales(address, kind.scale)
        return builder.fmul(numbers, vectors.every_float(0.5)) if kind.values == "e2m1" else numbers

    def zero_points(self, place: PanelStep, group: int, at: int) -> Any:
        """Return the zero points of a group as 32-bit integers."""
        return self._vectors.load_bytes(self._plane(place, "zero_points", group, at), signed=False)

    def _shifted_shorts(self, word: Any) -> Any:
        """Return the upper byte of each 16-bit number."""
        kind = self._vectors.shorts
        shift = self._builder.bitcast(self._vectors.every(0x00080008), kind)
        return self._builder.lshr(self._builder.bitcast(word, kind), shift)

    def _plane(self, place: PanelStep, name: str, group: int, at: int) -> Int:
        plane = next(each for key, each in self._layout.planes.items() if key == name)
        lane = group * plane.num_bytes // plane.groups + at * self._vectors.lanes * plane.item_bytes
        return (place.head if plane.in_head else place.step) + (plane.offset + lane)
