"""Decode steps as CUDA graphs: launches recorded once for each of some sizes, replayed with one call."""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch


def graph_sizes(most: int) -> tuple[int, ...]:
    """Return the numbers of sequences that have a graph, ascending: 1, 2, 4, 8, then by 8 to 256 and by 16 to 512.

    The last is the least that holds `most`, where that is at most 512.
    """
    sizes = [1, 2, 4, 8, *range(16, 257, 8), *range(272, 513, 16)]
    return tuple(sizes[: bisect_left(sizes, most) + 1])


class Replayer(Protocol):
    """Runs steps of fixed sizes."""

    sizes: Sequence[int]

    def replay(self, size: int) -> None:
        """Enqueue the step of this size, one of `sizes`."""
        ...


def fitting(sizes: Sequence[int], count: int) -> int | None:
    """Return the least of ascending sizes that holds count; None: none does."""
    place = bisect_left(sizes, count)
    return sizes[place] if place < len(sizes) else None


class DirectReplayer:
    """The same launches, made anew each time: where there are no graphs, as under Triton's interpreter."""

    def __init__(self, sizes: Sequence[int], step: Callable[[int], None]) -> None:
        """step: enqueues the step of a size."""
        self.sizes = sizes
        self._step = step

    def replay(self, size: int) -> None:
        self._step(size)


class CudaGraphs:
    """A graph for each size; all share one pool of memory, as only one runs at a time."""

    def __init__(self, sizes: Sequence[int], step: Callable[[int], None]) -> None:
        """Run each step twice, once to compile and warm up and once to be captured; the largest first."""
        self.sizes = sizes
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        pool = None
        with _nothing_collected():
            for size in sorted(sizes, reverse=True):
                step(size)
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    step(size)
                pool = pool or graph.pool()
                self._graphs[size] = graph

    def replay(self, size: int) -> None:
        self._graphs[size].replay()


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Collect garbage now and not in here: what it frees may wait for the device, which no capture allows."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
