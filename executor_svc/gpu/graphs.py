"""Steps as CUDA graphs: launches recorded once for each of some sizes, replayed with one call."""

from __future__ import annotations

import gc
import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from executor_svc.gpu.kernels.slots.slots import StepSizes

_log = logging.getLogger(__name__)

_DECODE_SEQS = (1, 2, 4, 8, *range(16, 257, 8), *range(272, 513, 16))
_MIXED_TOKENS = (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
_MIXED_SEQS = (16, 64, 256, 1024)
_MOST_OPERATIONS = 4e12
"""Of a step's matrix products, two for each parameter and token: a Hopper GPU has them in some 8 ms. By estimate that
is what the host takes to launch a small model's 300 kernels one by one; a longer step hides its launches."""


def decode_sizes(most_seqs: int) -> list[StepSizes]:
    """Return the steps of decodes that have a graph, ascending: of 1, 2, 4, 8, then by 8 to 256 and by 16 to 512.

    The last holds most_seqs sequences, where that is at most 512.
    """
    return [StepSizes.decode(size) for size in sizes_up_to(_DECODE_SEQS, most_seqs)]


def mixed_sizes(most_tokens: int, most_seqs: int, num_parameters: int) -> list[StepSizes]:
    """Return the other steps that have a graph, up to their hidden states, ascending: of 32 to 2,048 tokens.

    Only of those whose launches would take longer than their work, with a model of so many parameters.
    """
    most_tokens = min(most_tokens, int(_MOST_OPERATIONS / (2 * max(1, num_parameters))) // 16 * 16)
    if most_tokens < _MIXED_TOKENS[0]:
        return []
    pairs = (
        (tokens, min(seqs, tokens))
        for tokens in sizes_up_to(_MIXED_TOKENS, most_tokens)
        for seqs in sizes_up_to(_MIXED_SEQS, most_seqs)
    )
    return [StepSizes(tokens, seqs, 0, 0) for tokens, seqs in dict.fromkeys(pairs)]


def sizes_up_to(sizes: Sequence[int], most: int) -> list[int]:
    """Return those of ascending sizes that are below `most`, and `most`, which holds what the next one would have."""
    place = bisect_left(sizes, most)
    return [*sizes[:place], most] if place < len(sizes) else list(sizes)


def smallest_fitting(sizes: Sequence[StepSizes], needed: StepSizes) -> StepSizes | None:
    """Return the first of sizes, by ascending num_tokens, that holds what is needed; None: none does."""
    place = bisect_left(sizes, needed.num_tokens, key=lambda each: each.num_tokens)
    return next((size for size in sizes[place:] if needed.within(size)), None)


class Replayer(Protocol):
    """Runs steps, or parts of them, of fixed sizes."""

    def replay(self, sizes: StepSizes) -> None:
        """Enqueue the step of one of the sizes that this was made with."""
        ...


class DirectReplayer:
    """The same launches, made anew each time: where there are no graphs, as under Triton's interpreter."""

    def __init__(self, sizes: Sequence[StepSizes], step: Callable[[StepSizes], None]) -> None:
        """step: enqueues the step of one of these sizes."""
        self._step = step

    def replay(self, sizes: StepSizes) -> None:
        self._step(sizes)


class CudaGraphs:
    """A graph for each size; all share one pool of memory, as only one runs at a time."""

    def __init__(self, sizes: Sequence[StepSizes], step: Callable[[StepSizes], None]) -> None:
        """Run each step twice, once to compile and warm up and once to be captured, those of most tokens first."""
        self._graphs: dict[StepSizes, torch.cuda.CUDAGraph] = {}
        pool = None
        # Captures give it back too: what is taken is then what graphs take.
        torch.cuda.empty_cache()
        began, free = time.monotonic(), torch.cuda.mem_get_info()[0]
        with _without_collections():
            for each in sorted(sizes, key=lambda size: size.num_tokens, reverse=True):
                step(each)
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    step(each)
                pool = pool or graph.pool()
                self._graphs[each] = graph
        taken = free - torch.cuda.mem_get_info()[0]
        _log.info("%d CUDA graphs in %.1f s, %d bytes", len(self._graphs), time.monotonic() - began, taken)

    def replay(self, sizes: StepSizes) -> None:
        self._graphs[sizes].replay()


@contextmanager
def _without_collections() -> Iterator[None]:
    """Collect garbage now and not in here: what it frees may wait for the device, which no capture allows."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
