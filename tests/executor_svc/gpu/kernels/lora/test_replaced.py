"""Rows of tables that adapters replace: the rows and products, the same bits in every batch, what is left alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from executor_svc.gpu.kernels.lora.places import Taker
from executor_svc.gpu.kernels.lora.replaced import HostRows, ReplacedPlaces, replace_embeddings, replace_logits
from executor_svc.gpu.kernels.lora.tables import FEW_ROWS, RowTable, sort_rows
from tests.executor_svc.gpu.kernels.lora.cases import UNIT, bits, ints

VOCABULARY, COLUMNS = 150, 300


@dataclass(frozen=True)
class Rows:
    """Implements `ReplacedRows`."""

    token_ids: Tensor
    rows: Tensor


def some(ids: list[int], seed: int) -> Rows:
    random = torch.Generator().manual_seed(seed)
    return Rows(torch.tensor(ids), torch.randn(len(ids), COLUMNS, generator=random))


ADAPTERS = {0: some([149], 1), 2: some([0, 3, 4, 9, 100], 2), 3: some(list(range(0, 150, 3)), 3), 4: some([], 4)}
"""By place; there is none at place 1."""


class Placed:
    """Places with adapters, and their memory, which steps read."""

    def __init__(self, adapters: dict[int, Rows], max_loras: int, dtype: torch.dtype, device: torch.device) -> None:
        self.places = ReplacedPlaces(COLUMNS, VOCABULARY, max_loras, dtype, device)
        self.held: list[HostRows] = []
        for place, rows in adapters.items():
            size = self.places.packed_bytes(rows)
            memory = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
            self.held.append(self.places.pack(rows, Taker(memory)))
            self.places.set(place, self.held[-1])

    def table(self, of_rows: list[int]) -> RowTable:
        device, places = self.places.fields.device, len(self.places.fields)
        table = RowTable.empty(len(of_rows), places, device)
        sort_rows(ints(of_rows, device), torch.arange(len(of_rows), device=device), table)
        return table

    def embeddings(self, tokens: Tensor, y: Tensor, of_rows: list[int]) -> Tensor:
        out = y.clone().to(self.places.fields.device)
        replace_embeddings(tokens.to(out.device), self.places, self.table(of_rows), out)
        return out.cpu()

    def logits(self, x: Tensor, y: Tensor, of_rows: list[int]) -> Tensor:
        out = y.clone().to(self.places.fields.device)
        replace_logits(x.to(out.device), self.places, self.table(of_rows), out)
        return out.cpu()


def steps(num_rows: int) -> list[int]:
    """Return places of rows, all at first; most of the others have none, which takes the interpreter less time."""
    others = np.random.default_rng(num_rows).choice([*range(5), *[-1] * (num_rows // 4)], num_rows - 10)
    return [*range(5), *range(5), *others.tolist()]


@pytest.mark.parametrize("dtype", UNIT, ids=str)
@pytest.mark.parametrize("num_rows", [40, FEW_ROWS + 3])
def test_embeddings(num_rows: int, dtype: torch.dtype, device: torch.device) -> None:
    of_rows, random = steps(num_rows), torch.Generator().manual_seed(num_rows)
    tokens = torch.randint(VOCABULARY, (num_rows,), generator=random)
    tokens[::5], tokens[1] = 149, -1
    y = torch.randn(num_rows, COLUMNS, generator=random).to(dtype)
    expected, num_replaced = y.clone(), 0
    for row, (token, place) in enumerate(zip(tokens.tolist(), of_rows, strict=True)):
        known = ADAPTERS.get(place)
        if known is not None and token in known.token_ids.tolist():
            expected[row] = known.rows[known.token_ids.tolist().index(token)].to(dtype)
            num_replaced += 1
    assert num_replaced > 2
    assert torch.equal(Placed(ADAPTERS, 5, dtype, device).embeddings(tokens, y, of_rows), expected)


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("ordered_products")
@pytest.mark.parametrize("dtype", UNIT, ids=str)
@pytest.mark.parametrize("num_rows", [24, FEW_ROWS + 3])
def test_logits(num_rows: int, dtype: torch.dtype, device: torch.device) -> None:
    """Of the products of a row alone, too; what is not replaced stays, and is float32 as sums that were not rounded."""
    of_rows, random = steps(num_rows), torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, COLUMNS, generator=random).to(dtype)
    y = torch.randn(num_rows, VOCABULARY, generator=random)
    found = Placed(ADAPTERS, 5, dtype, device).logits(x, y, of_rows)
    rest = torch.ones_like(y, dtype=torch.bool)
    for place, known in ADAPTERS.items():
        rows, ids = np.flatnonzero(np.array(of_rows) == place), known.token_ids.tolist()
        assert len(rows)
        weight = known.rows.to(dtype).double()
        exact, size = x[rows].double() @ weight.t(), x[rows].double().abs() @ weight.abs().t()
        close = found[rows][:, ids].double()
        assert ((close - exact).abs() <= UNIT[dtype] * 1.001 * exact.abs() + 2**-19 * size).all()
        assert torch.equal(close, close.to(dtype).double())
        rest[np.ix_(rows, ids)] = False
        one, last = Placed({0: known}, 1, dtype, device), int(rows[-1])
        assert torch.equal(bits(one.logits(x[last:][:1], y[last:][:1], [0])), bits(found[last:][:1]))
    assert torch.equal(found[rest], y[rest])


def test_a_place_is_set_again(device: torch.device) -> None:
    placed = Placed({0: ADAPTERS[3]}, 1, torch.bfloat16, device)
    tokens, y = torch.tensor([0, 3, 149]), torch.zeros(3, COLUMNS, dtype=torch.bfloat16)
    assert placed.embeddings(tokens, y, [0] * 3).any(1).tolist() == [True, True, False]
    other = Placed({0: ADAPTERS[0]}, 1, torch.bfloat16, device)
    placed.places.set(0, other.held[0])
    assert placed.embeddings(tokens, y, [0] * 3).any(1).tolist() == [False, False, True]
    placed.places.set(0, None)
    assert not placed.embeddings(tokens, y, [0] * 3).any()


def test_wrong_arguments_are_named(device: torch.device) -> None:
    dtype = torch.bfloat16
    placed = Placed({}, 2, dtype, device)
    x, y = torch.zeros(2, COLUMNS, dtype=dtype), torch.zeros(2, VOCABULARY)
    tokens, known = torch.zeros(2, dtype=torch.int64), ADAPTERS[2]

    def sizes(**fields: Any) -> int:
        return placed.places.packed_bytes(replace(known, **fields))

    for message, call in (
        (r"\[5, 299\]: \[5, 300\] are expected", lambda: sizes(rows=known.rows[:, 1:])),
        ("must ascend from 0 on, below 150", lambda: sizes(token_ids=known.token_ids.flip(0))),
        ("must ascend", lambda: sizes(token_ids=known.token_ids - 1)),
        ("must ascend", lambda: sizes(token_ids=known.token_ids + 50)),
        ("x must be a matrix of torch.bfloat16", lambda: placed.logits(x.float(), y, [0, 0])),
        ("y must be a matrix of torch.bfloat16 or torch.float32", lambda: placed.logits(x, y.half(), [0, 0])),
        (r"y \[2, 149\]", lambda: placed.logits(x, y[:, 1:], [0, 0])),
        ("rows of 299 columns", lambda: placed.logits(x[:, 1:], y, [0, 0])),
        ("table: of 1 rows and 2 places", lambda: placed.logits(x, y, [0])),
        ("token_ids must be contiguous", lambda: placed.embeddings(tokens.int(), x, [0, 0])),
        ("y must be a matrix", lambda: placed.embeddings(tokens, x.float(), [0, 0])),
    ):
        with pytest.raises(ValueError, match=message):
            call()
