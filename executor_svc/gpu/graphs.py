"""Steps as CUDA graphs: launches are captured once for each of some sizes, and replayed with one call."""

from __future__ import annotations

import gc
import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar, Protocol

import torch

from executor_svc.gpu.kernels.slots.slots import StepSizes

_log = logging.getLogger(__name__)

_DECODE_SEQS = (1, 2, 4, 8, *range(16, 257, 8), *range(272, 513, 16))
_ADAPTED_SEQS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_DRAFTS = (1, 3, 5, 8, 16, 32, 64)
_DRAFTING_SEQS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_MIXED_TOKENS = (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
_MIXED_SEQS = (16, 64, 256, 1024)
_MAX_OPERATIONS = 4e12
"""Operations of a step's matrix products, two per parameter and token, that a Hopper GPU computes in some 8 ms. The
host is estimated to need as long to launch a small model's 300 kernels one by one; a longer step hides its launches."""


def decode_sizes(max_seqs: int) -> list[StepSizes]:
    """Return the sizes of decode steps with a graph, ascending: 1, 2, 4, 8, then by 8 to 256 and by 16 to 512.

    The last size holds max_seqs sequences, if that is at most 512.
    """
    return [StepSizes.decode(size) for size in sizes_up_to(_DECODE_SEQS, max_seqs)]


def adapted_decode_sizes(max_seqs: int) -> list[StepSizes]:
    """Return the sizes of decode steps with adapters with a graph, ascending: up to 512, as `decode_sizes`, but fewer.

    A step is padded by a third or half of its sequences at most: each graph takes time and memory at the start, with
    adapters too for all that serve few of them.
    """
    return [StepSizes.decode(size) for size in sizes_up_to(_ADAPTED_SEQS, max_seqs)]


def draft_sizes(max_rows: int, max_drafts: int) -> list[StepSizes]:
    """Return the sizes of decode steps with drafts with a graph: with at most max_rows rows of logits.

    For 1, 3, 5, 8, 16 and 32 drafts up to max_drafts, and for max_drafts: with any number between, a step takes the
    next, and leaves the places that it does not need empty. Fewer numbers of sequences than without drafts, as there
    would be a list for each number of drafts: each graph takes time at the start.
    """
    counts = sizes_up_to(_DRAFTS, max_drafts) if max_drafts else []
    return [
        StepSizes.decode(seqs, count)
        for count in counts
        for seqs in (sizes_up_to(_DRAFTING_SEQS, max_rows // (1 + count)) if max_rows > count else [])
    ]


def mixed_sizes(max_tokens: int, max_seqs: int, num_parameters: int) -> list[StepSizes]:
    """Return the sizes of other steps whose hidden states have a graph, ascending: 32 to 2,048 tokens.

    Only sizes whose launches would take longer than their work, with a model whose tokens are multiplied with
    num_parameters parameters.
    """
    max_tokens = min(max_tokens, int(_MAX_OPERATIONS / (2 * max(1, num_parameters))) // 16 * 16)
    if max_tokens < _MIXED_TOKENS[0]:
        return []
    pairs = (
        (tokens, min(seqs, tokens))
        for tokens in sizes_up_to(_MIXED_TOKENS, max_tokens)
        for seqs in sizes_up_to(_MIXED_SEQS, max_seqs)
    )
    return [StepSizes(tokens, seqs, 0, 0) for tokens, seqs in dict.fromkeys(pairs)]


def repeated_sizes(max_tokens: int, max_seqs: int, after: int) -> list[StepSizes]:
    """Return the sizes of other steps that have no graph but repeated launches, ascending: of more tokens than `after`.

    Padding adds an eighth to the tokens at most, of which a product's tiles would pad some anyway.
    """
    pairs = (
        (tokens, min(seqs, tokens))
        for tokens in sizes_up_to(_repeated_tokens(max_tokens), max_tokens)
        if tokens > after
        for seqs in sizes_up_to(_MIXED_SEQS, max_seqs)
    )
    return [StepSizes(tokens, seqs, 0, 0) for tokens, seqs in dict.fromkeys(pairs)]


def _repeated_tokens(most: int) -> list[int]:
    """Return multiples of 32 up to 256, then eight of each power of 2, up to `most` or just above."""
    found = list(range(32, 256, 32))
    while found[-1] < most:
        found.append(found[-1] + max(32, (1 << found[-1].bit_length() - 1) // 8))
    return found


def row_sizes(max_rows: int) -> list[int]:
    """Return the numbers of rows of logits that such steps are padded to, ascending: those of decodes."""
    return sizes_up_to(_DECODE_SEQS, max_rows)


def next_power(number: int, most: int) -> int:
    """Return the least power of 2 that is not below a number above 0, or `most` if that is less."""
    return min(1 << (number - 1).bit_length(), most)


def sizes_up_to(sizes: Sequence[int], most: int) -> list[int]:
    """Return the ascending sizes below `most`, and `most` in place of the next one."""
    place = bisect_left(sizes, most)
    return [*sizes[:place], most] if place < len(sizes) else list(sizes)


def smallest_fitting(sizes: Sequence[StepSizes], needed: StepSizes) -> StepSizes | None:
    """Return the first of sizes, ordered by num_tokens, that holds `needed`; None if none does."""
    place = bisect_left(sizes, needed.num_tokens, key=lambda each: each.num_tokens)
    return next((size for size in sizes[place:] if needed.within(size)), None)


class Replayer(Protocol):
    """Replays steps, or parts of steps, of fixed sizes."""

    def replay(self, sizes: StepSizes) -> None:
        """Enqueue the step of one of the sizes of the constructor."""
        ...


class DirectReplayer:
    """Launches steps each time: for devices without graphs, such as Triton's interpreter."""

    runs_at_once: ClassVar[bool] = False
    """Whether each step is run once when it is made, the largest first, as a capture does: to compile kernels."""

    def __init__(self, sizes: Sequence[StepSizes], step: Callable[[StepSizes], None]) -> None:
        """step: enqueues the step of one of these sizes."""
        self._step = step
        for each in sorted(sizes, key=lambda size: size.num_tokens, reverse=True) if self.runs_at_once else ():
            step(each)

    def replay(self, sizes: StepSizes) -> None:
        self._step(sizes)


class CudaGraphs:
    """A graph for each size; all share one pool of memory, as only one runs at a time."""

    def __init__(
        self, sizes: Sequence[StepSizes], step: Callable[[StepSizes], None], *, has_group: bool = False
    ) -> None:
        """Run each step twice, first to compile and warm up, then to capture it; steps with most tokens first.

        has_group: the process has a group of ranks, with a thread that asks for events meanwhile.
        """
        mode = "thread_local" if has_group else "global"
        self._graphs: dict[StepSizes, torch.cuda.CUDAGraph] = {}
        pool = None
        # Captures also empty the cache: the difference in free memory is then the memory of the graphs.
        torch.cuda.empty_cache()
        began, free = time.monotonic(), torch.cuda.mem_get_info()[0]
        with _without_collections():
            for each in sorted(sizes, key=lambda size: size.num_tokens, reverse=True):
                step(each)
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, capture_error_mode=mode):
                    step(each)
                pool = pool or graph.pool()
                self._graphs[each] = graph
        taken = free - torch.cuda.mem_get_info()[0]
        _log.info("%d CUDA graphs in %.1f s, %d bytes", len(self._graphs), time.monotonic() - began, taken)

    def replay(self, sizes: StepSizes) -> None:
        self._graphs[sizes].replay()


@contextmanager
def _without_collections() -> Iterator[None]:
    """Collect garbage now and not during the block: a collection may wait for the device, which fails a capture."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
