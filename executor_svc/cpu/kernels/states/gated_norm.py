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

    def __str__(self) -> str:
        weight = "shared" if self.shared else "whole"
        return f"{self.kind.replace(' ', '_')}_{self.width}_{self.group}_{weight}_{self.eps}"


def gated_norm(code: Code, dtype: Dtype, weight_dtype: Dtype, norm: GatedNorm) -> str:
    """Add the kernel; returns its name.

    Items: one for each row. Arguments: rows, x and the address of the first gate, each with the bytes from one of its
    rows to the next, weight, y [rows, width].
    """
    size, weight_size = ITEM_BYTES[dtype], ITEM_BYTES[weight_dtype]
    activate = sigmoid if norm.kind == "norm then sigmoid" else silu

    def body(
        emit: Emitter, item: Int, _: Int, __: Int, x: Int, stride: Int, gate: Int, gate_stride: Int, weight: Int, y: Int
    ) -> None:
        numbers = scratch(emit, len(pieces(norm.group)) * LANES * _FLOAT)

        def group(index: Int, _: list[Vec]) -> None:
            first = index * norm.group
            source, gates = x + item * stride + first * size, gate + item * gate_stride + first * size
            into = y + (item * norm.width + first) * size
            factors = weight if norm.shared else weight + first * weight_size

            def activated(offset: Int, count: int) -> Vec:
                return activate(emit.load(gates + offset * size, dtype, count))

            def read(offset: Int, count: int) -> None:
                number = emit.load(source + offset * size, dtype, count)
                if norm.kind == "silu then norm":
                    number = number * activated(offset, count)
                emit.store(number, numbers + offset * _FLOAT, "float32")

            each_piece(emit, norm.group, read)
            mean = sum_of_squares(emit, numbers, "float32", norm.group) / float(norm.group)
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

    return code.kernel(f"gated_norm_{dtype}_{weight_dtype}_{norm}", 7, body)
