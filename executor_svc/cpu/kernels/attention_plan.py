"""The CPU's attention plan of a step: computed once per step, shared by all layers of one attention shape."""

from __future__ import annotations

import itertools
import operator
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from executor_svc.device.kernels import AttentionShape

_Ints = NDArray[np.int64]

TILE_FIELDS = 4
"""Fields of a query tile: first row, number of tokens, position of the first token, sequence."""

_MAX_ROWS = 12
_LATENT_ROWS = 32
_LEAST_HEADS = 4
"""Of an item among latents, where there are as many: they share each loaded number of a key."""
_ITEMS_OF_THREAD = 4
_names = itertools.count()


def tile_tokens(shape: AttentionShape) -> int:
    """Return the tokens of a query tile: they share each loaded key, with all query heads of its KV head."""
    if shape.latent is not None:
        return max(1, _LATENT_ROWS // latent_heads(shape))
    return max(1, _MAX_ROWS // shape.group)


def latent_heads(shape: AttentionShape) -> int:
    """Return the most heads of an item of attention among latents, which all have the same keys."""
    return max(heads for heads in range(1, _LATENT_ROWS + 1) if shape.num_heads % heads == 0)


class CpuAttentionPlan:
    """Query tiles, block tables and slots of a step, at fixed addresses for launches; `fill` sets them for a step."""

    def __init__(
        self,
        shape: AttentionShape,
        max_model_len: int,
        max_tokens: int,
        num_threads: int,
        scratch: Tensor,
        num_tables: int = 1,
    ) -> None:
        """scratch: `attention.scratch_bytes` of memory for every thread. num_tables: block tables of a sequence."""
        self.name = f"tiles{next(_names)}"
        self.max_model_len = max_model_len
        self.num_tiles = 0
        """Items of attention in the current step: a query tile with as many KV heads as `table` says."""
        self.slots_of = np.zeros((num_tables, max_tokens), np.int64)
        """Of each block table, where the step's tokens are written."""
        self.slots = self.slots_of[0]
        self.table = np.zeros((num_tables, 7), np.int64)
        """Of each block table: addresses of tiles and block tables, bytes of a row of the block tables, address of the
        scratch memory, the distance in items to the item that a thread will probably process next, KV heads of an
        item, or heads of one among latents, tokens of the step."""
        self.table[:, 3:5] = scratch.data_ptr(), num_threads
        self._shape = shape
        self._num_threads = num_threads
        # Kept alive: launches hold only addresses.
        self._scratch = scratch
        self._tiles = np.zeros((max_tokens, TILE_FIELDS), np.int64)
        self.table[:, 0] = self._tiles.ctypes.data
        self._is_one_each = False
        """Whether each sequence of the step has one token."""
        self._step: tuple[Tensor, ...] = ()
        """The tensors of the current step."""
        self._arrays: tuple[NDArray[Any], ...] = ()
        """The first three of them, as arrays."""
        self._tables = torch.empty(0)
        """The block tables, contiguous."""

    def fill(self, slot_mapping: Tensor, query_start_loc: Tensor, seq_lens: Tensor, block_tables: Tensor) -> None:
        """Set the step; arguments as in `forward_batch.ForwardBatch`.

        The tensors of the last step may come again with other values, except for query_start_loc: that costs less.
        """
        last, step = self._step, (slot_mapping, query_start_loc, seq_lens, block_tables)
        is_same = len(last) == len(step) and all(map(operator.is_, last, step)) and block_tables.is_contiguous()
        if not is_same:
            self._adopt(*step)
        mapping, starts, lens = self._arrays
        self.slots_of[:, : mapping.shape[-1]] = mapping
        if is_same and self._is_one_each:
            _set_one_each(self._tiles, lens)
            return
        tiles = _tiles(starts.astype(np.int64), lens, tile_tokens(self._shape))
        self._tiles[: len(tiles)] = tiles
        self._is_one_each = len(tiles) == len(lens) == starts[-1]
        heads, num_heads = self._heads(len(tiles))
        self.num_tiles = len(tiles) * (num_heads // heads)
        self.table[:, 5] = heads

    def _adopt(self, slot_mapping: Tensor, query_start_loc: Tensor, seq_lens: Tensor, block_tables: Tensor) -> None:
        tables = block_tables.contiguous()
        assert tables.numel() == len(seq_lens) * len(self.table) * tables.shape[-1], "another number of block tables"
        self._step = (slot_mapping, query_start_loc, seq_lens, block_tables)
        self._tables = tables
        self._arrays = slot_mapping.numpy(), query_start_loc.numpy(), seq_lens.numpy()
        row_bytes = tables.shape[-1] * 4
        self.table[:, 1] = tables.data_ptr() + row_bytes * np.arange(len(self.table))
        self.table[:, 2], self.table[:, 6] = tables.stride(0) * 4, slot_mapping.shape[-1]

    def _heads(self, num_tiles: int) -> tuple[int, int]:
        """Return the heads of an item, and of all items of a tile."""
        shape = self._shape
        if shape.latent is None:
            return _heads_of_item(shape.num_kv_heads, num_tiles, self._num_threads), shape.num_kv_heads
        most = latent_heads(shape)
        heads = _heads_of_item(most, num_tiles * (shape.num_heads // most), self._num_threads)
        enough = next(each for each in range(min(_LEAST_HEADS, most), most + 1) if most % each == 0)
        return max(heads, enough), shape.num_heads


@lru_cache(maxsize=1024)
def _heads_of_item(num_kv_heads: int, num_tiles: int, num_threads: int) -> int:
    """Return the KV heads of an item: all, or for few tiles as many as leave each thread several items."""
    divisors = (heads for heads in range(num_kv_heads, 0, -1) if num_kv_heads % heads == 0)
    enough = _ITEMS_OF_THREAD * num_threads
    return next((heads for heads in divisors if num_tiles * (num_kv_heads // heads) >= enough), 1)


def _tiles(starts: _Ints, seq_lens: NDArray[np.int32], size: int) -> _Ints:
    """Cut the tokens of each sequence into tiles [tiles, TILE_FIELDS] of up to `size` tokens, largest work first."""
    lens = np.diff(starts)
    positions = seq_lens - lens
    if (lens == 1).all():
        tiles = np.empty((len(lens), TILE_FIELDS), np.int64)
        tiles[:, 0], tiles[:, 1], tiles[:, 2], tiles[:, 3] = starts[:-1], 1, positions, np.arange(len(lens))
        return tiles if len(lens) == 1 else _by_work(tiles)
    per_sequence = -(-lens // size)
    owner = np.repeat(np.arange(len(lens)), per_sequence)
    offset = (np.arange(len(owner)) - np.repeat(np.cumsum(per_sequence) - per_sequence, per_sequence)) * size
    count = np.minimum(lens[owner] - offset, size)
    return _by_work(np.stack([starts[owner] + offset, count, positions[owner] + offset, owner], axis=1))


def _set_one_each(tiles: _Ints, seq_lens: NDArray[np.int32]) -> None:
    """Set what `_tiles` returns for the next step of sequences that have one token each."""
    if len(seq_lens) == 1:
        tiles[0, 2] = seq_lens[0] - 1
        return
    order = np.argsort(-seq_lens, kind="stable")
    these = tiles[: len(order)]
    these[:, 0] = these[:, 3] = order
    these[:, 2] = seq_lens[order]
    these[:, 2] -= 1


def _by_work(tiles: _Ints) -> _Ints:
    """Sort tiles by their work, largest first, so that the last ones are short."""
    tokens, position = tiles[:, 1], tiles[:, 2]
    return np.ascontiguousarray(tiles[np.argsort(-(position + tokens) * tokens, kind="stable")], np.int64)
