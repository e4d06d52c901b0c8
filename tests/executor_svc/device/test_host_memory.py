"""Memory of weights: zeros, apart from each other, side by side, and freed with its last weight."""

from __future__ import annotations

import gc

import psutil
import pytest
import torch

from executor_svc.device.host_memory import WeightMemory

SLAB = 1 << 26


def test_weights_lie_side_by_side() -> None:
    memory = WeightMemory()
    sizes = [1, 64, 100_000, 3 << 20, 0, 2_000_001]
    taken = [memory.take(size) for size in sizes]
    assert [each.numel() for each in taken] == sizes
    assert not any(each.any() for each in taken)
    for number, each in enumerate(taken, start=1):
        each.fill_(number)
    assert [set(each[[0, -1]].tolist()) if len(each) else set() for each in taken] == [{1}, {2}, {3}, {4}, set(), {6}]
    held = [each for each in taken if each.numel()]
    assert all(each.data_ptr() % 64 == 0 for each in held)
    assert max(each.data_ptr() for each in held) - min(each.data_ptr() for each in held) < SLAB
    assert held[0].data_ptr() % (1 << 21) == 0, "the first begins a huge page"


@pytest.mark.parametrize("size", [9 << 20, 7 << 20])
def test_large_ones_have_memory_of_their_own_and_full_slabs_are_left(size: int) -> None:
    memory = WeightMemory()
    taken = [memory.take(size) for _ in range(12)]
    for each in taken:
        each[:: 1 << 12] = 7
    assert len({each.data_ptr() for each in taken}) == 12
    assert not memory.take(size).any()


def test_a_slab_is_freed_with_its_last_weight() -> None:
    memory = WeightMemory()
    process = psutil.Process()
    taken = [torch.empty(0)]
    for _ in range(10):
        taken = [memory.take(6 << 20) for _ in range(20)]
        for each in taken:
            each.fill_(1)
    del each
    gc.collect()
    held = process.memory_info().rss
    taken.clear()
    gc.collect()
    assert held - process.memory_info().rss > SLAB // 2
