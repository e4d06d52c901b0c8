"""LoRA beside a linear: the sums, the same bits in every batch, and what is left alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from executor_svc.gpu.kernels.lora.lora import add_lora, workspace_size
from executor_svc.gpu.kernels.lora.places import LoraPlaces, LoraShape
from executor_svc.gpu.kernels.lora.shrink import num_splits, split_columns
from executor_svc.gpu.kernels.lora.tables import FEW_ROWS, RowTable
from tests.executor_svc.gpu.kernels.lora.cases import (
    NAN,
    UNIT,
    Adapter,
    adapter,
    added,
    bits,
    expected,
    load,
    placed,
    rows_of,
)
from tests.helpers.marks import short_and_long

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
QKV = LoraShape(576, 320, (0, 192, 256))
GATE_UP = LoraShape(300, 160, (0, 80))
UNALIGNED = LoraShape(100, 295, (0, 130))
WIDE = LoraShape(2100, 48, (0,))


def check(x: Tensor, y: Tensor, found: Tensor, of_rows: list[int], adapters: dict[int, Adapter]) -> None:
    """Each row's numbers beside those of its adapter in float64, rounded once."""
    places = np.array(of_rows)
    for place, parts in adapters.items():
        rows = np.flatnonzero(places == place)
        exact, size = expected(x[rows], y[rows], parts)
        error = abs(found[rows].double().numpy() - exact)
        assert (error <= UNIT[found.dtype] * 1.001 * abs(exact) + 2**-19 * size).all()
    alone = np.flatnonzero(places < 0)
    assert torch.equal(bits(found[alone]), bits(y[alone]))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [QKV, UNALIGNED, WIDE], ids=["qkv", "unaligned", "wide"])
def test_a_mixed_batch(shape: LoraShape, dtype: torch.dtype, device: torch.device) -> None:
    """Ranks 1 to 64, parts that are missing, places without rows, more rows of a place than of a tile."""
    ranks = [1, 8, 16, 17, 64, 0]
    parts = len(shape.parts)
    adapters = {
        place: adapter(shape, [ranks[(index + part) % len(ranks)] for part in range(parts)], dtype, index)
        for index, place in enumerate([1, 2, 5, 7])
    }
    of_rows = [7, -1, 2, 1, 1, -1, 2, 5, *[1, 5, -1] * 11, *[2] * 17]
    x, y = rows_of(shape, len(of_rows), dtype)
    found = added(x, y, placed(shape, adapters, 8, 64, dtype, device), of_rows)
    check(x, y, found, of_rows, adapters)
    for place, each in adapters.items():
        has = {part.first_row for part in each}
        for first, end in shape.parts:
            if first not in has:
                rows = np.flatnonzero(np.array(of_rows) == place)
                assert torch.equal(bits(found[rows, first:end]), bits(y[rows, first:end]))


@pytest.mark.usefixtures("ordered_products")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_rows", "max_loras", "max_rank"), short_and_long([(45, 8, 64), (FEW_ROWS + 9, 4, 40)], [(45, 8, 64)])
)
def test_a_row_has_the_bits_that_it_has_alone(
    num_rows: int, max_loras: int, max_rank: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Beside other rows, adapters, places and largest ranks, with few rows in splits, and with many."""
    adapters = {3: adapter(GATE_UP, [8, 20], dtype, 1), 1: adapter(GATE_UP, [40, 0], dtype, 2)}
    rare = min(0.4, 36 / num_rows)  # two tiles of each
    of_rows = np.random.default_rng(num_rows).choice([-1, 1, 3], num_rows, p=[1 - 2 * rare, rare, rare]).tolist()
    x, y = rows_of(GATE_UP, num_rows, dtype)
    found = added(x, y, placed(GATE_UP, adapters, max_loras, max_rank, dtype, device), of_rows)
    check(x, y, found, of_rows, adapters)
    for place, parts in adapters.items():
        places = placed(GATE_UP, {0: parts}, 1, max(part.a.shape[0] for part in parts), dtype, device)
        rows = np.flatnonzero(np.array(of_rows) == place)
        for row in rows[[0, 5, 6, 12, -1]]:
            alone = added(x[row : row + 1], y[row : row + 1], places, [0])
            assert torch.equal(bits(alone), bits(found[row : row + 1]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_logits_are_float32(dtype: torch.dtype, device: torch.device) -> None:
    """Numbers of 16 bits that were rounded once: neither before, nor what lies between the products."""
    parts = adapter(WIDE, [24], dtype, 1)
    x, y = rows_of(WIDE, 4, dtype)
    places = placed(WIDE, {0: parts}, 2, 32, dtype, device)
    found, narrow = (added(x, each, places, [0, 1, -1, 0]) for each in (y.float(), y))
    assert found.dtype == torch.float32
    assert torch.equal(bits(found), bits(narrow.float()))
    check(x, y, narrow, [0, -1, -1, 0], {0: parts})
    # Sums that were not rounded stay so in rows without an adapter, and of a place without one.
    y = y.float() + 2**-20
    found = added(x, y, places, [0, 1, -1, 0])
    assert torch.equal(found[1:3], y[1:3])
    assert torch.equal(found[[0, 3]], found[[0, 3]].to(dtype).float())


def test_other_rows_may_be_anything(device: torch.device) -> None:
    """NaN and infinite numbers in a row stay in that row; an adapter that is not finite, in rows that have it."""
    good, bad = adapter(QKV, [5, 9, 33], torch.bfloat16, 1), adapter(QKV, [5, 9, 33], torch.bfloat16, 2)
    bad[1].a[3, 7], bad[1].b[4, 2] = NAN, float("inf")
    of_rows = [0, 1, 0, -1, 1, 0]
    x, y = rows_of(QKV, 6, torch.bfloat16)
    places = placed(QKV, {0: good, 1: bad}, 2, 64, torch.bfloat16, device)
    x[2, 5], y[2, 9], x[3] = float("inf"), NAN, NAN
    with np.errstate(invalid="ignore"):  # the interpreter's
        found = added(x, y, places, of_rows)
    x, y = x.nan_to_num(0, 0, 0), y.nan_to_num(0)
    wanted = added(x, y, placed(QKV, {0: good}, 2, 64, torch.bfloat16, device), [0, -1, 0, -1, -1, 0])
    for row in (0, 5):
        assert found[row].isfinite().all()
        assert torch.equal(bits(found[row]), bits(wanted[row]))
    assert torch.equal(bits(found[3]), bits(y[3]))
    assert found[2].isfinite().logical_not().all()
    assert found[1, 192:256].isnan().all()
    assert found[1, :192].isfinite().all()


def test_a_place_is_written_again(device: torch.device) -> None:
    """A smaller adapter after a larger one that was not finite; and after a clear, none."""
    dtype = torch.float16
    large, small = adapter(QKV, [30, 64, 16], dtype, 1), adapter(QKV, [9, 0, 16], dtype, 2)
    for part in large:
        part.a.fill_(NAN)
        part.b.fill_(NAN)
    x, y = rows_of(QKV, 3, dtype)
    places = placed(QKV, {0: large}, 1, 64, dtype, device)
    load(places, 0, small)
    wanted = added(x, y, placed(QKV, {0: small}, 1, 64, dtype, device), [0, 0, 0])
    assert torch.equal(bits(added(x, y, places, [0, 0, 0])), bits(wanted))
    check(x, y, wanted, [0, 0, 0], {0: small})
    places.set(0, None)
    assert torch.equal(bits(added(x, y, places, [0, 0, 0])), bits(y))


def test_numbers_are_rounded_to_the_dtype_of_the_places(device: torch.device) -> None:
    parts = adapter(UNALIGNED, [6, 7], torch.float32, 3)
    rounded = tuple(replace(part, a=part.a.bfloat16(), b=part.b.bfloat16()) for part in parts)
    x, y = rows_of(UNALIGNED, 2, torch.bfloat16)
    found, wanted = (
        added(x, y, placed(UNALIGNED, {0: each}, 1, 16, torch.bfloat16, device), [0, 0]) for each in (parts, rounded)
    )
    assert torch.equal(bits(found), bits(wanted))


@pytest.mark.parametrize("in_features", [1, 64, 576, 2048, 2049, 4096, 11008, 14336, 53248])
def test_splits_cover_the_columns(in_features: int) -> None:
    size, count = split_columns(in_features), num_splits(in_features)
    assert size % 128 == 0
    assert (count - 1) * size < in_features <= count * size
    assert count <= 8


def test_no_rows(device: torch.device) -> None:
    places = placed(WIDE, {}, 2, 8, torch.float32, device)
    table, empty = RowTable.empty(4, 2, device), torch.empty(0, device=device)
    add_lora(torch.empty(0, 2100, device=device), places, table, empty, torch.empty(0, 48, device=device))


def test_wrong_arguments_are_named(device: torch.device) -> None:
    dtype = torch.bfloat16
    places = placed(QKV, {}, 2, 16, dtype, device)
    x, y = (each.to(device) for each in rows_of(QKV, 3, dtype))
    table = RowTable.empty(4, 2, device)
    workspace = torch.empty(workspace_size(QKV, 16, 3), device=device)

    def call(x=x, y=y, table=table, workspace=workspace):
        add_lora(x, places, table, workspace, y)

    call()
    part = adapter(QKV, [4, 4, 4], dtype, 0)
    for message, wrong in (
        ("x must be a matrix of torch.bfloat16", lambda: call(x=x.float())),
        ("y must be a matrix of torch.bfloat16 or torch.float32", lambda: call(y=y.half())),
        (r"x \[3, 570\], y", lambda: call(x=x[:, :570])),
        ("table: of 4 rows and 3 places", lambda: call(table=RowTable.empty(4, 3, device))),
        ("table: of 2 rows and 2 places", lambda: call(table=RowTable.empty(2, 2, device))),
        ("workspace: must be 432 float32", lambda: call(workspace=workspace[1:])),
        ("a part twice", lambda: places.check([part[0], part[0]])),
        ("no part of", lambda: places.check([replace(part[0], first_row=64)])),
        ("no part of", lambda: places.check([replace(part[0], a=part[0].a[:, 1:])])),
        ("--max-lora-rank 16: a part has rank 17", lambda: places.check(adapter(QKV, [17, 0, 0], dtype, 0))),
        ("first_rows: ", lambda: LoraShape(4, 8, (0, 8))),
        ("first_rows: ", lambda: LoraShape(4, 8, (1, 4))),
        ("dtype: ", lambda: LoraPlaces.empty(QKV, 1, 1, torch.float64, device)),
        ("--max-loras 0", lambda: LoraPlaces.empty(QKV, 0, 1, dtype, device)),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()
