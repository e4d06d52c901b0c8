"""Paged attention of the GPU against its float64 meaning, over caches full of NaN wherever nothing may be read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from executor_svc.gpu.kernels.attention import attention as operation
from executor_svc.gpu.kernels.attention.attention import attention, variants
from executor_svc.gpu.kernels.attention.config import (
    COPIED_BLOCK,
    HEAD_SIZES,
    AttentionKind,
    Phase,
    attention_config,
    padded,
)
from tests.executor_svc.gpu.kernels.attention.cases import ARCH, F8, Chunks, Sizes, check, make_call
from tests.helpers.marks import short_and_long

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
MIXED: Chunks = [(70, 1), (0, 0), (0, 33), (0, 1), (-1, 3), (40, 21), (129, 1)]
"""Decodes, a whole prompt, a chunk in the middle, one without tokens, and three tokens of padding."""


def compare(chunks: Chunks, sizes: Sizes, device: torch.device, seed: int = 0) -> None:
    """Run it and compare all rows."""
    call = make_call(chunks, sizes, device, seed)
    attention(call, ARCH)
    check(call)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("block_size", "dtype"), [(16, F16), (16, F32), (COPIED_BLOCK, BF16)])
@pytest.mark.parametrize("head_size", short_and_long(HEAD_SIZES, HEAD_SIZES[::2]))
def test_head_sizes_and_dtypes(head_size: int, block_size: int, dtype: torch.dtype, device: torch.device) -> None:
    sizes = Sizes(2, 2, head_size, block_size, dtype)
    compare([(70, 1), (20, 9)], sizes, device)
    compare([(70, 1), (-1, 1), (0, 1)], sizes, device)


@pytest.mark.parametrize(("dtype", "block_size"), [(F32, 16), (BF16, COPIED_BLOCK)])
@pytest.mark.parametrize("group", short_and_long(range(1, 9), (1, 3, 4, 8)))
def test_groups(group: int, dtype: torch.dtype, block_size: int, device: torch.device) -> None:
    compare([(30, 5), (0, 70 // group)], Sizes(2, group, 64, block_size, dtype), device)
    compare([(30, 1), (65, 1)], Sizes(2, group, 64, block_size), device)


@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
def test_mixed_batches(block_size: int, device: torch.device) -> None:
    compare(MIXED, Sizes(2, 3, block_size=block_size), device)


@pytest.mark.parametrize("block_size", [16, COPIED_BLOCK])
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_edges_of_query_and_key_tiles(more: int, block_size: int, device: torch.device) -> None:
    sizes = Sizes(block_size=block_size)
    kind = make_call([(0, 1)], sizes, device).kind
    config = attention_config(kind, Phase.PREFILL, ARCH)
    tokens = config.rows // 4
    compare([(0, tokens + more), (config.tile - tokens, tokens + more)], sizes, device)
    tile = attention_config(kind, Phase.DECODE, ARCH).tile
    compare([(tile + more - 1, 1), (2 * tile + more - 1, 1)], sizes, device)


@pytest.mark.parametrize("window", [1, 17, 64, None])
@pytest.mark.parametrize("softcap", [5.0, None])
def test_window_and_softcap(window: int | None, softcap: float | None, device: torch.device) -> None:
    sizes = Sizes(1, 2, block_size=8, dtype=F32, window=window, softcap=softcap)
    compare([(100, 40), (0, 30), (150, 1)], sizes, device)
    compare([(150, 1), (3, 1), (63, 1), (64, 1)], sizes, device)


@pytest.mark.parametrize(
    "sizes", [Sizes(2, 4), Sizes(1, 3, window=33, softcap=5.0), Sizes(2, 2, window=33, kv_dtype=F8), Sizes(1, 19)]
)
def test_sinks(sizes: Sizes, device: torch.device) -> None:
    """One more score of each head, of no value."""
    sizes = replace(sizes, sinks=True)
    compare([(70, 1), (-1, 2), (40, 21), (0, 1)], sizes, device)
    compare([(90, 1), (0, 1), (-1, 1)], sizes, device)


@pytest.mark.parametrize("chunk", [1, 24, 100])
def test_chunks_of_positions(chunk: int, device: torch.device) -> None:
    sizes = Sizes(1, 2, block_size=8, dtype=F32, chunk=chunk)
    compare([(90, 40), (0, 30), (150, 1)], sizes, device)
    compare([(99, 1), (100, 1), (23, 1), (24, 1)], sizes, device)


def test_heads_of_512(device: torch.device) -> None:
    for sizes in (
        Sizes(1, 4, 512),
        Sizes(2, 2, 512, COPIED_BLOCK),
        Sizes(1, 2, 512, dtype=F32),
        Sizes(1, 8, 512, kv_dtype=F8),
    ):
        compare([(40, 9), (0, 3)], sizes, device)
        compare([(70, 1), (3, 1)], sizes, device)


def test_window_over_many_key_tiles(device: torch.device) -> None:
    """Tiles at the window's ends have masks, those between have none, those before are not gone through."""
    compare([(600, 3)], Sizes(1, 2, window=400), device)


FP8_CACHES = [*zip(HEAD_SIZES, (16, 8, 32, 32, 16, 16), strict=True), (64, COPIED_BLOCK), (96, COPIED_BLOCK)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("head_size", "block_size", "dtype"), [*((*sizes, BF16) for sizes in FP8_CACHES), (*FP8_CACHES[0], F16)]
)
def test_fp8_cache(head_size: int, block_size: int, dtype: torch.dtype, device: torch.device) -> None:
    sizes = Sizes(2, 4, head_size, block_size, dtype=dtype, kv_dtype=F8)
    compare([(70, 1), (-1, 2), (40, 21)], sizes, device)
    compare([(90, 1), (60, 9)], replace(sizes, window=33), device)
    compare([(70, 1), (0, 1)], replace(sizes, softcap=20.0), device)


def test_fp8_cache_with_queries_that_fp16_does_not_hold(device: torch.device) -> None:
    call = make_call([(40, 1), (9, 3)], Sizes(dtype=BF16, kv_dtype=F8), device)
    call.q[:, 0] *= 1e6
    call.q[:, 1] *= 1e-7
    call.q[:, 2] = 0
    attention(replace(call, scale=1e-6), ARCH)
    check(replace(call, scale=1e-6))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("length", short_and_long([1, 64, 65, 129], [1, 65]))
@pytest.mark.parametrize(("head_size", "kv_dtype"), [(96, None), (80, F8), (256, F8)])
def test_the_copy_engine_fetches_what_threads_load(
    length: int, head_size: int, kv_dtype: torch.dtype | None, device: torch.device
) -> None:
    for tokens in {1, min(length, 7)}:
        sizes = Sizes(2, 3, head_size, COPIED_BLOCK, kv_dtype=kv_dtype)
        call = make_call([(length - tokens, tokens), (0, 1)], sizes, device)
        config = call.config(Phase.DECODE if tokens == 1 else Phase.PREFILL, ARCH)
        assert config.copies == (ARCH >= 90)
        attention(call, ARCH, config)
        check(call)
        copied = call.out.clone()
        attention(call, ARCH, replace(config, copies=False))
        torch.testing.assert_close(copied, call.out, equal_nan=True)


def test_when_the_copy_engine_is_used() -> None:
    kind_90 = AttentionKind(128, BF16, BF16, COPIED_BLOCK, 4, softcap=True)
    assert attention_config(kind_90, Phase.PREFILL, 90).copies
    assert attention_config(replace(kind_90, kv_dtype=F8), Phase.DECODE, 90).copies
    assert not attention_config(kind_90, Phase.PREFILL, 80).copies
    assert not attention_config(replace(kind_90, window=True), Phase.PREFILL, 90).copies
    assert not attention_config(replace(kind_90, block_size=32), Phase.PREFILL, 90).copies
    assert not attention_config(replace(kind_90, dtype=F32, kv_dtype=F32), Phase.PREFILL, 90).copies
    wide = replace(kind_90, group=17)
    assert attention_config(wide, Phase.PREFILL, 90).copies
    assert not attention_config(wide, Phase.DECODE, 90).copies


@pytest.mark.parametrize("arch", [86, 89, 120])
def test_gpus_with_little_shared_memory(arch: int) -> None:
    """Keys and values on their way, and the queries, leave 4 of 99 KiB to what else compiled kernels have there."""
    caches = [(BF16, BF16), (F32, F32)] + [(BF16, F8)] * (arch >= 90)
    for head_size, (dtype, kv_dtype), group in product(HEAD_SIZES, caches, (1, 17)):
        kind = AttentionKind(head_size, dtype, kv_dtype, COPIED_BLOCK, group)
        for phase in Phase:
            if phase is Phase.DRAFTS and dtype == F32:
                continue
            if (head_size, dtype, group) == (HEAD_SIZES[-1], F32, 17):
                with pytest.raises(ValueError, match="at most 16 fit a tile"):
                    attention_config(kind, phase, arch)
                continue
            config = attention_config(kind, phase, arch)
            loading = max(1, config.num_stages - 1)
            num_bytes = dtype.itemsize * config.rows + 2 * kv_dtype.itemsize * config.tile * loading
            converted = dtype.itemsize * config.tile if kind.scales else 0
            assert padded(head_size) * (num_bytes + converted) <= 96 << 10
            assert not config.copies


def test_more_keys_than_the_copy_engine_counts_are_refused(device: torch.device) -> None:
    call = make_call([(0, 5)], Sizes(block_size=COPIED_BLOCK), device)
    config = replace(call.config(Phase.PREFILL, 90), copies=True)
    most = 2**31 // (2 * COPIED_BLOCK)
    cache = torch.empty(most, 2, 1, COPIED_BLOCK, 64, dtype=BF16, device="meta")
    with pytest.raises(ValueError, match=r"^kv_layer must have less than 2\^31"):
        replace(call, kv_layer=cache).cache(config)
    assert not replace(call, kv_layer=cache).config(Phase.PREFILL, 90).copies
    fewer = replace(call, kv_layer=cache[1:])
    assert fewer.cache(config).shape == [2**31 - 2 * COPIED_BLOCK, 64]
    assert fewer.config(Phase.PREFILL, 90).copies


def test_more_heads_than_a_decode_tile_has_rows(device: torch.device) -> None:
    compare([(50, 1), (130, 1)], Sizes(1, 19), device)


def test_long_decode(device: torch.device) -> None:
    compare([(8191, 1)], Sizes(1, 4, 64, 32), device)


def test_few_heads_at_once(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys too many for the L2 change the order of programs, not what they give."""
    call = make_call(MIXED, Sizes(3, 2), device)
    attention(call, ARCH)
    side_by_side = call.out.clone()
    monkeypatch.setattr(operation, "_L2_BYTES", 0)
    attention(call, ARCH)
    assert torch.equal(side_by_side.nan_to_num(7.0), call.out.nan_to_num(7.0))


@st.composite
def batches(
    draw: st.DrawFn, block_sizes: Sequence[int], windows: st.SearchStrategy[int | None]
) -> tuple[Chunks, Sizes, int]:
    decode = st.tuples(st.integers(-1, 200), st.just(1))
    chunk = st.tuples(st.integers(0, 100), st.integers(0, 50))
    sizes = Sizes(
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 8)),
        head_size=draw(st.sampled_from(HEAD_SIZES)),
        block_size=draw(st.sampled_from(block_sizes)),
        dtype=draw(st.sampled_from([BF16, F16, F32])),
        window=draw(windows),
        softcap=draw(st.sampled_from([None, 5.0])),
    )
    chunks = draw(st.lists(st.one_of(decode, chunk), min_size=1, max_size=5))
    return chunks, sizes, draw(st.integers(0, 9))


@settings(max_examples=12)
@given(batches([8, 16, 32, 64], st.one_of(st.none(), st.integers(1, 150))))
def test_any_mixture(device: torch.device, batch: tuple[Chunks, Sizes, int]) -> None:
    compare(batch[0], batch[1], device, batch[2])


@settings(max_examples=8)
@given(batches([COPIED_BLOCK], st.none()))
def test_any_mixture_fetched_by_the_copy_engine(device: torch.device, batch: tuple[Chunks, Sizes, int]) -> None:
    compare(batch[0], batch[1], device, batch[2])


@pytest.mark.parametrize("block_size", [16, COPIED_BLOCK])
def test_a_row_does_not_depend_on_its_batch(block_size: int, device: torch.device) -> None:
    """Bit for bit: tokens of a chunk, alone and behind other sequences."""
    together = make_call([(3, 7), (60, 40), (90, 1)], Sizes(block_size=block_size), device)
    attention(together, ARCH)
    alone = replace(
        together,
        q=together.q[7:47],
        query_start_loc=torch.tensor([0, 40], dtype=torch.int32, device=device),
        seq_lens=together.seq_lens[1:2],
        block_tables=together.block_tables[1:2],
        out=torch.empty_like(together.out[7:47]),
    )
    attention(alone, ARCH)
    assert torch.equal(alone.out, together.out[7:47])


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"scale": 0.0}, "scale"),
        ({"softcap": 0.0}, "softcap"),
        ({"window": 0}, "window"),
        ({"chunk": 0}, "chunk"),
        ({"chunk": 8, "window": 8}, "chunk"),
        ({"max_query_len": 0}, "max_query_len"),
        ({"max_seq_len": 10_000}, "block_tables"),
        ({"seq_lens": torch.zeros(1, dtype=torch.int64)}, "seq_lens"),
        ({"query_start_loc": torch.zeros(3, dtype=torch.int32)}, "query_start_loc"),
        ({"out": torch.zeros(7, 256)}, "out"),
        ({"q": torch.zeros(7, 4, 72, dtype=BF16)}, "q"),
        ({"kv_layer": torch.zeros(2, 2, 1, 16, 64)}, "kv_layer"),
        ({"kv_layer": torch.zeros(2, 2, 1, 24, 64, dtype=BF16)}, "kv_layer"),
        ({"kv_layer": torch.zeros(2, 2, 1, 16, 64).to(F8)}, "k_scale"),
        ({"k_scale": torch.ones(1)}, "k_scale"),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict[str, Any], name: str, device: torch.device) -> None:
    with pytest.raises(ValueError, match=f"^{name} "):
        attention(replace(make_call([(0, 5)], Sizes(), device), **changed), ARCH)


def test_too_many_heads_for_a_tile_are_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match=r"^q has 33 query heads"):
        attention(make_call([(0, 1)], Sizes(1, 33, 256, dtype=F32), device), ARCH)


def test_fp8_is_refused_where_it_does_not_compile(device: torch.device) -> None:
    with pytest.raises(ValueError, match=r"^kv_layer must not be in float8"):
        attention(make_call([(0, 1)], Sizes(kv_dtype=F8), device), 80)


def test_variants_name_every_argument() -> None:
    found = variants()
    assert len({each.name for each in found}) == len(found)
    for each in found:
        assert list(each.signature) == each.kernel.arg_names
        assert {name for name, type_ in each.signature.items() if type_ == "constexpr"} == set(each.constants)
