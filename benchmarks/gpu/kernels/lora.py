"""What adapters of rank 16 add to a linear in bf16: matrices of an 8B model, by rows and distinct adapters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from benchmarks.gpu.cases import Bench, Case, Group, Metrics

if TYPE_CHECKING:
    from executor_svc.gpu.kernels.lora.places import LoraPair, LoraPlaces

_LAYERS = {
    "qkv": (4096, 6144, (0, 4096, 5120)),
    "o": (4096, 4096, (0,)),
    "gate_up": (4096, 28672, (0, 14336)),
    "down": (14336, 4096, (0,)),
}
"""Columns, rows, and the first row of each part."""
_TINY_LAYERS = {"qkv": (256, 96, (0, 64, 80))}
_BATCHES = ((1, 1), (16, 1), (16, 16), (64, 1), (64, 16), (64, 64), (256, 16), (2048, 1), (2048, 16))
"""Rows, and adapters among them."""
_RANK, _MAX_RANK, _SCALE = 16, 64, 0.5
_LARGEST_ERROR = 0.005
"""Relative error beside products in float32, by L2 norm: results are rounded to bf16."""


def cases(tiny: bool) -> Sequence[Case]:
    """Every layer, by rows and adapters."""
    layers, batches = (_TINY_LAYERS, ((3, 2),)) if tiny else (_LAYERS, _BATCHES)
    return [_case(layer, layers[layer], *batch) for batch in batches for layer in layers]


def _case(layer: str, sizes: tuple[int, int, tuple[int, ...]], rows: int, adapters: int) -> Case:
    params = {
        "layer": layer, "rows": rows, "adapters": adapters, "rank": _RANK, "in_features": sizes[0],
        "out_features": sizes[1],
    }  # fmt: skip
    name = f"{layer} {sizes[0]} to {sizes[1]}, {rows} rows, {adapters} adapters"
    return Case(name, params, lambda bench: _time(bench, sizes, rows, adapters), 4.0)


def _time(bench: Bench, sizes: tuple[int, int, tuple[int, ...]], rows: int, adapters: int) -> Metrics:
    from executor_svc.gpu.kernels.lora.lora import add_lora, workspace_size
    from executor_svc.gpu.kernels.lora.places import LoraPlaces, LoraShape
    from executor_svc.gpu.kernels.lora.tables import RowTable, sort_rows

    shape, device = LoraShape(*sizes), bench.device
    places = LoraPlaces.empty(shape, adapters, _MAX_RANK, torch.bfloat16, device)
    pairs = [_load(places, place) for place in range(adapters)]
    weight = (torch.randn(shape.out_features, shape.in_features, device=device) * 0.02).to(torch.bfloat16)
    x = torch.randn(rows, shape.in_features, device=device).to(torch.bfloat16)
    y, workspace = x @ weight.t(), torch.empty(workspace_size(shape, _MAX_RANK, rows), device=device)
    of_rows = torch.arange(rows, dtype=torch.int32, device=device) % adapters
    table, every = RowTable.empty(rows, adapters, device), torch.arange(rows, device=device)

    def sort(count: int = rows) -> None:
        sort_rows(of_rows[-count:].contiguous(), every[:count], table)

    alone = y[-1:].clone()
    sort(1)
    add_lora(x[-1:], places, table, workspace, alone)
    sort()
    found = y.clone()
    add_lora(x, places, table, workspace, found)
    if not torch.equal(alone, found[-1:]):
        raise RuntimeError(f"lora is wrong: a row alone has other bits than among {rows}")
    _check(x, y, found, of_rows, pairs)
    out = torch.empty_like(y)
    base_s, seconds, sort_s = (
        bench.clock.seconds(work)
        for work in (
            lambda: torch.mm(x, weight.t(), out=out),
            lambda: add_lora(x, places, table, workspace, found),
            sort,
        )
    )
    return {
        "us": 1e6 * seconds,
        "base_us": 1e6 * base_s,
        "overhead_percent": 100 * seconds / base_s,
        "sort_us": 1e6 * sort_s,
    }


def _load(places: LoraPlaces, place: int) -> list[LoraPair]:
    from executor_svc.gpu.kernels.lora.places import LoraPair, Taker

    def random(*shape: int) -> Tensor:
        return (torch.randn(*shape, device=places.a.device) * 0.05).to(torch.bfloat16)

    shape = places.shape
    pairs = [
        LoraPair(random(_RANK, shape.in_features), random(end - first, _RANK), _SCALE, first)
        for first, end in shape.parts
    ]
    size, on_gpu = places.packed_bytes([_RANK] * len(pairs)), places.a.device.type == "cuda"
    memory = torch.zeros(size, dtype=torch.uint8, pin_memory=on_gpu)
    places.set(place, places.pack(pairs, Taker(memory)))
    return pairs


def _check(x: Tensor, y: Tensor, found: Tensor, of_rows: Tensor, pairs: Sequence[Sequence[LoraPair]]) -> None:
    """Beside products in float64, of at most some 16 rows."""
    some = slice(None, None, max(1, len(x) // 16))
    expected = y[some].double()
    for row, place in enumerate(of_rows[some].tolist()):
        for part in pairs[place]:
            added = part.b.double() @ (part.a.double() @ x[some][row].double())
            expected[row, part.first_row : part.first_row + len(added)] += part.scale * added
    error = float((found[some].double() - expected).norm() / expected.norm())
    if not error < _LARGEST_ERROR:
        raise RuntimeError(f"lora is wrong: relative error {error:.3g}")


GROUP = Group("lora", "adapters beside linears in bf16", cases, limit_s=60)
