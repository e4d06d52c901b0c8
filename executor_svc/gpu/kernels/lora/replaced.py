"""Rows that adapters put in place of some of a table of embeddings, or of the head's weight.

They stay in the host's memory, pinned, where kernels read them through the addresses at the adapter's place: few
adapters have some, and those that have may have as many as the vocabulary. Of embeddings a step reads the rows of its
own tokens; of a head all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from executor_svc.device.adapters import ReplacedRows
from executor_svc.gpu.kernels.lora.places import RANKS, Taker, piece_bytes
from executor_svc.gpu.kernels.lora.shrink import sum_columns
from executor_svc.gpu.kernels.lora.tables import TILE_ROWS, TILE_WORDS, RowTable, num_tiles, tile_rows
from executor_svc.gpu.kernels.rows import DTYPES, check, check_rows
from executor_svc.gpu.kernels.variant import Variant

FIELDS = 3
"""Of a place: the number of replaced rows, the addresses of their ids and of the rows."""
_TILE_WORDS = tl.constexpr(TILE_WORDS)
_FIELDS = tl.constexpr(FIELDS)
_CHUNK = 256
_COLUMNS = 64
"""Columns of one step of a product."""
_PROGRAMS = 64
"""Of a tile, among which blocks of replaced rows of a head are divided."""
_WARPS = 4
_STAGES = 2


@dataclass(frozen=True, slots=True)
class HostRows:
    """Replaced rows in the host's memory."""

    token_ids: Tensor
    """[n] int64, ascending."""
    rows: Tensor
    """[n, columns]."""
    fields: Tensor
    """[FIELDS] int64."""


class ReplacedPlaces:
    """The replaced rows of the adapters of one table."""

    def __init__(
        self, columns: int, num_rows: int | None, max_loras: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """num_rows: of the table; None: any number."""
        self.columns, self.num_rows, self.dtype = columns, num_rows, dtype
        self.fields = torch.zeros(max_loras, FIELDS, dtype=torch.int64, device=device)

    def packed_bytes(self, replaced: ReplacedRows) -> int:
        """Return the memory that `pack` takes; raises ValueError for rows that do not fit."""
        ids, rows = replaced.token_ids, replaced.rows
        if tuple(rows.shape) != (len(ids), self.columns):
            raise ValueError(f"replaced rows {list(rows.shape)}: {[len(ids), self.columns]} are expected")
        within = not len(ids) or (int(ids[0]) >= 0 and (self.num_rows is None or int(ids[-1]) < self.num_rows))
        if not within or bool((ids.diff() <= 0).any()):
            raise ValueError(f"ids of replaced rows must ascend from 0 on, below {self.num_rows}")
        pieces = ((torch.int64, ids.shape), (self.dtype, rows.shape), (torch.int64, (FIELDS,)))
        return sum(piece_bytes(dtype, *shape) for dtype, shape in pieces)

    def pack(self, replaced: ReplacedRows, memory: Taker) -> HostRows:
        """Copy replaced rows to memory that steps read, rounded to the dtype of the places."""
        ids = memory.take(torch.int64, *replaced.token_ids.shape).copy_(replaced.token_ids)
        rows = memory.take(self.dtype, *replaced.rows.shape).copy_(replaced.rows)
        fields = memory.take(torch.int64, FIELDS)
        fields.copy_(torch.tensor([len(ids), ids.data_ptr(), rows.data_ptr()]))
        return HostRows(ids, rows, fields)

    def set(self, place: int, packed: HostRows | None) -> None:
        """Enqueue the change of a place; its rows must live until no step reads them."""
        if packed is None:
            self.fields[place].zero_()
        else:
            self.fields[place].copy_(packed.fields, non_blocking=True)


@triton.jit
def _find(ids, num, token, ROWS: tl.constexpr):
    """Return the first place in ascending ids [num] that is not below each token [ROWS]."""
    low = tl.zeros((ROWS,), tl.int64)
    high = low + num
    left = num
    while left > 0:
        middle = (low + high) // 2
        open = low < high
        below = tl.load(ids + middle, open, other=0) < token
        low = tl.where(open & below, middle + 1, low)
        high = tl.where(open & below, high, middle)
        left = left // 2
    return low


@triton.jit(do_not_specialize_on_alignment=["token_ids"])
def _replace_embeddings(
    token_ids, fields, rows, tiles, y, columns, y_stride, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Copy some columns of the replaced rows of the tokens of a tile of rows."""
    tile = tiles + tl.program_id(0) * _TILE_WORDS
    place = tl.load(tile)
    first = tl.load(tile + 1)
    count = tl.load(tile + 2)
    num = tl.load(fields + place * _FIELDS)
    if (count > 0) & (num > 0):
        lane = tl.arange(0, ROWS)
        row = tl.load(rows + first + lane, lane < count, other=0)
        token = tl.load(token_ids + row, lane < count, other=-1)
        ids = tl.load(fields + place * _FIELDS + 1).to(tl.pointer_type(tl.int64))
        found = _find(ids, num, token, ROWS)
        is_replaced = (token >= 0) & (tl.load(ids + found, found < num, other=-1) == token)
        source = tl.multiple_of(tl.load(fields + place * _FIELDS + 2).to(tl.pointer_type(y.dtype.element_ty)), 16)
        column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
        inside = is_replaced[:, None] & (column < columns)[None, :]
        some = tl.load(source + found[:, None] * columns + column[None, :], inside, other=0.0)
        tl.store(y + row.to(tl.int64)[:, None] * y_stride + column[None, :], some, inside)


@triton.jit
def _replace_logits(
    x, fields, rows, tiles, y, in_features, x_stride, y_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Write the products of a tile of rows and some blocks of the replaced rows of their adapter."""
    tile = tiles + tl.program_id(0) * _TILE_WORDS
    place = tl.load(tile)
    first = tl.load(tile + 1)
    count = tl.load(tile + 2)
    num = tl.load(fields + place * _FIELDS).to(tl.int32)
    if count > 0:
        lane = tl.arange(0, ROWS)
        within = lane < count
        row = tl.load(rows + first + lane, within, other=0).to(tl.int64)
        ids = tl.load(fields + place * _FIELDS + 1).to(tl.pointer_type(tl.int64))
        weight = tl.multiple_of(tl.load(fields + place * _FIELDS + 2).to(tl.pointer_type(x.dtype.element_ty)), 16)
        for start in range(tl.program_id(1) * BLOCK, num, PROGRAMS * BLOCK):
            which = start + tl.arange(0, BLOCK)
            known = which < num
            total = sum_columns(
                x + row[:, None] * x_stride, weight + which.to(tl.int64)[:, None] * in_features, within[:, None],
                known[:, None], 0, in_features, in_features, ROWS, BLOCK, COLUMNS,
            )  # fmt: skip
            token = tl.load(ids + which, known, other=0)
            rounded = total.to(x.dtype.element_ty).to(y.dtype.element_ty)
            tl.store(y + row[:, None] * y_stride + token[None, :], rounded, within[:, None] & known[None, :])


def replace_embeddings(token_ids: Tensor, places: ReplacedPlaces, table: RowTable, y: Tensor) -> None:
    """Write the rows of tokens that the rows' adapters replace.

    Args:
        token_ids: [R] int64; nothing is written to the row of token -1.
        places: of the table.
        table: of these R rows, sorted for exactly as many.
        y: [R, columns] in the dtype of the places, columns adjacent.

    Raises ValueError naming the argument.
    """
    num_rows = len(y)
    check("token_ids", token_ids, (num_rows,), torch.int64)
    check_rows("y", y, places.dtype)
    _check(places, table, num_rows, y.shape[1], places.columns)
    if num_rows:
        _replace_embeddings[(num_tiles(num_rows, table.max_loras), -(-places.columns // _CHUNK))](
            token_ids, places.fields, table.rows, table.tiles, y, places.columns, y.stride(0),
            **_constants_of_embeddings(tile_rows(num_rows)), num_warps=_WARPS, num_stages=1, enable_fp_fusion=False,
        )  # fmt: skip


def replace_logits(x: Tensor, places: ReplacedPlaces, table: RowTable, y: Tensor) -> None:
    """Write the products of rows and the replaced rows of their adapters, summed in float32 and rounded as x is.

    A row's bits depend on that row and its adapter alone, as in `lora.add_lora`.

    Args:
        x: [R, columns] in the dtype of the places, columns adjacent.
        places: of the head.
        table: of these R rows, sorted for exactly as many.
        y: [R, rows of the head] in the dtype of x or float32, columns adjacent.

    Raises ValueError naming the argument.
    """
    num_rows = len(x)
    check_rows("x", x, places.dtype)
    check_rows("y", y, x.dtype, torch.float32)
    _check(places, table, num_rows, x.shape[1], places.columns)
    if tuple(y.shape) != (num_rows, places.num_rows):
        raise ValueError(f"y {list(y.shape)}: must be {[num_rows, places.num_rows]}")
    if num_rows:
        _replace_logits[(num_tiles(num_rows, table.max_loras), _PROGRAMS)](
            x, places.fields, table.rows, table.tiles, y, places.columns, x.stride(0), y.stride(0),
            **_constants_of_logits(tile_rows(num_rows)), num_warps=_WARPS, num_stages=_STAGES, enable_fp_fusion=False,
        )  # fmt: skip


def _check(places: ReplacedPlaces, table: RowTable, num_rows: int, columns: int, expected: int) -> None:
    if columns != expected:
        raise ValueError(f"rows of {columns} columns: must be of {expected}")
    if table.max_loras != len(places.fields) or table.rows.numel() < num_rows:
        raise ValueError(
            f"table: of {table.rows.numel()} rows and {table.max_loras} places, "
            f"not of {num_rows} and {len(places.fields)}"
        )


def _constants_of_embeddings(rows: int) -> dict[str, Any]:
    return {"ROWS": rows, "CHUNK": _CHUNK}


def _constants_of_logits(rows: int) -> dict[str, Any]:
    return {"ROWS": rows, "BLOCK": RANKS, "COLUMNS": _COLUMNS, "PROGRAMS": _PROGRAMS}


def variants() -> list[Variant]:
    """Return each dtype with each tile, of embeddings and of logits, which are float32."""
    return [each(dtype, rows) for dtype in DTYPES.values() for rows in TILE_ROWS for each in (_embeddings, _logits)]


def _embeddings(dtype: str, rows: int) -> Variant:
    pointers = {"token_ids": "*i64", "fields": "*i64", "rows": "*i32", "tiles": "*i32", "y": f"*{dtype}"}
    return _variant(
        "lora_replace_embeddings", _replace_embeddings, dtype, rows, pointers, ("columns", "y_stride"),
        _constants_of_embeddings(rows), 1,
    )  # fmt: skip


def _logits(dtype: str, rows: int) -> Variant:
    pointers = {"x": f"*{dtype}", "fields": "*i64", "rows": "*i32", "tiles": "*i32", "y": "*fp32"}
    return _variant(
        "lora_replace_logits", _replace_logits, dtype, rows, pointers, ("in_features", "x_stride", "y_stride"),
        _constants_of_logits(rows), _STAGES,
    )  # fmt: skip


def _variant(
    name: str, kernel: Any, dtype: str, rows: int, pointers: dict[str, str], sizes: tuple[str, ...],
    constants: dict[str, Any], stages: int,
) -> Variant:  # fmt: skip
    return Variant(
        name=f"{name} {dtype} rows{rows}",
        kernel=kernel,
        signature={**pointers, **dict.fromkeys(sizes, "i32"), **dict.fromkeys(constants, "constexpr")},
        constants=constants,
        divisible=(*(each for each in pointers if each != "token_ids"), *sizes),
        num_warps=_WARPS,
        num_stages=stages,
        fp_fusion=False,
        no_spills=True,
        quick=(kernel, dtype, rows) == (_replace_logits, "bf16", 16),
    )
