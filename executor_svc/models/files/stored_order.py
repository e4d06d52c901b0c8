"""Tensors of a file in the order of Cadenza's kernels: transposed weights, and rows of q, k and v that lie by head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from executor_svc.device.stored_linear import QuantBlock, QuantRows
from executor_svc.models.parallel.part_tensors import Cut, within
from executor_svc.models.safetensors_file import StoredTensor, TensorRows
from executor_svc.models.specs.file_form import LAYERS
from executor_svc.models.specs.spec import DecoderSpec


def rows_by_head(spec: DecoderSpec) -> tuple[range, ...]:
    """Return the stored rows of all query heads, then of all keys, then of all values, for `FileForm.qkv_by_head`."""
    queries = spec.num_heads // spec.num_kv_heads * spec.head_size
    group = queries + 2 * spec.head_size
    firsts = [head * group for head in range(spec.num_kv_heads)]
    edges = ((0, queries), (queries, queries + spec.head_size), (queries + spec.head_size, group))
    return tuple(range(first + start, first + stop) for start, stop in edges for first in firsts)


def row_order(ranges: tuple[range, ...]) -> Tensor:
    """Return the rows of ranges, one after the other, [rows] int64."""
    return torch.cat([torch.arange(each.start, each.stop) for each in ranges])


class FileOrder:
    """The order of a decoder's tensors in files of its family."""

    def __init__(self, spec: DecoderSpec) -> None:
        form = spec.files
        self._transposed = form.transposed
        qkv = spec.names.qkv[0] if form.qkv_by_head else None
        self._by_head = () if qkv is None else (f".{qkv}.weight", f".{qkv}.bias")
        self._ranges = rows_by_head(spec) if form.qkv_by_head else ()

    def of(self, name: str, stored: StoredTensor) -> TensorRows:
        """Return a tensor as it is in Cadenza."""
        if name.endswith(self._by_head):
            return _Rearranged(stored, self._ranges)
        if self._transposed and len(stored.shape) == 2 and name.startswith(f"{LAYERS}."):
            return _Transposed(stored)
        return stored

    def of_rows(self, prefix: str, rows: QuantRows) -> QuantRows:
        """Return the weight in few bits of a linear as it is in Cadenza: formats have no transposed ones."""
        return QuantRowsByHead(rows, self._ranges) if f"{prefix}.weight".endswith(self._by_head) else rows


class _Transposed:
    """Implements `TensorRows`: a matrix [columns, rows], read whole."""

    def __init__(self, stored: StoredTensor) -> None:
        self._stored = stored
        self.shape: tuple[int, ...] = stored.shape[::-1]

    def blocks(self, rows: int) -> Iterator[Tensor]:
        return self.row_blocks(range(self.shape[0]), rows)

    def row_blocks(self, chosen: range, rows: int) -> Iterator[Tensor]:
        for block in self._stored.whole().t()[chosen.start : chosen.stop].split(max(1, rows)):
            yield block.contiguous()

    def column_blocks(self, chosen: range, rows: int) -> Iterator[Tensor]:
        for block in self._stored.rows_alone(chosen).whole().t().split(max(1, rows)):
            yield block.contiguous()


class _Rearranged:
    """Implements `TensorRows`: a tensor's rows in the order of some ranges."""

    def __init__(self, stored: StoredTensor, ranges: tuple[range, ...]) -> None:
        self._stored, self._ranges = stored, ranges
        self.shape: tuple[int, ...] = stored.shape

    def blocks(self, rows: int) -> Iterator[Tensor]:
        return Cut(0, self._ranges).blocks(self._stored, rows)

    def row_blocks(self, chosen: range, rows: int) -> Iterator[Tensor]:
        ranges = tuple(within(self._ranges, slice(chosen.start, chosen.stop)))
        return Cut(0, ranges).blocks(self._stored, rows) if ranges else iter(())

    def column_blocks(self, chosen: range, rows: int) -> Iterator[Tensor]:
        raise AssertionError("ranks have rows of q, k and v")


class QuantRowsByHead:
    """Implements `QuantRows`: rows in the order of some ranges, in memory."""

    def __init__(self, rows: QuantRows, ranges: tuple[range, ...]) -> None:
        self.shape, self.format = rows.shape, rows.format
        self.column_order, self.whole_row_activations = rows.column_order, rows.whole_row_activations
        self._rows, self._ranges = rows, ranges

    def blocks(self, num_bytes: int, multiple: int) -> Iterator[QuantBlock]:
        """As in `QuantRows`."""
        names, read = [each.name for each in fields(QuantBlock)], dict[str, list[Tensor]]()
        for block in self._rows.blocks(num_bytes, multiple):
            for name in names:
                if (plane := getattr(block, name)) is not None:
                    read.setdefault(name, []).append(plane.clone())
        order = row_order(self._ranges)
        planes = {name: torch.cat(parts)[order] for name, parts in read.items()}
        count = multiple * max(1, num_bytes // (multiple * self.shape[1]))
        for start in range(0, self.shape[0], count):
            chosen: dict[str, Any] = {name: plane[start : start + count] for name, plane in planes.items()}
            yield QuantBlock(**chosen)
