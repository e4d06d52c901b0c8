"""Adapters, places full of NaN but for them, and what they add to rows, in float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from executor_svc.gpu.kernels.lora.lora import add_lora, workspace_size
from executor_svc.gpu.kernels.lora.places import LoraPair, LoraPlaces, LoraShape, Taker
from executor_svc.gpu.kernels.lora.tables import RowTable, sort_rows

UNIT = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Largest relative error of rounding."""
NAN = float("nan")


def ints(values: Sequence[int] | np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.array(values, np.int32)).to(device)


Adapter = tuple[LoraPair, ...]


def adapter(shape: LoraShape, ranks: Sequence[int], dtype: torch.dtype, seed: int) -> Adapter:
    """Return an adapter with these ranks of the parts; 0: without the part."""
    random = torch.Generator().manual_seed(seed)
    return tuple(
        LoraPair(
            torch.randn(rank, shape.in_features, generator=random).mul(shape.in_features**-0.5).to(dtype),
            torch.randn(end - first, rank, generator=random).to(dtype),
            2 / rank + 0.1 * seed,
            first,
        )
        for rank, (first, end) in zip(ranks, shape.parts, strict=True)
        if rank
    )


def rows_of(shape: LoraShape, num_rows: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return x and y, of which some numbers are -0, which the sum with 0 would change."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, shape.in_features, generator=random).to(dtype)
    y = torch.randn(num_rows, shape.out_features, generator=random).to(dtype)
    y[:, ::3] = -0.0
    return x, y


def placed(
    shape: LoraShape, adapters: Mapping[int, Adapter], max_loras: int, max_rank: int, dtype: torch.dtype,
    device: torch.device,
) -> LoraPlaces:  # fmt: skip
    """Return places with adapters by place; all that was not written is NaN."""
    places = LoraPlaces.empty(shape, max_loras, max_rank, dtype, device)
    for each in (places.a, places.b, places.scales):
        each.fill_(NAN)
    for place, parts in adapters.items():
        load(places, place, parts)
    return places


def load(places: LoraPlaces, place: int, parts: Adapter) -> None:
    """Pack an adapter, at least one part, and set it in a place."""
    size = places.packed_bytes([part.a.shape[0] for part in parts])
    memory = torch.zeros(size, dtype=torch.uint8, pin_memory=places.a.device.type == "cuda")
    places.set(place, places.pack(parts, Taker(memory)))


def added(x: Tensor, y: Tensor, places: LoraPlaces, of_rows: Sequence[int]) -> Tensor:
    """Return y with what the adapters add to rows of these places, computed between columns of a wider tensor."""
    device, num_rows = places.a.device, len(x)
    table = RowTable.empty(num_rows + 5, places.max_loras, device)
    sort_rows(ints(of_rows, device), torch.arange(num_rows, device=device), table)
    size = workspace_size(places.shape, places.max_rank, num_rows)
    workspace = torch.full((size,), NAN, device=device)
    whole = torch.full((num_rows + 1, y.shape[1] + 32), 7.0, dtype=y.dtype, device=device)
    out = whole[:-1, 16:-16]
    out.copy_(y)
    add_lora(x.to(device), places, table, workspace, out)
    assert (whole[-1] == 7).all()
    assert (whole[:, :16] == 7).all()
    assert (whole[:, -16:] == 7).all()
    return out.cpu()


def expected(x: Tensor, y: Tensor, parts: Adapter) -> tuple[np.ndarray, np.ndarray]:
    """Return the result for rows of one adapter, and the sums of all products' magnitudes, both in float64."""
    result, size = y.double().numpy().copy(), np.zeros(tuple(y.shape))
    for part in parts:
        a, b = part.a.to(x.dtype).double().numpy(), part.b.to(x.dtype).double().numpy()
        rows, columns = x.double().numpy(), slice(part.first_row, part.first_row + len(b))
        result[:, columns] += part.scale * ((rows @ a.T) @ b.T)
        size[:, columns] = abs(part.scale) * ((abs(rows) @ abs(a).T) @ abs(b).T)
    return result, size


def bits(rows: Tensor) -> Tensor:
    """Return the bits of rows: -0 is not 0, and a NaN equals itself."""
    return rows.contiguous().view({2: torch.int16, 4: torch.int32}[rows.dtype.itemsize])
