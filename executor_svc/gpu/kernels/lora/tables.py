"""Sorts a step's rows by the place of their adapter, on the device, in one launch.

A place's rows are cut into tiles of one size, so a program of `shrink` or `expand` reads one adapter. The number of
tiles is the most that so many rows can need: it depends on the sizes of the step only, as a CUDA graph demands. Tiles
that are not needed have no rows, and rows without an adapter are in no tile.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from executor_svc.gpu.kernels.rows import check
from executor_svc.gpu.kernels.slots.slots import QUERY_START_LOC, SEQ_LENS, SEQ_SLOTS, StepBuffers, StepSizes
from executor_svc.gpu.kernels.variant import Variant
from executor_svc.plan.arrays import IntArray

MAX_PLACES = 256
"""Of adapters, on a device: one program counts the rows of them all."""
TILE_WORDS = 4
"""Words of a tile in `RowTable.tiles`."""
FEW_ROWS = 512
"""Up to so many rows of a step, tiles are small."""
TILE_ROWS = (16, 32)
"""Rows of a tile: with few rows, and with more. A row has the same bits in both."""

_TILE_WORDS = tl.constexpr(TILE_WORDS)
_CHUNK = 256
_ELEMENTS = 2048
"""Numbers of the largest matrix in the program that lists the tiles."""
_WARPS = 4
_INTEGERS = ("by_seq_stride", "num_groups", "num_rows", "num_tiles", "tile_rows")
_names = itertools.count()


def tile_rows(num_rows: int) -> int:
    """Return the rows of a tile in a step of so many rows."""
    return TILE_ROWS[num_rows > FEW_ROWS]


def num_tiles(num_rows: int, max_loras: int) -> int:
    """Return the most tiles that so many rows, of so many adapters at most, are cut into."""
    groups = min(num_rows, max_loras)
    return (num_rows - groups) // tile_rows(num_rows) + groups


@dataclass(frozen=True, slots=True)
class RowTable:
    """Rows that have an adapter, sorted by its place, then by row; the same memory for every step."""

    max_loras: int
    rows: Tensor
    """[R] int32: rows with an adapter; the rest has no meaning."""
    tiles: Tensor
    """[N, 4] int32: place, first of its `rows`, their number, 0. Without rows all are 0."""

    @classmethod
    def empty(cls, max_rows: int, max_loras: int, device: torch.device) -> RowTable:
        """Return a table for steps of at most max_rows rows. Raises ValueError for more than MAX_PLACES places."""
        if not 1 <= max_loras <= MAX_PLACES:
            raise ValueError(f"--max-loras: {max_loras}, must be 1 to {MAX_PLACES} on a GPU")
        most = max(num_tiles(count, max_loras) for count in (max_rows, min(max_rows, FEW_ROWS)))
        rows = torch.zeros(max_rows, dtype=torch.int32, device=device)
        return cls(max_loras, rows, torch.zeros(most, TILE_WORDS, dtype=torch.int32, device=device))


@triton.jit
def _groups(
    at, by_seq, by_seq_stride, slot_places, index, token_places, num_groups, SEQUENCES: tl.constexpr,
):  # fmt: skip
    """Return the place, -1 for none, the first row and the number of rows of some groups of adjacent rows."""
    within = at < num_groups
    if SEQUENCES:
        slot = tl.load(by_seq + SEQ_SLOTS * by_seq_stride + at, within, other=-1)
        # Sequences that have stopped, and padding, have no length.
        length = tl.load(by_seq + SEQ_LENS * by_seq_stride + at, within, other=0)
        place = tl.load(slot_places + slot, (slot >= 0) & (length > 0), other=-1)
        first = tl.load(by_seq + QUERY_START_LOC * by_seq_stride + at, within, other=0)
        count = tl.load(by_seq + QUERY_START_LOC * by_seq_stride + at + 1, within, other=0) - first
    else:
        token = tl.load(index + at, within, other=-1)
        place = tl.load(token_places + token, token >= 0, other=-1)
        first = at
        count = within.to(tl.int32)
    return place, first, count


@triton.jit
def _list_group(
    group, by_seq, by_seq_stride, slot_places, index, token_places, rows, num_groups, SEQUENCES: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Write a group's rows behind those of lower places, and of earlier groups of its own place."""
    lane = tl.arange(0, CHUNK)
    place, first, count = _groups(
        group, by_seq, by_seq_stride, slot_places, index, token_places, num_groups, SEQUENCES
    )  # fmt: skip
    if SEQUENCES:
        for start in range(0, count, CHUNK):
            inside = start + lane < count
            tl.store(token_places + first + start + lane, tl.zeros((CHUNK,), tl.int32) + place, inside)
    if place >= 0:
        before = tl.zeros((CHUNK,), tl.int32)
        for start in range(0, num_groups, CHUNK):
            at = start + lane
            theirs, _, counts = _groups(
                at, by_seq, by_seq_stride, slot_places, index, token_places, num_groups, SEQUENCES
            )  # fmt: skip
            lower = (theirs >= 0) & ((theirs < place) | ((theirs == place) & (at < group)))
            before += tl.where(lower, counts, 0)
        target = rows + tl.sum(before, 0)
        for start in range(0, count, CHUNK):
            tl.store(target + start + lane, first + start + lane, start + lane < count)


@triton.jit
def _list_tiles(
    by_seq, by_seq_stride, slot_places, index, token_places, tiles, num_groups, num_tiles, tile_rows,
    SEQUENCES: tl.constexpr, PLACES: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """Count the rows of each place, and cut them into tiles."""
    lane = tl.arange(0, MANY)
    place = tl.arange(0, PLACES)
    count = tl.zeros((PLACES,), tl.int32)
    for start in range(0, num_groups, MANY):
        theirs, _, counts = _groups(
            start + lane, by_seq, by_seq_stride, slot_places, index, token_places, num_groups, SEQUENCES
        )  # fmt: skip
        count += tl.sum(tl.where(theirs[:, None] == place[None, :], counts[:, None], 0), 0)
    needed = (count + tile_rows - 1) // tile_rows
    end = tl.cumsum(needed, 0)
    first_row = tl.cumsum(count, 0) - count
    for start in range(0, num_tiles, MANY):
        tile = start + lane
        done = (tile[:, None] - (end - needed)[None, :]) * tile_rows
        its = (done >= 0) & (tile[:, None] < end[None, :])
        left = tl.minimum(count[None, :] - done, tile_rows)
        target = tiles + tile * _TILE_WORDS
        tl.store(target, tl.sum(tl.where(its, place[None, :], 0), 1), tile < num_tiles)
        tl.store(target + 1, tl.sum(tl.where(its, first_row[None, :] + done, 0), 1), tile < num_tiles)
        tl.store(target + 2, tl.sum(tl.where(its, left, 0), 1), tile < num_tiles)


@triton.jit(do_not_specialize=_INTEGERS, do_not_specialize_on_alignment=["index", "slot_places"])
def _sort_rows(
    by_seq, slot_places, index, token_places, rows, tiles, by_seq_stride, num_groups, num_rows, num_tiles, tile_rows,
    SEQUENCES: tl.constexpr, PLACES: tl.constexpr, MANY: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Groups are sequences, or single rows, each at a token of `index`. The last program lists the tiles."""
    program = tl.program_id(0)
    if program < num_groups:
        _list_group(
            program, by_seq, by_seq_stride, slot_places, index, token_places, rows, num_groups, SEQUENCES, CHUNK,
        )  # fmt: skip
    else:
        _list_tiles(
            by_seq, by_seq_stride, slot_places, index, token_places, tiles, num_groups, num_tiles, tile_rows,
            SEQUENCES, PLACES, MANY,
        )  # fmt: skip
        if SEQUENCES:
            # Padding that no sequence owns.
            owned = tl.load(by_seq + QUERY_START_LOC * by_seq_stride + num_groups)
            for start in range(owned, num_rows, CHUNK):
                at = start + tl.arange(0, CHUNK)
                tl.store(token_places + at, tl.full((CHUNK,), -1, tl.int32), at < num_rows)


def sort_tokens(
    buffers: StepBuffers, sizes: StepSizes, slot_places: Tensor, token_places: Tensor, table: RowTable
) -> None:
    """Write the adapter's place of each token, and the table of the tokens.

    Args:
        buffers: of the step, whose inputs are built.
        sizes: of the step, at least one token.
        slot_places: [n] int32: the place of each slot's adapter, below max_loras; -1: none.
        token_places: [at least T] int32, for the result; -1 for padding and for sequences that have stopped.
        table: for at least T rows.

    Raises ValueError naming the argument.
    """
    if not sizes.within(buffers.most):
        raise ValueError(f"sizes: {sizes} are not within those of the buffers, {buffers.most}")
    check("slot_places", slot_places, (slot_places.numel(),), torch.int32)
    check("token_places", token_places, (token_places.numel(),), torch.int32)
    if token_places.numel() < sizes.num_tokens:
        raise ValueError(f"token_places: {token_places.numel()} are less than the {sizes.num_tokens} tokens")
    _launch(sizes.num_seqs, sizes.num_tokens, table, buffers.by_seq, slot_places, None, token_places)


def sort_rows(token_places: Tensor, tokens: Tensor, table: RowTable) -> None:
    """Write the table of rows that belong to some tokens, such as rows of logits.

    Args:
        token_places: as `sort_tokens` wrote it.
        tokens: [R] int64: each row's token; -1: the row has no adapter.
        table: for at least R rows.

    Raises ValueError naming the argument.
    """
    check("tokens", tokens, (tokens.numel(),), torch.int64)
    check("token_places", token_places, (token_places.numel(),), torch.int32)
    _launch(tokens.numel(), tokens.numel(), table, None, None, tokens, token_places)


def _launch(
    num_groups: int, num_rows: int, table: RowTable, by_seq: Tensor | None, slot_places: Tensor | None,
    index: Tensor | None, token_places: Tensor,
) -> None:  # fmt: skip
    if num_rows > table.rows.numel():
        raise ValueError(f"table: has room for {table.rows.numel()} rows, not for {num_rows}")
    if not num_rows:
        return
    stride = 0 if by_seq is None else by_seq.stride(0)
    _sort_rows[(num_groups + 1,)](
        by_seq, slot_places, index, token_places, table.rows, table.tiles, stride, num_groups, num_rows,
        num_tiles(num_rows, table.max_loras), tile_rows(num_rows), **_constants(table.max_loras, by_seq is not None),
        num_warps=_WARPS, num_stages=1, enable_fp_fusion=False,
    )  # fmt: skip


def _constants(max_loras: int, sequences: bool) -> dict[str, Any]:
    places = max(16, int(triton.next_power_of_2(max_loras)))
    return {"SEQUENCES": sequences, "PLACES": places, "MANY": max(16, _ELEMENTS // places), "CHUNK": _CHUNK}


def variants() -> list[Variant]:
    """Return the tables of tokens and of rows, for few and for the most adapters in a batch."""
    return [_variant(places, sequences) for places in (16, 64, MAX_PLACES) for sequences in (True, False)]


def _variant(places: int, sequences: bool) -> Variant:
    pointers = {"by_seq": "*i32", "slot_places": "*i32", "index": "*i64", "token_places": "*i32"}
    absent = dict.fromkeys(("index",) if sequences else ("by_seq", "slot_places"))
    constants = _constants(places, sequences) | absent
    pointers = {name: kind for name, kind in pointers.items() if name not in absent} | dict.fromkeys(
        ("rows", "tiles"), "*i32"
    )
    return Variant(
        name=f"lora_rows {'tokens' if sequences else 'logits'} places{places}",
        kernel=_sort_rows,
        signature={**pointers, **dict.fromkeys(_INTEGERS, "i32"), **dict.fromkeys(constants, "constexpr")},
        constants=constants,
        divisible=tuple(name for name in pointers if name not in ("index", "slot_places")),
        num_warps=_WARPS,
        num_stages=1,
        fp_fusion=False,
        no_spills=True,
        quick=sequences and places == 16,
    )


class GpuAdapterRows:
    """Implements `device.adapters.AdapterRows`; for steps of slots, `slot_adapters.StepAdapters` writes the table."""

    def __init__(self, max_rows: int, num_places: int, device: torch.device) -> None:
        """Take the memory of the table. Raises ValueError naming the option."""
        self.name = f"adapter tiles{next(_names)}"
        self.num_tiles = 0
        self.table = RowTable.empty(max_rows, num_places, device)
        self._device = device

    def fill(self, places: IntArray) -> None:
        """As in `AdapterRows`; enqueues the sort, and a copy."""
        self.num_tiles = 0
        if (places >= 0).any():
            self.num_tiles = num_tiles(len(places), self.table.max_loras)
            there = torch.from_numpy(places.astype(np.int32)).to(self._device)
            sort_rows(there, torch.arange(len(places), device=self._device), self.table)
