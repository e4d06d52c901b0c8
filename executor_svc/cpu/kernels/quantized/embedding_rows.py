"""Gathers rows of a packed weight by index, as numbers: the embeddings of a table in few bits."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import ITEM_BYTES, LANES, Dtype, Emitter, Int, Vec
from executor_svc.cpu.kernels.panel_layout import PANEL
from executor_svc.cpu.kernels.quantized.code_values import CodeValues
from executor_svc.cpu.kernels.quantized.few_rows import format_key
from executor_svc.cpu.kernels.quantized.layout import STEP, WORD_BYTES, WORD_PLANE_BYTES, PackedLayout

_I32 = ir.IntType(32)
_VI32, _VF32 = ir.VectorType(_I32, LANES), ir.VectorType(ir.FloatType(), LANES)
_SMALL_FLOATS = {"e2m1": (4, 22, 2.0**126), "e4m3": (8, 20, 2.0**120)}
"""Bits, the place of the lowest in a float, and the factor that makes up for the float's other exponent."""


def take_rows(code: Code, layout: PackedLayout, dtype: Dtype, scale: float) -> str:
    """Add the kernel y[i] = dequantized weight[ids[i]], rounded to dtype, times scale, rounded; returns its name.

    Items: one for each row of y. Arguments: rows, packed panels, ids [rows] int64, y [rows, columns].
    """
    size = ITEM_BYTES[dtype]

    def body(emit: Emitter, item: Int, _: Int, __: Int, packed: Int, ids: Int, y: Int) -> None:
        index, into = emit.load_int(ids + item * 8), y + item * (layout.columns * size)
        panel, row = packed + index // PANEL * layout.panel_bytes, index % PANEL
        values = CodeValues(emit, layout, code.isa, row)

        def one_step(number: Int, columns: int = STEP) -> None:
            head = panel + number // layout.steps_per_block * layout.block_bytes
            step = head + (number % layout.steps_per_block * layout.step_bytes + layout.head_bytes)
            for piece in range(-(-columns // LANES)):
                found = _piece(emit, layout, values, head, step, row, piece).rounded(dtype)
                place = into + number * (STEP * size) + piece * LANES * size
                emit.store(found if scale == 1.0 else found * scale, place, dtype, min(LANES, columns - piece * LANES))

        whole, rest = divmod(layout.columns, STEP)
        emit.loop(0, whole, 1, lambda number, _: one_step(number))
        if rest:
            one_step(emit.integer(whole), rest)

    name = f"take_rows_{format_key(layout)}_{layout.columns}_{dtype}_{scale}"
    return code.kernel(name, 4, body)


def _piece(emit: Emitter, layout: PackedLayout, values: CodeValues, head: Int, step: Int, row: Int, piece: int) -> Vec:
    """Return 16 numbers of a row of the panel: columns of a step."""
    group = piece * layout.groups_per_step // 2
    scale = values.group_numbers("scales", head, step, group, 0).lane(0)
    zeros = values.zero_points(head, step, group, 0)
    number = _numbers(emit, layout, _codes(emit, layout, step + row * WORD_BYTES, piece), zeros) * scale
    if "minimums" in layout.planes:
        number = number + values.group_numbers("minimums", head, step, group, 0).lane(0)
    return number


def _codes(emit: Emitter, layout: PackedLayout, words: Int, piece: int) -> Any:
    """Return 16 codes of a row as integers. words: the row's first word, as if the step began with words."""
    bits, builder = layout.kind.bits, emit.builder
    columns = range(piece * LANES, (piece + 1) * LANES)
    low_bits, places = layout.low_bits, [layout.place_of(column) for column in columns]
    low_places = [(word, 8 * byte + low_bits * part) for word, byte, part in places]
    low = _fields(emit, words + layout.low_offset, low_places, 2**low_bits - 1)
    if not layout.high_words:
        return low
    width, high_places = bits - low_bits, []
    for low_word, byte, part in places:
        word, shift = layout.high_shift(low_word)
        high_places.append((word, shift + low_bits + 8 * byte + width * part))
    high = _fields(emit, words + layout.high_offset, high_places, 2**width - 1)
    return builder.or_(low, builder.shl(high, ir.Constant(_VI32, [low_bits] * LANES)))


def _fields(emit: Emitter, words: Int, places: list[tuple[int, int]], mask: int) -> Any:
    """Return the bits of a mask at (word, shift) for each lane."""
    builder = emit.builder
    loaded = {
        word: builder.load(emit.pointer(words + word * WORD_PLANE_BYTES, _I32)) for word in {word for word, _ in places}
    }
    lanes: Any = ir.Constant(_VI32, ir.Undefined)
    for lane, (word, _) in enumerate(places):
        lanes = builder.insert_element(lanes, loaded[word], ir.Constant(_I32, lane))
    shifted = builder.lshr(lanes, ir.Constant(_VI32, [shift for _, shift in places]))
    return builder.and_(shifted, ir.Constant(_VI32, [mask] * LANES))


def _numbers(emit: Emitter, layout: PackedLayout, codes: Any, zeros: Any) -> Vec:
    """Return the numbers of codes; zeros: zero points, that of the row in the first lane, or None."""
    builder, kind = emit.builder, layout.kind
    if kind.values == "integer":
        floats = Vec(emit, builder.sitofp(codes, _VF32))
        return floats - (float(kind.zero) if zeros is None else Vec(emit, builder.sitofp(zeros, _VF32)).lane(0))
    if kind.values == "table":
        return _looked_up(emit, kind.table, codes)
    bits, place, factor = _SMALL_FLOATS[kind.values]
    magnitude = builder.and_(codes, ir.Constant(_VI32, [2 ** (bits - 1) - 1] * LANES))
    sign = builder.and_(
        builder.shl(codes, ir.Constant(_VI32, [32 - bits] * LANES)), ir.Constant(_VI32, [1 << 31] * LANES)
    )
    moved = builder.or_(builder.shl(magnitude, ir.Constant(_VI32, [place] * LANES)), sign)
    return Vec(emit, builder.bitcast(moved, _VF32)) * factor


def _looked_up(emit: Emitter, table: tuple[int, ...], codes: Any) -> Vec:
    """Return the numbers of a table at the places of codes, by one comparison for each."""
    builder, found = emit.builder, emit.vec(0.0).value
    for place, number in enumerate(table):
        here = builder.icmp_signed("==", codes, ir.Constant(_VI32, [place] * LANES))
        found = builder.select(here, emit.vec(float(number)).value, found)
    return Vec(emit, found)
