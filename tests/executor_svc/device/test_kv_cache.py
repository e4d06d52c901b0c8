"""Moves of KV blocks within and between the pools, and how large the pools are made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from executor_svc.config import ExecutorConfig
from executor_svc.cpu.device import CpuDevice
from executor_svc.device.interface import DeviceError
from executor_svc.device.kv_cache import DraftLayers, KVCache
from executor_svc.device.kv_layout import KVLayout, LayerKV
from executor_svc.plan.description import ModelGeometry


def plain_cache(layers: int, heads: int, blocks: int, host_blocks: int, dtype: torch.dtype) -> KVCache:
    layout = KVLayout.of([LayerKV(heads, 16)] * layers, 8, dtype)
    return KVCache(layout, blocks, host_blocks, torch.device("cpu"))


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def cache(request: pytest.FixtureRequest) -> KVCache:
    cache = plain_cache(3, 2, 10, 6, request.param)
    generator = torch.Generator().manual_seed(0)
    for layer in cache.layers:
        layer.copy_(torch.randn(layer.shape, generator=generator))
    return cache


def snapshot(cache: KVCache) -> list[torch.Tensor]:
    return [layer.clone() for layer in cache.layers]


def test_copy_reads_all_before_it_writes(cache: KVCache) -> None:
    before = snapshot(cache)
    cache.copy([0, 1, 2, 5], [1, 2, 0, 9])
    for layer, old in zip(cache.layers, before, strict=True):
        assert torch.equal(layer[[1, 2, 0, 9]], old[[0, 1, 2, 5]])
        assert torch.equal(layer[[3, 4, 5, 6, 7, 8]], old[[3, 4, 5, 6, 7, 8]])


def test_swap_out_and_in_elsewhere(cache: KVCache) -> None:
    before = snapshot(cache)
    cache.swap_out(torch.tensor([7, 2, 4], dtype=torch.int32), [5, 0, 3])
    for layer in cache.layers:
        layer.fill_(float("nan"))
    cache.swap_in([0, 5, 3], [1, 8, 6])
    for layer, old in zip(cache.layers, before, strict=True):
        assert torch.equal(layer[[1, 8, 6]], old[[2, 7, 4]])


def test_nothing_to_move(cache: KVCache) -> None:
    before = snapshot(cache)
    cache.copy([], [])
    assert all(torch.equal(a, b) for a, b in zip(cache.layers, before, strict=True))


@pytest.mark.parametrize(
    ("sources", "destinations", "message"),
    [([0], [10], "destination"), ([-1], [0], "source"), ([0, 1], [2], "2 source"), ([0, 1], [2, 2], "twice")],
)
def test_bad_moves(cache: KVCache, sources: list[int], destinations: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cache.copy(sources, destinations)


def test_host_pool_may_be_empty() -> None:
    cache = plain_cache(1, 1, 2, 0, torch.float32)
    cache.swap_out([], [])
    with pytest.raises(ValueError, match="destination"):
        cache.swap_out([0], [0])


LAYERS = (LayerKV(2, 16), LayerKV(2, 16), LayerKV(1, 32), LayerKV(4, 16), LayerKV(4, 16), LayerKV(4, 16))
"""Two of a target, and those of a draft of two shapes."""


def all_pools(cache: KVCache) -> list[Tensor]:
    """Bytes of each layer on the device, the draft's included: [blocks, bytes]."""
    return [layer.flatten(1).contiguous().view(torch.uint8) for layer in (*cache.layers, *cache.draft_layers)]


def drafted_cache(dtype: torch.dtype) -> KVCache:
    cache = KVCache(KVLayout.of(LAYERS, 8, dtype), 10, 6, torch.device("cpu"), num_draft_layers=4)
    generator = torch.Generator().manual_seed(0)
    for layer in (*cache.layers, *cache.draft_layers):
        layer.copy_(torch.randn(layer.shape, generator=generator))
    return cache


def test_a_block_holds_all_layers() -> None:
    cache = drafted_cache(torch.bfloat16)
    assert [tuple(layer.shape) for layer in cache.layers] == [(10, 2, 2, 8, 16)] * 2
    assert [tuple(layer.shape) for layer in cache.draft_layers] == [(10, 2, 1, 8, 32)] + [(10, 2, 4, 8, 16)] * 3
    held = sum(layer[0].numel() for layer in (*cache.layers, *cache.draft_layers))
    assert cache.bytes_per_block == held * 2
    assert not plain_cache(1, 1, 2, 0, torch.float32).draft_layers


@st.composite
def pairs(draw: st.DrawFn, num_sources: int, num_destinations: int) -> tuple[list[int], list[int]]:
    destinations = draw(st.lists(st.integers(0, num_destinations - 1), unique=True, max_size=num_destinations))
    return [draw(st.integers(0, num_sources - 1)) for _ in destinations], destinations


@settings(deadline=None, max_examples=50)
@given(
    moves=st.lists(
        st.one_of(
            st.tuples(st.just("copy"), pairs(10, 10)),
            st.tuples(st.just("swap_out"), pairs(10, 6)),
            st.tuples(st.just("swap_in"), pairs(6, 10)),
        ),
        max_size=8,
    ),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_all_layers_move_together(moves: list[tuple[str, tuple[list[int], list[int]]]], dtype: torch.dtype) -> None:
    """Any sequence of moves puts the same block at the same place in every layer, the draft's included."""
    cache = drafted_cache(dtype)
    cache.swap_out(list(range(6)), list(range(6)))  # so that every block of the host holds something
    before = all_pools(cache)
    device, host = list(range(10)), list(range(6))
    for name, (sources, destinations) in moves:
        read, written = {"copy": (device, device), "swap_out": (device, host), "swap_in": (host, device)}[name]
        for source, destination in zip([read[source] for source in sources], destinations, strict=True):
            written[destination] = source
        getattr(cache, name)(sources, destinations)
    for now, old in zip(all_pools(cache), before, strict=True):
        assert torch.equal(now, old[device])


GEOMETRY = ModelGeometry("m", "LlamaForCausalLM", 100, 64, 2, 4, 2, 10, 100, "float32", 1000, 4000)
BLOCK_BYTES = 2 * 2 * 2 * 16 * 16 * 4  # layers, K and V, heads, tokens, padded head size, float32


def new_cache(free: int, monkeypatch: pytest.MonkeyPatch, draft: DraftLayers | None = None, **options: Any) -> KVCache:
    config = ExecutorConfig(model="m", num_threads=1, **options)
    device = CpuDevice(config)
    monkeypatch.setattr(device, "free_memory_bytes", lambda: free)
    return device.new_kv_cache(GEOMETRY, config, draft=draft)


def test_pool_takes_its_share_of_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = new_cache(40 * BLOCK_BYTES - 4000, monkeypatch, gpu_memory_utilization=0.5)
    assert cache.bytes_per_block == BLOCK_BYTES
    assert cache.num_device_blocks == (20 * BLOCK_BYTES - 4000) // BLOCK_BYTES


def test_pool_is_no_larger_than_its_sequences_need(monkeypatch: pytest.MonkeyPatch) -> None:
    assert new_cache(1 << 40, monkeypatch, max_num_seqs=3).num_device_blocks == 3 * 7


def test_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeviceError, match=r"not one KV block .*--gpu-memory-utilization"):
        new_cache(BLOCK_BYTES, monkeypatch)
    with pytest.raises(DeviceError, match="--num-gpu-blocks 50"):
        new_cache(20 * BLOCK_BYTES, monkeypatch, num_gpu_blocks=50)
    with pytest.raises(DeviceError, match="--num-cpu-blocks 40"):
        new_cache(20 * BLOCK_BYTES, monkeypatch, num_cpu_blocks=40)


def test_draft_has_its_share_of_each_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers of the draft make blocks larger, its weights make the share of memory smaller."""
    layer = LayerKV(2, 16)
    size = BLOCK_BYTES + layer.num_bytes(16, torch.float32)
    draft = DraftLayers((layer,), 6000)
    cache = new_cache(40 * size - 10000, monkeypatch, draft, gpu_memory_utilization=0.5)
    assert cache.bytes_per_block == size == BLOCK_BYTES * 3 // 2
    assert cache.num_device_blocks == (20 * size - 10000) // size
    with pytest.raises(DeviceError, match="--num-gpu-blocks 30"):
        new_cache(30 * BLOCK_BYTES, monkeypatch, draft, num_gpu_blocks=30)
    assert new_cache(30 * BLOCK_BYTES, monkeypatch, num_gpu_blocks=30).num_device_blocks == 30
