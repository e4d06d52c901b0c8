"""How what work takes of a GPU's memory is read off PyTorch's allocator; without a GPU, off a stand-in for it."""

from __future__ import annotations

import pytest
import torch

from executor_svc.gpu.measuring import peak_bytes_of

GPU = torch.device("cuda")


class Allocator:
    """Counts as `torch.cuda` does, while freed memory stays reserved until it is given back."""

    def __init__(self, used: int, cached: int) -> None:
        self.used, self.reserved, self.most = used, used + cached, used + cached

    def allocate(self, size: int) -> None:
        self.used += size
        self.reserved = max(self.reserved, self.used)
        self.most = max(self.most, self.reserved)

    def free(self, size: int) -> None:
        self.used -= size

    def empty_cache(self) -> None:
        self.reserved = self.used

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.most = self.reserved

    def max_memory_reserved(self, device: torch.device) -> int:
        return self.most

    def memory_reserved(self, device: torch.device) -> int:
        return self.reserved

    def synchronize(self, device: torch.device) -> None:
        pass


class Buffer:
    """Memory that an object has while it lives."""

    def __init__(self, allocator: Allocator, size: int) -> None:
        self.allocator, self.size = allocator, size
        allocator.allocate(size)

    def __del__(self) -> None:
        self.allocator.free(self.size)


def new_allocator(monkeypatch: pytest.MonkeyPatch, used: int, cached: int) -> Allocator:
    allocator = Allocator(used, cached)
    for name in (
        "empty_cache", "reset_peak_memory_stats", "max_memory_reserved", "memory_reserved", "synchronize",
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, getattr(allocator, name))
    return allocator


def test_what_is_given_back_counts_and_what_stays_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = new_allocator(monkeypatch, used=1000, cached=500)
    kept = []

    def work() -> None:
        held = Buffer(allocator, 70)
        kept.append(Buffer(allocator, 20))
        del held
        Buffer(allocator, 60)

    assert peak_bytes_of(work, GPU) == 70
    assert allocator.reserved == 1020, "what was cached before the work and in it was given back"


def test_garbage_does_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = new_allocator(monkeypatch, used=0, cached=0)

    def work() -> None:
        ring: list[object] = [Buffer(allocator, 40)]
        ring.append(ring)

    assert peak_bytes_of(work, GPU) == 40
    assert allocator.used == 0
