"""The weighted sum of what a token's experts returned, and what they read where weights multiply that."""

from __future__ import annotations

from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import ITEM_BYTES, Dtype, Emitter, Int, Vec
from executor_svc.cpu.kernels.codegen.functions import exp, where
from executor_svc.cpu.kernels.norm import each_piece


def spread(code: Code, dtype: Dtype, width: int, num_chosen: int) -> str:
    """Add the kernel that writes each token's row to its routed rows, times their weights, rounded; returns its name.

    Items: one for each token. Arguments: tokens, x [T, width], places [T, K] int64, weights [T, K] float32,
    y [T * K, width]. Choices at place -1 are another rank's.
    """
    size = ITEM_BYTES[dtype]

    def body(emit: Emitter, item: Int, _: Int, __: Int, x: Int, places: Int, weights: Int, y: Int) -> None:
        source = x + item * (width * size)
        for choice in range(num_chosen):
            at = item * num_chosen + choice
            place = emit.load_int(places + at * 8)
            target = y + place * (width * size)

            def write(at: Int = at, target: Int = target) -> None:
                weight = emit.load_all(weights + at * 4, "float32")

                def piece(offset: Int, count: int) -> None:
                    value = emit.load(source + offset * size, dtype, count) * weight
                    emit.store(value, target + offset * size, dtype, count)

                each_piece(emit, width, piece)

            emit.when(emit.builder.not_(place.less(0)), write)

    return code.kernel(f"spread_{dtype}_{width}_{num_chosen}", 5, body)


def combine(
    code: Code,
    dtype: Dtype,
    width: int,
    num_chosen: int,
    weighed: bool,
    rounded: bool,
    with_beside: bool,
    with_gate: bool,
    partial: bool = False,
) -> str:
    """Add the kernel y = sum of weight * row over a token's choices, in fp32 and in their order, rounded once.

    weighed: else all weights are 1; rounded: each product is rounded first. With `beside`, that is added; with a gate,
    its sigmoid multiplies it first. Items: one for each token. Arguments: tokens, rows [T * K, width], places [T, K]
    int64, weights [T, K] float32, beside [T, width], gate [T, 1], y [T, width]. Returns its name.

    partial: choices at place -1 are another rank's, beside and y are float32, and nothing but products is rounded.
    """
    size = ITEM_BYTES[dtype]
    around: Dtype = "float32" if partial else dtype

    def body(
        emit: Emitter, item: Int, _: Int, __: Int, rows: Int, places: Int, weights: Int, beside: Int, gate: Int, y: Int
    ) -> None:
        factor: Vec | None = None
        if with_gate:
            factor = emit.vec(1.0) / (exp(emit.load_all(gate + item * size, dtype) * -1.0) + 1.0)
            factor = factor.rounded(dtype)
        choices = range(num_chosen)
        at = [emit.load_int(places + (item * num_chosen + choice) * 8) for choice in choices]
        starts = [rows + (place.most(0) if partial else place) * (width * size) for place in at]
        shares = [emit.load_all(weights + (item * num_chosen + choice) * 4, "float32") for choice in choices]

        def piece(offset: Int, count: int) -> None:
            total: Vec | None = None
            for place, start, share in zip(at, starts, shares, strict=True):
                product = emit.load(start + offset * size, dtype, count)
                if weighed:
                    product = product * share
                    product = product.rounded(dtype) if rounded else product
                product = where(emit, place.less(0), emit.vec(0.0), product) if partial else product
                total = product if total is None else total + product
            assert total is not None
            into = (item * width + offset) * ITEM_BYTES[around]
            if with_beside:
                more = emit.load(beside + into, around, count)
                more = more if factor is None else (more * factor).rounded(around)
                total = total.rounded(around) + more
            emit.store(total, y + into, around, count)

        each_piece(emit, width, piece)

    kind = f"{dtype}_{width}_{num_chosen}_{weighed}_{rounded}_{with_beside}_{with_gate}_{partial}"
    return code.kernel(f"combine_{kind}", 7, body)
