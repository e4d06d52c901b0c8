"""Paged attention of the CPU against its float64 meaning, over caches full of NaN wherever nothing need be written."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from executor_svc.kernels import reference
from executor_svc.kernels.cpu import CpuKernels
from executor_svc.kernels.cpu import attention_plan as plans
from executor_svc.kernels.interface import AttentionShape
from tests.kernels.driver import flat_batch

Chunks = list[tuple[int, int]]


def compare(
    chunks: Chunks,
    kv_heads: int,
    group: int,
    head_size: int,
    block_size: int,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    query_tiles: tuple[int, ...] = (1, 16, 64),
    window: int | None = None,
    softcap: float | None = None,
) -> None:
    """Fill permuted blocks with the random keys and values that each sequence's tokens see, and compare all rows."""
    generator = torch.Generator().manual_seed(seed)
    kernels = CpuKernels(query_tiles)
    padded = kernels.padded_head_size(head_size)
    shape = AttentionShape(kv_heads * group, kv_heads, head_size, padded, head_size**-0.5, window, softcap)
    needed = [-(-(context + count) // block_size) for context, count in chunks]
    order = torch.randperm(sum(needed) + 3, generator=generator).tolist()
    tables = [[order.pop() for _ in range(n)] for n in needed]
    cache = torch.full((sum(needed) + 3, 2, kv_heads, block_size, padded), float("nan"), dtype=dtype)
    for (context, count), table in zip(chunks, tables, strict=True):
        for position in range(0 if window is None else max(0, context - window + 1), context + count):
            kv = torch.zeros(2, kv_heads, padded)
            kv[..., :head_size] = torch.randn(2, kv_heads, head_size, generator=generator)
            cache[table[position // block_size], :, :, position % block_size] = kv.to(dtype)
    tokens = sum(count for _, count in chunks)
    q = torch.zeros(max(2, tokens), shape.num_heads, padded, dtype=dtype)
    q[..., :head_size] = torch.randn(max(2, tokens), shape.num_heads, head_size, generator=generator).to(dtype)
    b = flat_batch(chunks, tables, block_size, [0] * tokens)
    plan = kernels.plan_attention(shape, block_size, b.slot_mapping, b.query_start_loc, b.seq_lens, b.block_tables)
    found = kernels.attention(q, cache, shape, plan)
    expected = reference.attention(
        q[:tokens], cache, b.query_start_loc, b.seq_lens, b.block_tables, shape.scale, window, softcap
    )
    tolerance = {"rtol": 2e-5, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(found[:tokens].double(), expected.flatten(1), **tolerance)
    assert not found[tokens:].any()


@st.composite
def mixtures(draw: st.DrawFn) -> Chunks:
    """Decodes, whole prompts and chunks in the middle, one to six of them."""
    decode = st.tuples(st.integers(0, 200), st.just(1))
    prompt = st.tuples(st.just(0), st.integers(1, 150))
    chunk = st.tuples(st.integers(0, 200), st.integers(1, 100))
    return draw(st.lists(st.one_of(decode, prompt, chunk), min_size=1, max_size=6))


@settings(max_examples=60)
@given(
    chunks=mixtures(),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 5),
    head_size=st.sampled_from([2, 10, 16, 20, 36, 64]),
    block_size=st.sampled_from([8, 16, 32, 64]),
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_mixtures(
    chunks: Chunks, kv_heads: int, group: int, head_size: int, block_size: int, seed: int, dtype: torch.dtype
) -> None:
    compare(chunks, kv_heads, group, head_size, block_size, seed, dtype)


@settings(max_examples=60)
@given(
    chunks=mixtures(),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 5),
    head_size=st.sampled_from([8, 16, 20, 64, 80, 128]),
    block_size=st.sampled_from([8, 16, 32, 64]),
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    window=st.sampled_from([None, 1, 2, 7, 64, 65, 1000]),
    softcap=st.sampled_from([None, 0.5, 50.0]),
)
def test_windows_and_softcaps(
    chunks: Chunks,
    kv_heads: int,
    group: int,
    head_size: int,
    block_size: int,
    seed: int,
    dtype: torch.dtype,
    window: int | None,
    softcap: float | None,
) -> None:
    compare(chunks, kv_heads, group, head_size, block_size, seed, dtype, window=window, softcap=softcap)


@pytest.mark.parametrize("window", [1, 2, 7, 64, 65, 128])
@pytest.mark.parametrize("length", [63, 64, 65, 128, 129, 200])
def test_windows_around_tile_borders(length: int, window: int) -> None:
    compare([(length - 1, 1), (0, length), (length, 64)], 2, 3, 16, 8, window=window)


def test_a_window_over_everything_is_none() -> None:
    """And one of a single position too few is not."""
    outputs = []
    for window in (None, 100, 99):
        shape = AttentionShape(2, 1, 16, 16, 0.25, window)
        generator = torch.Generator().manual_seed(0)
        cache = torch.randn(13, 2, 1, 8, 16, generator=generator)
        q = torch.randn(100, 2, 16, generator=generator)
        b = flat_batch([(0, 100)], [list(range(13))], 8, [0] * 100)
        plan = CpuKernels().plan_attention(shape, 8, b.slot_mapping, b.query_start_loc, b.seq_lens, b.block_tables)
        outputs.append(CpuKernels().attention(q, cache, shape, plan))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0][:99], outputs[2][:99])
    assert not torch.equal(outputs[0][99], outputs[2][99])


@pytest.mark.parametrize(("context", "count"), [(100_000, 1), (100_000, 64), (0, 6400)])
@pytest.mark.parametrize("window", [1, 64, 200])
def test_work_is_proportional_to_the_window(context: int, count: int, window: int) -> None:
    """However long the context is, a query tile meets the key tiles of its tokens' windows only."""
    builder = plans.PlanBuilder(AttentionShape(2, 2, 16, 16, 1.0, window), 64, (1, 16, 64))
    b = flat_batch([(context, count)], [list(range((context + count) // 64 + 1))], 64, [0] * count)
    for group in builder.build(b.slot_mapping, b.query_start_loc, b.seq_lens, b.block_tables).groups:
        most = (window + group.query_tile - 2) // 64 + 2  # tiles that a run of window + query_tile - 1 keys can touch
        assert len(group.levels) <= most
        assert group.levels[-1][1] <= most * group.num_tiles


@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 128, 129])
def test_around_tile_borders(length: int, block_size: int) -> None:
    compare([(length - 1, 1), (0, length)], 2, 3, 16, block_size)


def test_one_sequence_of_one_token() -> None:
    for kv_heads in (1, 2):
        compare([(0, 1)], kv_heads, 1, 16, 16)


def test_work_cut_into_many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits on scratch memory change how the work is cut, not what comes out."""
    monkeypatch.setattr(plans, "_CHUNK_ELEMENTS", 1)
    monkeypatch.setattr(plans, "_GROUP_SCORES", 4000)
    chunks = [(250, 1), (0, 200), (130, 70), (3, 1), (64, 1), (0, 17), (500, 30)]
    for kv_heads in (1, 2):
        for window in (None, 70):
            compare(chunks, kv_heads, 2, 16, 16, window=window)


def test_a_single_size_of_query_tiles() -> None:
    """What a machine gets where the bits of a product change with the tile's size."""
    compare([(250, 1), (0, 100), (130, 70), (0, 1)], 2, 3, 20, 8, query_tiles=(16,))


def test_no_sequence_loop_in_the_plan() -> None:
    """As many groups for 200 decodes as for one."""
    builder = plans.PlanBuilder(AttentionShape(4, 2, 16, 16, 1.0), 16, (1, 16, 64))
    for count in (1, 200):
        b = flat_batch([(5, 1)] * count, [[i] for i in range(count)], 16, [0] * count)
        plan = builder.build(b.slot_mapping, b.query_start_loc, b.seq_lens, b.block_tables)
        assert len(plan.groups) == 1
        assert len(plan.groups[0].levels) == 1
