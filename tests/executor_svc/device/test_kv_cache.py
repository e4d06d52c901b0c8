"""Moves of KV blocks within and between the pools, and how large the pools are made."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from executor_svc.config import ExecutorConfig
from executor_svc.cpu.device import CpuDevice
from executor_svc.device.interface import DeviceError
from executor_svc.device.kv_cache import KVCache
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


GEOMETRY = ModelGeometry("m", "LlamaForCausalLM", 100, 64, 2, 4, 2, 10, 100, "float32", 1000, 4000)
BLOCK_BYTES = 2 * 2 * 2 * 16 * 16 * 4  # layers, K and V, heads, tokens, padded head size, float32


def new_cache(free: int, monkeypatch: pytest.MonkeyPatch, **options: Any) -> KVCache:
    config = ExecutorConfig(model="m", num_threads=1, **options)
    device = CpuDevice(config)
    monkeypatch.setattr(device, "free_memory_bytes", lambda: free)
    return device.new_kv_cache(GEOMETRY, config)


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
