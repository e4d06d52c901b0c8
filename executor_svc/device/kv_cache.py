"""KV memory in pages: a device pool and a host pool, with moves of pages within and between them.

Both are [num_pages, page_bytes]; `kv_layout` says where each layer lies in the pages. Copies and swaps move whole
pages, which with one KV group are whole blocks: "blocks" below are pages. A layer's view is [num_blocks, 2 (K, V),
num_kv_heads, block_size, head_size], with the pages as its blocks. The order within a head is device-specific (keys on
the CPU are [head_size, block_size], see `cpu.kernels.rope`).

A draft model or head has layers of its own in the same pages, perhaps with other KV heads and another head size.
Recurrent states are pages of the same pools, and move with the same calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from executor_svc.config import ExecutorConfig
from executor_svc.device.host_memory import new_memory
from executor_svc.device.kv_layout import KVLayout, LayerKV
from executor_svc.device.latent import latent_columns
from executor_svc.device.state_layout import StateHeaders
from executor_svc.device.states import StateMemory
from executor_svc.plan.description import LayerHeads, ModelGeometry, max_drafts_of
from executor_svc.plan.limits import GroupShape

BlockIds = Sequence[int] | Tensor


@dataclass(frozen=True, slots=True)
class DraftLayers:
    """What a draft model or head adds to a target's memory."""

    layers: tuple[LayerKV, ...]
    weight_bytes: int
    """Bytes of its weights, which are in memory when the pools are sized."""


def model_layout(
    geometry: ModelGeometry,
    padded: Callable[[int], int],
    draft: DraftLayers,
    config: ExecutorConfig,
    dtype: torch.dtype,
) -> KVLayout:
    """Return the layout of a target's layers and then its draft's; padded: returns the size of heads in the cache."""
    heads = geometry.layer_heads or (LayerHeads(geometry.num_kv_heads, geometry.head_size),) * geometry.num_layers
    windows = () if config.disable_hybrid_kv_cache_manager else geometry.windows
    tail, model_dtype = 1 + max_drafts_of(config), getattr(torch, geometry.dtype)
    units = [() if each is None else each.unit_bytes(tail, model_dtype) for each in geometry.layer_states]
    return layout_of(heads, windows, geometry.max_model_len, padded, config.block_size, dtype, draft.layers, units)


def layout_of(
    heads: Sequence[LayerHeads],
    layer_windows: Sequence[int | None],
    max_model_len: int,
    padded: Callable[[int], int],
    block_size: int,
    dtype: torch.dtype,
    draft_layers: Sequence[LayerKV] = (),
    units: Sequence[Sequence[int]] = (),
) -> KVLayout:
    """Return the layout of layers that keep these heads, and have these windows; none: all layers read everything.

    Layers with a window below max_model_len are in a group with those of the same window; all others, and the draft's,
    in group 0, if there are any. Layers with the same keys and values are together. units: as in `KVLayout.of`.
    """
    kept = [window if window and window < max_model_len else 0 for window in layer_windows] or [0] * len(heads)
    # A layer without keys and values makes no group.
    first = next((window for window, each in zip(kept, heads, strict=True) if each.num_kv_heads), 0)
    kept = [window if each.num_kv_heads else first for window, each in zip(kept, heads, strict=True)]
    owners = [index if each.kv_of is None else each.kv_of for index, each in enumerate(heads)]
    readers = [[kept[index] for index, owner in enumerate(owners) if owner == each] for each in owners]
    kept = [0 if 0 in each else max(each) for each in readers]
    windows = tuple(sorted({*kept, *([0] if draft_layers else [])}))
    alone = zip(layers_of_heads(heads, padded), kept, strict=True)
    target = [replace(layer, group=windows.index(window)) for layer, window in alone]
    moved = (
        each if each.shared_with is None else replace(each, shared_with=each.shared_with + len(target))
        for each in draft_layers
    )
    return KVLayout.of((*target, *moved), block_size, dtype, windows, units)


def layers_of_heads(heads: Sequence[LayerHeads], padded: Callable[[int], int]) -> tuple[LayerKV, ...]:
    """Return the layers of a model alone; padded: as of `model_layout`."""
    return tuple(
        LayerKV(each.num_kv_heads, padded(each.head_size), shared_with=each.kv_of)
        if each.latent is None
        else LayerKV(1, latent_columns(each.latent, each.head_size - each.latent), parts=1, shared_with=each.kv_of)
        for each in heads
    )


class KVCache:
    """Both pools of one model, and of its draft if it has one.

    Attention never reads unwritten places.
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
    ) -> None:
        """Reserve memory for so many blocks of every KV group; the last num_draft_layers layers are the draft's.

        num_state_pages: pages of the device pool beside those; all pages may hold blocks and states.
        """
        num_device_blocks = num_device_blocks * layout.num_tables + num_state_pages
        num_host_blocks *= layout.num_tables
        self.layout = layout
        self.block_size = layout.block_size
        self.num_device_blocks = num_device_blocks
        self.num_host_blocks = num_host_blocks
        self.dtype = layout.dtype
        self.bytes_per_block = layout.page_bytes
        self.pool = self._new_pool(num_device_blocks, device)
        """[num_device_blocks, page_bytes] uint8, on the device."""
        self.host = self._new_pool(num_host_blocks, torch.device("cpu"))
        layers, num_layers = layout.views(self.pool), len(layout.layers) - num_draft_layers
        self.layers: tuple[Tensor, ...] = layers[:num_layers]
        """The target's."""
        self.draft_layers: tuple[Tensor, ...] = layers[num_layers:]
        """The draft's."""
        self.tables, self.draft_tables = layout.tables[:num_layers], layout.tables[num_layers:]
        """Of each of these layers, the block table that names its pages."""
        none: tuple[StateMemory | None, ...] = ()
        self.states = none if layout.states is None else layout.states.memories(self.pool)
        """Of each of the target's layers, where its part of a recurrent state lies; empty: the model has none."""
        on_cpu = layout.states is not None and device.type == "cpu"
        self.state_headers = StateHeaders(self.pool) if on_cpu else None
        """None on a GPU, and without states."""

    @property
    def pages_per_state(self) -> int:
        """As in `Limits`."""
        return self.layout.pages_per_state

    @property
    def kv_groups(self) -> tuple[GroupShape, ...]:
        """As in `Limits`."""
        return self.layout.groups

    def _new_pool(self, num_pages: int, device: torch.device) -> Tensor:
        sizes = num_pages, self.bytes_per_block
        if device.type == "cpu":
            return new_memory(num_pages * self.bytes_per_block).view(sizes)
        return torch.empty(sizes, dtype=torch.uint8, device=device)

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
        self.pool.index_copy_(0, destinations, self.pool.index_select(0, sources))

    def _swap_out(self, device_ids: Tensor, host_ids: Tensor) -> None:
        self.host.index_copy_(0, host_ids, self.pool.index_select(0, device_ids))

    def _swap_in(self, host_ids: Tensor, device_ids: Tensor) -> None:
        self.pool.index_copy_(0, device_ids, self.host.index_select(0, host_ids))


def _checked(ids: BlockIds, num_blocks: int, what: str) -> Tensor:
    """Return ids as an int64 tensor; raises ValueError for an id outside the pool."""
    tensor = torch.as_tensor(ids, dtype=torch.int64).reshape(-1)
    if tensor.numel() and (int(tensor.min()) < 0 or int(tensor.max()) >= num_blocks):
        raise ValueError(f"{what} block ids must be in 0 to {num_blocks - 1}")
    return tensor
