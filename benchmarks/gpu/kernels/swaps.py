"""KV blocks between the GPU's pool and pinned memory of the host, for swaps and the host's tier, beside the link.

The link's rate is that of one large copy to or from pinned memory. Blocks lie in no order on the device and in order on
the host, as a swap places them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from benchmarks.gpu.cases import Bench, Case, Goal, Group, Metrics

_LAYERS, _HEADS, _HEAD_SIZE, _BLOCK = 32, 8, 128, 16
"""Of the 8B shape: 2 MiB for a block."""
_COUNTS, _TINY_COUNTS = (64, 1024), (4,)
_REPEATS = 5
_GOAL = Goal("percent_of_link", at_least=80)


def cases(tiny: bool) -> Sequence[Case]:
    """Out and in, by blocks of a swap."""
    counts = _TINY_COUNTS if tiny else _COUNTS
    return [
        Case(f"{name} {count} blocks", {"direction": name, "blocks": count}, partial(_swap, name, count), 8.0, _GOAL)
        for count in counts
        for name in ("out", "in")
    ]


def _swap(direction: str, count: int, bench: Bench) -> Metrics:
    from executor_svc.device.kv_layout import KVLayout, LayerKV
    from executor_svc.gpu.kv_cache import GpuKVCache

    layers, heads = (1, 1) if bench.tiny else (_LAYERS, _HEADS)
    layout = KVLayout.of([LayerKV(heads, _HEAD_SIZE)] * layers, _BLOCK, torch.bfloat16)
    cache = GpuKVCache(layout, count, count, bench.device)
    cache.warm_up()
    on_device = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    on_host = torch.arange(count)
    # Whole bytes, so that what comes back can be compared.
    cache.pool.random_(0, 256)
    before = cache.pool.clone()
    cache.swap_out(on_device, on_host)
    cache.pool.zero_()
    cache.swap_in(on_host, on_device)
    _wait(bench)
    if not torch.equal(cache.pool, before):
        raise RuntimeError("a block that went to the host has come back with other bytes")
    work = partial(cache.swap_out, on_device, on_host) if direction == "out" else partial(
        cache.swap_in, on_host, on_device)  # fmt: skip
    size = count * cache.bytes_per_block
    own, link = size / _seconds(bench, work), _link(bench, direction, size)
    return {"gb_per_s": own / 1e9, "link_gb_per_s": link / 1e9, "percent_of_link": 100 * own / link}


def _link(bench: Bench, direction: str, size: int) -> float:
    """Bytes per second of one copy of so many bytes between the device and pinned memory."""
    host = torch.empty(size, dtype=torch.uint8, pin_memory=bench.device.type == "cuda")
    device = torch.zeros(size, dtype=torch.uint8, device=bench.device)
    target, source = (host, device) if direction == "out" else (device, host)
    return size / _seconds(bench, lambda: target.copy_(source, non_blocking=True))


def _seconds(bench: Bench, work: Callable[[], object]) -> float:
    """The median seconds until the device has done all of the work, on all streams."""
    found = []
    for _ in range(_REPEATS):
        _wait(bench)
        began = time.perf_counter()
        work()
        _wait(bench)
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def _wait(bench: Bench) -> None:
    if bench.device.type == "cuda":
        torch.cuda.synchronize(bench.device)


GROUP = Group("swaps", "KV blocks to the host and back, beside the link's rate", cases, limit_s=40)
