"""LoRA beside a table of embeddings: the sums, the bits, and tokens and rows that are left alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from executor_svc.gpu.kernels.lora.embedding import (
    EmbeddingMatrices,
    PackedEmbedding,
    add_embedding_lora,
    embedding_workspace_size,
)
from executor_svc.gpu.kernels.lora.places import LoraPair, Taker
from executor_svc.gpu.kernels.lora.tables import FEW_ROWS, RowTable, sort_rows
from tests.executor_svc.gpu.kernels.lora.cases import NAN, UNIT, bits, ints

VOCABULARY, HIDDEN = 50, 150


def matrices(rank: int, dtype: torch.dtype) -> LoraPair:
    random = torch.Generator().manual_seed(rank)
    a, b = torch.randn(VOCABULARY, rank, generator=random), torch.randn(HIDDEN, rank, generator=random)
    return LoraPair(a.to(dtype), b.to(dtype), 3 / rank, 0)


def placed(
    adapters: dict[int, LoraPair], max_loras: int, max_rank: int, dtype: torch.dtype, device: torch.device
) -> EmbeddingMatrices:
    places = EmbeddingMatrices(HIDDEN, max_loras, max_rank, dtype, device)
    places.products.b.fill_(NAN)
    for place, each in adapters.items():
        load(places, place, each)
    return places


def load(places: EmbeddingMatrices, place: int, pair: LoraPair) -> None:
    memory = torch.zeros(
        places.packed_bytes(pair), dtype=torch.uint8, pin_memory=places.addresses.device.type == "cuda"
    )
    packed = places.pack(pair, Taker(memory))
    held.append(packed)
    places.set(place, packed)


held: list[PackedEmbedding] = []
"""Adapters of the test that runs: steps read their memory."""


@pytest.fixture(autouse=True)
def _hold() -> Iterator[None]:
    yield
    held.clear()


def added(tokens: Tensor, y: Tensor, places: EmbeddingMatrices, of_rows: list[int]) -> Tensor:
    device, num_rows = places.addresses.device, len(y)
    table = RowTable.empty(num_rows, places.products.max_loras, device)
    sort_rows(ints(of_rows, device), torch.arange(num_rows, device=device), table)
    size = embedding_workspace_size(places.products.max_rank, num_rows)
    out = y.clone().to(device)
    add_embedding_lora(tokens.to(device), places, table, torch.full((size,), NAN, device=device), out)
    return out.cpu()


@pytest.mark.parametrize("dtype", UNIT, ids=str)
@pytest.mark.parametrize("num_rows", [9, FEW_ROWS + 3])
def test_rows_of_tokens(num_rows: int, dtype: torch.dtype, device: torch.device) -> None:
    adapters = {1: matrices(5, dtype), 4: matrices(33, dtype)}
    random = torch.Generator().manual_seed(num_rows)
    tokens = torch.randint(VOCABULARY, (num_rows,), generator=random)
    tokens[2] = -1
    # Most rows have no adapter, which takes the interpreter less time.
    of_rows = torch.tensor([1, 4, *[-1] * (num_rows // 8)])[
        torch.randint(2 + num_rows // 8, (num_rows,), generator=random)
    ].tolist()
    of_rows[2] = 4
    y = torch.randn(num_rows, HIDDEN, generator=random).to(dtype)
    found = added(tokens, y, placed(adapters, 5, 40, dtype, device), of_rows)
    for row, (token, place) in enumerate(zip(tokens.tolist(), of_rows, strict=True)):
        if place < 0 or token < 0:
            assert torch.equal(bits(found[row]), bits(y[row]))
            continue
        pair = adapters[place]
        products = pair.scale * pair.a[token].double() * pair.b.double()
        exact = y[row].double() + products.sum(1)
        error = (found[row].double() - exact).abs()
        assert (error <= UNIT[dtype] * 1.001 * exact.abs() + 2**-19 * products.abs().sum(1)).all()


def test_a_place_is_loaded_again(device: torch.device) -> None:
    """A smaller adapter after one that was not finite, and none."""
    dtype = torch.bfloat16
    bad = matrices(20, dtype)
    bad.a.fill_(NAN)
    bad.b.fill_(NAN)
    tokens, y = torch.tensor([3, 49]), torch.ones(2, HIDDEN, dtype=dtype)
    places = placed({1: bad}, 2, 32, dtype, device)
    load(places, 1, matrices(7, dtype))
    wanted = added(tokens, y, placed({0: matrices(7, dtype)}, 1, 7, dtype, device), [0, 0])
    assert wanted.isfinite().all()
    assert torch.equal(added(tokens, y, places, [1, 1]), wanted)
    places.set(1, None)
    assert torch.equal(added(tokens, y, places, [1, 1]), y)


def test_wrong_arguments_are_named(device: torch.device) -> None:
    dtype = torch.bfloat16
    places, table = placed({}, 2, 16, dtype, device), RowTable.empty(2, 2, device)
    tokens, y = torch.zeros(2, dtype=torch.int64, device=device), torch.zeros(2, HIDDEN, dtype=dtype, device=device)
    workspace = torch.empty(32, device=device)
    pair = matrices(4, dtype)
    for message, call in (
        ("token_ids must be contiguous", lambda: add_embedding_lora(tokens.int(), places, table, workspace, y)),
        (
            "y must be a matrix of torch.bfloat16",
            lambda: add_embedding_lora(tokens, places, table, workspace, y.half()),
        ),
        (r"y \[2, 149\]", lambda: add_embedding_lora(tokens, places, table, workspace, y[:, 1:])),
        ("workspace must be", lambda: add_embedding_lora(tokens, places, table, workspace[1:], y)),
        ("table: of 1 rows", lambda: add_embedding_lora(tokens, places, RowTable.empty(1, 2, device), workspace, y)),
        ("a must be", lambda: places.packed_bytes(replace(pair, a=pair.a[:, 1:]))),
        ("no part of", lambda: places.packed_bytes(replace(pair, b=pair.b[1:]))),
        ("--max-lora-rank 16", lambda: places.packed_bytes(matrices(17, dtype))),
    ):
        with pytest.raises(ValueError, match=message):
            call()
