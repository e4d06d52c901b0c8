"""Where units of recurrent states lie: in one page each, apart, in few pages of which blocks fill as much as before."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from executor_svc.config import ExecutorConfig
from executor_svc.device.kv_cache import DraftLayers, KVCache, layout_of, model_layout
from executor_svc.device.kv_layout import MAX_STRIPS, KVLayout, LayerKV
from executor_svc.device.pool_sizes import chosen_pages, least_of
from executor_svc.device.state_layout import HEADER_BYTES, StateLayout
from executor_svc.plan.description import LayerHeads, ModelGeometry
from executor_svc.plan.limits import GroupShape
from executor_svc.plan.state_sizes import ConvState, DeltaState, LayerState

BF16 = torch.bfloat16
LFM2 = LayerState(ConvState(2048, 3))
QWEN3_5 = LayerState(ConvState(8192, 4), DeltaState(16, 32, 128, 128))
CPU = torch.device("cpu")


def geometry(heads: LayerHeads, state: LayerState, pattern: str, dtype: str = "bfloat16") -> ModelGeometry:
    """pattern: a for layers of attention, r for recurrent ones."""
    attends = [kind == "a" for kind in pattern]
    own = (heads if each else LayerHeads(0, heads.head_size) for each in attends)
    return ModelGeometry(
        "m", "M", 100, 64, len(pattern), 4, heads.num_kv_heads, heads.head_size, 4096, dtype, 1, 1,
        layer_heads=tuple(own), layer_states=tuple(None if each else state for each in attends),
    )  # fmt: skip


def layout(heads: LayerHeads, state: LayerState, pattern: str, dtype: str = "bfloat16", **options: object) -> KVLayout:
    config = ExecutorConfig(model="m", block_size=16, **options)  # type: ignore[arg-type]
    own = geometry(heads, state, pattern, dtype)
    return model_layout(own, lambda size: size, DraftLayers((), 0), config, getattr(torch, dtype))


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[list[int]], int]:
    sizes = st.integers(1, 12).map(lambda count: 64 * count)
    units = draw(st.lists(st.lists(sizes, max_size=6), min_size=1, max_size=8))
    least = max((size for each in units for size in each), default=64)
    return units, 64 * draw(st.integers(least // 64, 40))


@given(cases())
@settings(max_examples=200, deadline=None)
def test_every_byte_is_of_one_unit_or_of_the_header(case: tuple[list[list[int]], int]) -> None:
    units, page_bytes = case
    found = StateLayout.of(units, page_bytes)
    used = np.zeros((found.pages_per_state, page_bytes), np.int64)
    used[0, :HEADER_BYTES] += 1
    for sizes, places in zip(units, found.layers, strict=True):
        for size, (page, offset) in zip(sizes, places, strict=True):
            assert offset % 64 == 0
            assert offset + size <= page_bytes
            used[page, offset : offset + size] += 1
    assert used.max() == 1
    assert used.sum() == found.used_bytes
    assert all(used[page].any() for page in range(found.pages_per_state))
    assert abs(found.padding(page_bytes) - (1 - used.mean())) < 1e-12


def test_units_are_packed_into_pages_that_are_half_full_at_least() -> None:
    units = [QWEN3_5.unit_bytes(1, BF16)] * 24
    found = StateLayout.of(units, 1 << 19)
    assert found.padding(1 << 19) < 0.1


@pytest.mark.parametrize(
    ("heads", "state", "pattern", "most_padding"),
    [
        (LayerHeads(8, 64), LFM2, "rrarrarrararararr"[:16], 0.15),
        (LayerHeads(4, 256), QWEN3_5, "rrra" * 8, 0.1),
        (LayerHeads(1, 576), QWEN3_5, "rrra" * 7, 0.3),
    ],
)
def test_pages_of_models_have_little_padding(
    heads: LayerHeads, state: LayerState, pattern: str, most_padding: float
) -> None:
    found = layout(heads, state, pattern, speculative="off")
    assert found.padding < most_padding
    assert found.page_bytes % 64 == 0
    assert max(found.pages_per_block) <= MAX_STRIPS
    assert found.pages_per_state * found.page_bytes >= sum(map(sum, [state.unit_bytes(1, BF16)])) * pattern.count("r")
    with_drafts = layout(heads, state, pattern, speculative="ngram", num_speculative_tokens=5)
    assert with_drafts.pages_per_state * with_drafts.page_bytes > found.pages_per_state * found.page_bytes


def test_a_model_without_states_has_the_pages_that_it_had() -> None:
    layers = [LayerKV(2, 16)] * 3
    for units in ((), ((), (), ())):
        found = KVLayout.of(layers, 8, BF16, units=units)
        assert (found.states, found.pages_per_state, found.groups) == (None, 0, ())
        assert found.page_bytes == 3 * layers[0].num_bytes(8, BF16)


def test_layers_without_keys_and_values_have_no_place_and_no_group() -> None:
    heads = [LayerHeads(0, 64), LayerHeads(2, 64), LayerHeads(0, 64), LayerHeads(2, 64)]
    windows = [None, 256, None, 256]
    units = [[1024], [], [1024], []]
    found = layout_of(heads, windows, 4096, lambda size: size, 16, BF16, units=units)
    assert found.groups == (GroupShape(256, found.num_tables),)
    views = found.views(torch.zeros(3, found.page_bytes, dtype=torch.uint8))
    assert [view.shape[2] for view in views] == [0, 2, 0, 2]


def test_a_pool_has_memory_of_states_and_headers() -> None:
    found = layout(LayerHeads(8, 64), LFM2, "rar")
    cache = KVCache(found, 2, 0, CPU, num_state_pages=3)
    assert cache.num_device_blocks == 2 * found.num_tables + 3
    assert [memory is None for memory in cache.states] == [False, True, False]
    assert cache.states[0] is not None
    assert cache.states[0].pool.data_ptr() == cache.pool.data_ptr()
    assert cache.state_headers is not None
    tables = np.array([[0], [2], [1]], np.int32)
    cache.state_headers.write(torch.from_numpy(tables), torch.tensor([7, 9, 11], dtype=torch.int32))
    assert cache.state_headers.read(tables, np.array([8, 9, 0])).tolist() == [7, 9, 0]
    cache.copy([2], [1])
    assert cache.state_headers.read(tables, np.array([8, 9, 20])).tolist() == [7, 9, 9]


def test_options_count_blocks_and_add_states() -> None:
    found = layout(LayerHeads(8, 64), LFM2, "rar")
    config = ExecutorConfig(model="m", num_gpu_blocks=10, max_num_seqs=6)
    assert chosen_pages(found, config) == 10 * found.num_tables + 6 * found.pages_per_state
    assert chosen_pages(found, ExecutorConfig(model="m")) is None
    assert "and one recurrent state of" in least_of(found)
    assert found.least_blocks * found.num_tables >= found.num_tables + found.pages_per_state
    plain = layout_of([LayerHeads(8, 64)], [None], 4096, lambda size: size, 16, BF16)
    assert least_of(plain) == f"one KV block of {plain.bytes_per_block} bytes"
    assert plain.least_blocks == 1
    more = found.useful_blocks(10, 4096, 512) - 10 * 256
    assert more == -(-10 * 4 * found.pages_per_state // found.num_tables)
