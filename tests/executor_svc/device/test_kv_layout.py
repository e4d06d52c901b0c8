"""Where layers lie in pages: every byte is of one layer, whatever the shapes and groups."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from executor_svc.config import ExecutorConfig
from executor_svc.device.kv_cache import DraftLayers, model_layout
from executor_svc.device.kv_layout import MAX_STRIPS, KVLayout, LayerKV
from executor_svc.plan.description import ModelGeometry
from executor_svc.plan.limits import GroupShape

BF16 = torch.bfloat16


def test_one_group_has_one_page_a_block() -> None:
    """A page is then a block of all layers, side by side."""
    layers = [LayerKV(2, 16)] * 3 + [LayerKV(1, 64)]
    layout = KVLayout.of(layers, 8, torch.float32)
    sizes = [layer.num_bytes(8, torch.float32) for layer in layers]
    assert sizes == [2048, 2048, 2048, 4096]
    assert (layout.pages_per_block, layout.page_bytes, layout.bytes_per_block) == ((1,), sum(sizes), sum(sizes))
    assert [(place.strip, place.offset) for place in layout.places] == [(0, 0), (0, 2048), (0, 4096), (0, 6144)]
    views = layout.views(torch.empty(5, layout.page_bytes, dtype=torch.uint8))
    assert [tuple(view.shape) for view in views] == [(5, 2, 2, 8, 16)] * 3 + [(5, 2, 1, 8, 64)]
    assert {view.stride(0) for view in views} == {layout.page_bytes // 4}


def test_pages_are_whole_rows_of_every_layer() -> None:
    layout = KVLayout.of([LayerKV(1, 80), LayerKV(1, 96)], 8, BF16)
    assert layout.page_bytes == 5760 > 2 * 8 * (80 + 96) * 2
    assert layout.page_bytes % (80 * 2) == layout.page_bytes % (96 * 2) == 0


def test_gemma_3_12b() -> None:
    """8 full layers and 40 with a window: pages of a full block, of 1 MiB, without padding."""
    layers = [LayerKV(8, 256, group=int(index % 6 != 5)) for index in range(48)]
    layout = KVLayout.of(layers, 16, BF16)
    assert (layout.page_bytes, layout.pages_per_block, layout.padding) == (1 << 20, (1, 5), 0.0)
    strips = [place.strip for place, layer in zip(layout.places, layers, strict=True) if layer.group]
    assert strips == [index // 8 for index in range(40)]


def test_a_block_has_few_pages() -> None:
    """Though layers of more than half a page, one to a page, would need more."""
    layers = [LayerKV(3, 64, group=0)] + [LayerKV(2, 64, group=1)] * 40
    layout = KVLayout.of(layers, 16, BF16)
    assert max(layout.pages_per_block) <= MAX_STRIPS


def test_shared_layers_and_keys_that_are_values() -> None:
    layers = [LayerKV(2, 16), LayerKV(2, 16, parts=1), LayerKV(2, 16, shared_with=0)]
    layout = KVLayout.of(layers, 8, BF16)
    assert layout.page_bytes == 1024 + 512
    pool = torch.zeros(3, layout.page_bytes, dtype=torch.uint8)
    own, single, shared = layout.views(pool)
    own[1].fill_(1)
    single[1, 0].fill_(2)
    assert (shared[1] == 1).all()
    assert (single[1, 1] == 2).all()
    assert not pool[[0, 2]].any()


LAYERS = st.lists(
    st.builds(LayerKV, st.sampled_from([1, 2, 3, 8]), st.sampled_from([64, 80, 128, 256]), st.integers(0, 1)),
    min_size=1,
    max_size=12,
).filter(lambda layers: {layer.group for layer in layers} in ({0}, {0, 1}))


@settings(deadline=None, max_examples=100)
@given(layers=LAYERS, block_size=st.sampled_from([8, 16, 64]))
def test_no_byte_is_of_two_layers(layers: list[LayerKV], block_size: int) -> None:
    layout = KVLayout.of(layers, block_size, BF16)
    taken = set()
    for layer, place in zip(layers, layout.places, strict=True):
        assert 0 <= place.strip < layout.pages_per_block[layer.group] <= MAX_STRIPS
        end = place.offset + layer.num_bytes(block_size, BF16)
        assert end <= layout.page_bytes
        for unit in range(place.offset, end, 64):
            assert (layer.group, place.strip, unit) not in taken
            taken.add((layer.group, place.strip, unit))
    if len(layout.pages_per_block) == 1:
        assert layout.pages_per_block == (1,)


def layout_of(windows: tuple[int | None, ...], num_draft_layers: int = 0, **options: Any) -> KVLayout:
    geometry = ModelGeometry("", "", 9, 64, len(windows), 4, 2, 64, 4096, "bfloat16", 0, 0, windows=windows)
    draft = DraftLayers((LayerKV(1, 64),) * num_draft_layers, 0)
    return model_layout(geometry, lambda size: size, draft, ExecutorConfig(model=".", **options), BF16)


def test_layers_with_a_window_are_groups_of_their_own() -> None:
    several = (1024, None, 512, 1024, 4096, None)
    layout = layout_of(several)
    assert layout.groups == (GroupShape(0, 3), GroupShape(512, 1), GroupShape(1024, 2))
    assert layout.tables == (4, 0, 3, 5, 1, 2)
    assert layout.num_tables * layout.page_bytes == layout.bytes_per_block
    assert layout_of(several, disable_hybrid_kv_cache_manager=True).groups == ()
    for windows in ((None,), (None, None), (4096, None)):
        assert (layout_of(windows).groups, layout_of(windows).pages_per_block) == ((), (1,))
    assert layout_of((512, 512)).groups == (GroupShape(512, 1),)


def test_layers_of_drafts_are_in_the_group_without_a_window() -> None:
    layout = layout_of((512, 512), num_draft_layers=2)
    assert layout.groups == (GroupShape(0, 1), GroupShape(512, 2))
    assert layout.tables == (1, 2, 0, 0)


def test_useful_blocks() -> None:
    """Of one group what whole sequences take; with windows a fraction of the same memory."""
    assert layout_of((None,) * 6).useful_blocks(10, 4096, 512) == 10 * 256
    assert layout_of((512,) * 5 + (None,)).useful_blocks(10, 4096, 512) == -(-10 * (256 + 5 * 100) // 6)
    assert layout_of((512,) * 5 + (None,)).useful_blocks(10, 128, 512) == 10 * 8
