"""Vectors as wide as the level's registers, of columns of a panel: loads of the packed numbers, integer operations."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from executor_svc.cpu.kernels.codegen.emit import Emitter, Int, repeated
from executor_svc.cpu.kernels.codegen.isa import Isa
from executor_svc.device.stored_linear import ScaleType

_I8, _I16, _I32, _F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType()
_LEAST_E8M0_BITS = 0x00400000
"""2^-127, of exponent 0; the exponents above are those of normal floats."""
_INFINITY_BITS, _NAN_BITS = 0x7F800000, 0x7FC00000


def register_lanes(isa: Isa) -> int:
    """Return the 32-bit numbers of a register."""
    return 16 if isa.has("avx512f") else 8


class Vectors:
    """Emits operations on vectors of `lanes` 32-bit numbers."""

    def __init__(self, emit: Emitter, lanes: int) -> None:
        self.emit = emit
        self.lanes = lanes
        self.integers = ir.VectorType(_I32, lanes)
        self.floats = ir.VectorType(_F32, lanes)
        self.shorts = ir.VectorType(_I16, 2 * lanes)
        self.bytes = ir.VectorType(_I8, 4 * lanes)

    # ------------------------------------------------------------------ memory

    def load(self, address: Int, kind: Any | None = None) -> Any:
        """Load 32-bit integers, or a vector of another kind."""
        loaded = self.emit.builder.load(self.emit.pointer(address, kind or self.integers))
        loaded.align = 1
        return loaded

    def store(self, value: Any, address: Int) -> None:
        self.emit.builder.store(value, self.emit.pointer(address, value.type)).align = 4

    def load_all(self, address: Int, kind: Any = _I32) -> Any:
        """Load one 32-bit number into every lane."""
        number = self.emit.builder.load(self.emit.pointer(address, kind))
        number.align = 4
        nothing = ir.Constant(ir.VectorType(kind, self.lanes), ir.Undefined)
        one = self.emit.builder.insert_element(nothing, number, ir.Constant(_I32, 0))
        return self.emit.builder.shuffle_vector(one, nothing, repeated(self.integers, 0))

    def load_float(self, address: Int) -> Any:
        """Load one float into every lane."""
        return self.load_all(address, _F32)

    def load_bytes(self, address: Int, signed: bool) -> Any:
        """Load bytes as 32-bit integers."""
        loaded = self.load(address, ir.VectorType(_I8, self.lanes))
        extend = self.emit.builder.sext if signed else self.emit.builder.zext
        return extend(loaded, self.integers)

    def load_scales(self, address: Int, kind: ScaleType) -> Any:
        """Load numbers of a scale's type as floats."""
        builder = self.emit.builder
        if kind == "float32":
            return self.load(address, self.floats)
        if kind == "float16":
            return builder.fpext(self.load(address, ir.VectorType(ir.HalfType(), self.lanes)), self.floats)
        if kind == "bfloat16":
            wide = builder.zext(self.load(address, ir.VectorType(_I16, self.lanes)), self.integers)
            return builder.bitcast(builder.shl(wide, self.every(16)), self.floats)
        bits = builder.shl(self.load_bytes(address, signed=False), self.every(23))
        least = self.every(_LEAST_E8M0_BITS)
        bits = builder.select(builder.icmp_signed(">", bits, least), bits, least)
        is_nan = builder.icmp_signed("==", bits, self.every(_INFINITY_BITS))  # of exponent 255
        return builder.bitcast(builder.select(is_nan, self.every(_NAN_BITS), bits), self.floats)

    # ------------------------------------------------------------------ arithmetic

    def every(self, number: int) -> Any:
        return repeated(self.integers, number)

    def zeros(self) -> Any:
        return self.every(0)

    def every_float(self, number: float) -> Any:
        return repeated(self.floats, number)

    def fused(self, left: Any, right: Any, addend: Any) -> Any:
        """left * right + addend, rounded once."""
        return self.call(f"llvm.fma.v{self.lanes}f32", self.floats, left, right, addend)

    def masked(self, word: Any, shift: int, mask: int) -> Any:
        """Return word >> shift (to the left, if negative) & mask."""
        builder = self.emit.builder
        if shift > 0:
            word = builder.lshr(word, self.every(shift))
        elif shift < 0:
            word = builder.shl(word, self.every(-shift))
        return builder.and_(word, self.every(mask))

    def looked_up(self, table: tuple[int, ...], codes: Any) -> Any:
        """Replace each byte below 16 by the byte of a table."""
        name = "llvm.x86.avx512.pshuf.b.512" if self.lanes == 16 else "llvm.x86.avx2.pshuf.b"
        numbers = ir.Constant(self.bytes, list(table) * (self.lanes // 4))
        found = self.call(name, self.bytes, numbers, self.emit.builder.bitcast(codes, self.bytes))
        return self.emit.builder.bitcast(found, self.integers)

    def call(self, name: str, result: Any, *arguments: Any) -> Any:
        function = self.emit.declare(name, result, [each.type for each in arguments])
        return self.emit.builder.call(function, list(arguments))
