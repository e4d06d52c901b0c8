"""Emits the numbers of codes in registers: floats, or pairs of bfloat16, which hold them exactly."""

from __future__ import annotations

from typing import Any

import torch
from llvmlite import ir

from executor_svc.cpu.kernels.codegen.emit import LANES, Emitter, Int, Vec, every
from executor_svc.cpu.kernels.codegen.isa import Isa
from executor_svc.cpu.kernels.quantized.layout import STEP, WORD_BYTES, WORD_PLANE_BYTES, PackedLayout, Plane, PlaneName
from executor_svc.device.dequantize import code_values
from executor_svc.device.stored_linear import QuantBlock, QuantFormat

_I8, _I16, _I32, _F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType()
_VI32, _VF32, _VI8, _VF16 = (ir.VectorType(element, LANES) for element in (_I32, _F32, _I8, ir.HalfType()))
_WORDS = ir.VectorType(_I16, 2 * LANES)
_HALF_BYTES = LANES * WORD_BYTES
_LOW_NIBBLES, _LOW_HALF, _HIGH_HALF = 0x000F000F, 0x0000FFFF, 0xFFFF0000
_E4M3_BITS, _E4M3_SCALE = 0x87F00000, 2.0**120
_E8M0_EXCEPTIONS = {0: 0x00400000, 255: 0x7FC00000}
"""2**-127 and NaN, as floats."""


class CodeValues:
    """Emits the numbers of the codes of steps of one format, for one function."""

    def __init__(self, emit: Emitter, layout: PackedLayout, isa: Isa, row: Int | None = None) -> None:
        """row: of the panel, from which the 16 rows of half 0 begin; None: from row 0."""
        self._emit, self._builder, self._row = emit, emit.builder, row
        self._layout, self._kind, self._isa = layout, layout.kind, isa
        self._words: dict[int, Any] = {}

    # ------------------------------------------------------------------ numbers of groups

    def group_numbers(self, name: PlaneName, head: Int, step: Int, group: int, half: int) -> Vec:
        """Return the scales or minimums of 16 rows of the panel: group of the step at `step`, whose head is at `head`.

        With super groups: sub scales times super scales, each product rounded.
        """
        planes = self._layout.planes
        plane = planes[name]
        place = self._place(plane, head, step, group, half)
        above = planes.get("super_scales" if name == "scales" else "super_minimums")
        if above is None:
            return self._load_scales(place)
        scales = self._load_scales(self._place(above, head, step, 0, half))
        return self._floats_of(self._builder.sext(self._load(place, _VI8), _VI32)) * scales

    def _place(self, plane: Plane, head: Int, step: Int, group: int, half: int) -> Int:
        lane = group * 2 * LANES + half * LANES
        place = (head if plane.in_head else step) + (plane.offset + lane * plane.item_bytes)
        return place if self._row is None else place + self._row * plane.item_bytes

    def _load_scales(self, place: Int) -> Vec:
        builder, scale = self._builder, self._kind.scale
        if scale == "float16":
            return Vec(self._emit, builder.fpext(self._load(place, _VF16), _VF32))
        if scale != "e8m0":
            return self._emit.load(place, scale)
        exponents = builder.zext(self._load(place, _VI8), _VI32)
        bits = builder.shl(exponents, every(23))
        for exponent, exception in _E8M0_EXCEPTIONS.items():
            bits = builder.select(builder.icmp_unsigned("==", exponents, every(exponent)), every(exception), bits)
        return Vec(self._emit, builder.bitcast(bits, _VF32))

    def zero_points(self, head: Int, step: Int, group: int, half: int) -> Any:
        """Return the zero points of 16 rows as 32-bit integers, or None for a format without them."""
        if self._kind.offsets != "zero_point":
            return None
        place = self._place(self._layout.planes["zero_points"], head, step, group, half)
        return self._builder.zext(self._load(place, _VI8), _VI32)

    # ------------------------------------------------------------------ codes

    def pair(self, step: Int, half: int, index: int, zeros: Any) -> Any:
        """Return the numbers of columns 2 * index and 2 * index + 1 of a step, as pairs of bfloat16 in 16 lanes."""
        builder, bits = self._builder, self._kind.bits
        if bits == 8:
            first, second = (
                builder.bitcast(self.floats(step, half, 2 * index + which, zeros).value, _VI32) for which in (0, 1)
            )
            return builder.or_(builder.lshr(first, every(16)), builder.and_(second, every(_HIGH_HALF)))
        word, byte, part = self._layout.place_of(2 * index)
        low_bits = self._layout.low_bits
        low = self._shifted(self._low_word(step, half, word), 8 * byte + low_bits * part)
        if not self._layout.high_words:
            if zeros is not None:
                both = builder.or_(zeros, builder.shl(zeros, every(16)))
                codes = builder.bitcast(builder.and_(low, every(_LOW_NIBBLES)), _WORDS)
                low = builder.bitcast(builder.sub(codes, builder.bitcast(both, _WORDS)), _VI32)
            return self._look_up_pairs(low)
        high = self._high_bits(step, half, word, byte, part)
        mask = 0x00010001 * (2**low_bits - 1)
        codes = builder.or_(builder.and_(low, every(mask)), builder.and_(high, every(mask ^ 0xFFFFFFFF)))
        return self._look_up_pairs(codes)

    def floats(self, step: Int, half: int, column: int, zeros: Any) -> Vec:
        """Return the numbers of a column of a step, in 16 lanes."""
        kind, builder = self._kind, self._builder
        word, byte, part = self._layout.place_of(column)
        low, low_bits = self._low_word(step, half, word), self._layout.low_bits
        if kind.values == "e4m3":
            moved = builder.ashr(builder.shl(low, every(24 - 8 * byte)), every(4))
            return Vec(self._emit, builder.bitcast(builder.and_(moved, every(_E4M3_BITS)), _VF32)) * _E4M3_SCALE
        if kind.bits == 8:
            return self._integers(low, 8 * byte, 0xFF, zeros)
        shift, mask = 8 * byte + low_bits * part, 2**low_bits - 1
        if not self._layout.high_words:
            if zeros is None and self._isa.has("avx512f"):
                return self._look_up(self._shifted(low, shift))
            if kind.values != "integer":
                return self._look_up_in_halves(self._shifted(low, shift))
            return self._integers(low, shift, mask, zeros)
        above = (2 ** (kind.bits - low_bits) - 1) << low_bits
        high = builder.and_(self._high_bits(step, half, word, byte, part), every(above))
        codes = builder.or_(builder.and_(self._shifted(low, shift), every(mask)), high)
        return (
            self._look_up(codes) if kind.bits <= 5 and self._isa.has("avx512f") else self._integers(codes, 0, -1, zeros)
        )

    def _integers(self, word: Any, shift: int, mask: int, zeros: Any) -> Vec:
        """Return the codes at a place of a word, less their zeros: without a shift where the float's exponent does."""
        builder = self._builder
        if mask != -1 and shift + mask.bit_length() == 32:
            word, shift = builder.lshr(word, every(shift)), 0
        elif mask != -1:
            word = builder.and_(word, every(mask << shift))
        floats = self._floats_of(word)
        if zeros is None:
            zero = self._emit.vec(-float(self._kind.zero))
        else:
            zero = Vec(self._emit, builder.fneg(self._floats_of(zeros).value))
        if shift:
            return floats.times_plus(2.0**-shift, zero)
        return floats + zero if zeros is not None or self._kind.zero else floats

    def _high_bits(self, step: Int, half: int, word: int, byte: int, part: int) -> Any:
        """Return high words with a code's high bits shifted to where its low bits end, and 16 above the next one's."""
        high_word, shift = self._layout.high_shift(word)
        place = self._layout.high_offset + high_word * WORD_PLANE_BYTES + half * _HALF_BYTES
        words = self._word(step, place)
        return self._shifted(words, shift + 8 * byte + (self._kind.bits - self._layout.low_bits) * part)

    def _low_word(self, step: Int, half: int, word: int) -> Any:
        return self._word(step, self._layout.low_offset + word * WORD_PLANE_BYTES + half * _HALF_BYTES)

    def start_step(self) -> None:
        """Discard the loaded words of the last step."""
        self._words.clear()

    def _word(self, step: Int, place: int) -> Any:
        if place not in self._words:
            first = step if self._row is None else step + self._row * WORD_BYTES
            self._words[place] = self._load(first + place, _VI32)
        return self._words[place]

    def _shifted(self, words: Any, right: int) -> Any:
        if not right:
            return words
        return self._builder.lshr(words, every(right)) if right > 0 else self._builder.shl(words, every(-right))

    # ------------------------------------------------------------------ tables

    def _look_up(self, codes: Any) -> Vec:
        """Return the numbers of codes in the low 2 to 5 bits, by AVX-512's permutations."""
        table = table_of(self._kind, self._kind.bits)
        table = table * max(1, LANES // len(table))
        halves = [ir.Constant(_VF32, table[start : start + LANES]) for start in range(0, len(table), LANES)]
        if len(halves) == 1:
            one = self._emit.declare("llvm.x86.avx512.permvar.sf.512", _VF32, [_VF32, _VI32])
            return Vec(self._emit, self._builder.call(one, [halves[0], codes]))
        two = self._emit.declare("llvm.x86.avx512.vpermi2var.ps.512", _VF32, [_VF32, _VI32, _VF32])
        return Vec(self._emit, self._builder.call(two, [halves[0], codes, halves[1]]))

    def _look_up_in_halves(self, codes: Any) -> Vec:
        """Return the numbers of codes in the low 4 bits, by AVX2's permutations of 8 numbers."""
        builder, eight = self._builder, LANES // 2
        floats, integers = ir.VectorType(_F32, eight), ir.VectorType(_I32, eight)
        table = table_of(self._kind, 4)
        permute = self._emit.declare("llvm.x86.avx2.permps", floats, [floats, integers])
        parts = []
        for start in (0, eight):
            lanes = ir.Constant(integers, list(range(start, start + eight)))
            own = builder.shuffle_vector(codes, codes, lanes)
            low, high = (
                builder.call(permute, [ir.Constant(floats, numbers), own]) for numbers in (table[:eight], table[eight:])
            )
            moved = builder.shl(own, ir.Constant(integers, [28] * eight))
            is_high = builder.icmp_signed("<", moved, ir.Constant(integers, [0] * eight))
            parts.append(builder.select(is_high, high, low))
        return Vec(self._emit, builder.shuffle_vector(*parts, ir.Constant(_VI32, list(range(LANES)))))

    def _look_up_pairs(self, codes: Any) -> Any:
        """Return the numbers of pairs of codes of 2 to 6 bits; the bits above an index of 5 bits do not matter."""
        signed = self._kind.offsets == "zero_point"
        table = (
            [float(each - 32 * (each > 15)) for each in range(32)] if signed else table_of(self._kind, self._kind.bits)
        )
        table = table * max(1, 2 * LANES // len(table))
        bits = torch.tensor(table, dtype=torch.bfloat16).view(torch.int16).tolist()
        parts = [ir.Constant(_WORDS, bits[start : start + 32]) for start in range(0, len(bits), 32)]
        index = self._builder.bitcast(codes, _WORDS)
        if len(parts) == 1:
            one = self._emit.declare("llvm.x86.avx512.permvar.hi.512", _WORDS, [_WORDS, _WORDS])
            found = self._builder.call(one, [parts[0], index])
        else:
            two = self._emit.declare("llvm.x86.avx512.vpermi2var.hi.512", _WORDS, [_WORDS, _WORDS, _WORDS])
            found = self._builder.call(two, [parts[0], index, parts[1]])
        return self._builder.bitcast(found, _VI32)

    # ------------------------------------------------------------------

    def _floats_of(self, integers: Any) -> Vec:
        return Vec(self._emit, self._builder.sitofp(integers, _VF32))

    def _load(self, address: Int, kind: Any) -> Any:
        loaded = self._builder.load(self._emit.pointer(address, kind))
        loaded.align = 1
        return loaded


def table_of(kind: QuantFormat, bits: int) -> list[float]:
    """Return the numbers of the first 2**bits codes of a format without zero points."""
    codes = torch.arange(2**bits, dtype=torch.uint8)[None]
    return code_values(QuantBlock(codes, torch.ones(1, 1)), kind)[0].tolist()


assert STEP == 2 * LANES
