"""The models of instructions against this processor's own, to the bit: normal, subnormal and arbitrary numbers."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from llvmlite import ir

from executor_svc.cpu.kernels.codegen import tiles
from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import LANES, BfloatType, Emitter, Int, Vec
from executor_svc.cpu.kernels.codegen.isa import Isa, level
from executor_svc.cpu.kernels.codegen.team import KernelLaunch, LaunchProgram, Team
from executor_svc.cpu.kernels.quantized.vectors import Vectors
from tests.executor_svc.cpu.kernels.instructions import (
    Bits,
    Floats,
    Integers,
    dot_bytes,
    dot_pairs,
    fused,
    narrowed,
    same,
    tile_byte_product,
    tile_product,
)
from tests.executor_svc.cpu.kernels.processors import ISAS

COUNT = 64 * LANES
_RANDOM = np.random.default_rng(22)


def floats(scale: float) -> Floats:
    return (_RANDOM.standard_normal(COUNT) * scale).astype(np.float32)


def any_floats() -> Floats:
    """Return floats of random bits, NaN and infinity among them."""
    return _RANDOM.integers(0, 2**32, COUNT, dtype=np.uint32).view(np.float32)


def pairs(scale: float) -> Bits:
    return narrowed((_RANDOM.standard_normal(2 * COUNT) * scale).astype(np.float32))


def any_pairs() -> Bits:
    return _RANDOM.integers(0, 2**16, 2 * COUNT, dtype=np.uint16)


def on_processor(isa: Isa, operation: Callable[..., Vec], *inputs: Any) -> Floats:
    """Run operation(emitter, addresses of 64 bytes of each input), a vector of 16 floats, over whole inputs."""
    code, result = Code(isa), np.zeros(COUNT, np.float32)

    def body(emit: Emitter, item: Int, _: Int, __: Int, *addresses: Int) -> None:
        *sources, into = (address + item * (4 * LANES) for address in addresses)
        emit.store(operation(emit, *sources), into, "float32")

    name = code.kernel("tested", 2 + len(inputs), body)
    arguments = tuple(each.ctypes.data for each in (*inputs, result))
    LaunchProgram(Team(code, 1), [KernelLaunch(name, "items", 1, 1, arguments)]).run(items=COUNT // LANES)
    return result


def emit_fused(emit: Emitter, left: Int, right: Int, addend: Int) -> Vec:
    values = [emit.load(address, "float32") for address in (left, right, addend)]
    return values[0].times_plus(values[1], values[2])


def emit_dot(emit: Emitter, total: Int, left: Int, right: Int) -> Vec:
    kind, wide = ir.VectorType(BfloatType(), 2 * LANES), ir.VectorType(ir.FloatType(), LANES)
    dot = emit.declare("llvm.x86.avx512bf16.dpbf16ps.512", wide, [wide, kind, kind])
    loaded = [emit.builder.load(emit.pointer(address, kind)) for address in (left, right)]
    for each in loaded:
        each.align = 2
    return Vec(emit, emit.builder.call(dot, [emit.load(total, "float32").value, *loaded]))


FUSED = {
    "normal": lambda: (floats(1), floats(1), floats(1)),
    "cancelled": lambda: (floats(1), np.ones(COUNT, np.float32), floats(2.0**-24)),
    "subnormal": lambda: (floats(2.0**-63), floats(2.0**-63), floats(2.0**-127)),
    "tiny products": lambda: (floats(2.0**-100), floats(2.0**-40), floats(2.0**-127)),
    "any": lambda: (any_floats(), any_floats(), any_floats()),
}
DOTS = {
    "normal": lambda: (floats(1), pairs(1), pairs(1)),
    "subnormal totals": lambda: (floats(2.0**-127), pairs(2.0**-63), pairs(2.0**-63)),
    "subnormal factors": lambda: (floats(2.0**-20), pairs(2.0**-127), pairs(2.0**106)),
    "any": lambda: (any_floats(), any_pairs(), any_pairs()),
}


@pytest.mark.parametrize("numbers", FUSED)
@pytest.mark.parametrize("isa", ISAS)
def test_fused_multiply_add(isa: str, numbers: str) -> None:
    inputs = FUSED[numbers]()
    assert same(on_processor(ISAS[isa], emit_fused, *inputs), fused(*inputs))


@pytest.mark.skipif("avx512-bf16" not in ISAS, reason="no AVX512-BF16 here")
@pytest.mark.parametrize("numbers", DOTS)
def test_dot_product_of_pairs(numbers: str) -> None:
    inputs = DOTS[numbers]()
    found = on_processor(level("avx512-bf16"), emit_dot, *inputs)
    assert same(found, dot_pairs(*inputs))
    if numbers == "normal":
        swapped = [each.reshape(-1, 2)[:, ::-1].reshape(-1) for each in inputs[1:]]
        assert not same(found, dot_pairs(inputs[0], *swapped)), "the order within a pair must show"


def any_bytes(kind: type[np.int8] | type[np.uint8], count: int = 4 * COUNT) -> Any:
    """Return random bytes, a third of them at the ends."""
    ends = np.array([np.iinfo(kind).min, np.iinfo(kind).max], kind)
    numbers = _RANDOM.integers(ends[0], int(ends[1]) + 1, count).astype(kind)
    return np.where(_RANDOM.random(count) < 1 / 3, _RANDOM.choice(ends, count), numbers)


def any_integers() -> Integers:
    return _RANDOM.integers(-(2**31), 2**31, COUNT).astype(np.int32)


@pytest.mark.parametrize("isa", [name for name, isa in ISAS.items() if isa.has("avx512vnni") or isa.has("avxvnni")])
def test_dot_product_of_bytes(isa: str) -> None:
    """Sums beyond 32 bits included, which wrap around."""
    lanes = 16 if ISAS[isa].has("avx512f") else 8

    def emit_bytes(emit: Emitter, total: Int, left: Int, right: Int) -> Vec:
        vectors, sums = Vectors(emit, lanes), []
        for at in range(0, 4 * LANES, 4 * lanes):
            given = vectors.load(total + at), *(vectors.load(each + at, vectors.bytes) for each in (left, right))
            name = f"llvm.x86.avx512.vpdpbusd.{32 * lanes}"
            sums.append(emit.builder.bitcast(vectors.call(name, vectors.integers, *given), vectors.floats))
        both = ir.Constant(ir.VectorType(ir.IntType(32), LANES), list(range(LANES)))
        return Vec(emit, sums[0] if len(sums) == 1 else emit.builder.shuffle_vector(*sums, both))

    inputs = any_integers(), any_bytes(np.uint8), any_bytes(np.int8)
    found = on_processor(ISAS[isa], emit_bytes, *inputs).view(np.int32)
    assert np.array_equal(found, dot_bytes(*inputs))
    assert not np.array_equal(found, dot_bytes(inputs[0], inputs[2].view(np.uint8), inputs[1].view(np.int8)))


def test_byte_products_of_single_numbers() -> None:
    """The left factor of VPDPBUSD is unsigned; right tiles are signed or not; sums wrap around at 32 bits."""
    ones = np.array([0xFF, 0, 0, 0], np.uint8)
    assert dot_bytes(np.array([5], np.int32), ones, ones.view(np.int8)).tolist() == [5 - 255]
    assert dot_bytes(np.array([2**31 - 1], np.int32), np.full(4, 1, np.uint8), np.full(4, 1, np.int8)).tolist() == [
        -(2**31) + 3
    ]
    left, right = np.arange(8, dtype=np.int8)[None], np.zeros((2, 8), np.int8)
    right[0, 5], right[1, 2] = -1, 3  # column 1 times x[1], column 0 times x[6]
    assert tile_byte_product(np.zeros((1, 2), np.int32), left, right).tolist() == [[18, -1]]
    assert tile_byte_product(np.zeros((1, 2), np.int32), left, right.view(np.uint8)).tolist() == [[18, 255]]


@pytest.mark.skipif("amx" not in ISAS, reason="no AMX here")
@pytest.mark.parametrize("kind", [np.int8, np.uint8])
@pytest.mark.parametrize(("rows", "words"), [(16, 16), (16, 8), (7, 4), (1, 1)])
def test_tile_product_of_bytes(kind: type[np.int8] | type[np.uint8], rows: int, words: int) -> None:
    left, right = any_bytes(np.int8, rows * 4 * words).reshape(rows, -1), any_bytes(kind, words * 64).reshape(words, -1)
    total = any_integers()[: rows * 16].reshape(rows, 16)
    wanted, found = tile_byte_product(total, left, right), total.copy()

    def body(emit: Emitter, item: Int, _: Int, __: Int, *places: Int) -> None:
        heights, widths = (rows, rows, *[words] * 6), (64, 4 * words, *[64] * 6)
        tiles.configure(emit, tiles.scratch(emit, 64), heights, widths)
        for tile, (place, width) in enumerate(zip(places, widths, strict=False)):
            tiles.load(emit, tile, place, width)
        tiles.add_int8_product(emit, 0, 1, 2, unsigned=kind is np.uint8)
        tiles.store(emit, 0, places[0], 64)
        tiles.release(emit)

    code = Code(ISAS["amx"])
    name = code.kernel("tested", 4, body)
    places = tuple(each.ctypes.data for each in (found, left, right))
    LaunchProgram(Team(code, 1), [KernelLaunch(name, "items", 1, 1, places)]).run(items=1)
    assert np.array_equal(found, wanted)


def test_a_sum_is_rounded_once() -> None:
    """Against exact fractions, where float64 would round a second time."""
    one, small = np.float32(1), np.float32(2.0**-12)
    left, right = one + small, one + small  # 1 + 2^-11 + 2^-24: half way between floats
    for addend, expected in ((2.0**-80, 1 + 2.0**-11 + 2.0**-23), (-(2.0**-80), 1 + 2.0**-11), (0.0, 1 + 2.0**-11)):
        found = fused(np.array([left]), np.array([right]), np.array([addend], np.float32))
        exact = Fraction(float(left)) * Fraction(float(right)) + Fraction(addend)
        assert found[0] == expected
        assert abs(Fraction(float(found[0])) - exact) <= Fraction(1, 2**24)


def test_a_tile_product_sums_even_and_odd_places_apart() -> None:
    """From zero, and adds the sum to the total last: 2^25 swallows a 1 that comes alone, not all of them at once."""
    ones, total = narrowed(np.ones((1, 32), np.float32)), np.full((1, 16), 2.0**25, np.float32)
    right = narrowed(np.ones((16, 32), np.float32))
    assert tile_product(total, ones, right).tolist() == [[2.0**25 + 32] * 16]
    assert dot_pairs(total[:, :1], ones[:, :2], ones[:, :2]).tolist() == [[2.0**25]]
    left = np.zeros((1, 32), np.float32)
    left[0, 0], left[0, 1], left[0, 2] = 2.0**24, 1.0, -(2.0**24)  # the 1 has the odd places for itself
    assert tile_product(np.zeros((1, 16), np.float32), narrowed(left), right).tolist() == [[1.0] * 16]
    left[0, 1], left[0, 4] = 0.0, 2.0**-10
    assert tile_product(np.zeros((1, 16), np.float32), narrowed(left), right).tolist() == [[2.0**-10] * 16]
    left[0, 2], left[0, 4], left[0, 6] = 1.0, -(2.0**24), 0.0  # one after the other, the 1 is lost
    assert tile_product(np.zeros((1, 16), np.float32), narrowed(left), right).tolist() == [[0.0] * 16]


def test_a_tile_product_has_no_subnormal_numbers() -> None:
    """Neither as factors, nor as products, nor in the total, nor as a result."""
    zeros, ones = np.zeros((1, 16), np.float32), narrowed(np.ones((16, 32), np.float32))
    left = np.zeros((1, 32), np.float32)
    left[0, 0] = 2.0**-127
    assert tile_product(zeros, narrowed(left), narrowed(np.full((16, 32), 2.0**100, np.float32))).tolist() == [
        [0.0] * 16
    ]
    left[0, 0], left[0, 2] = 2.0**-126, -1.5 * 2.0**-126
    assert tile_product(zeros, narrowed(left), ones).view(np.uint32).tolist() == [[0x0] * 16]
    assert tile_product(np.full((1, 16), 2.0**-127, np.float32), narrowed(left * 0), ones).tolist() == [[0.0] * 16]
    left[0, 2] = 0.0
    assert tile_product(zeros, narrowed(left), ones).tolist() == [[2.0**-126] * 16]
