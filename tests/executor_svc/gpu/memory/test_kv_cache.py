"""Moves of KV blocks on a GPU: what they do, and that streams can run in any order that their events allow."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from random import Random

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from executor_svc.device.kv_cache import KVCache
from executor_svc.device.kv_layout import KVLayout, LayerKV
from executor_svc.gpu.kernels import copy_pages as copying
from executor_svc.gpu.kv_cache import GpuKVCache, Streams
from tests.executor_svc.driver import spoil

LAYERS, HEADS, HEAD_SIZE, BLOCK_SIZE = 2, 1, 16, 8
DRAFT = LayerKV(2 * HEADS, HEAD_SIZE)
"""The layer of a draft, which moves with those of the target."""
BLOCK_BYTES = (LAYERS * HEADS + DRAFT.num_kv_heads) * 2 * HEAD_SIZE * BLOCK_SIZE * 2


def layout(dtype: torch.dtype) -> KVLayout:
    return KVLayout.of([*[LayerKV(HEADS, HEAD_SIZE)] * LAYERS, DRAFT], BLOCK_SIZE, dtype)


def new_cache(
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    num_host_blocks: int = 6,
    part_blocks: int = 1,
    streams: Streams | None = None,
    by_torch: bool = False,
) -> GpuKVCache:
    staging = 4 * part_blocks * BLOCK_BYTES
    cache = GpuKVCache(
        layout(dtype), 10, num_host_blocks, device, 1, staging_bytes=staging, streams=streams, by_torch=by_torch
    )
    generator = torch.Generator().manual_seed(0)
    for layer in layers_of(cache):
        layer.copy_(torch.randn(layer.shape, generator=generator).to(dtype))
    return cache


def layers_of(cache: KVCache) -> tuple[Tensor, ...]:
    return (*cache.layers, *cache.draft_layers)


def values(cache: KVCache) -> Tensor:
    """Bytes of the device pool, on the CPU: [layers, blocks, ...]; a layer of the draft as two of the target."""
    layers = [
        part for layer in layers_of(cache) for part in layer.cpu().flatten(2).split(HEADS * BLOCK_SIZE * HEAD_SIZE, 2)
    ]
    return torch.stack([layer.contiguous().view(torch.uint8) for layer in layers])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn])
def test_swap_out_and_in_elsewhere(dtype: torch.dtype, device: torch.device) -> None:
    cache = new_cache(device, dtype, part_blocks=2)
    before = values(cache)
    cache.swap_out(torch.tensor([7, 2, 4, 9, 0], dtype=torch.int32), [5, 0, 3, 4, 1])
    spoil(cache)
    cache.swap_in([0, 5, 3, 1, 4], [1, 8, 6, 3, 2])
    assert torch.equal(values(cache)[:, [1, 8, 6, 3, 2]], before[:, [2, 7, 4, 0, 9]])
    assert (values(cache)[:, [0, 4, 5, 7, 9]] == 0xFF).all()


def test_copy(device: torch.device) -> None:
    cache = new_cache(device)
    before = values(cache)
    cache.copy([3, 3, 4], [0, 8, 5])
    expected = before.clone()
    expected[:, [0, 8, 5]] = before[:, [3, 3, 4]]
    assert torch.equal(values(cache), expected)


def test_copy_reads_all_before_it_writes(device: torch.device) -> None:
    cache = new_cache(device)
    before = values(cache)
    cache.copy([0, 1, 2, 5, 9], [1, 2, 0, 9, 9 - 1])
    expected = before.clone()
    expected[:, [1, 2, 0, 9, 8]] = before[:, [0, 1, 2, 5, 9]]
    assert torch.equal(values(cache), expected)


def test_pytorch_moves_the_same(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    caches = [new_cache(device, by_torch=by_torch) for by_torch in (False, True)]
    for cache in caches:
        cache.copy([0, 1, 2, 5, 9], [1, 2, 0, 9, 8])
        cache.swap_out([7, 2, 4], [5, 0, 3])
        cache.swap_in([0, 3], [1, 6])
        cache.warm_up()
        monkeypatch.setattr(copying, "_copy_pages", None)  # the second one launches none
    assert torch.equal(values(caches[0]), values(caches[1]))


def test_nothing_to_move_and_warm_up(device: torch.device) -> None:
    cache = new_cache(device)
    before = values(cache)
    cache.copy([], [])
    cache.swap_out([], [])
    cache.swap_in([], [])
    cache.warm_up()
    assert torch.equal(values(cache), before)


@pytest.mark.parametrize(
    ("sources", "destinations", "message"),
    [([0], [10], "destination"), ([-1], [0], "source"), ([0, 1], [2], "2 source"), ([0, 1], [2, 2], "twice")],
)
def test_bad_moves(sources: list[int], destinations: list[int], message: str, device: torch.device) -> None:
    cache = new_cache(device, num_host_blocks=10)
    for move in (cache.copy, cache.swap_out, cache.swap_in):
        with pytest.raises(ValueError, match=message):
            move(sources, destinations)


def test_host_pool_may_be_empty(device: torch.device) -> None:
    cache = new_cache(device, num_host_blocks=0)
    cache.swap_out([], [])
    cache.warm_up()
    with pytest.raises(ValueError, match="destination"):
        cache.swap_out([0], [0])


def test_sizes(device: torch.device) -> None:
    cache = new_cache(device)
    assert cache.bytes_per_block == BLOCK_BYTES
    assert (cache.num_device_blocks, cache.num_host_blocks, cache.block_size) == (10, 6, BLOCK_SIZE)
    assert new_cache(device, torch.float8_e4m3fn).bytes_per_block == BLOCK_BYTES // 2


class Event:
    """Counts how often it was recorded, and how many of these have happened."""

    def __init__(self) -> None:
        self.recorded = 0
        self.happened = 0


class LateStreams:
    """Streams that run work on command, in any order that the events allow: a device that the host is ahead of."""

    def __init__(self) -> None:
        self.queues: tuple[deque[Callable[[], bool]], deque[Callable[[], bool]]] = (deque(), deque())

    def new_event(self) -> Event:
        return Event()

    def compute(self, work: Callable[[], None]) -> None:
        self._enqueue(0, work)

    def side(self, work: Callable[[], None]) -> None:
        self._enqueue(1, work)

    def record_compute(self, event: Event) -> None:
        self._record(0, event)

    def record_side(self, event: Event) -> None:
        self._record(1, event)

    def compute_waits(self, event: Event) -> None:
        self._wait(0, event)

    def side_waits(self, event: Event) -> None:
        self._wait(1, event)

    def step(self, stream: int) -> bool:
        """Take the next thing of a stream, if there is one and it need not wait; returns whether it was taken."""
        queue = self.queues[stream]
        if not queue or not queue[0]():
            return False
        queue.popleft()
        return True

    def run(self, choose: Callable[[], int]) -> None:
        """Take everything, from the stream that `choose` names wherever there is a choice."""
        while any(self.queues):
            first = choose()
            assert self.step(first) or self.step(1 - first), "streams wait for one another"

    def _enqueue(self, stream: int, work: Callable[[], None]) -> None:
        def run() -> bool:
            work()
            return True

        self.queues[stream].append(run)

    def _record(self, stream: int, event: Event) -> None:
        event.recorded += 1
        number = event.recorded

        def happen() -> bool:
            event.happened = number
            return True

        self.queues[stream].append(happen)

    def _wait(self, stream: int, event: Event) -> None:
        number = event.recorded
        self.queues[stream].append(lambda: event.happened >= number)


Pairs = tuple[list[int], list[int]]


@st.composite
def pairs(draw: st.DrawFn, num_sources: int, num_destinations: int) -> Pairs:
    destinations = draw(st.lists(st.integers(0, num_destinations - 1), unique=True, max_size=num_destinations))
    return [draw(st.integers(0, num_sources - 1)) for _ in destinations], destinations


PLANS = st.lists(st.tuples(pairs(10, 6), pairs(10, 10), pairs(6, 10)), min_size=1, max_size=3)


# Not shrunk: that takes minutes here.
@settings(max_examples=25, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(plans=PLANS, order=st.randoms(use_true_random=False), bias=st.sampled_from([0.0, 0.2, 0.5, 0.8, 1.0]))
def test_any_order_that_events_allow(
    plans: list[tuple[Pairs, Pairs, Pairs]], order: Random, bias: float, device: torch.device
) -> None:
    """Steps that write to their blocks, with the host ahead of both streams, against moves one after the other."""
    streams = LateStreams()
    cache = new_cache(device, streams=streams)
    expected = KVCache(layout(torch.bfloat16), 10, 6, torch.device("cpu"), 1)
    for layer, same in zip(layers_of(expected), layers_of(cache), strict=True):
        layer.copy_(same)
    for cached in (cache, expected):
        cached.host.fill_(7)

    def compute(cached: KVCache, number: int) -> None:
        for layer in layers_of(cached):
            layer[number::3].add_(1)

    for number, (out, copies, back) in enumerate(plans):
        for cached in (cache, expected):
            cached.swap_out(*out)
            cached.copy(*copies)
            cached.swap_in(*back)
        streams.compute(partial(compute, cache, number))
        compute(expected, number)
    streams.run(lambda: int(order.random() < bias))
    assert torch.equal(values(cache), values(expected))
    assert torch.equal(cache.host, expected.host)
