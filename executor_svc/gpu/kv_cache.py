"""KV memory of a GPU: a device pool and a host pool in pinned memory, with swaps concurrent to computation.

A swap passes through a staging buffer on the device. Out: a kernel on the compute stream gathers blocks into the
buffer, then the copy engine copies it to the host on a side stream. In: the copy engine fills the buffer on the side
stream, then a kernel on the compute stream scatters it. Later work on the compute stream may therefore overwrite
swapped-out blocks, and finds swapped-in blocks complete. The side stream runs in order, which orders the accesses to a
host block. The host never waits.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from executor_svc.device.kv_cache import KVCache
from executor_svc.device.kv_layout import KVLayout
from executor_svc.gpu.kernels.copy_pages import copy_pages, copy_pages_by_torch

STAGING_BYTES = 256 << 20
"""Default size of the staging buffer; a larger swap waits for the bus."""

_NUM_PARTS = 4
"""Parts of the staging buffer: while a kernel fills or empties one, the copy engine copies others."""


def staging_blocks(num_host_blocks: int, block_bytes: int, max_bytes: int = STAGING_BYTES) -> int:
    """Return the blocks of the staging buffer: at most max_bytes, but at least one block per part."""
    if not num_host_blocks:
        return 0
    enough = -(-num_host_blocks // _NUM_PARTS)
    return _NUM_PARTS * max(1, min(enough, max_bytes // (_NUM_PARTS * block_bytes)))


class Streams(Protocol):
    """Two queues of device work, compute and side, with events between them."""

    def new_event(self) -> Any:
        """Return an event; before it is recorded, waiting for it has no effect."""
        ...

    def compute(self, work: Callable[[], None]) -> None:
        """Enqueue work before the later computation of steps."""
        ...

    def side(self, work: Callable[[], None]) -> None:
        """Enqueue work concurrent to the computation."""
        ...

    def record_compute(self, event: Any) -> None:
        """Record the event after all compute work so far."""
        ...

    def record_side(self, event: Any) -> None:
        """Record the event after all side work so far."""
        ...

    def compute_waits(self, event: Any) -> None:
        """Make later compute work wait for the last record of the event."""
        ...

    def side_waits(self, event: Any) -> None:
        """Make later side work wait for the last record of the event."""
        ...


class NoStreams:
    """The streams of a device that works synchronously: the CPU."""

    def new_event(self) -> None:
        pass

    def compute(self, work: Callable[[], None]) -> None:
        work()

    def side(self, work: Callable[[], None]) -> None:
        work()

    def record_compute(self, event: None) -> None:
        pass

    def record_side(self, event: None) -> None:
        pass

    def compute_waits(self, event: None) -> None:
        pass

    def side_waits(self, event: None) -> None:
        pass


class CudaStreams:
    """The current stream for compute work, and a separate stream for side work."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)

    def new_event(self) -> torch.cuda.Event:
        return torch.cuda.Event()

    def compute(self, work: Callable[[], None]) -> None:
        work()

    def side(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._side):
            work()

    def record_compute(self, event: torch.cuda.Event) -> None:
        event.record(torch.cuda.current_stream(self._device))

    def record_side(self, event: torch.cuda.Event) -> None:
        event.record(self._side)

    def compute_waits(self, event: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)

    def side_waits(self, event: torch.cuda.Event) -> None:
        self._side.wait_event(event)


@dataclass(frozen=True, slots=True)
class _StagingPart:
    """A part of the staging buffer."""

    pages: Tensor
    """[pages, bytes of a page] uint8, as both pools."""
    full: Any
    """Event: it holds the data of a swap."""
    free: Any
    """Event: it may be overwritten."""


class GpuKVCache(KVCache):
    """Both pools of one model, and of its draft if it has one.

    Moves are enqueued on the stream of the steps' computation; no call waits. On a CPU device (Triton's interpreter)
    the same code runs synchronously.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_device_blocks: int,
        num_host_blocks: int,
        device: torch.device,
        num_draft_layers: int = 0,
        *,
        num_state_pages: int = 0,
        staging_bytes: int = STAGING_BYTES,
        streams: Streams | None = None,
        by_torch: bool = False,
    ) -> None:
        """Reserve memory for the blocks of all layers, and for the staging buffer if there are host blocks.

        by_torch: whether PyTorch copies pages, in the place of a kernel.
        """
        self._copy_pages = copy_pages_by_torch if by_torch else copy_pages
        super().__init__(
            layout, num_device_blocks, num_host_blocks, device, num_draft_layers, num_state_pages=num_state_pages
        )
        on_gpu = device.type == "cuda"
        self.streams: Streams = streams or (CudaStreams(device) if on_gpu else NoStreams())
        if on_gpu and num_host_blocks:
            _pin(self, self.host)
        self._parts = self._staging(staging_bytes)
        self._next_part = 0

    def _staging(self, staging_bytes: int) -> list[_StagingPart]:
        pages = staging_blocks(self.num_host_blocks, self.bytes_per_block, staging_bytes)
        if not pages:
            return []
        sizes = _NUM_PARTS, pages // _NUM_PARTS, self.bytes_per_block
        staging = torch.empty(sizes, dtype=torch.uint8, device=self.pool.device)
        new_event = self.streams.new_event
        return [_StagingPart(part, new_event(), new_event()) for part in staging.unbind(0)]

    def warm_up(self) -> None:
        """Compile the kernels of block moves; the contents do not change."""
        if len(self.pool):
            first = torch.zeros(1, dtype=torch.int64)
            self._move(self.pool, self.pool, first, first, 1)
            for part in self._parts[:1]:
                self._move(self.pool, part.pages, first, None, 1)
                self._move(part.pages, self.pool, None, first, 1)
                self.streams.record_compute(part.free)

    def _copy(self, sources: Tensor, destinations: Tensor) -> None:
        # Plans have no block on both sides, so this is one launch. Otherwise read blocks before they are overwritten.
        late = torch.isin(sources, destinations)
        num_late = int(late.sum())
        if not num_late:
            self._move(self.pool, self.pool, sources, destinations, len(sources))
            return
        kept = self.pool.new_empty(num_late, self.bytes_per_block)
        self._move(self.pool, kept, sources[late], None, num_late)
        self._move(self.pool, self.pool, sources[~late], destinations[~late], len(sources) - num_late)
        self._move(kept, self.pool, None, destinations[late], num_late)

    def _swap_out(self, device_ids: Tensor, host_ids: Tensor) -> None:
        for part, start, stop in self._in_parts(host_ids):
            self.streams.compute_waits(part.free)
            self._move(self.pool, part.pages, device_ids[start:stop], None, stop - start)
            self.streams.record_compute(part.full)
            self.streams.side_waits(part.full)
            for at, page, count in _runs(host_ids[start:stop]):
                self._transfer(self.host[page : page + count], part.pages[at : at + count])
            self.streams.record_side(part.free)

    def _swap_in(self, host_ids: Tensor, device_ids: Tensor) -> None:
        for part, start, stop in self._in_parts(host_ids):
            self.streams.side_waits(part.free)
            for at, page, count in _runs(host_ids[start:stop]):
                self._transfer(part.pages[at : at + count], self.host[page : page + count])
            self.streams.record_side(part.full)
            self.streams.compute_waits(part.full)
            self._move(part.pages, self.pool, None, device_ids[start:stop], stop - start)
            self.streams.record_compute(part.free)

    def _in_parts(self, ids: Tensor) -> Iterator[tuple[_StagingPart, int, int]]:
        """Split pairs into ranges, each with the least recently used part of the staging buffer."""
        start = 0
        while start < len(ids):
            part = self._parts[self._next_part]
            self._next_part = (self._next_part + 1) % len(self._parts)
            stop = min(start + len(part.pages), len(ids))
            yield part, start, stop
            start = stop

    def _move(
        self, source: Tensor, target: Tensor, source_ids: Tensor | None, target_ids: Tensor | None, num_pairs: int
    ) -> None:
        """Enqueue a copy of pages, for ids on the host."""
        if num_pairs:
            read, written = self._on_device(source_ids), self._on_device(target_ids)
            self.streams.compute(lambda: self._copy_pages(source, target, read, written, num_pairs))

    def _on_device(self, ids: Tensor | None) -> Tensor | None:
        # PyTorch's cache of pinned memory keeps this until the copy is done.
        if ids is None or self.pool.device.type != "cuda":
            return ids
        return ids.pin_memory().to(self.pool.device, non_blocking=True)

    def _transfer(self, target: Tensor, source: Tensor) -> None:
        """Enqueue a copy of one contiguous piece between the staging buffer and pinned memory."""
        self.streams.side(lambda: _copy_over(target, source))


def _copy_over(target: Tensor, source: Tensor) -> None:
    target.copy_(source, non_blocking=True)


def _runs(ids: Tensor) -> Iterator[tuple[int, int, int]]:
    """Split ids into runs of consecutive ids: (index of the first id, first id, length)."""
    start, listed = 0, ids.tolist()
    for index in range(1, len(listed) + 1):
        if index == len(listed) or listed[index] != listed[index - 1] + 1:
            yield start, listed[start], index - start
            start = index


def _pin(owner: object, pool: Tensor) -> None:
    """Pin a tensor's memory during the life of its owner.

    PyTorch's allocator of pinned memory rounds sizes up to a power of two, which can waste half of a large pool.
    """
    cudart: Any = torch.cuda.cudart()
    address = pool.data_ptr()
    torch.cuda.check_error(cudart.cudaHostRegister(address, pool.numel() * pool.element_size(), 0))
    weakref.finalize(owner, _unpin, pool).atexit = False


def _unpin(pool: Tensor) -> None:
    """Wait for the copies, then unpin the memory."""
    torch.cuda.synchronize()
    cudart: Any = torch.cuda.cudart()
    torch.cuda.check_error(cudart.cudaHostUnregister(pool.data_ptr()))
