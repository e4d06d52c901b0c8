"""What a step's attention works through on the CPU: made once per step, shared by all layers of one attention shape."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from executor_svc.device.kernels import AttentionShape

_Ints = NDArray[np.int64]

TILE_FIELDS = 4
"""Of a query tile: its first row, its number of tokens, the position of the first, and the sequence."""

_MOST_ROWS = 12
_names = itertools.count()


def tile_tokens(shape: AttentionShape) -> int:
    """Tokens of a query tile: as many as share what is loaded of a key, with all heads of its KV head."""
    return max(1, _MOST_ROWS // shape.group)


class CpuAttentionPlan:
    """Query tiles, block tables and slots of a step, at addresses that launches know; `fill` gives them for a step."""

    def __init__(
        self, shape: AttentionShape, max_model_len: int, most_tokens: int, num_threads: int, scratch: Tensor
    ) -> None:
        """Take scratch memory for every thread, as `attention.scratch_bytes` has it."""
        self.name = f"tiles{next(_names)}"
        self.max_model_len = max_model_len
        self.num_tiles = 0
        self.slots = np.zeros(most_tokens, np.int64)
        self.table = np.zeros(5, np.int64)
        """Addresses of tiles and block tables, bytes of a row of those, address of the scratch memory, and how many
        items on the one lies that a thread may be given next."""
        self.table[3:] = scratch.data_ptr(), num_threads
        self._shape = shape
        # Only their addresses are known to launches.
        self._scratch = scratch
        self._kept: tuple[object, ...] = ()

    def fill(self, slot_mapping: Tensor, query_start_loc: Tensor, seq_lens: Tensor, block_tables: Tensor) -> None:
        """Take a step: arguments as in `input_batch.ForwardBatch`."""
        self.slots[: slot_mapping.shape[0]] = slot_mapping.numpy()
        tiles = _tiles(query_start_loc.numpy().astype(np.int64), seq_lens.numpy(), tile_tokens(self._shape))
        tables = block_tables.contiguous()
        self.num_tiles = len(tiles)
        self.table[0], self.table[1], self.table[2] = tiles.ctypes.data, tables.data_ptr(), tables.stride(0) * 4
        self._kept = (tiles, tables)


def _tiles(starts: _Ints, seq_lens: NDArray[np.int32], size: int) -> _Ints:
    """Cut the tokens of each sequence into tiles [tiles, TILE_FIELDS] of up to `size`, those with most work first."""
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


def _by_work(tiles: _Ints) -> _Ints:
    """Those with most work first, so that the last ones to be taken are short."""
    tokens, position = tiles[:, 1], tiles[:, 2]
    return np.ascontiguousarray(tiles[np.argsort(-(position + tokens) * tokens, kind="stable")], np.int64)
