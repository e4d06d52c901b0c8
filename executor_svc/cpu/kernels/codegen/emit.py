"""A thin layer over llvmlite that lets kernels read like arithmetic: integers, vectors of 16 floats, loops.

LLVM may not change the order of floating-point operations, so a kernel's bits depend on its source only, not on the
width of the processor's vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from llvmlite import ir

LANES = 16
"""Floats of a vector: one AVX-512 register, two AVX2 registers, four NEON registers."""

_CACHE_LINE = 64

Dtype = Literal["float32", "bfloat16"]
ITEM_BYTES: dict[Dtype, int] = {"float32": 4, "bfloat16": 2}

_I1, _I16, _I32, _I64, _F32 = ir.IntType(1), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_VI16, _VI32, _VF32, _VI1 = (ir.VectorType(element, LANES) for element in (_I16, _I32, _F32, _I1))


class BfloatType(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite does not have."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BfloatType)

    def __hash__(self) -> int:
        return hash(BfloatType)


@dataclass(frozen=True, slots=True)
class Int:
    """A 64-bit integer: a count, an index, or an address in bytes."""

    emit: Emitter
    value: Any

    def __add__(self, other: Int | int) -> Int:
        return Int(self.emit, self.emit.builder.add(self.value, self.emit.integer(other).value))

    def __sub__(self, other: Int | int) -> Int:
        return Int(self.emit, self.emit.builder.sub(self.value, self.emit.integer(other).value))

    def __mul__(self, other: Int | int) -> Int:
        return Int(self.emit, self.emit.builder.mul(self.value, self.emit.integer(other).value))

    def __floordiv__(self, other: Int | int) -> Int:
        """Return the quotient of unsigned integers."""
        return Int(self.emit, self.emit.builder.udiv(self.value, self.emit.integer(other).value))

    def __mod__(self, other: Int | int) -> Int:
        """Return the remainder of unsigned integers."""
        return Int(self.emit, self.emit.builder.urem(self.value, self.emit.integer(other).value))

    def less(self, other: Int | int) -> Any:
        """Return the condition self < other, of signed integers."""
        return self.emit.builder.icmp_signed("<", self.value, self.emit.integer(other).value)

    def equals(self, other: Int | int) -> Any:
        """Return the condition self == other."""
        return self.emit.builder.icmp_signed("==", self.value, self.emit.integer(other).value)

    def where(self, condition: Any, other: Int | int) -> Int:
        """Return self if the condition holds, else other."""
        return Int(self.emit, self.emit.builder.select(condition, self.value, self.emit.integer(other).value))

    def least(self, other: Int | int) -> Int:
        other = self.emit.integer(other)
        return Int(self.emit, self.emit.builder.select(self.less(other), self.value, other.value))

    def most(self, other: Int | int) -> Int:
        other = self.emit.integer(other)
        return Int(self.emit, self.emit.builder.select(self.less(other), other.value, self.value))


@dataclass(frozen=True, slots=True)
class Vec:
    """A vector of LANES floats."""

    emit: Emitter
    value: Any

    def __add__(self, other: Vec | float) -> Vec:
        return Vec(self.emit, self.emit.builder.fadd(self.value, self.emit.vec(other).value))

    def __sub__(self, other: Vec | float) -> Vec:
        return Vec(self.emit, self.emit.builder.fsub(self.value, self.emit.vec(other).value))

    def __mul__(self, other: Vec | float) -> Vec:
        return Vec(self.emit, self.emit.builder.fmul(self.value, self.emit.vec(other).value))

    def __truediv__(self, other: Vec | float) -> Vec:
        return Vec(self.emit, self.emit.builder.fdiv(self.value, self.emit.vec(other).value))

    def times_plus(self, factor: Vec | float, addend: Vec | float) -> Vec:
        """self * factor + addend, rounded once."""
        return self.emit.call("llvm.fma.v16f32", self, self.emit.vec(factor), self.emit.vec(addend))

    def sqrt(self) -> Vec:
        return self.emit.call("llvm.sqrt.v16f32", self)

    def larger(self, other: Vec) -> Vec:
        """Return the larger of self and other; other, if self is NaN."""
        chosen = self.emit.builder.fcmp_ordered(">", self.value, other.value)
        return Vec(self.emit, self.emit.builder.select(chosen, self.value, other.value))

    def total(self) -> Vec:
        """Return the sum of all lanes, in every lane: halves are added, then quarters, and so on."""
        return self._fold(lambda left, right: left + right)

    def highest(self) -> Vec:
        """Return the maximum of all lanes, in every lane."""
        return self._fold(lambda left, right: left.larger(right))

    def _fold(self, combine: Callable[[Vec, Vec], Vec]) -> Vec:
        folded, distance = self, LANES // 2
        while distance:
            lanes = ir.Constant(_VI32, [lane ^ distance for lane in range(LANES)])
            other = self.emit.builder.shuffle_vector(folded.value, folded.value, lanes)
            folded, distance = combine(folded, Vec(self.emit, other)), distance // 2
        return folded

    def lane(self, index: int) -> Vec:
        """Return one lane's value in every lane."""
        lanes = repeated(_VI32, index)
        return Vec(self.emit, self.emit.builder.shuffle_vector(self.value, self.value, lanes))

    def rounded(self, dtype: Dtype) -> Vec:
        """Return the nearest value of dtype, as a float."""
        return self if dtype == "float32" else Vec(self.emit, self.emit.widened(self.emit.narrowed(self)))


class Emitter:
    """Writes the instructions of one function; created by `compiled.Code`."""

    def __init__(self, module: Any, function: Any) -> None:
        self.builder = ir.IRBuilder(function.append_basic_block("entry"))
        self._module = module
        self._function = function

    # ------------------------------------------------------------------ values

    def integer(self, value: Int | int) -> Int:
        return value if isinstance(value, Int) else Int(self, _integer(value))

    def vec(self, value: Vec | float) -> Vec:
        """Return a vector unchanged, or a number in every lane."""
        return value if isinstance(value, Vec) else Vec(self, repeated(_VF32, value))

    def call(self, intrinsic: str, *vectors: Vec) -> Vec:
        """Call an LLVM intrinsic from float vectors to a float vector."""
        return Vec(
            self, self.builder.call(self.declare(intrinsic, _VF32, [_VF32] * len(vectors)), [v.value for v in vectors])
        )

    def declare(self, name: str, result: Any, arguments: Sequence[Any]) -> Any:
        """Return a function of the module or of LLVM, declared once."""
        known = self._module.globals.get(name)
        return known or ir.Function(self._module, ir.FunctionType(result, arguments), name)

    # ------------------------------------------------------------------ control

    def loop(
        self,
        start: Int | int,
        stop: Int | int,
        step: int,
        body: Callable[[Int, list[Vec]], Sequence[Vec] | None],
        carried: Sequence[Vec] = (),
    ) -> list[Vec]:
        """Emit `for index in range(start, stop, step): carried = body(index, carried)`; return the last `carried`.

        Carried vectors may be of any type.
        """
        builder, before = self.builder, self.builder.block
        first, end = self.integer(start), self.integer(stop)
        header, inside, after = (self._function.append_basic_block(name) for name in ("header", "body", "after"))
        builder.branch(header)
        builder.position_at_end(header)
        index = builder.phi(_I64)
        phis = [builder.phi(vector.value.type) for vector in carried]
        index.add_incoming(first.value, before)
        for phi, initial in zip(phis, carried, strict=True):
            phi.add_incoming(initial.value, before)
        builder.cbranch(Int(self, index).less(end), inside, after)
        builder.position_at_end(inside)
        made = body(Int(self, index), [Vec(self, phi) for phi in phis]) or ()
        following, last = Int(self, index) + step, builder.block
        index.add_incoming(following.value, last)
        for phi, vector in zip(phis, made, strict=True):
            phi.add_incoming(vector.value, last)
        builder.branch(header)
        builder.position_at_end(after)
        return [Vec(self, phi) for phi in phis]

    def when(self, condition: Any, body: Callable[[], None]) -> None:
        """Emit body under a condition."""
        with self.builder.if_then(condition):
            body()

    # ------------------------------------------------------------------ memory

    def pointer(self, address: Int, kind: Any) -> Any:
        return self.builder.inttoptr(address.value, kind.as_pointer())

    def load_int(self, address: Int) -> Int:
        return Int(self, self.builder.load(self.pointer(address, _I64)))

    def load_int32(self, address: Int) -> Int:
        return Int(self, self.builder.sext(self.builder.load(self.pointer(address, _I32)), _I64))

    def load(self, address: Int, dtype: Dtype, count: int = LANES) -> Vec:
        """Read `count` consecutive numbers of dtype; further lanes are 0, without a read."""
        if count < LANES:
            return self.load_some(address, dtype, self.integer(count))
        raw = self.builder.load(self.pointer(address, _kind(dtype)))
        raw.align = ITEM_BYTES[dtype]
        return Vec(self, raw if dtype == "float32" else self.widened(raw))

    def load_row(self, address: Int, dtype: Dtype, vectors: int, order: Dtype | None = None) -> list[Vec]:
        """Read consecutive vectors, for `store_row`; order: the dtype in whose order they are, None: their own.

        In bfloat16 two vectors are the even and the odd numbers of their memory: one operation each instead of two.
        """
        pairs = vectors // 2 if (order or dtype) == "bfloat16" else 0
        found: list[Vec] = []
        for pair in range(pairs):
            if dtype == "float32":
                start = address + pair * 2 * LANES * ITEM_BYTES[dtype]
                both = [self.load(start + which * LANES * ITEM_BYTES[dtype], dtype) for which in range(2)]
                found += [self._taken(both, range(first, 2 * LANES, 2)) for first in range(2)]
                continue
            raw = self.builder.load(self.pointer(address + pair * 2 * LANES * ITEM_BYTES[dtype], _VI32))
            raw.align = ITEM_BYTES[dtype]
            bits = (self.builder.shl(raw, every(16)), self.builder.and_(raw, every(0xFFFF0000)))
            found += [Vec(self, self.builder.bitcast(each, _VF32)) for each in bits]
        rest = range(2 * pairs, vectors)
        return found + [self.load(address + which * LANES * ITEM_BYTES[dtype], dtype) for which in rest]

    def store_row(self, row: Sequence[Vec], address: Int, dtype: Dtype, order: Dtype | None = None) -> None:
        """Write vectors that are in the order of `load_row`, rounded to nearest even; order: as there."""
        pairs = len(row) // 2 if (order or dtype) == "bfloat16" else 0
        for pair in range(pairs):
            if dtype == "float32":
                both, start = row[2 * pair : 2 * pair + 2], address + pair * 2 * LANES * ITEM_BYTES[dtype]
                for half in range(2):
                    lanes = [
                        which + at for at in range(half * LANES // 2, (half + 1) * LANES // 2) for which in (0, LANES)
                    ]
                    self.store(self._taken(both, lanes), start + half * LANES * ITEM_BYTES[dtype], dtype)
                continue
            low, high = (self.builder.zext(self.narrowed(each), _VI32) for each in row[2 * pair : 2 * pair + 2])
            raw = self.builder.or_(low, self.builder.shl(high, every(16)))
            place = self.pointer(address + pair * 2 * LANES * ITEM_BYTES[dtype], _VI32)
            self.builder.store(raw, place).align = ITEM_BYTES[dtype]
        for which in range(2 * pairs, len(row)):
            self.store(row[which], address + which * LANES * ITEM_BYTES[dtype], dtype)

    def _taken(self, both: Sequence[Vec], lanes: Sequence[int]) -> Vec:
        """Return a vector of these lanes of two vectors, one behind the other."""
        first, second = both
        return Vec(self, self.builder.shuffle_vector(first.value, second.value, ir.Constant(_VI32, list(lanes))))

    def load_some(self, address: Int, dtype: Dtype, count: Int) -> Vec:
        """Read `count` numbers, a count known only at run time; it may be negative or more than LANES."""
        kind = _kind(dtype)
        function = self.declare(_masked("load", dtype), kind, [kind.as_pointer(), _I32, _VI1, kind])
        zeros = repeated(kind, 0.0 if dtype == "float32" else 0)
        size = ir.Constant(_I32, ITEM_BYTES[dtype])
        raw = self.builder.call(function, [self.pointer(address, kind), size, self.first(count), zeros])
        return Vec(self, raw if dtype == "float32" else self.widened(raw))

    def prefetch(self, address: Int, num_bytes: int, level: int = 1) -> None:
        """Prefetch memory into this level of cache."""
        kind = ir.IntType(8)
        function = self.declare("llvm.prefetch.p0", ir.VoidType(), [kind.as_pointer(), _I32, _I32, _I32])
        for offset in range(0, num_bytes, _CACHE_LINE):
            hints = [ir.Constant(_I32, value) for value in (0, 4 - level, 1)]  # to read, how near, data
            self.builder.call(function, [self.pointer(address + offset, kind), *hints])

    def load_all(self, address: Int, dtype: Dtype) -> Vec:
        """Read one number into every lane."""
        builder = self.builder
        if dtype == "float32":
            number = builder.load(self.pointer(address, _F32))
        else:
            bits = builder.zext(builder.load(self.pointer(address, _I16)), _I32)
            number = builder.bitcast(builder.shl(bits, ir.Constant(_I32, 16)), _F32)
        one = builder.insert_element(ir.Constant(_VF32, ir.Undefined), number, ir.Constant(_I32, 0))
        return Vec(self, one).lane(0)

    def store(self, vector: Vec, address: Int, dtype: Dtype, count: int = LANES) -> None:
        """Write the first `count` lanes as numbers of dtype, rounded to nearest even."""
        if count == 1 and dtype == "bfloat16":  # LLVM 22 compiles this masked store to 32 bits, 16 too many
            self._store_first(vector, address)
            return
        if count < LANES:
            self.store_some(vector, address, dtype, self.integer(count))
            return
        raw = vector.value if dtype == "float32" else self.narrowed(vector)
        self.builder.store(raw, self.pointer(address, _kind(dtype))).align = ITEM_BYTES[dtype]

    def store_some(self, vector: Vec, address: Int, dtype: Dtype, count: Int) -> None:
        """Write the first `count` lanes, a count known only at run time; it may be negative or more than LANES."""
        kind = _kind(dtype)
        raw = vector.value if dtype == "float32" else self.narrowed(vector)
        function = self.declare(_masked("store", dtype), ir.VoidType(), [kind, kind.as_pointer(), _I32, _VI1])
        size = ir.Constant(_I32, ITEM_BYTES[dtype])
        self.builder.call(function, [raw, self.pointer(address, kind), size, self.first(count)])

    def _store_first(self, vector: Vec, address: Int) -> None:
        number = self.builder.extract_element(self.narrowed(vector), ir.Constant(_I32, 0))
        self.builder.store(number, self.pointer(address, _I16)).align = ITEM_BYTES["bfloat16"]

    def scatter(self, vector: Vec, address: Int, stride_bytes: int, dtype: Dtype) -> None:
        """Write the lanes as numbers of dtype, stride_bytes apart."""
        raw = vector.value if dtype == "float32" else self.narrowed(vector)
        kind = _F32 if dtype == "float32" else _I16
        for lane in range(LANES):
            number = self.builder.extract_element(raw, ir.Constant(_I32, lane))
            self.builder.store(number, self.pointer(address + lane * stride_bytes, kind))

    def first(self, count: Int) -> Any:
        """Return a condition for each lane: whether it is below a count."""
        return self.builder.icmp_signed("<", self.lanes(), self.every(count))

    def lanes(self) -> Any:
        """Return 0 to LANES - 1, as 32-bit integers."""
        return ir.Constant(_VI32, list(range(LANES)))

    def every(self, number: Int) -> Any:
        """Return a number in every lane, as 32-bit integers."""
        nothing = ir.Constant(_VI32, ir.Undefined)
        one = self.builder.insert_element(nothing, self.builder.trunc(number.value, _I32), ir.Constant(_I32, 0))
        return self.builder.shuffle_vector(one, nothing, every(0))

    def widened(self, bits: Any) -> Any:
        """Convert bfloat16, as 16-bit integers, to floats."""
        wide = self.builder.shl(self.builder.zext(bits, _VI32), every(16))
        return self.builder.bitcast(wide, _VF32)

    def narrowed(self, vector: Vec) -> Any:
        """Convert floats to bfloat16, as 16-bit integers, to nearest even; NaN stays NaN."""
        builder = self.builder
        bits = builder.bitcast(vector.value, _VI32)
        odd = builder.and_(builder.lshr(bits, every(16)), every(1))
        rounded = builder.lshr(builder.add(bits, builder.add(odd, every(0x7FFF))), every(16))
        is_nan = builder.fcmp_unordered("uno", vector.value, vector.value)
        return builder.trunc(builder.select(is_nan, every(0x7FC0), rounded), _VI16)


def pieces(length: int) -> list[tuple[int, int]]:
    """Return (offset, count) of the vectors that cover `length` numbers; count is LANES, perhaps less for the last."""
    return [(start, min(LANES, length - start)) for start in range(0, length, LANES)]


def every(number: int) -> Any:
    """Return a 32-bit integer in every lane."""
    return repeated(_VI32, number)


def repeated(kind: Any, number: float) -> Any:
    """Return a number in every lane of a type of vectors."""
    return _repeated(kind, number, repr(number))


# A kernel has thousands of a few constants, and each would take longer to make and to write than an instruction.
@lru_cache(maxsize=4096)
def _integer(number: int) -> Any:
    return ir.Constant(_I64, number)


@lru_cache(maxsize=4096)
def _repeated(kind: Any, number: float, _: str) -> Any:
    """The last argument tells -0.0 from 0.0, and 1 from 1.0."""
    return ir.Constant(kind, [number] * kind.count)


def _kind(dtype: Dtype) -> Any:
    return _VF32 if dtype == "float32" else _VI16


def _masked(what: str, dtype: Dtype) -> str:
    return f"llvm.masked.{what}.v16{'f32' if dtype == 'float32' else 'i16'}.p0"
