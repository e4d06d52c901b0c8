"""Terms of the gated delta rule's rows: normalized keys and queries, decays, strengths (`terms.TermLayout`)."""

from __future__ import annotations

from executor_svc.cpu.kernels.activation import sigmoid
from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import ITEM_BYTES, Dtype, Emitter, Int, Vec, pieces
from executor_svc.cpu.kernels.codegen.functions import exp, softplus
from executor_svc.cpu.kernels.norm import sum_of_squares
from executor_svc.cpu.kernels.states.terms import TermLayout
from executor_svc.plan.state_sizes import DeltaState

_FLOAT = 4
_L2_EPS = 1e-6


def delta_terms(code: Code, dtype: Dtype, shape: DeltaState) -> str:
    """Add the kernel; returns its name.

    Items: one for each row. Arguments: rows, qkv, gates and beta, each with the bytes from one of its rows to the next,
    decay [HV], dt_bias, vectors and scalars of `TermLayout`, and the rows of each head there.
    """
    terms, size = TermLayout.of(shape), ITEM_BYTES[dtype]

    def body(
        emit: Emitter, item: Int, _: Int, __: Int, qkv: Int, qkv_stride: Int, gates: Int, gate_stride: Int, beta: Int,
        beta_stride: Int, decay: Int, dt_bias: Int, vectors: Int, scalars: Int, height: Int,
    ) -> None:  # fmt: skip
        numbers = scalars + item * terms.scalar_bytes
        queries, gate = qkv + item * qkv_stride, gates + item * gate_stride
        _strengths(emit, dtype, terms, beta + item * beta_stride, numbers, height)
        if not terms.by_key:
            _decays(emit, dtype, terms, gate, (decay, dt_bias), numbers, height)

        def head(index: Int, _: list[Vec]) -> None:
            own = index if not terms.by_key else _key_head(shape, index)
            query = queries + own * (shape.key_size * size)
            key = query + shape.key_heads * shape.key_size * size
            place = vectors + (index * height + item) * terms.vector_bytes
            if terms.by_key:
                given = gate + index * (shape.key_size * size), dt_bias + index * (shape.key_size * _FLOAT)
                _decays_by_key(emit, dtype, terms, given, decay + index * _FLOAT, place)
            product = _keys_and_queries(emit, dtype, terms, query, key, place)
            for value_head in _value_heads(shape, terms, index):
                at = numbers + value_head * height * terms.scalar_bytes + 2 * _FLOAT
                emit.store(product, at, "float32", 1)

        emit.loop(0, terms.key_heads, 1, head)

    return code.kernel(f"delta_terms_{dtype}_{terms}", 12, body)


def _key_head(shape: DeltaState, value_head: Int) -> Int:
    return value_head % shape.key_heads if shape.tiled else value_head // (shape.value_heads // shape.key_heads)


def _value_heads(shape: DeltaState, terms: TermLayout, head: Int) -> list[Int]:
    """Return the heads whose matrices are multiplied with a head's vectors."""
    if terms.by_key:
        return [head]
    group = shape.value_heads // shape.key_heads
    return [head + which * shape.key_heads if shape.tiled else head * group + which for which in range(group)]


def _strengths(emit: Emitter, dtype: Dtype, terms: TermLayout, beta: Int, scalars: Int, height: Int) -> None:
    for offset, count in pieces(terms.shape.num_heads):
        strength = sigmoid(emit.load(beta + offset * ITEM_BYTES[dtype], dtype, count)).rounded(dtype)
        terms.scatter(strength, scalars + _FLOAT, offset, height)


def _decays(
    emit: Emitter,
    dtype: Dtype,
    terms: TermLayout,
    gates: Int,
    constants: tuple[Int, Int],
    scalars: Int,
    height: Int,
) -> None:
    """Write the decays of all heads."""
    decay, dt_bias = constants
    for offset, count in pieces(terms.shape.num_heads):
        rate, bias = (emit.load(each + offset * _FLOAT, "float32", count) for each in (decay, dt_bias))
        gate = emit.load(gates + offset * ITEM_BYTES[dtype], dtype, count)
        terms.scatter(exp(softplus(gate + bias) * rate), scalars, offset, height)


def _decays_by_key(
    emit: Emitter, dtype: Dtype, terms: TermLayout, given: tuple[Int, Int], decay: Int, vectors: Int
) -> None:
    """Write the decays of a head; given: its gates and biases."""
    gates, dt_bias = given
    rate = emit.load_all(decay, "float32")
    for offset, count in pieces(terms.unit.rows):
        gate = emit.load(gates + offset * ITEM_BYTES[dtype], dtype, count)
        bias = emit.load(dt_bias + offset * _FLOAT, "float32", count)
        decays = exp(softplus(gate + bias) * rate)
        emit.store(decays, vectors + terms.decay_offset + offset * _FLOAT, "float32")


def _keys_and_queries(emit: Emitter, dtype: Dtype, terms: TermLayout, query: Int, key: Int, vectors: Int) -> Vec:
    """Write a head's vectors; return the product of its key and query."""
    rows, size = terms.unit.rows, ITEM_BYTES[dtype]
    inverse = [
        emit.vec(1.0) / (sum_of_squares(emit, each, dtype, rows) + _L2_EPS).sqrt() for each in (key, query)
    ]  # fmt: skip
    total, scale = emit.vec(0.0), rows**-0.5
    for offset, count in pieces(rows):
        k, q = (
            emit.load(each + offset * size, dtype, count) * factor
            for each, factor in zip((key, query), inverse, strict=True)
        )
        q = q * scale
        total = k.times_plus(q, total)
        found = [k, q]
        if terms.by_key:
            decays = emit.load(vectors + terms.decay_offset + offset * _FLOAT, "float32")
            found = [k, decays, k * decays, q * decays]
        for which, each in enumerate(found):
            emit.store(each, vectors + (which * terms.unit.padded_rows + offset) * _FLOAT, "float32")
    return total.total()
