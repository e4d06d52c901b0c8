"""Packs blocks of rows of weights in few bits into panels (`layout`)."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch
from llvmlite import ir
from torch import Tensor
from torch.nn import functional

from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import Emitter, Int
from executor_svc.cpu.kernels.panel_layout import PANEL
from executor_svc.cpu.kernels.quantized.layout import STEP, WORD_BYTES, WORD_PLANE_BYTES, PackedLayout, Plane
from executor_svc.device.dequantize import scales_marking_nan
from executor_svc.device.host_memory import new_weight_memory
from executor_svc.device.stored_linear import QuantBlock

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_ARGUMENTS = 7
_BYTES_OF_SCALES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def new_packed(rows: int, layout: PackedLayout) -> Tensor:
    """Return packed panels [rows / 32, panel bytes] uint8, all zeros."""
    shape = (-(-rows // PANEL), layout.panel_bytes)
    return new_weight_memory(shape[0] * shape[1]).view(shape)


class QuantPanelWriter:
    """Puts blocks of rows of one format into panels; any thread may do so."""

    def __init__(self, code: Code, layout: PackedLayout) -> None:
        self._layout = layout
        bits = layout.kind.bits
        name = code.function(f"pack_{bits}_bits", _ARGUMENTS, lambda emit, *args: _pack(emit, bits, *args))
        self._pack = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * _ARGUMENTS)(code.address(name))

    def write(self, packed: Tensor, first: int, block: QuantBlock) -> None:
        """Write a block as rows first to first + R of the weight."""
        layout = self._layout
        assert packed.shape[1] == layout.panel_bytes
        assert first + len(block) <= packed.shape[0] * PANEL
        assert block.codes.shape[1] == layout.columns
        missing = layout.steps * STEP - layout.columns
        codes = functional.pad(block.codes, (0, missing)) if missing else block.codes.contiguous()
        for panel, lane, start, count in _runs(first, len(block)):
            self._write_codes(packed, panel, lane, codes[start : start + count])
        for name, plane in layout.planes.items():
            numbers = getattr(block, name)
            assert numbers is not None, f"a block of {layout.kind.name} without {name}"
            if name == "scales":
                numbers = scales_marking_nan(block, layout.kind)
            self._write_plane(packed, plane, first, numbers)

    def _write_codes(self, packed: Tensor, panel: int, lane: int, codes: Tensor) -> None:
        layout = self._layout
        sizes = (layout.steps_per_block * layout.step_bytes, layout.head_bytes, layout.step_bytes)
        target = packed.data_ptr() + panel * layout.panel_bytes + layout.high_offset + lane * WORD_BYTES
        self._pack(codes.data_ptr(), target, len(codes), layout.steps, *sizes)

    def _write_plane(self, packed: Tensor, plane: Plane, first: int, numbers: Tensor) -> None:
        """Write numbers [R, groups] of a plane."""
        kind = _BYTES_OF_SCALES[plane.item_bytes]
        assert numbers.element_size() == plane.item_bytes
        target = self._places(packed, plane).view(kind)
        shape = target.shape[1:4]
        numbers = functional.pad(numbers.contiguous().view(kind), (0, shape.numel() - numbers.shape[1]))
        numbers = numbers.unflatten(1, tuple(shape))
        for panel, lane, start, count in _runs(first, len(numbers)):
            target[panel, ..., lane : lane + count] = numbers[start : start + count].permute(1, 2, 3, 0)

    def _places(self, packed: Tensor, plane: Plane) -> Tensor:
        """Return the bytes of a plane, [panels, blocks, steps or 1 of a head, groups, bytes of 32 rows]."""
        layout = self._layout
        blocks = packed.view(len(packed), layout.num_blocks, layout.block_bytes)
        if plane.in_head:
            heads = blocks[:, :, None, plane.offset : plane.offset + plane.num_bytes]
            head: Tensor = heads.unflatten(3, (1, plane.num_bytes))
            return head
        steps = blocks[:, :, layout.head_bytes :].unflatten(2, (layout.steps_per_block, layout.step_bytes))
        planes: Tensor = steps[..., plane.offset : plane.offset + plane.num_bytes].unflatten(3, (plane.groups, -1))
        return planes


def _runs(first: int, rows: int) -> Iterator[tuple[int, int, int, int]]:
    """Cut rows at panels: the panel, the lane of its first row, the first row, the number of rows."""
    start = 0
    while start < rows:
        panel, lane = divmod(first + start, PANEL)
        count = min(PANEL - lane, rows - start)
        yield panel, lane, start, count
        start += count


def _pack(
    emit: Emitter, bits: int, source: Int, target: Int, rows: Int, steps: Int, block_steps: Int, head: Int, step: Int
) -> None:
    """Emit: write the codes of rows of one panel, one byte each, as words.

    target: the row's first word, as if its step began with codes; block_steps: bytes of all steps of a block.
    """
    row_bytes = steps * STEP
    per_block = block_steps // step

    def pack_step(index: Int, _: object) -> None:
        into = target + index // per_block * (head + block_steps) + head + index % per_block * step

        def pack_row(row: Int, _: object) -> None:
            codes = source + row * row_bytes + index * STEP
            pack_words(emit, bits, codes, into + row * WORD_BYTES)

        emit.loop(0, rows, 1, pack_row)

    emit.loop(0, steps, 1, pack_step)


def pack_words(emit: Emitter, bits: int, codes: Int, target: Int) -> None:
    """Emit: write the words of 32 codes of one row."""
    builder = emit.builder
    if bits == 8:
        for word in range(STEP // 4):
            number = builder.load(emit.pointer(codes + word * 4, _I32))
            number.align = 1
            builder.store(number, emit.pointer(target + word * WORD_PLANE_BYTES, _I32)).align = WORD_BYTES
        return
    if bits < 4:
        _pack_quarters(emit, bits, codes, target)
        return
    width = bits - 4
    low_words, high_words = STEP // 8, width
    words = low_words // high_words if high_words else low_words
    high = [_I32(0) for _ in range(high_words)]
    for word in range(low_words):
        eight = builder.load(emit.pointer(codes + word * 8, _I64))
        eight.align = 1
        place = target + (high_words + word) * WORD_PLANE_BYTES
        builder.store(_nibbles(builder, eight), emit.pointer(place, _I32)).align = WORD_BYTES
        if high_words:
            parts = _nibbles(builder, builder.lshr(eight, _I64(4)))
            even = builder.and_(parts, _I32(0x01010101 * (2**width - 1)))
            odd = builder.and_(builder.lshr(parts, _I32(4 - width)), _I32(0x01010101 * ((2**width - 1) << width)))
            moved = builder.shl(builder.or_(even, odd), _I32(2 * width * (word % words)))
            high[word // words] = builder.or_(high[word // words], moved)
    for index, number in enumerate(high):
        builder.store(number, emit.pointer(target + index * WORD_PLANE_BYTES, _I32)).align = WORD_BYTES


def _pack_quarters(emit: Emitter, bits: int, codes: Int, target: Int) -> None:
    """Emit: write the words of 32 codes of 2 or 3 bits of one row."""
    builder, high, words = emit.builder, _I32(0), []
    for word in range(2):
        low = _I32(0)
        for part in range(4):
            four = builder.load(emit.pointer(codes + (word * 16 + part * 4), _I32))
            four.align = 1
            low = builder.or_(low, builder.shl(builder.and_(four, _I32(0x03030303)), _I32(2 * part)))
            more = builder.and_(builder.lshr(four, _I32(2)), _I32(0x01010101))
            high = builder.or_(high, builder.shl(more, _I32(4 * word + part)))
        words.append(low)
    for index, number in enumerate([high, *words] if bits == 3 else words):
        up = builder.shl(builder.and_(number, _I32(0x0000FF00)), _I32(8))
        down = builder.and_(builder.lshr(number, _I32(8)), _I32(0x0000FF00))
        ordered = builder.or_(builder.and_(number, _I32(0xFF0000FF)), builder.or_(up, down))
        builder.store(ordered, emit.pointer(target + index * WORD_PLANE_BYTES, _I32)).align = WORD_BYTES


def _nibbles(builder: ir.IRBuilder, eight: ir.Value) -> ir.Value:
    """Return the low nibbles of eight bytes: those of even bytes in the lower half, those of odd bytes in the upper."""
    halves = []
    for shift in (0, 8):
        spread = builder.and_(builder.lshr(eight, _I64(shift)), _I64(0x000F000F000F000F))
        for distance, mask in ((12, 0x000000FF000000FF), (24, 0xFFFF)):
            spread = builder.and_(builder.or_(spread, builder.lshr(spread, _I64(distance))), _I64(mask))
        halves.append(builder.trunc(spread, _I32))
    return builder.or_(halves[0], builder.shl(halves[1], _I32(16)))
