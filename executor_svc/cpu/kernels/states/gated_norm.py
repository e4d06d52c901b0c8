"""RMS norms of groups of columns with a gate before or after them (`device.states.StateOperations.gated_norm`)."""

from __future__ import annotations

from dataclasses import dataclass

from executor_svc.cpu.kernels.activation import sigmoid, silu
from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import ITEM_BYTES, LANES, Dtype, Emitter, Int, Vec, pieces
from executor_svc.cpu.kernels.codegen.tiles import scratch
from executor_svc.cpu.kernels.norm import each_piece, sum_of_squares
from executor_svc.device.states import GatedNormKind

_FLOAT = 4


@dataclass(frozen=True, slots=True)
class GatedNorm:
    """What a kernel is made for."""

    kind: GatedNormKind
    width: int
    group: int
    shared: bool
    """Whether all groups have one weight."""
    eps: float
    parts: int = 1
    """Ranks that have parts of a group; with more than one, the group is all of the width."""

    def __str__(self) -> str:
        weight = "shared" if self.shared else "whole"
        parts = f"_{self.parts}" if self.parts > 1 else ""
        return f"{self.kind.replace(' ', '_')}_{self.width}_{self.group}_{weight}_{self.eps}{parts}"


def gated_norm(code: Code, dtype: Dtype, weight_dtype: Dtype, norm: GatedNorm) -> str:
    """Add the kernel; returns its name.

    Items: one for each row. Arguments: rows, x and the address of the first gate, each with the bytes from one of its
    rows to the next, weight, y [rows, width]; if ranks have parts of groups, the address of the first row's sum of
    squares, float32, and the bytes to the next row's.
    """
    size, weight_size = ITEM_BYTES[dtype], ITEM_BYTES[weight_dtype]
    activate = sigmoid if norm.kind == "norm then sigmoid" else silu

    def body(
        emit: Emitter, item: Int, _: Int, __: Int, x: Int, stride: Int, gate: Int, gate_stride: Int, weight: Int,
        y: Int, *sums: Int,
    ) -> None:  # fmt: skip
        numbers = scratch(emit, len(pieces(norm.group)) * LANES * _FLOAT)

        def group(index: Int, _: list[Vec]) -> None:
            first = index * norm.group
            source, gates = x + item * stride + first * size, gate + item * gate_stride + first * size
            into = y + (item * norm.width + first) * size
            factors = weight if norm.shared else weight + first * weight_size

            def activated(offset: Int, count: int) -> Vec:
                return activate(emit.load(gates + offset * size, dtype, count))

            _read(emit, dtype, norm, source, gates, numbers)
            if norm.parts > 1:
                squares = emit.load_all(sums[0] + item * sums[1], "float32")
            else:
                squares = sum_of_squares(emit, numbers, "float32", norm.group)
            mean = squares / float(norm.group * norm.parts)
            inverse = emit.vec(1.0) / (mean + norm.eps).sqrt()
            between: Dtype = dtype if weight_dtype == dtype else "float32"

            def write(offset: Int, count: int) -> None:
                normed = (emit.load(numbers + offset * _FLOAT, "float32") * inverse).rounded(between)
                factor = emit.load(factors + offset * weight_size, weight_dtype, count)
                scaled = (normed * factor).rounded(between)
                result = scaled if norm.kind == "silu then norm" else scaled * activated(offset, count)
                emit.store(result, into + offset * size, dtype, count)

            each_piece(emit, norm.group, write)

        emit.loop(0, norm.width // norm.group, 1, group)

    return code.kernel(f"gated_norm_{dtype}_{weight_dtype}_{norm}", 9 if norm.parts > 1 else 7, body)


def gated_squares(code: Code, dtype: Dtype, norm: GatedNorm, columns: int, own: int) -> str:
    """Add the kernel of a rank's sums of squares in a group that others have parts of, too; returns its name.

    columns: the groups of all ranks; own: the one of this rank. Items: one for each row. Arguments: rows, x and the
    address of the first gate, each with the bytes from one of its rows to the next, sums [rows, columns] float32, which
    are 0 for the other groups.
    """

    def body(
        emit: Emitter, item: Int, _: Int, __: Int, x: Int, stride: Int, gate: Int, gate_stride: Int, sums: Int
    ) -> None:
        numbers = scratch(emit, len(pieces(norm.group)) * LANES * _FLOAT)
        _read(emit, dtype, norm, x + item * stride, gate + item * gate_stride, numbers)
        found = sum_of_squares(emit, numbers, "float32", norm.group)
        for column in range(columns):
            number = found if column == own else emit.vec(0.0)
            emit.store(number, sums + item * (columns * _FLOAT) + column * _FLOAT, "float32", 1)

    return code.kernel(f"gated_squares_{dtype}_{norm}_{columns}_{own}", 6, body)


def _read(emit: Emitter, dtype: Dtype, norm: GatedNorm, source: Int, gates: Int, numbers: Int) -> None:
    """Write what is normalized of a group to numbers, float32."""
    size = ITEM_BYTES[dtype]

    def read(offset: Int, count: int) -> None:
        number = emit.load(source + offset * size, dtype, count)
        if norm.kind == "silu then norm":
            number = number * silu(emit.load(gates + offset * size, dtype, count))
        emit.store(number, numbers + offset * _FLOAT, "float32")

    each_piece(emit, norm.group, read)
