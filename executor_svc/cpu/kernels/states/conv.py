"""Causal depthwise convolutions on the CPU, with the ring of inputs that a sequence keeps (`device.states`).

An item is some channels of a sequence, all its rows: it alone reads and writes their columns of the ring. Each output
is one chain of fused multiply-adds, the oldest row first, so its bits do not depend on the step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from executor_svc.cpu.kernels.activation import silu
from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import ITEM_BYTES, LANES, Dtype, Emitter, Int, Vec, pieces
from executor_svc.cpu.kernels.codegen.functions import where
from executor_svc.cpu.kernels.states.plan import SequenceStep, UnitPlaces
from executor_svc.plan.state_sizes import ConvState

CHANNELS = 128
"""Channels of an item."""
_PAIR = 2 * LANES


@dataclass(frozen=True, slots=True)
class Convolution:
    """What a kernel is made for."""

    state: ConvState
    tail: int
    silu: bool
    biased: bool

    @property
    def blocks(self) -> int:
        """Items of a sequence."""
        return -(-self.state.channels // CHANNELS)

    def __str__(self) -> str:
        ends = ("_biased" if self.biased else "") + ("_silu" if self.silu else "")
        return f"{self.state.channels}_{self.state.width}_{self.tail}{ends}"


def causal_conv(code: Code, dtype: Dtype, conv: Convolution) -> str:
    """Add the kernel; returns its name.

    Items: one for each block of channels of each sequence of the plan. Arguments: items, the address of the first
    column of x, bytes from one of its rows to the next, y [rows, C], weight [W, C], bias [C] or 0, the pool, bytes of a
    page, places of units, table of the plan.
    """

    def body(
        emit: Emitter, item: Int, _: Int, __: Int, x: Int, stride: Int, y: Int, weight: Int, bias: Int, pool: Int,
        page_bytes: Int, places: Int, table: Int,
    ) -> None:  # fmt: skip
        step = SequenceStep.read(emit, table, item // conv.blocks)
        units, size, channels = UnitPlaces(pool, page_bytes, places), ITEM_BYTES[dtype], conv.state.channels
        rings = _Rings(emit, dtype, conv, step, units, x + step.row * stride, stride)
        out, first = y + step.row * (channels * size), item % conv.blocks * CHANNELS

        def some(offset: Int, vectors: int, count: int) -> None:
            at = offset * size
            columns = _Columns(emit, dtype, conv, vectors, count)
            columns.run(rings, at, out + at, weight + at, bias + at)

        _each_block(emit, channels, first, some)
        rings.update(lambda each: _each_block(emit, channels, first, each))

    return code.kernel(f"causal_conv_{dtype}_{conv}", 10, body)


def _each_block(emit: Emitter, channels: int, first: Int, body: Callable[[Int, int, int], None]) -> None:
    """Emit body(channel, vectors, count of the last vector) for the channels of an item, two vectors at a time."""
    whole = channels // _PAIR * _PAIR
    emit.loop(first, (first + CHANNELS).least(whole), _PAIR, lambda offset, _: body(offset, 2, LANES))

    def rest() -> None:
        for offset, count in pieces(channels - whole):
            body(emit.integer(whole + offset), 1, count)

    if whole < channels:
        emit.when(emit.integer(whole).less(first + CHANNELS), rest)


class _Columns:
    """A vector or a pair of vectors of channels; pairs are in the order of `load_row`."""

    def __init__(self, emit: Emitter, dtype: Dtype, conv: Convolution, vectors: int, count: int) -> None:
        self._emit, self._dtype, self._conv, self._vectors, self._count = emit, dtype, conv, vectors, count

    def load(self, address: Int) -> list[Vec]:
        if self._vectors == 1:
            return [self._emit.load(address, self._dtype, self._count)]
        return self._emit.load_row(address, self._dtype, self._vectors)

    def store(self, row: list[Vec], address: Int) -> None:
        if self._vectors == 1:
            self._emit.store(row[0], address, self._dtype, self._count)
        else:
            self._emit.store_row(row, address, self._dtype)

    def run(self, rings: _Rings, at: Int, y: Int, weight: Int, bias: Int) -> None:
        """Emit the outputs of all rows; at: bytes from the first channel."""
        emit, width = self._emit, self._conv.state.width
        row_bytes = self._conv.state.channels * ITEM_BYTES[self._dtype]
        taps = [self.load(weight + tap * row_bytes) for tap in range(width)]
        added = self.load(bias) if self._conv.biased else None
        before = [each for back in range(width - 1, 0, -1) for each in rings.before(self, back, at)]

        def row(index: Int, earlier: list[Vec]) -> list[Vec]:
            inputs = [*earlier, *self.load(rings.x + index * rings.stride + at)]
            self.store(self._outputs(taps, inputs, added), y + index * row_bytes)
            return inputs[self._vectors :]

        emit.loop(0, rings.step.rows, 1, row, before)

    def _outputs(self, taps: list[list[Vec]], inputs: list[Vec], added: list[Vec] | None) -> list[Vec]:
        found = []
        for which in range(self._vectors):
            total = self._emit.vec(0.0)
            for tap, own in zip(taps, inputs[which :: self._vectors], strict=True):
                total = own.times_plus(tap[which], total)
            if added is not None:
                total = total + added[which]
            found.append(silu(total.rounded(self._dtype)) if self._conv.silu else total)
        return found


class _Rings:
    """The rings of a sequence and of its saves."""

    def __init__(
        self,
        emit: Emitter,
        dtype: Dtype,
        conv: Convolution,
        step: SequenceStep,
        units: UnitPlaces,
        x: Int,
        stride: Int,
    ) -> None:
        self._emit, self._dtype, self._conv, self._units = emit, dtype, conv, units
        self.step, self.x, self.stride = step, x, stride
        self._own = units.address(emit, step.pages, 0)
        self._rows = conv.state.ring_rows(conv.tail)

    def before(self, columns: _Columns, back: int, at: Int) -> list[Vec]:
        """Return a row before the step's first: `back` positions before it; zeros before position 0."""
        position = self.step.context - back
        there, nothing = position.less(0), self._emit.vec(0.0)
        found = columns.load(self._place(self._own, position.most(0)) + at)
        return [where(self._emit, there, nothing, each) for each in found]

    def update(self, each_block: Callable[[Callable[[Int, int, int], None]], None]) -> None:
        """Emit the writes of saves, then those of the step's last rows."""
        emit, step = self._emit, self.step

        def copy(source: Int, target: Int) -> None:
            def some(offset: Int, vectors: int, count: int) -> None:
                columns, at = _Columns(emit, self._dtype, self._conv, vectors, count), offset * ITEM_BYTES[self._dtype]
                columns.store(columns.load(source + at), target + at)

            each_block(some)

        def save(position: Int, pages: Int) -> None:
            saved = self._units.address(emit, pages, 0)
            first = (position - (self._conv.state.width - 1)).most(0)

            def row(at: Int, _: list[Vec]) -> None:
                here = self.x + (at - step.context) * self.stride
                source = self._place(self._own, at).where(at.less(step.context), here)
                copy(source, self._place(saved, at))

            emit.loop(first, position, 1, row)

        step.each_save(emit, save)

        def last(index: Int, _: list[Vec]) -> None:
            copy(self.x + index * self.stride, self._place(self._own, step.context + index))

        emit.loop((step.rows - self._rows).most(0), step.rows, 1, last)

    def _place(self, ring: Int, position: Int) -> Int:
        """Return the address of a position's row in a ring."""
        return ring + position % self._rows * (self._conv.state.channels * ITEM_BYTES[self._dtype])
