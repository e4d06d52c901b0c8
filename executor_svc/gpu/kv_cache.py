"""KV memory of a GPU: a device pool and a host pool in pinned memory, with swaps concurrent to computation.

A swap passes through a staging buffer on the device. Out: a kernel on the compute stream gathers blocks into the
buffer, then the copy engine copies it to the host on a side stream. In: the copy engine fills the buffer on the side
stream, then a kernel on the compute stream scatters it. Later work on the compute stream may therefore overwrite
swapped-out blocks, and finds swapped-in blocks complete. The side stream runs in order, which orders the accesses to a
host block. The host never waits.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from executor_svc.device.kv_cache import KVCache, KVGroup
from executor_svc.gpu.kernels.copy_blocks import copy_blocks

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

    blocks: Tensor
    """[blocks, layers, ...], as the host pool."""
    by_layer: Tensor
    """The same memory as [layers, blocks, ...], as the device pool."""
    full: Any
    """Event: it holds the data of a swap."""
    free: Any
    """Event: it may be overwritten."""


class _Moves:
    """The moves of one group of layers, through a staging buffer of its own."""

    def __init__(self, pool: Tensor, host: Tensor, staging_bytes: int, streams: Streams) -> None:
        """pool: [layers, blocks, ...] on the device; host: [blocks, layers, ...]."""
        self._device, self._host, self._streams = pool, host, streams
        self._parts = self._staging(staging_bytes)
        self._next_part = 0

    def _staging(self, staging_bytes: int) -> list[_StagingPart]:
        host = self._host
        num_blocks, block = len(host), host.shape[1:]
        blocks = staging_blocks(num_blocks, block.numel() * host.element_size(), staging_bytes)
        if not blocks:
            return []
        staging = torch.empty(_NUM_PARTS, blocks // _NUM_PARTS, *block, dtype=host.dtype, device=self._device.device)
        new_event = self._streams.new_event
        return [_StagingPart(part, part.transpose(0, 1), new_event(), new_event()) for part in staging.unbind(0)]

    def warm_up(self) -> None:
        """As in `KVCache`."""
        if self._device.shape[1]:
            first = torch.zeros(1, dtype=torch.int64)
            self._move(self._device, self._device, first, first, 1)
            for part in self._parts[:1]:
                self._move(self._device, part.by_layer, first, None, 1)
                self._move(part.by_layer, self._device, None, first, 1)
                self._streams.record_compute(part.free)

    def copy(self, sources: Tensor, destinations: Tensor) -> None:
        """As in `KVCache`, like the following methods, for checked ids."""
        # Plans have no block on both sides, so this is one launch. Otherwise read blocks before they are overwritten.
        late = torch.isin(sources, destinations)
        num_late = int(late.sum())
        if not num_late:
            self._move(self._device, self._device, sources, destinations, len(sources))
            return
        kept = self._device.new_empty(self._device.shape[0], num_late, *self._device.shape[2:])
        self._move(self._device, kept, sources[late], None, num_late)
        self._move(self._device, self._device, sources[~late], destinations[~late], len(sources) - num_late)
        self._move(kept, self._device, None, destinations[late], num_late)

    def swap_out(self, device_ids: Tensor, host_ids: Tensor) -> None:
        for part, start, stop in self._in_parts(host_ids):
            self._streams.compute_waits(part.free)
            self._move(self._device, part.by_layer, device_ids[start:stop], None, stop - start)
            self._streams.record_compute(part.full)
            self._streams.side_waits(part.full)
            for at, block, count in _runs(host_ids[start:stop]):
                self._transfer(self._host[block : block + count], part.blocks[at : at + count])
            self._streams.record_side(part.free)

    def swap_in(self, host_ids: Tensor, device_ids: Tensor) -> None:
        for part, start, stop in self._in_parts(host_ids):
            self._streams.side_waits(part.free)
            for at, block, count in _runs(host_ids[start:stop]):
                self._transfer(part.blocks[at : at + count], self._host[block : block + count])
            self._streams.record_side(part.full)
            self._streams.compute_waits(part.full)
            self._move(part.by_layer, self._device, None, device_ids[start:stop], stop - start)
            self._streams.record_compute(part.free)

    def _in_parts(self, ids: Tensor) -> Iterator[tuple[_StagingPart, int, int]]:
        """Split pairs into ranges, each with the least recently used part of the staging buffer."""
        start = 0
        while start < len(ids):
            part = self._parts[self._next_part]
            self._next_part = (self._next_part + 1) % len(self._parts)
            stop = min(start + part.blocks.shape[0], len(ids))
            yield part, start, stop
            start = stop

    def _move(
        self, source: Tensor, target: Tensor, source_ids: Tensor | None, target_ids: Tensor | None, num_pairs: int
    ) -> None:
        """Enqueue `copy_blocks`, for ids on the host."""
        if num_pairs:
            read, written = self._on_device(source_ids), self._on_device(target_ids)
            self._streams.compute(lambda: copy_blocks(source, target, read, written, num_pairs))

    def _on_device(self, ids: Tensor | None) -> Tensor | None:
        # PyTorch's cache of pinned memory keeps this until the copy is done.
        if ids is None or self._device.device.type != "cuda":
            return ids
        return ids.pin_memory().to(self._device.device, non_blocking=True)

    def _transfer(self, target: Tensor, source: Tensor) -> None:
        """Enqueue a copy of one contiguous piece between the staging buffer and pinned memory."""
        self._streams.side(lambda: _copy_over(target, source))


class GpuKVCache(KVCache):
    """Both pools of one model, and of its draft if it has one.

    Moves are enqueued on the stream of the steps' computation; no call waits. On a CPU device (Triton's interpreter)
    the same code runs synchronously.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_size: int,
        block_size: int,
        num_device_blocks: int,
        num_host_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        staging_bytes: int = STAGING_BYTES,
        streams: Streams | None = None,
        draft: Sequence[KVGroup] = (),
    ) -> None:
        """Reserve memory for the blocks of all layers, and for the staging buffers if there are host blocks.

        staging_bytes: of all groups; each has its share, so that their staging buffers hold the same number of blocks.
        """
        sizes = num_layers, num_kv_heads, head_size, block_size, num_device_blocks, num_host_blocks
        super().__init__(*sizes, dtype, device, draft)
        on_gpu = device.type == "cuda"
        self.streams: Streams = streams or (CudaStreams(device) if on_gpu else NoStreams())
        self._moves: list[_Moves] = []
        for pools in self._pools:
            if on_gpu and num_host_blocks:
                _pin(self, pools.host)
            group_bytes = pools.host.shape[1:].numel() * dtype.itemsize
            share = staging_bytes * group_bytes // self.bytes_per_block
            self._moves.append(_Moves(pools.device, pools.host, share, self.streams))

    def warm_up(self) -> None:
        """Compile the kernels of block moves; the contents do not change."""
        for moves in self._moves:
            moves.warm_up()

    def _copy(self, sources: Tensor, destinations: Tensor) -> None:
        for moves in self._moves:
            moves.copy(sources, destinations)

    def _swap_out(self, device_ids: Tensor, host_ids: Tensor) -> None:
        for moves in self._moves:
            moves.swap_out(device_ids, host_ids)

    def _swap_in(self, host_ids: Tensor, device_ids: Tensor) -> None:
        for moves in self._moves:
            moves.swap_in(host_ids, device_ids)


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
