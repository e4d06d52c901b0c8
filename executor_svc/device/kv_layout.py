"""Where each layer's keys and values lie in the pages of the KV pools.

A pool is [num_pages, page_bytes]. A block of a KV group is some of its pages, the group's *strips*: strip 0 first. A
layer lies in one strip, at the same offset in every page. Layers with the same KV, of any group's shape, are entries of
one table, so that kernels need no more than a layer's view of the pool and its strides. Recurrent states are other
pages of the same pools: `state_layout` says where their parts lie.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from executor_svc.device.state_layout import StateLayout, page_sizes_for
from executor_svc.plan.limits import GroupShape
from executor_svc.plan.state_sizes import UNIT_MULTIPLE

MAX_STRIPS = 32
"""Maximum pages of a block."""
_MAX_DIVISOR = 16
"""A page is at least this part of one group's block, or has its largest layer."""
_LITTLE = 1 / 32
"""With states, pages may have so much more padding than the least: larger ones are fewer."""
_STATES_OF_A_SEQUENCE = 4
"""Its own, and those of prefixes that others share."""


@dataclass(frozen=True, slots=True)
class LayerKV:
    """The keys and values of a layer."""

    num_kv_heads: int
    """0: the layer keeps none."""
    head_size: int
    """As stored, with padding."""
    group: int = 0
    """The KV group that it belongs to."""
    parts: int = 2
    """Keys and values; 1: the keys are the values."""
    shared_with: int | None = None
    """Index of an earlier layer, of the same shape and group, whose keys and values this layer reads."""

    def num_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        """Return the bytes of one block."""
        return self.parts * self.num_kv_heads * block_size * self.head_size * dtype.itemsize


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """A layer's place in the pages of its group's blocks."""

    strip: int
    """Which of a block's pages."""
    offset: int
    """Bytes from the beginning of the page."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The table of places, for blocks of `block_size` tokens."""

    layers: tuple[LayerKV, ...]
    places: tuple[LayerPlace, ...]
    """Of each layer."""
    block_size: int
    dtype: torch.dtype
    page_bytes: int
    pages_per_block: tuple[int, ...]
    """Of each group."""
    windows: tuple[int, ...] = (0,)
    """Of each group: how many of the last positions its layers read; 0: all."""
    states: StateLayout | None = None
    """Of a sequence's recurrent state; None: there is none."""

    @staticmethod
    def of(
        layers: Sequence[LayerKV],
        block_size: int,
        dtype: torch.dtype,
        windows: tuple[int, ...] = (0,),
        units: Sequence[Sequence[int]] = (),
    ) -> KVLayout:
        """Choose the size of pages with the least padding, the largest of such; pack the layers in their order.

        With one group it is the bytes of a block: one page. windows: of each group. units: of each layer the bytes of
        the units of its recurrent state, none for others; with such, padding is that of a block and of a state.
        """
        units = units if any(units) else ()
        found = [_packed(layers, block_size, dtype, size) for size in _page_sizes(layers, block_size, dtype, units)]
        possible = [each for each in found if max(each.pages_per_block) <= MAX_STRIPS]  # a page of the largest block is
        if units:
            possible = [replace(each, states=StateLayout.of(units, each.page_bytes)) for each in possible]
            most = min(each.padding for each in possible) + _LITTLE
            return replace(
                max((each for each in possible if each.padding <= most), key=lambda each: each.page_bytes),
                windows=windows,
            )
        best = min(possible, key=lambda each: (each.padding, -each.page_bytes))
        return replace(best, windows=windows)

    @property
    def pages_per_state(self) -> int:
        """Pages of a sequence's recurrent state."""
        return 0 if self.states is None else self.states.pages_per_state

    @property
    def groups(self) -> tuple[GroupShape, ...]:
        """The KV groups; none where all layers keep all positions, and a block is a page."""
        if self.windows == (0,) and self.pages_per_block == (1,):
            return ()
        return tuple(map(GroupShape, self.windows, self.pages_per_block))

    @property
    def num_tables(self) -> int:
        """The number of a sequence's block tables: the pages of a block of every group."""
        return sum(self.pages_per_block)

    @property
    def tables(self) -> tuple[int, ...]:
        """Of each layer, the block table that names its pages: those of a group's strips follow each other."""
        first = [0, *accumulate(self.pages_per_block)]
        return tuple(first[layer.group] + place.strip for layer, place in zip(self.layers, self.places, strict=True))

    def useful_blocks(self, num_seqs: int, max_model_len: int, chunk: int) -> int:
        """Return the most blocks of every group that sequences of this length can use, in steps of so many tokens.

        Of a window that is what a sequence holds while it computes a chunk, and as much for prefixes that others share.
        Recurrent states count as blocks of as many pages.
        """
        most, pages = -(-max_model_len // self.block_size), _STATES_OF_A_SEQUENCE * self.pages_per_state
        for window, size in zip(self.windows, self.pages_per_block, strict=True):
            kept = 2 * -(-window // self.block_size) + -(-chunk // self.block_size) + 4 if window else most
            pages += size * min(most, kept)
        return -(-num_seqs * pages // self.num_tables)

    @property
    def least_blocks(self) -> int:
        """The fewest blocks of every group whose pages are enough for one block and one state."""
        return 1 + -(-self.pages_per_state // self.num_tables)

    @property
    def padding(self) -> float:
        """The part of a group's pages that holds nothing, of all groups and of a state together."""
        sizes = enumerate(self.pages_per_block)
        of_blocks = sum(
            1 - _group_bytes(self.layers, group, self.block_size, self.dtype) / (pages * self.page_bytes)
            for group, pages in sizes
        )
        return of_blocks if self.states is None else of_blocks + self.states.padding(self.page_bytes)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block of every group."""
        return self.page_bytes * sum(self.pages_per_block)

    def views(self, pool: Tensor) -> tuple[Tensor, ...]:
        """Return each layer's view of a pool [num_pages, page_bytes] uint8: [num_pages, 2, KVH, B, D] in the dtype.

        Layers with one part have the same memory for both. A view begins at the layer's offset in page 0; whoever uses
        it reads the ids of the layer's strip.
        """
        views = []
        for layer, place in zip(self.layers, self.places, strict=True):
            end = place.offset + layer.num_bytes(self.block_size, self.dtype)
            sizes = (layer.parts, layer.num_kv_heads, self.block_size, layer.head_size)
            view = pool[:, place.offset : end].view(self.dtype).unflatten(1, sizes)
            views.append(view if layer.parts == 2 else view.expand(-1, 2, -1, -1, -1))
        return tuple(views)


def _group_bytes(layers: Sequence[LayerKV], group: int, block_size: int, dtype: torch.dtype) -> int:
    own = [layer for layer in layers if layer.group == group and layer.shared_with is None]
    return sum(layer.num_bytes(block_size, dtype) for layer in own)


def _page_sizes(
    layers: Sequence[LayerKV], block_size: int, dtype: torch.dtype, units: Sequence[Sequence[int]]
) -> set[int]:
    """Return the sizes of pages to try: each group's block, or a part of it, in whole rows of every layer.

    A row is a head's numbers of a token: a GPU's copy engine counts a page in rows. With units of states, pages are
    whole units, too.
    """
    row = math.lcm(*(layer.head_size * dtype.itemsize for layer in layers), UNIT_MULTIPLE if units else 1)
    largest = max(layer.num_bytes(block_size, dtype) for layer in layers)
    num_groups = 1 + max(layer.group for layer in layers)
    blocks = [_group_bytes(layers, group, block_size, dtype) for group in range(num_groups)]
    divisors = range(1, (_MAX_DIVISOR if num_groups > 1 or units else 1) + 1)
    sizes = {row * -(-block // (row * divisor)) for block in blocks for divisor in divisors}
    sizes = {max(size, row * -(-largest // row)) for size in sizes}
    return page_sizes_for(sizes, units, row) if units else sizes


def _packed(layers: Sequence[LayerKV], block_size: int, dtype: torch.dtype, page_bytes: int) -> KVLayout:
    """Put each layer into the first strip of its group that has room."""
    used: list[list[int]] = [[] for _ in range(1 + max(layer.group for layer in layers))]
    places: list[LayerPlace] = []
    for layer in layers:
        if layer.shared_with is not None:
            places.append(places[layer.shared_with])
            continue
        size, strips = layer.num_bytes(block_size, dtype), used[layer.group]
        strip = next((index for index, end in enumerate(strips) if end + size <= page_bytes), len(strips))
        if strip == len(strips):
            strips.append(0)
        places.append(LayerPlace(strip, strips[strip]))
        strips[strip] += size
    return KVLayout(tuple(layers), tuple(places), block_size, dtype, page_bytes, tuple(map(len, used)))
