"""The weighted sum of what a token's experts returned."""

from __future__ import annotations

from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import ITEM_BYTES, Dtype, Emitter, Int, Vec
from executor_svc.cpu.kernels.norm import each_piece


def combine(code: Code, dtype: Dtype, width: int, num_chosen: int, rounded: bool) -> str:
    """Add the kernel y = sum of weight * row over a token's choices, in fp32 and in their order, rounded once.

    rounded: each product is rounded first. Items: one for each token. Arguments: tokens, rows [T * K, width],
    places [T, K] int64, weights [T, K] float32, y [T, width]. Returns its name.
    """
    size = ITEM_BYTES[dtype]

    def body(emit: Emitter, item: Int, _: Int, __: Int, rows: Int, places: Int, weights: Int, y: Int) -> None:
        choices = range(num_chosen)
        starts = [
            rows + emit.load_int(places + (item * num_chosen + choice) * 8) * (width * size) for choice in choices
        ]
        factors = [emit.load_all(weights + (item * num_chosen + choice) * 4, "float32") for choice in choices]

        def piece(offset: Int, count: int) -> None:
            total: Vec | None = None
            for start, factor in zip(starts, factors, strict=True):
                product = emit.load(start + offset * size, dtype, count) * factor
                product = product.rounded(dtype) if rounded else product
                total = product if total is None else total + product
            assert total is not None
            emit.store(total, y + (item * width + offset) * size, dtype, count)

        each_piece(emit, width, piece)

    return code.kernel(f"combine_{dtype}_{width}_{num_chosen}_{rounded}", 5, body)
