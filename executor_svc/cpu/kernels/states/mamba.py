"""Terms of the rows of Mamba-2's recurrence: B and C in fp32, decays, steps (`terms.TermLayout`)."""

from __future__ import annotations

import math

from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import ITEM_BYTES, Dtype, Emitter, Int, Vec, pieces
from executor_svc.cpu.kernels.codegen.functions import exp, softplus, where
from executor_svc.cpu.kernels.states.terms import TermLayout
from executor_svc.plan.state_sizes import MambaState

_FLOAT = 4


def mamba_terms(code: Code, dtype: Dtype, shape: MambaState, limits: tuple[float, float]) -> str:
    """Add the kernel; returns its name.

    Items: one for each row. Arguments: rows, xbc and dt, each with the bytes from one of its rows to the next, decay
    and dt_bias [H], vectors and scalars of `TermLayout`, and the rows of each head there.
    """
    terms, size = TermLayout.of(shape), ITEM_BYTES[dtype]

    def body(
        emit: Emitter, item: Int, _: Int, __: Int, xbc: Int, stride: Int, dt: Int, dt_stride: Int, decay: Int,
        dt_bias: Int, vectors: Int, scalars: Int, height: Int,
    ) -> None:  # fmt: skip
        numbers = scalars + item * terms.scalar_bytes
        _steps(emit, dtype, terms, dt + item * dt_stride, (decay, dt_bias), limits, (numbers, height))
        first = xbc + item * stride + shape.heads * shape.head_size * size

        def group(index: Int, _: list[Vec]) -> None:
            key = first + index * (shape.state_size * size)
            product = _keys_and_queries(emit, dtype, terms, key, vectors + (index * height + item) * terms.vector_bytes)
            shared = shape.heads // shape.groups

            def head(which: Int, _: list[Vec]) -> None:
                emit.store(product, numbers + which * height * terms.scalar_bytes + 2 * _FLOAT, "float32", 1)

            emit.loop(index * shared, index * shared + shared, 1, head)

        emit.loop(0, shape.groups, 1, group)

    return code.kernel(f"mamba_terms_{dtype}_{terms}_{limits[0]}_{limits[1]}", 10, body)


def _steps(
    emit: Emitter, dtype: Dtype, terms: TermLayout, dt: Int, constants: tuple[Int, Int], limits: tuple[float, float],
    into: tuple[Int, Int],
) -> None:  # fmt: skip
    """Write the decays and the steps of all heads; into: scalars of the row, and the rows of each head there."""
    decay, dt_bias = constants
    (least, most), (scalars, height) = limits, into
    for offset, count in pieces(terms.shape.num_heads):
        rate, bias = (emit.load(each + offset * _FLOAT, "float32", count) for each in (decay, dt_bias))
        step = softplus(emit.load(dt + offset * ITEM_BYTES[dtype], dtype, count) + bias)
        step = _bounded(step, "<", least)
        if not math.isinf(most):
            step = _bounded(step, ">", most)
        terms.scatter(exp(step * rate), scalars, offset, height)
        terms.scatter(step, scalars + _FLOAT, offset, height)


def _bounded(step: Vec, beyond: str, limit: float) -> Vec:
    """Return the limit where a step is beyond it; NaN stays NaN."""
    emit = step.emit
    is_beyond = emit.builder.fcmp_ordered(beyond, step.value, emit.vec(limit).value)
    return where(emit, is_beyond, emit.vec(limit), step)


def _keys_and_queries(emit: Emitter, dtype: Dtype, terms: TermLayout, key: Int, vectors: Int) -> Vec:
    """Write B and C of a group; return their product."""
    shape, size = terms.shape, ITEM_BYTES[dtype]
    assert isinstance(shape, MambaState)
    query, total = key + shape.groups * shape.state_size * size, emit.vec(0.0)
    for offset, count in pieces(shape.state_size):
        found = [emit.load(each + offset * size, dtype, count) for each in (key, query)]
        total = found[0].times_plus(found[1], total)
        for which, each in enumerate(found):
            emit.store(each, vectors + (which * terms.unit.padded_rows + offset) * _FLOAT, "float32")
    return total.total()
