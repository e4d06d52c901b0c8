"""Adapters on the CPU against float64, and same row, same bits: alone, in any batch, for any largest rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from executor_svc.cpu.kernels import matmul_tiles
from executor_svc.cpu.kernels.codegen.emit import Emitter, Vec
from executor_svc.cpu.kernels.codegen.isa import level
from executor_svc.cpu.kernels.cpu_kernels import CpuKernels
from executor_svc.cpu.kernels.linear import CpuLinear
from executor_svc.cpu.kernels.lora import shrink
from executor_svc.cpu.kernels.lora.places import CpuAdapterPlaces
from executor_svc.cpu.kernels.lora.rows import TILE_ROWS, CpuAdapterRows
from executor_svc.cpu.kernels.panel_layout import widened_weights
from executor_svc.device import reference
from tests.executor_svc.cpu.kernels.bits import equal_bits
from tests.executor_svc.cpu.kernels.processors import ISAS

F32, BF16 = torch.float32, torch.bfloat16
MOST = 90


@dataclass(frozen=True)
class Part:
    a: Tensor
    b: Tensor
    scale: float
    first_row: int


@dataclass(frozen=True)
class Replaced:
    token_ids: Tensor
    rows: Tensor


AS_PAIRS = "avx512-bf16, by fused operations"
"""The source of a level with a dot product of pairs, where this processor has none: in its place two fused operations,
and the instructions of the lowest level."""


@pytest.fixture(scope="module", params=[*ISAS, *([] if "avx512-bf16" in ISAS else [AS_PAIRS])])
def kernels(request: pytest.FixtureRequest) -> Iterator[CpuKernels]:
    if request.param != AS_PAIRS:
        yield CpuKernels(isa=ISAS[request.param])
        return
    with pytest.MonkeyPatch.context() as patch:
        for module in (matmul_tiles, shrink):
            patch.setattr(module, "dot", fused_pair)
        yield CpuKernels(isa=replace(level("avx512-bf16"), flags=next(iter(ISAS.values())).flags))


def fused_pair(emit: Emitter, total: Vec, factor: Any, weights: Any) -> Vec:
    """Add the products of a pair, one after the other."""
    wide = (widened_weights(emit, each, "bfloat16") for each in (factor, weights))
    for number, weight in zip(*wide, strict=True):
        total = number.times_plus(weight, total)
    return total


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def draw_adapter(
    random: np.random.Generator, inner: int, columns: list[int], most: int, dtype: torch.dtype
) -> list[Part]:
    """Return an adapter of some of a linear's parts, at least one, each of another rank."""
    chosen = random.permutation(len(columns))[: random.integers(1, len(columns) + 1)]
    starts = np.cumsum([0, *columns])
    parts = []
    for which in sorted(chosen):
        rank, seed = int(random.integers(1, most + 1)), int(random.integers(2**31))
        a, b = randn(seed, rank, inner).to(dtype), randn(seed + 1, columns[which], rank).to(dtype)
        parts.append(Part(a, b, float(np.float32(random.uniform(0.1, 2))), int(starts[which])))
    return parts


def new_places(
    kernels: CpuKernels, adapters: list[list[Part]], inner: int, columns: list[int], most: int, dtype: torch.dtype
) -> CpuAdapterPlaces:
    places = kernels.new_adapter_places(len(adapters), most, inner, columns, dtype)
    for place, parts in enumerate(adapters):
        load(kernels, places, place, parts)
    return places


def load(
    kernels: CpuKernels, places: CpuAdapterPlaces, place: int, parts: list[Part], replaced: Replaced | None = None
) -> int:
    """Put parts into a place; return the bytes that they take."""
    memory = kernels.new_adapter_memory(places.packed_bytes(parts, replaced))
    places.set(place, places.pack(parts, replaced, memory))
    return len(memory)


def add(kernels: CpuKernels, x: Tensor, y: Tensor, places: CpuAdapterPlaces, chosen: list[int]) -> Tensor:
    rows = kernels.new_adapter_rows(len(chosen))
    rows.fill(np.array(chosen, np.int64))
    result = y.clone()
    assert kernels.add_adapters(x, result, places, rows) is result
    return result


def check(found: Tensor, x: Tensor, y: Tensor, chosen: list[int], adapters: list[list[Part]]) -> None:
    """Compare with float64, within the bound of chains of roundings."""
    parts = [[(part.a, part.b, part.scale, part.first_row) for part in each] for each in adapters]
    sizes = [[(a.abs(), b.abs(), scale, first) for a, b, scale, first in each] for each in parts]
    expected = reference.add_adapters(x, y, chosen, parts)
    size = reference.add_adapters(x.abs(), y.abs(), chosen, sizes)
    rank = max((len(part.a) for each in adapters for part in each), default=0)
    bound = (x.shape[1] + rank + 4) * 2**-23 * size + (2**-8 * expected.abs() if x.dtype == BF16 else 0.0) + 1e-30
    worst = ((found.double() - expected).abs() / bound).max()
    assert worst <= 1.0


@pytest.mark.sampled(3)
@settings(max_examples=35)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 3 * TILE_ROWS + 1),
    inner=st.one_of(st.integers(1, 9), st.integers(60, 130)),
    columns=st.lists(st.one_of(st.integers(1, 40), st.sampled_from([16, 32, 64])), min_size=1, max_size=3),
    most=st.sampled_from([1, 2, 8, 15, 33, 64]),
    num_places=st.integers(1, 5),
    dtype=st.sampled_from([F32, BF16]),
    wide_out=st.booleans(),
)
def test_adapters_of_any_shape(
    kernels: CpuKernels,
    seed: int,
    rows: int,
    inner: int,
    columns: list[int],
    most: int,
    num_places: int,
    dtype: torch.dtype,
    wide_out: bool,
) -> None:
    random = np.random.default_rng(seed)
    adapters = [draw_adapter(random, inner, columns, most, dtype) for _ in range(num_places)]
    places = new_places(kernels, adapters, inner, columns, most, dtype)
    chosen = random.integers(-1, num_places, rows).tolist()
    x, y = randn(seed, rows, inner).to(dtype), randn(seed + 1, rows, sum(columns)).to(dtype)
    y = y.float() if wide_out else y
    found = add(kernels, x, y, places, chosen)
    check(found, x, y, chosen, adapters)
    without = [row for row, place in enumerate(chosen) if place < 0]
    assert equal_bits(found[without], y[without])
    if wide_out:
        assert equal_bits(found, found.to(dtype).float())


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("inner", [65, 128])
def test_a_row_has_the_bits_that_it_has_alone(kernels: CpuKernels, dtype: torch.dtype, inner: int) -> None:
    """Whatever else is in the batch, and in whatever place its adapter is, for whatever largest rank."""
    random, columns = np.random.default_rng(inner), [48, 16, 19]
    adapters = [draw_adapter(random, inner, columns, rank, dtype) for rank in (1, 7, 16, 64)]
    places = new_places(kernels, adapters, inner, columns, 64, dtype)
    x, y = randn(0, MOST, inner).to(dtype), randn(1, MOST, sum(columns)).to(dtype)
    for shares in ([0.2, 0.2, 0.2, 0.2, 0.2], [0.0, 0.0, 0.0, 0.0, 1.0], [0.5, 0.05, 0.05, 0.2, 0.2]):
        chosen = (random.choice(5, MOST, p=shares) - 1).tolist()
        mixed = add(kernels, x, y, places, chosen)
        for row in range(0, MOST, 7):
            if chosen[row] < 0:
                assert equal_bits(mixed[row], y[row])
                continue
            parts = adapters[chosen[row]]
            most = max(len(part.a) for part in parts)
            one = new_places(kernels, [[], parts], inner, columns, most, dtype)
            assert equal_bits(add(kernels, x[[row]], y[[row]], one, [1]), mixed[[row]]), row


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_threads_change_no_bit(dtype: torch.dtype) -> None:
    random, columns = np.random.default_rng(0), [40, 33]
    adapters = [draw_adapter(random, 70, columns, 20, dtype) for _ in range(3)]
    x, y, chosen = randn(0, 40, 70).to(dtype), randn(1, 40, 73).to(dtype), random.integers(-1, 3, 40).tolist()
    found = []
    for threads in (1, 2, 3):
        kernels = CpuKernels(threads)
        found.append(add(kernels, x, y, new_places(kernels, adapters, 70, columns, 20, dtype), chosen))
    assert equal_bits(found[0], found[1])
    assert equal_bits(found[0], found[2])


def test_sums_are_two_chains_and_products_one() -> None:
    """The written order of all operations, in numpy: factors of few bits have exact products."""
    x, y = randn(0, 3, 37).to(BF16).float(), randn(1, 3, 5)
    a, b = randn(2, 4, 37).to(BF16).float(), randn(3, 5, 4).to(BF16).float()
    kernels = CpuKernels()
    places = new_places(kernels, [[Part(a, b, 0.5, 0)]], 37, [5], 4, F32)
    sums = np.zeros((2, 3, 4), np.float32)
    for k in range(37):
        half = int(k >= 19)
        sums[half] = sums[half] + x[:, k, None].numpy() * a[None, :, k].numpy()
    whole, total = torch.from_numpy(sums[0] + sums[1]), torch.zeros(3, 5)
    for rank in range(4):
        total = (total.double() + whole[:, rank, None].double() * b[None, :, rank].double()).float()
    expected = (y.double() + 0.5 * total.double()).float()
    assert equal_bits(add(kernels, x, y, places, [0, 0, 0]), expected)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_an_adapter_takes_the_place_of_another(kernels: CpuKernels, dtype: torch.dtype) -> None:
    """Of a larger rank, with more parts; neighbours stay; a cleared place adds nothing."""
    random, columns = np.random.default_rng(1), [20, 33, 16]
    old, new, beside = (draw_adapter(random, 50, columns, rank, dtype) for rank in (30, 3, 30))
    x, y, chosen = randn(0, 6, 50).to(dtype), randn(1, 6, 69).to(dtype), [0, 1, 0, 1, -1, 0]
    places = new_places(kernels, [old, beside], 50, columns, 30, dtype)
    load(kernels, places, 0, new)
    fresh = new_places(kernels, [new, beside], 50, columns, 30, dtype)
    assert equal_bits(add(kernels, x, y, places, chosen), add(kernels, x, y, fresh, chosen))
    places.set(0, None)
    found, expected = add(kernels, x, y, places, chosen), add(kernels, x, y, fresh, chosen)
    assert equal_bits(found[[0, 2, 4, 5]], y[[0, 2, 4, 5]])
    assert equal_bits(found[[1, 3]], expected[[1, 3]])


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([Part(randn(0, 5, 10), randn(0, 8, 5), 1.0, 0)], "rank 5: at most 4"),
        ([Part(randn(0, 2, 11), randn(0, 8, 2), 1.0, 0)], "the linear is 24 by 10"),
        ([Part(randn(0, 2, 10), randn(0, 8, 3), 1.0, 0)], "the linear is 24 by 10"),
        ([Part(randn(0, 2, 10), randn(0, 8, 2), 1.0, 17)], "the linear is 24 by 10"),
        ([Part(randn(0, 2, 10), randn(0, 8, 2), 1.0, 0)] * 3, "3 parts"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(parts: list[Part], message: str) -> None:
    kernels = CpuKernels()
    held = [Part(randn(1, 4, 10), randn(2, 16, 4), 1.0, 0)]
    places = new_places(kernels, [held], 10, [8, 16], 4, F32)
    x, y = randn(3, 2, 10), randn(4, 2, 24)
    before = add(kernels, x, y, places, [0, 0])
    with pytest.raises(ValueError, match=message):
        places.packed_bytes(parts)
    with pytest.raises(ValueError, match=message):
        load(kernels, places, 0, parts)
    assert equal_bits(add(kernels, x, y, places, [0, 0]), before)
    for place in (-1, 1):
        with pytest.raises(ValueError, match=f"adapter place {place}"):
            load(kernels, places, place, held)


@given(st.lists(st.integers(-1, 6), max_size=60))
def test_tiles_cover_the_rows_with_adapters(places: list[int]) -> None:
    """Each once, sorted by place, in their order; a step without adapters has no tiles."""
    rows = CpuAdapterRows(60)
    rows.fill(np.array([3] * 60, np.int64))
    rows.fill(np.array(places, np.int64))
    seen = []
    for place, first, count in rows.tiles[: rows.num_tiles].tolist():
        assert 1 <= count <= TILE_ROWS
        seen += [(place, int(row)) for row in rows.order[first : first + count]]
    assert seen == sorted((place, row) for row, place in enumerate(places) if place >= 0)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("rank", [1, 7, 16, 40])
def test_adapters_of_embeddings(kernels: CpuKernels, dtype: torch.dtype, rank: int) -> None:
    """Pairs, replaced rows, both or nothing."""
    places, rows = kernels.new_embedding_places(5, 40, 45, dtype), kernels.new_adapter_rows(60)
    pairs = [Part(randn(seed, 30, rank).to(dtype), randn(seed + 9, 45, rank).to(dtype), 0.5, 0) for seed in range(2)]
    tokens = [torch.tensor(ids) for ids in ([0, 3, 4, 5, 6, 7, 12, 29], [11])]
    replaced = [Replaced(ids, randn(20 + len(ids), len(ids), 45).to(dtype)) for ids in tokens]
    held = [(pairs[0], None), (None, replaced[0]), (pairs[1], replaced[1]), (pairs[1], replaced[0]), (None, None)]
    for place, (pair, own_rows) in enumerate(held):
        memory = kernels.new_adapter_memory(places.packed_bytes(pair, own_rows))
        places.set(place, places.pack(pair, own_rows, memory))
    random = np.random.default_rng(rank)
    chosen, ids = random.integers(-1, 5, 60), torch.from_numpy(random.integers(0, 30, 60))
    rows.fill(chosen)
    y = randn(3, 60, 45).to(dtype)
    found = kernels.add_embedding_adapters(ids, y.clone(), places, rows)
    expected = y.double()
    for row, place in enumerate(chosen):
        pair, own_rows = held[place] if place >= 0 else (None, None)
        if own_rows is not None and ids[row] in own_rows.token_ids:
            expected[row] = own_rows.rows[own_rows.token_ids.tolist().index(ids[row])].double()
        if pair is not None:
            expected[row] += pair.scale * (pair.b.double() @ pair.a[ids[row]].double())
        else:
            assert equal_bits(found[row], expected[row].to(dtype))
    torch.testing.assert_close(found.double(), expected, rtol=2**-8 if dtype == BF16 else 1e-5, atol=1e-5)
    for place in range(5):
        places.set(place, None)
    assert equal_bits(kernels.add_embedding_adapters(ids, y.clone(), places, rows), y)
    scaled = kernels.scale_rows(found.clone(), 1.7)
    assert equal_bits(scaled, (found.float() * torch.tensor(1.7)).to(dtype))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("inner", [37, 64])
def test_replaced_rows_of_a_head(kernels: CpuKernels, dtype: torch.dtype, inner: int) -> None:
    """They give the bits of a linear that has them; what a pair adds comes on top."""
    weight, x, chosen = randn(0, 70, inner).to(dtype), randn(1, 11, inner).to(dtype), [0, 1, -1, *[0] * 8]
    ids = torch.tensor([0, 1, *range(5, 40), 69])
    replaced = Replaced(ids, randn(2, len(ids), inner).to(dtype))
    other = weight.clone()
    other[ids] = replaced.rows
    pair = Part(randn(3, 4, inner).to(dtype), randn(4, 70, 4).to(dtype), 0.7, 0)
    places = kernels.new_adapter_places(2, 4, inner, [70], dtype, replaces_rows=True)
    assert load(kernels, places, 0, [], replaced) >= replaced.rows.nbytes
    load(kernels, places, 1, [pair], replaced)
    base, changed = (CpuLinear(each, None, kernels)(x, F32) for each in (weight, other))
    found = add(kernels, x, base, places, chosen)
    if not kernels.isa.has("amx-bf16"):  # its products have another order of sums
        assert equal_bits(found[3:], changed[3:])
        assert equal_bits(found[[0]], changed[[0]])
    torch.testing.assert_close(found[3:], changed[3:], rtol=2**-7 if dtype == BF16 else 1e-5, atol=1e-4)
    assert equal_bits(found[2], base[2])
    alone = kernels.new_adapter_places(1, 4, inner, [70], dtype, replaces_rows=True)
    load(kernels, alone, 0, [pair])
    if not kernels.isa.has("amx-bf16"):
        assert equal_bits(found[[1]], add(kernels, x[[1]], changed[[1]], alone, [0]))
    places.set(1, None)
    assert equal_bits(add(kernels, x, base, places, chosen)[[1, 2]], base[[1, 2]])


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        (Replaced(torch.tensor([3]), randn(0, 1, 9)), r"\[1, 10\] are expected"),
        (Replaced(torch.tensor([3, 20]), randn(0, 2, 10)), "below 20"),
        (Replaced(torch.tensor([3, 3]), randn(0, 2, 10)), "must ascend"),
        (Replaced(torch.tensor([-1, 3]), randn(0, 2, 10)), "must ascend"),
    ],
)
def test_replaced_rows_that_do_not_fit_are_refused(replaced: Replaced, message: str) -> None:
    kernels = CpuKernels()
    head = kernels.new_adapter_places(1, 4, 10, [20], F32, replaces_rows=True)
    with pytest.raises(ValueError, match=message):
        load(kernels, head, 0, [], replaced)
    other = kernels.new_adapter_places(1, 4, 10, [20], F32)
    with pytest.raises(ValueError, match="cannot be replaced"):
        load(kernels, other, 0, [], replaced)
