"""A rank's part of a weight in few bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from executor_svc.device.stored_linear import QuantBlock, QuantFormat, QuantRows
from executor_svc.models.base import ModelConfigError
from executor_svc.models.parallel.part import Part


class QuantPart:
    """Implements `device.stored_linear.QuantRows`: some rows or columns of a weight, in memory alone.

    Columns begin and end where groups do that share a scale, or a super scale.
    """

    column_order: Tensor | None = None

    def __init__(self, name: str, stored: QuantRows, part: Part) -> None:
        """Raise ModelConfigError, by the module's name, for columns that cannot be taken apart."""
        rows, columns = stored.shape
        self.whole_row_activations = stored.whole_row_activations
        self.format = stored.format
        self._stored, self._part = stored, part
        if not part.of_columns:
            self.shape = (part.count, columns)
            self.column_order = stored.column_order
            return
        self.shape = (rows, part.count)
        if stored.column_order is not None:
            raise ModelConfigError(f"{name}: its columns have another order (act-order), and cannot be divided")
        self.format = _format_of_columns(name, stored.format, columns, part)

    def blocks(self, num_bytes: int, multiple: int) -> Iterator[QuantBlock]:
        """As in `QuantRows`."""
        if self._part.of_columns:
            for block in self._stored.blocks(num_bytes, multiple):
                yield _columns_of(block, self._part)
            return
        held: QuantBlock | None = None
        for chosen in self._chosen(num_bytes, multiple):
            held = _each(lambda tensor: tensor.clone(), chosen) if held is None else _below(held, chosen)
            if whole := len(held) // multiple * multiple:
                yield _rows_of(held, 0, whole)
                held = _rows_of(held, whole, len(held))
        if held is not None and len(held):
            yield held

    def _chosen(self, num_bytes: int, multiple: int) -> Iterator[QuantBlock]:
        first = 0
        for block in self._stored.blocks(num_bytes, multiple):
            for wanted in self._part.ranges:
                start, stop = max(first, wanted.start), min(first + len(block), wanted.stop)
                if start < stop:
                    yield _rows_of(block, start - first, stop - first)
            first += len(block)


def _format_of_columns(name: str, kind: QuantFormat, columns: int, part: Part) -> QuantFormat:
    if kind.group == columns:  # a scale for each row
        return replace(kind, group=part.count)
    unit = kind.super_group or kind.group
    if any(edge % unit for chosen in part.ranges for edge in (chosen.start, chosen.stop)):
        raise ModelConfigError(
            f"{name}: {kind.name} has a scale for {unit} columns, and ranks have {part.count} of {columns} columns each"
        )
    return kind


def _columns_of(block: QuantBlock, part: Part) -> QuantBlock:
    def take(tensor: Tensor) -> Tensor:
        """Return these columns of codes, or of what several columns share."""
        each = part.total // tensor.shape[1]
        if each == part.total:
            return tensor
        return torch.cat([tensor[:, columns.start // each : columns.stop // each] for columns in part.ranges], 1)

    return _each(take, block)


def _rows_of(block: QuantBlock, start: int, stop: int) -> QuantBlock:
    return _each(lambda tensor: tensor[start:stop], block)


def _below(upper: QuantBlock, lower: QuantBlock) -> QuantBlock:
    pairs = ((getattr(upper, name), getattr(lower, name)) for name in _PLANES)
    return QuantBlock(*(None if above is None else torch.cat((above, below)) for above, below in pairs))  # type: ignore[arg-type]


def _each(change: Callable[[Tensor], Tensor], block: QuantBlock) -> QuantBlock:
    planes = (getattr(block, name) for name in _PLANES)
    return QuantBlock(*(None if plane is None else change(plane) for plane in planes))  # type: ignore[arg-type]


_PLANES = ("codes", "scales", "super_scales", "minimums", "super_minimums", "zero_points")
