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
from executor_svc.device.kv_cache import DraftLayers, KVCache, KVGroup
from executor_svc.plan.description import ModelGeometry


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def cache(request: pytest.FixtureRequest) -> KVCache:
    cache = KVCache(3, 2, 16, 8, 10, 6, request.param, torch.device("cpu"))
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
    cache = KVCache(1, 1, 16, 8, 2, 0, torch.float32, torch.device("cpu"))
    cache.swap_out([], [])
    with pytest.raises(ValueError, match="destination"):
        cache.swap_out([0], [0])


GROUPS = (KVGroup(2, 2, 16), KVGroup(1, 1, 32), KVGroup(3, 4, 16))
"""A target's layers, and those of a draft of two shapes."""


def all_pools(cache: KVCache) -> list[Tensor]:
    """Bytes of each layer on the device, the draft's included: [blocks, bytes]."""
    return [layer.clone().flatten(1).view(torch.uint8) for layer in (*cache.layers, *cache.draft_layers)]


def grouped_cache(dtype: torch.dtype) -> KVCache:
    target = GROUPS[0]
    sizes = target.num_layers, target.num_kv_heads, target.head_size
    cache = KVCache(*sizes, 8, 10, 6, dtype, torch.device("cpu"), GROUPS[1:])
    generator = torch.Generator().manual_seed(0)
    for layer in (*cache.layers, *cache.draft_layers):
        layer.copy_(torch.randn(layer.shape, generator=generator))
    return cache


def test_a_block_holds_the_layers_of_all_groups() -> None:
    cache = grouped_cache(torch.bfloat16)
    assert [tuple(layer.shape) for layer in cache.layers] == [(10, 2, 2, 8, 16)] * 2
    assert [tuple(layer.shape) for layer in cache.draft_layers] == [(10, 2, 1, 8, 32)] + [(10, 2, 4, 8, 16)] * 3
    held = sum(layer[0].numel() for layer in (*cache.layers, *cache.draft_layers))
    assert cache.bytes_per_block == held * 2
    assert not KVCache(1, 1, 16, 8, 2, 0, torch.float32, torch.device("cpu")).draft_layers


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
def test_all_groups_move_together(moves: list[tuple[str, tuple[list[int], list[int]]]], dtype: torch.dtype) -> None:
    """Any sequence of moves puts the same block at the same place in every layer of every group."""
    cache = grouped_cache(dtype)
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
    group = KVGroup(1, 2, 16)
    size = BLOCK_BYTES + group.block_bytes(16, torch.float32)
    draft = DraftLayers((group,), 6000)
    cache = new_cache(40 * size - 10000, monkeypatch, draft, gpu_memory_utilization=0.5)
    assert cache.bytes_per_block == size == BLOCK_BYTES * 3 // 2
    assert cache.num_device_blocks == (20 * size - 10000) // size
    with pytest.raises(DeviceError, match="--num-gpu-blocks 30"):
        new_cache(30 * BLOCK_BYTES, monkeypatch, draft, num_gpu_blocks=30)
    assert new_cache(30 * BLOCK_BYTES, monkeypatch, num_gpu_blocks=30).num_device_blocks == 30
