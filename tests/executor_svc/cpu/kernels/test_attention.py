"""Paged attention of the CPU against its float64 meaning, over caches full of NaN wherever nothing need be written."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from executor_svc.cpu.kernels.attention import scratch_bytes
from executor_svc.cpu.kernels.attention_plan import TILE_FIELDS, CpuAttentionPlan, tile_tokens
from executor_svc.cpu.kernels.cpu_kernels import CpuKernels
from executor_svc.device import reference
from executor_svc.device.kernels import AttentionShape
from tests.executor_svc.cpu.kernels.layout import as_kept, plan_for
from tests.executor_svc.cpu.kernels.processors import ISAS
from tests.executor_svc.driver import flat_batch
from tests.executor_svc.paged import in_pages
from tests.helpers.marks import short_and_long

Chunks = list[tuple[int, int]]
F32, BF16 = torch.float32, torch.bfloat16
KERNELS = CpuKernels()
"""Made once: each shape is compiled once."""

LONGEST = 300
"""Most tokens of a sequence in most tests, so that kernels are shared."""


def compare(
    chunks: Chunks,
    kv_heads: int,
    group: int,
    head_size: int,
    block_size: int,
    seed: int = 0,
    dtype: torch.dtype = F32,
    window: int | None = None,
    softcap: float | None = None,
    kernels: CpuKernels = KERNELS,
    longest: int = LONGEST,
    sinks: bool = False,
    chunk: int | None = None,
    kv_dtype: torch.dtype | None = None,
) -> None:
    """Fill permuted blocks with the random keys and values that each sequence's tokens see, and compare all rows."""
    kv_dtype = kv_dtype or dtype
    generator = torch.Generator().manual_seed(seed)
    padded = kernels.padded_head_size(head_size)
    shape = AttentionShape(kv_heads * group, kv_heads, head_size, padded, head_size**-0.5, window, softcap, chunk)
    needed = [-(-(context + count) // block_size) for context, count in chunks]
    order = torch.randperm(sum(needed) + 3, generator=generator).tolist()
    tables = [[order.pop() for _ in range(n)] for n in needed]
    cache = torch.full((sum(needed) + 3, 2, kv_heads, block_size, padded), float("nan"), dtype=kv_dtype)
    for (context, count), table in zip(chunks, tables, strict=True):
        first = 0 if window is None else max(0, context - window + 1)
        positions = torch.arange(first if chunk is None else context // chunk * chunk, context + count)
        kv = torch.zeros(len(positions), 2, kv_heads, padded)
        kv[..., :head_size] = torch.randn(len(positions), 2, kv_heads, head_size, generator=generator)
        cache[torch.tensor(table)[positions // block_size], :, :, positions % block_size] = kv.to(kv_dtype)
    tokens = sum(count for _, count in chunks)
    q = torch.zeros(tokens, shape.num_heads, padded, dtype=dtype)
    q[..., :head_size] = torch.randn(tokens, shape.num_heads, head_size, generator=generator).to(dtype)
    b = flat_batch(chunks, tables, block_size, [0] * tokens)
    sunk = torch.randn(shape.num_heads, generator=generator) * 3 if sinks else None
    found = kernels.attention(q, in_pages(as_kept(cache)), shape, plan_for(kernels, shape, b, longest), sinks=sunk)
    expected = reference.attention(
        q, cache, b.query_start_loc, b.seq_lens, b.block_tables, shape.scale, window, softcap, sunk, chunk
    )
    tolerance = {"rtol": 1e-5, "atol": 5e-6} if dtype == F32 else {"rtol": 4e-3, "atol": 1e-5}
    assert found.shape == (tokens, shape.num_heads * padded)
    torch.testing.assert_close(found.double(), expected.flatten(1), **tolerance)


@st.composite
def mixtures(draw: st.DrawFn) -> Chunks:
    """Decodes, whole prompts and chunks in the middle, one to six of them."""
    decode = st.tuples(st.integers(0, LONGEST - 1), st.just(1))
    prompt = st.tuples(st.just(0), st.integers(1, 150))
    chunk = st.tuples(st.integers(0, 200), st.integers(1, 100))
    return draw(st.lists(st.one_of(decode, prompt, chunk), min_size=1, max_size=6))


MIXED = [
    (1, 3, 2, 8, F32), (1, 3, 2, 64, BF16), (2, 1, 10, 16, F32), (2, 1, 10, 32, BF16), (3, 2, 16, 32, F32),
    (3, 2, 16, 8, BF16), (1, 5, 20, 64, F32), (1, 5, 20, 16, BF16), (2, 4, 64, 8, F32), (2, 4, 64, 64, BF16),
    (1, 7, 36, 16, F32), (1, 7, 36, 32, BF16), (1, 1, 128, 32, F32), (1, 1, 128, 8, BF16),
]  # fmt: skip
"""KV heads, query heads of each, head size, block size, dtype: few, for each is compiled."""


@settings(max_examples=70)
@given(chunks=mixtures(), mixed=st.sampled_from(MIXED), seed=st.integers(0, 2**31))
def test_mixtures(chunks: Chunks, mixed: tuple[int, int, int, int, torch.dtype], seed: int) -> None:
    *sizes, dtype = mixed
    compare(chunks, *sizes, seed, dtype)


@pytest.mark.parametrize("head_size", [20, 64, 80])
@pytest.mark.parametrize("isa", ISAS)
def test_keys_and_values_in_bf16_of_a_model_in_fp32(head_size: int, isa: str) -> None:
    """Results are not rounded: within fp32's roundings of what float64 makes of the stored numbers."""
    kernels = CpuKernels(isa=ISAS[isa])
    for block_size in (8, 32):
        compare([(40, 1), (0, 26), (33, 7)], 2, 3, head_size, block_size, kv_dtype=BF16, kernels=kernels)
    compare([(200, 1), (90, 13)], 1, 5, head_size, 16, kv_dtype=BF16, window=70, softcap=0.5, kernels=kernels)


_NARROW, _WIDE = (2, 3, 16), (1, 4, 80)
WINDOWS: list[tuple[int | None, float | None, tuple[int, int, int], int, torch.dtype]] = [
    (None, 0.5, _NARROW, 8, F32),
    (None, 0.5, _WIDE, 32, BF16),
    (1, None, _NARROW, 32, BF16),
    (1, 0.5, _WIDE, 8, F32),
    (2, None, _WIDE, 32, F32),
    (7, None, _WIDE, 8, BF16),
    (7, 0.5, _NARROW, 32, F32),
    (64, None, _NARROW, 8, BF16),
    (64, 0.5, _WIDE, 32, F32),
    (65, None, _WIDE, 8, F32),
    (65, 0.5, _NARROW, 32, BF16),
    (1000, 0.5, _NARROW, 8, BF16),
]
"""Windows, softcaps, KV heads with query heads of each and head sizes, block sizes and dtypes: few, too."""


@settings(max_examples=60)
@given(chunks=mixtures(), case=st.sampled_from(WINDOWS), seed=st.integers(0, 2**31))
def test_windows_and_softcaps(
    chunks: Chunks, case: tuple[int | None, float | None, tuple[int, int, int], int, torch.dtype], seed: int
) -> None:
    window, softcap, sizes, block_size, dtype = case
    compare(chunks, *sizes, block_size, seed, dtype, window=window, softcap=softcap)


@settings(max_examples=40)
@given(
    chunks=mixtures(),
    case=st.sampled_from([(None, None, _WIDE, 16, F32), (7, None, _NARROW, 8, BF16), (64, 0.5, _WIDE, 32, BF16)]),
    seed=st.integers(0, 2**31),
)
def test_sinks(
    chunks: Chunks, case: tuple[int | None, float | None, tuple[int, int, int], int, torch.dtype], seed: int
) -> None:
    """Each head has one more score, of no value."""
    window, softcap, sizes, block_size, dtype = case
    compare(chunks, *sizes, block_size, seed, dtype, window=window, softcap=softcap, sinks=True)


@pytest.mark.parametrize("window", [None, 40])
def test_a_row_with_sinks_has_the_same_bits_in_any_chunk_and_batch(window: int | None) -> None:
    """With other sequences, in chunks, in blocks of another size, and as items of one head."""
    shape = AttentionShape(6, 2, 16, 16, 0.25, window)
    generator = torch.Generator().manual_seed(0)
    keys, q = torch.randn(130, 2, 2, 16, generator=generator), torch.randn(130, 6, 16, generator=generator)
    sinks = torch.randn(6, generator=generator) * 2
    whole: dict[tuple[int, int], torch.Tensor] = {}
    for block_size, step in ((8, 130), (8, 1), (16, 33), (32, 50), (64, 7)):
        cache = torch.zeros(130 // block_size + 1, 2, 2, block_size, 16)
        places = torch.arange(130)
        cache[places // block_size, :, :, places % block_size] = keys
        table = list(range(len(cache)))
        kept, rows = in_pages(as_kept(cache)), []
        for start in range(0, 130, step):
            count = min(step, 130 - start)
            b = flat_batch([(start, count), (start, count)], [table, table], block_size, [0] * 2 * count)
            both = torch.cat([q[start : start + count].flip(0), q[start : start + count]])
            found = KERNELS.attention(both, kept, shape, plan_for(KERNELS, shape, b, 130), sinks=sinks)
            rows.append(found[count:])
        whole[block_size, step] = torch.cat(rows)
    assert all(torch.equal(each, whole[8, 130]) for each in whole.values())


def test_a_sink_beyond_everything_leaves_nothing_and_one_below_changes_nothing() -> None:
    shape = AttentionShape(2, 1, 16, 16, 0.25)
    generator = torch.Generator().manual_seed(0)
    cache, q = torch.randn(13, 2, 1, 8, 16, generator=generator), torch.randn(100, 2, 16, generator=generator)
    b = flat_batch([(0, 100)], [list(range(13))], 8, [0] * 100)
    plan = plan_for(KERNELS, shape, b)
    without = KERNELS.attention(q, cache, shape, plan).unflatten(1, (2, 16))
    found = KERNELS.attention(q, cache, shape, plan, sinks=torch.tensor([1e4, -1e4])).unflatten(1, (2, 16))
    assert not found[:, 0].any()
    assert torch.equal(found[:, 1], without[:, 1])


GROUPS = [(group, dtype) for group in range(1, 14) for dtype in (F32, BF16)]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("group", "dtype"), short_and_long(GROUPS, GROUPS[::4] + GROUPS[3::4]))
def test_every_size_of_group(group: int, dtype: torch.dtype) -> None:
    """Up to more heads of a KV head than a tile has rows."""
    chunks = [(40, 1), (0, 26), (17, 9)]
    if dtype == F32:
        compare(chunks, 2, group, 16, 16)
    else:
        compare(chunks, 1, group, 20, 8, dtype=BF16)


@pytest.mark.parametrize("kv_heads", short_and_long(range(1, 9), [1, 3, 8]))
def test_many_decodes(kv_heads: int) -> None:
    """Contexts about borders of vectors and blocks, for any number of KV heads."""
    chunks = [(position, 1) for position in (0, 1, 7, 8, 15, 16, 40, 63, 64, 130)]
    for group in (1, 3, 13):
        compare(chunks, kv_heads, group, 16, 16)
    compare(chunks, kv_heads, 2, 20, 8, dtype=BF16, window=9, softcap=0.5)


@pytest.mark.parametrize("head_size", short_and_long([96, 112, 192, 256, 400], [112, 256, 400]))
def test_large_heads(head_size: int) -> None:
    """Up to more columns than there are registers."""
    for group in (1, 2):
        compare([(40, 1), (0, 26)], 1, group, head_size, 16, dtype=BF16)


@pytest.mark.parametrize("window", [1, 2, 7, 64, 65, 128])
def test_windows_around_borders_of_vectors_and_blocks(window: int) -> None:
    for length in (15, 16, 17, 63, 64, 65, 128, 129, 200):
        compare([(length - 1, 1), (0, length), (length, 64)], 2, 3, 16, 8, window=window)


@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
def test_around_borders_of_vectors_and_blocks(block_size: int) -> None:
    for length in (1, 2, 7, 8, 9, 15, 16, 17, 63, 64, 65, 128, 129):
        compare([(length - 1, 1), (0, length)], 2, 3, 16, block_size)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("window", [None, 1500])
def test_thousands_of_tokens(dtype: torch.dtype, window: int | None) -> None:
    compare([(5000, 1), (4090, 13), (0, 50)], 1, 3, 16, 16, dtype=dtype, window=window, longest=6000)


def test_as_long_as_the_model_allows() -> None:
    """Scratch memory holds the scores of so many positions, on no border of anything; nothing is written beyond."""
    for block_size in (8, 64):
        compare([(0, 131), (130, 1)], 1, 2, 16, block_size, longest=131)
    shape = AttentionShape(2, 1, 16, 16, 0.25)
    b = flat_batch([(0, 131)], [list(range(17))], 8, [0] * 131)
    used = scratch_bytes(shape, 131)
    scratch = torch.full((used + 4096,), 77, dtype=torch.uint8)
    plan = CpuAttentionPlan(shape, 131, 131, 1, scratch)
    plan.fill(b.slot_mapping, b.query_start_loc, b.seq_lens, b.block_tables)
    KERNELS.attention(torch.ones(131, 2, 16), torch.zeros(17, 2, 1, 8, 16), shape, plan)
    assert bool((scratch[used:] == 77).all())
    assert not bool((scratch[:used] == 77).all())


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("plain", "windowed"), short_and_long([(F32, BF16), (BF16, F32)], [(BF16, F32)]))
@pytest.mark.parametrize("isa", ISAS)
def test_as_compiled_for_lower_levels(isa: str, plain: torch.dtype, windowed: torch.dtype) -> None:
    kernels = CpuKernels(isa=ISAS[isa])
    chunks = [(250, 1), (0, 100), (130, 70), (0, 1)]
    compare(chunks, 2, 3, 20, 8, dtype=plain, kernels=kernels)
    compare(chunks, 1, 1, 64, 32, dtype=windowed, window=70, softcap=0.5, kernels=kernels)


@pytest.mark.parametrize("num_threads", [2, 3])
def test_threads_have_scratch_memory_of_their_own(num_threads: int) -> None:
    kernels = CpuKernels(num_threads)
    compare([(250, 1)] * 20 + [(0, 100), (130, 70), (0, 1)], 2, 2, 16, 16, kernels=kernels)


def test_one_sequence_of_one_token() -> None:
    for kv_heads in (1, 2):
        compare([(0, 1)], kv_heads, 1, 16, 16)


@pytest.mark.parametrize("chunk", [1, 7, 16, 50])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_chunks_of_positions(chunk: int, dtype: torch.dtype) -> None:
    """Within a step's tokens, and at their ends."""
    compare([(49, 1), (50, 1), (0, 120), (33, 70), (99, 3)], 2, 3, 16, 8, dtype=dtype, chunk=chunk)


def test_heads_of_512() -> None:
    compare([(200, 1), (0, 40), (33, 7)], 1, 4, 512, 16, dtype=BF16)
    compare([(200, 1), (0, 40), (33, 7)], 2, 1, 512, 32)


def test_a_window_over_everything_is_none() -> None:
    """And one of a single position too few is not."""
    outputs = []
    generator = torch.Generator().manual_seed(0)
    cache = torch.randn(13, 2, 1, 8, 16, generator=generator)
    q = torch.randn(100, 2, 16, generator=generator)
    for window in (None, 100, 99):
        shape = AttentionShape(2, 1, 16, 16, 0.25, window)
        b = flat_batch([(0, 100)], [list(range(13))], 8, [0] * 100)
        outputs.append(KERNELS.attention(q, cache, shape, plan_for(KERNELS, shape, b)))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0][:99], outputs[2][:99])
    assert not torch.equal(outputs[0][99], outputs[2][99])


def test_scores_of_any_size_make_finite_weights() -> None:
    """The maximum is taken off first, so that nothing overflows; and scores far below it weigh nothing."""
    shape = AttentionShape(1, 1, 16, 16, 1.0)
    q = torch.full((3, 1, 16), 1e15)
    cache = torch.zeros(1, 2, 1, 8, 16)
    cache[0, 0, 0, 1], cache[0, 1, 0, 0], cache[0, 1, 0, 1] = -1e15, 3.0, 5.0
    cache[0, 0, 0, 2], cache[0, 1, 0, 2] = 1e15, 7.0
    b = flat_batch([(0, 3)], [[0]], 8, [0] * 3)
    found = KERNELS.attention(q, as_kept(cache), shape, plan_for(KERNELS, shape, b))
    assert found[:, 0].tolist() == [3.0, 3.0, 7.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_numbers_that_are_none_show_in_all_rows_that_see_them(bad: float, softcap: float | None) -> None:
    """In a key or a value: rows before it and other sequences stay; so its sequence fails, and it alone."""
    shape = AttentionShape(2, 1, 16, 16, 0.25, softcap=softcap)
    generator = torch.Generator().manual_seed(0)
    clean = torch.randn(8, 2, 1, 16, 16, generator=generator)
    q = torch.randn(100, 2, 16, generator=generator)
    b = flat_batch([(0, 60), (10, 40)], [[0, 1, 2, 3], [4, 5, 6, 7]], 16, [0] * 100)
    expected = KERNELS.attention(q, as_kept(clean), shape, plan_for(KERNELS, shape, b))
    for which in (0, 1):
        cache = clean.clone()
        cache[2, which, 0, 3, 7] = bad  # position 35 of the first
        found = KERNELS.attention(q, as_kept(cache), shape, plan_for(KERNELS, shape, b))
        assert torch.equal(found[:35], expected[:35])
        assert torch.equal(found[60:], expected[60:])
        changed = found[35:60, 7 if which else slice(None)]
        if bad != bad or which == 1:
            assert not bool(changed.isfinite().any())


# --- plans


@given(contexts=st.lists(st.integers(0, 100), min_size=1, max_size=9), steps=st.integers(1, 3))
def test_tensors_with_new_values_make_the_plan_of_new_tensors(contexts: list[int], steps: int) -> None:
    """Decodes come in the same memory, step after step."""
    shape = AttentionShape(4, 2, 16, 16, 1.0)
    tables = [list(range(number, number + 8)) for number in range(len(contexts))]
    same = flat_batch([(context, 1) for context in contexts], tables, 16, [0] * len(contexts))
    plan = plan_for(KERNELS, shape, same, LONGEST)
    for step in range(1, steps + 1):
        chunks = [(context + step, 1) for context in contexts]
        new = flat_batch(chunks, tables, 16, [0] * len(chunks))
        same.slot_mapping[:], same.seq_lens[:] = new.slot_mapping, new.seq_lens
        plan.fill(same.slot_mapping, same.query_start_loc, same.seq_lens, same.block_tables)
        fresh = plan_for(KERNELS, shape, new, LONGEST)
        for name, part in (("_tiles", slice(len(chunks))), ("slots", slice(len(chunks))), ("table", (0, [2, 5, 6]))):
            assert (getattr(plan, name)[part] == getattr(fresh, name)[part]).all()


@given(chunks=mixtures(), group=st.integers(1, 14), repeats=st.sampled_from([1, 5]))
def test_tiles_hold_every_token_once(chunks: Chunks, group: int, repeats: int) -> None:
    """Each with its position and sequence, those with most work first."""
    chunks = chunks * repeats
    shape = AttentionShape(group, 1, 16, 16, 1.0)
    tables = [list(range((context + count) // 16 + 1)) for context, count in chunks]
    b = flat_batch(chunks, tables, 16, [0] * sum(count for _, count in chunks))
    plan = plan_for(KERNELS, shape, b, LONGEST)
    tiles: Any = plan._tiles[: plan.num_tiles]
    assert tiles.shape == (plan.num_tiles, TILE_FIELDS)
    found, work = Counter[tuple[int, ...]](), []
    for row, tokens, position, sequence in tiles.tolist():
        assert 1 <= tokens <= tile_tokens(shape)
        found.update((row + i, sequence, position + i) for i in range(tokens))
        work.append((position + tokens) * tokens)
    owners = [(s, context + i) for s, (context, count) in enumerate(chunks) for i in range(count)]
    assert found == Counter((row, *owner) for row, owner in enumerate(owners))
    assert work == sorted(work, reverse=True)


def test_a_plan_is_filled_anew_for_each_step() -> None:
    shape = AttentionShape(4, 2, 16, 16, 1.0)
    plan = KERNELS.new_attention_plan(shape, 100, 300)
    for chunks in ([(5, 1)] * 200, [(0, 12)], [(7, 1), (0, 100), (30, 3)]):
        b = flat_batch(chunks, [list(range(7))] * len(chunks), 16, [0] * sum(count for _, count in chunks))
        plan.fill(b.slot_mapping, b.query_start_loc, b.seq_lens, b.block_tables)
        assert plan.num_tiles == plan_for(KERNELS, shape, b, 100).num_tiles
        assert plan.slots[: len(b.slot_mapping)].tolist() == b.slot_mapping.tolist()
    other = KERNELS.new_attention_plan(shape, 100, 300)
    assert other.name != plan.name, "a program depends on what differs"


def test_items_hold_all_kv_heads_if_each_thread_has_several() -> None:
    """They are then read in the order of memory; and a row has the same bits if its heads are items of their own."""
    generator = torch.Generator().manual_seed(0)
    shape = AttentionShape(18, 6, 48, 48, 0.25)
    cache = as_kept(torch.randn(40, 2, 6, 16, 48, generator=generator).to(BF16))
    q = torch.randn(8, 18, 48, generator=generator).to(BF16)
    tables = [list(range(5 * which, 5 * which + 5)) for which in range(8)]
    kernels = CpuKernels(2)
    rows = []
    for count, items in ((1, 6), (2, 12), (3, 9), (4, 8), (8, 8)):
        b = flat_batch([(70, 1)] * count, tables[:count], 16, [0] * count)
        plan = plan_for(kernels, shape, b)
        assert plan.num_tiles == items
        rows.append(kernels.attention(q[:count], cache, shape, plan))
    for found in rows:
        assert torch.equal(found, rows[-1][: len(found)])
