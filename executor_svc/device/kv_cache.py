"""KV memory in blocks: a device pool and a host pool, with block moves within and between them.

Layout of each layer: [num_blocks, 2 (K, V), num_kv_heads, block_size, head_size]. A block's data in a layer is one
contiguous piece, which copies and swaps move as a whole. The order within a head is device-specific (keys on the CPU
are [head_size, block_size], see `cpu.kernels.rope`). The host pool keeps all layers of a block side by side.

A draft model or head has layers of its own in the same blocks, perhaps with other KV heads and another head size: a
group of layers with pools of its own, moved together with those of the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BlockIds = Sequence[int] | Tensor


def block_bytes(num_layers: int, num_kv_heads: int, block_size: int, head_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of one block over all layers; head_size: as stored, with padding."""
    return num_layers * 2 * num_kv_heads * block_size * head_size * dtype.itemsize


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers with the same shape of keys and values."""

    num_layers: int
    num_kv_heads: int
    head_size: int
    """As stored, with padding."""

    def block_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        """Return the bytes of one block over the layers of this group."""
        return block_bytes(self.num_layers, self.num_kv_heads, block_size, self.head_size, dtype)


@dataclass(frozen=True, slots=True)
class DraftLayers:
    """What a draft model or head adds to a target's memory."""

    groups: tuple[KVGroup, ...]
    """Its layers, in their order."""
    weight_bytes: int
    """Bytes of its weights, which are in memory when the pools are sized."""


class _Pools:
    """The memory of one group of layers, on the device and on the host."""

    def __init__(
        self,
        group: KVGroup,
        block_size: int,
        num_device_blocks: int,
        num_host_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        block = (2, group.num_kv_heads, block_size, group.head_size)
        self.device = torch.empty(group.num_layers, num_device_blocks, *block, dtype=dtype, device=device)
        self.host = torch.empty(num_host_blocks, group.num_layers, *block, dtype=dtype)


class KVCache:
    """Both pools of one model, and of its draft if it has one.

    Their memory is not initialized: attention never reads unwritten places.
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
        draft: Sequence[KVGroup] = (),
    ) -> None:
        """Reserve memory for the blocks of all layers; head_size: as stored, with padding; draft: further layers."""
        self.block_size = block_size
        self.num_device_blocks = num_device_blocks
        self.num_host_blocks = num_host_blocks
        self.dtype = dtype
        groups = (KVGroup(num_layers, num_kv_heads, head_size), *draft)
        self.bytes_per_block = sum(group.block_bytes(block_size, dtype) for group in groups)
        sizes = block_size, num_device_blocks, num_host_blocks, dtype, device
        self._pools = [_Pools(group, *sizes) for group in groups]
        self.layers: tuple[Tensor, ...] = self._pools[0].device.unbind(0)
        """The target's."""
        self.draft_layers: tuple[Tensor, ...] = tuple(layer for pools in self._pools[1:] for layer in pools.device)
        """The draft's, in the order of its groups."""
        self._all_layers = (*self.layers, *self.draft_layers)
        self._host_layers = tuple(layer for pools in self._pools for layer in pools.host.unbind(1))

    def warm_up(self) -> None:
        """Prepare block moves, so that no step waits for their setup; the contents do not change."""

    def copy(self, sources: BlockIds, destinations: BlockIds) -> None:
        """Copy device blocks sources[i] to destinations[i] in all layers. Reads all sources before it writes any block.

        Raises ValueError for ids out of range, lists of unequal length, or a destination named twice.
        """
        self._copy(*self._pairs(sources, self.num_device_blocks, destinations, self.num_device_blocks))

    def swap_out(self, device_ids: BlockIds, host_ids: BlockIds) -> None:
        """Copy device blocks to host blocks, pair by pair, in all layers; errors as in `copy`."""
        self._swap_out(*self._pairs(device_ids, self.num_device_blocks, host_ids, self.num_host_blocks))

    def swap_in(self, host_ids: BlockIds, device_ids: BlockIds) -> None:
        """Copy host blocks to device blocks, pair by pair, in all layers; errors as in `copy`."""
        self._swap_in(*self._pairs(host_ids, self.num_host_blocks, device_ids, self.num_device_blocks))

    def _pairs(
        self, sources: BlockIds, num_sources: int, destinations: BlockIds, num_destinations: int
    ) -> tuple[Tensor, Tensor]:
        read = _checked(sources, num_sources, "source")
        written = _checked(destinations, num_destinations, "destination")
        if read.shape != written.shape:
            raise ValueError(f"{read.numel()} source blocks for {written.numel()} destinations")
        if written.unique().numel() != written.numel():
            raise ValueError("a destination block is named twice")
        return read, written

    def _copy(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy checked blocks; ids are int64 on the CPU and may be empty."""
        _move(self._all_layers, sources, self._all_layers, destinations)

    def _swap_out(self, device_ids: Tensor, host_ids: Tensor) -> None:
        _move(self._all_layers, device_ids, self._host_layers, host_ids)

    def _swap_in(self, host_ids: Tensor, device_ids: Tensor) -> None:
        _move(self._host_layers, host_ids, self._all_layers, device_ids)


def _move(source: Sequence[Tensor], sources: Tensor, target: Sequence[Tensor], destinations: Tensor) -> None:
    if sources.numel():
        for from_layer, to_layer in zip(source, target, strict=True):
            to_layer.index_copy_(0, destinations, from_layer.index_select(0, sources))


def _checked(ids: BlockIds, num_blocks: int, what: str) -> Tensor:
    """Return ids as an int64 tensor; raises ValueError for an id outside the pool."""
    tensor = torch.as_tensor(ids, dtype=torch.int64).reshape(-1)
    if tensor.numel() and (int(tensor.min()) < 0 or int(tensor.max()) >= num_blocks):
        raise ValueError(f"{what} block ids must be in 0 to {num_blocks - 1}")
    return tensor
