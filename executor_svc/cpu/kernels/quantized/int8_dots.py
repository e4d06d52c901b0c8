"""Dot products of four unsigned codes and four int8 numbers in each 32-bit lane, as a level's instructions have them.

All are exact: the sum of a group fits 32 bits, and where an instruction adds in 16 bits, so few numbers are added that
it cannot saturate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from executor_svc.cpu.kernels.codegen.isa import Isa
from executor_svc.cpu.kernels.quantized.vectors import Vectors

Method = Literal["vnni", "bytes", "pairs"]
"""vnni: VPDPBUSD. bytes: VPMADDUBSW, sums of 16 bits. pairs: VPMADDWD of codes and numbers of 16 bits."""

_MOST = 127
_MOST_SHORT = 32767


def method(isa: Isa, most_code: int) -> Method:
    """Return how a level multiplies codes up to a largest one."""
    if isa.has("avx512vnni") or isa.has("avxvnni"):
        return "vnni"
    return "bytes" if words_in_short(most_code) else "pairs"


def words_in_short(most_code: int) -> int:
    """Return the words of four codes whose products can be added in 16 bits: each adds two to a 16-bit number."""
    return _MOST_SHORT // (2 * most_code * _MOST)


class Dots:
    """Sums of products in some lanes: one for each row of x and each vector of columns."""

    def __init__(self, vectors: Vectors, how: Method, most_code: int, starts: Sequence[Callable[[], Any]]) -> None:
        """starts: emit what each sum begins with, 32-bit integers, when it is needed: registers are few."""
        self._vectors = vectors
        self._how = how
        self._limit = words_in_short(most_code)
        self._starts = starts
        self._sums: list[Any | None] = [None] * len(starts)
        self._short: list[Any | None] = [None] * len(starts)
        self._added = [0] * len(starts)

    def add(self, place: int, codes: Any, numbers: Any) -> None:
        """Add the products of a word of codes and one of numbers; of 16-bit codes and numbers for `pairs`."""
        vectors, builder = self._vectors, self._vectors.emit.builder
        if self._how == "vnni":
            self._sums[place] = self._dot(self._sum(place), codes, numbers)
        elif self._how == "pairs":
            self._sums[place] = builder.add(self._pairs(codes, numbers), self._sum(place))
        else:
            name = "llvm.x86.avx512.pmaddubs.w.512" if vectors.lanes == 16 else "llvm.x86.avx2.pmadd.ub.sw"
            parts = [builder.bitcast(each, vectors.bytes) for each in (codes, numbers)]
            product, before = vectors.call(name, vectors.shorts, *parts), self._short[place]
            self._short[place] = product if before is None else builder.add(before, product)
            self._added[place] += 1
            if self._added[place] == self._limit:
                self._widen(place)

    def sum(self, place: int) -> Any:
        """Return a sum when all products are added."""
        self._widen(place)
        return self._sum(place)

    def _sum(self, place: int) -> Any:
        known = self._sums[place]
        return self._starts[place]() if known is None else known

    def _widen(self, place: int) -> None:
        short = self._short[place]
        if short is not None:
            ones = self._vectors.every(0x00010001)
            wide = self._pairs(self._vectors.emit.builder.bitcast(short, self._vectors.integers), ones)
            self._sums[place] = self._vectors.emit.builder.add(wide, self._sum(place))
            self._short[place], self._added[place] = None, 0

    def _pairs(self, left: Any, right: Any) -> Any:
        vectors = self._vectors
        name = "llvm.x86.avx512.pmaddw.d.512" if vectors.lanes == 16 else "llvm.x86.avx2.pmadd.wd"
        parts = [vectors.emit.builder.bitcast(each, vectors.shorts) for each in (left, right)]
        return vectors.call(name, vectors.integers, *parts)

    def _dot(self, total: Any, codes: Any, numbers: Any) -> Any:
        vectors = self._vectors
        name = f"llvm.x86.avx512.vpdpbusd.{32 * vectors.lanes}"
        parts = [vectors.emit.builder.bitcast(each, vectors.bytes) for each in (codes, numbers)]
        return vectors.call(name, vectors.integers, total, *parts)
