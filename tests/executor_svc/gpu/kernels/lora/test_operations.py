"""The operations of a device that runs adapters, on a GPU: as `device.reference` has them, with rows of the host."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from executor_svc.device import reference
from executor_svc.device.adapters import AdapterKernels, AdapterRows
from executor_svc.gpu.kernels.gpu_kernels import GpuKernels
from executor_svc.gpu.kernels.lora.places import LoraPair
from tests.executor_svc.gpu.kernels.lora.cases import UNIT
from tests.executor_svc.gpu.kernels.lora.test_replaced import Rows

NUM_PLACES, RANK = 3, 20
PLACES = np.array([2, -1, 0, 0, 1, 2, -1])


@pytest.fixture
def kernels(device: torch.device) -> AdapterKernels:
    return GpuKernels(device, 90, 132)


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rows_of(kernels: AdapterKernels) -> AdapterRows:
    rows = kernels.new_adapter_rows(9)
    rows.fill(PLACES)
    assert rows.num_tiles > 0
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_head_with_pairs_on_replaced_rows(kernels: AdapterKernels, device: torch.device, dtype: torch.dtype) -> None:
    """An adapter with both, one with rows alone, and one without any; in logits, which are float32."""
    places = kernels.new_adapter_places(NUM_PLACES, RANK, 48, [80], dtype, replaces_rows=True)
    pair = LoraPair(randn(1, 5, 48).to(dtype), randn(2, 80, 5).to(dtype), 0.5, 0)
    new = {0: Rows(torch.tensor([3, 79]), randn(3, 2, 48)), 2: Rows(torch.tensor([0]), randn(4, 1, 48))}
    for place, parts in ((0, [pair]), (2, [])):
        memory = kernels.new_adapter_memory(places.packed_bytes(parts, new[place]))
        places.set(place, places.pack(parts, new[place], memory))
    x, y = randn(5, len(PLACES), 48).to(dtype), randn(6, len(PLACES), 80).to(dtype).float()
    base = y.double()
    for row, place in enumerate(PLACES.tolist()):
        if place in new:
            products = x[row].double() @ new[place].rows.to(dtype).double().t()
            base[row, new[place].token_ids] = products.to(dtype).double()
    adapters = [[(pair.a, pair.b, pair.scale, 0)], [], []]
    expected = reference.add_adapters(x, base, PLACES.tolist(), adapters)
    found = kernels.add_adapters(x.to(device), y.to(device), places, rows_of(kernels)).cpu()
    assert torch.allclose(
        found.double(), expected, rtol=2.5 * UNIT[dtype], atol=1e-5 if dtype == torch.float32 else 0.02
    )
    same = PLACES != 0
    same[[0, 5]] = False
    assert torch.equal(found[same], y[same])
    for place in (0, 2):
        places.set(place, None)
    assert torch.equal(kernels.add_adapters(x.to(device), y.to(device), places, rows_of(kernels)).cpu(), y)
    with pytest.raises(ValueError, match="place 3"):
        places.set(3, None)
    other = kernels.new_adapter_places(NUM_PLACES, RANK, 48, [80], dtype)
    with pytest.raises(ValueError, match="cannot be replaced"):
        other.packed_bytes([pair], new[0])


def test_embeddings_with_a_pair_and_replaced_rows(kernels: AdapterKernels, device: torch.device) -> None:
    places = kernels.new_embedding_places(NUM_PLACES, RANK, 40, torch.float32)
    pair, new = LoraPair(randn(1, 30, 18), randn(2, 40, 18), 0.3, 0), Rows(torch.tensor([4, 9]), randn(3, 2, 40))
    for place, each in ((0, (pair, new)), (1, (None, new)), (2, (pair, None))):
        memory = kernels.new_adapter_memory(places.packed_bytes(*each))
        places.set(place, places.pack(*each, memory))
    table, tokens = randn(4, 30, 40), torch.tensor([9, 4, 9, 3, 4, 9, 1])
    expected = table[tokens].double()
    for row, (token, place) in enumerate(zip(tokens.tolist(), PLACES.tolist(), strict=True)):
        if place in (0, 1) and token in (4, 9):
            expected[row] = new.rows[(4, 9).index(token)].double()
        if place in (0, 2):
            expected[row] += pair.scale * (pair.b.double() @ pair.a[token].double())
    y = kernels.embed(table.to(device), tokens.to(device), 1.0)
    found = kernels.add_embedding_adapters(tokens.to(device), y, places, rows_of(kernels)).cpu()
    assert torch.allclose(found.double(), expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", UNIT, ids=str)
def test_scaled_rows_have_the_bits_of_scaled_embeddings(
    kernels: AdapterKernels, device: torch.device, dtype: torch.dtype
) -> None:
    table, tokens = randn(1, 9, 1100).to(device, dtype), torch.tensor([3, 8, 3, 0], device=device)
    found = kernels.scale_rows(kernels.embed(table, tokens, 1.0), 24.25)
    assert torch.equal(found, kernels.embed(table, tokens, 24.25))


def test_no_row_has_an_adapter(kernels: AdapterKernels) -> None:
    kernels.new_embedding_places(NUM_PLACES, RANK, 40, torch.float32)
    rows = kernels.new_adapter_rows(4)
    rows.fill(np.array([-1, -1]))
    assert not rows.num_tiles
