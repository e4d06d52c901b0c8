"""Attention of prompts with roles for warps: its twin against the float64 meaning, and what the two have in common."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from executor_svc.gpu.kernels.attention import tile, work
from executor_svc.gpu.kernels.attention.attention import attention
from executor_svc.gpu.kernels.attention.config import MOST_ROWS, AttentionConfig
from executor_svc.gpu.kernels.attention.gluon import kernel, twin
from executor_svc.gpu.kernels.attention.gluon.prefill import prompt_attention, variants
from executor_svc.gpu.kernels.attention.gluon.tiles import BLOCKS, TILES, PromptTiles, kind_of, tiles_of, why_not
from tests.executor_svc.gpu.kernels.attention.cases import ARCH, F8, Chunks, Sizes, check, make_call

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
PAGED = Sizes(2, 4)
MIXED: Chunks = [(70, 1), (0, 0), (0, 33), (0, 1), (-1, 3), (40, 21), (129, 1)]


def compare(chunks: Chunks, sizes: Sizes, device: torch.device, seed: int = 0) -> None:
    """Run it and compare all rows."""
    call = make_call(chunks, sizes, device, seed)
    prompt_attention(call)
    check(call)


@pytest.mark.parametrize(("head_size", "dtype", "block_size"), [(64, BF16, 64), (128, F16, 32), (128, BF16, 16)])
def test_head_sizes_and_dtypes(head_size: int, dtype: torch.dtype, block_size: int, device: torch.device) -> None:
    sizes = replace(PAGED, head_size=head_size, dtype=dtype, block_size=block_size)
    compare([(70, 1), (20, 9), (180, 41)], sizes, device)


@pytest.mark.parametrize("group", [1, 5, 8, 19])
def test_mixed_batches(group: int, device: torch.device) -> None:
    compare(MIXED, replace(PAGED, group=group), device)


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_edges_of_query_and_key_tiles(more: int, device: torch.device) -> None:
    tiles = TILES[64]
    tokens, block = tiles.rows // 4, PAGED.block_size
    compare([(0, tokens + more), (tiles.tile - tokens, tokens + more), (block - 3, 3 + more)], PAGED, device)


@pytest.mark.parametrize("sizes", [replace(PAGED, softcap=5.0), replace(PAGED, group=3, sinks=True)])
def test_softcap_and_sinks(sizes: Sizes, device: torch.device) -> None:
    compare([(70, 1), (-1, 2), (40, 21), (0, 130)], sizes, device)


def test_batches_without_sequences_write_nothing(device: torch.device) -> None:
    call = make_call([(0, 1)], PAGED, device)
    call = replace(
        call, seq_lens=call.seq_lens[:0], query_start_loc=call.query_start_loc[:1], block_tables=call.block_tables[:0]
    )
    prompt_attention(call)
    assert call.out.isnan().all()


@st.composite
def batches(draw: st.DrawFn) -> tuple[Chunks, Sizes, int]:
    sizes = Sizes(
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 8)),
        head_size=draw(st.sampled_from([*TILES])),
        block_size=draw(st.sampled_from(BLOCKS)),
        dtype=draw(st.sampled_from([BF16, F16])),
        softcap=draw(st.sampled_from([None, 5.0])),
    )
    chunk = st.tuples(st.integers(-1, 300), st.integers(0, 70))
    return draw(st.lists(chunk, min_size=1, max_size=4)), sizes, draw(st.integers(0, 9))


@settings(max_examples=8)
@given(batches())
def test_any_mixture(device: torch.device, batch: tuple[Chunks, Sizes, int]) -> None:
    compare(*batch[:2], device, batch[2])


def test_sums_have_the_order_of_todays_kernel(device: torch.device) -> None:
    """Bit for bit, where that has the same tiles, on the interpreter: a product's order is numpy's there."""
    call = make_call([(0, 70), (100, 40), (255, 1)], PAGED, device)
    prompt_attention(call, twin=True)
    found = call.out.clone()
    tiles = TILES[64]
    attention(call, ARCH, AttentionConfig(tiles.rows, tiles.tile, 8, 2))
    exactly = {"rtol": 0, "atol": 0} if device.type == "cpu" else {}
    torch.testing.assert_close(found, call.out, equal_nan=True, **exactly)


# --- one description of tiles ----------------------------------------------------------------------------------------


def test_the_kernel_and_its_twin_have_the_same_arguments() -> None:
    assert kernel.prompt_kernel.arg_names == twin.prompt_twin.arg_names
    by_name = {each.name: each for each in variants()}
    assert len(by_name) == 12 + 12 + 8
    twins = 0
    for name, each in by_name.items():
        assert list(each.signature) == each.kernel.arg_names
        other = by_name.get(re.sub("gluon (.*) blocks of 64 copied", r"twin \1", name))
        if other not in (None, each):
            assert each.constants == other.constants
            twins += 1
    assert twins == 12


def test_indices_masks_and_weights_are_one_text() -> None:
    """Both call the same functions for what a program's queries and keys are, which are seen, and what they weigh."""
    for shared in ("prompt_of", "keys_of", "first_row_of", "seen_values"):
        assert getattr(kernel, shared) is getattr(twin, shared) is getattr(work, shared)
    for shared in ("sink_exponents", "with_sink", "divided"):
        assert getattr(kernel, shared) is getattr(twin, shared) is getattr(tile, shared)
    # The twin's come by way of `weigh` and `query_places`.
    for shared in ("capped", "on_border", "visible", "weights_of", "row_places"):
        assert getattr(kernel, shared) is getattr(tile, shared)
    assert twin.weigh is tile.weigh
    calls = re.findall(r"gl\.(load|exp2|max|maximum|sum|where)\b", inspect.getsource(kernel))
    assert calls == ["load", "where"], "the queries' rows, and no keys for no tokens"


def test_registers_and_shared_memory_of_a_block() -> None:
    for head_size, tiles in TILES.items():
        assert 2 * tiles.consumer_registers + tiles.producer_registers <= 65536 // 128
        assert not any(tiles.tile % size for size in BLOCKS)
        assert tiles.stages >= 2
        numbers = tiles.rows + 2 * tiles.stages * tiles.tile
        assert 2 * head_size * numbers + 8 * (4 * tiles.stages + 1) <= 227 << 10
    assert PromptTiles(128, 2, 24).consumer_registers == 240


# --- what it does not have -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "lacking"),
    [
        ({"head_size": 80}, "heads of 80 numbers"),
        ({"dtype": F32, "kv_dtype": F32}, "32-bit queries"),
        ({"kv_dtype": F8}, "a cache in fp8"),
        ({"window": True}, "a window or chunks"),
        ({"block_size": 8}, "blocks of 8 tokens"),
        ({"countable": False}, "pools of 2^31"),
        ({"group": 129}, "129 query heads"),
        ({"more": 64}, "latents"),
    ],
)
def test_what_the_kernel_does_not_have(changed: dict[str, Any], lacking: str) -> None:
    kind = kind_of(128, BF16, 16)
    assert why_not(kind) is None
    assert lacking in str(why_not(replace(kind, **changed)))
    with pytest.raises(ValueError, match=re.escape(lacking)):
        tiles_of(replace(kind, **changed))


def test_more_rows_than_the_copy_engine_counts_are_refused(device: torch.device) -> None:
    call = make_call([(0, 5)], PAGED, device)
    most = MOST_ROWS // (2 * 2 * PAGED.block_size)
    cache = torch.empty(most, 2, 2, PAGED.block_size, 64, dtype=BF16, device="meta")
    with pytest.raises(ValueError, match=r"pools of 2\^31"):
        prompt_attention(replace(call, kv_layer=cache))
