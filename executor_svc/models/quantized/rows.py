"""A weight in few bits that is read when a device needs it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from executor_svc.device.file_rows import FileRows
from executor_svc.device.stored_linear import QuantBlock, QuantFormat
from executor_svc.models.folder import LoaderError
from executor_svc.models.quantized.tensors import CheckpointTensors, checked


@dataclass(slots=True)
class LazyRows:
    """Implements `device.stored_linear.QuantRows`."""

    shape: tuple[int, int]
    format: QuantFormat
    read: Callable[[int], Iterator[QuantBlock]]
    """Yields the weight, at most this number of rows at a time."""
    row_unit: int = 1
    """Rows that are packed together: blocks have a multiple of it."""
    column_order: Tensor | None = None
    whole_row_activations: bool = False
    scale_rows: int = 1
    """Consecutive rows that share their scales."""
    file: FileRows | None = None
    """Where its rows lie as they are, if they do."""

    def in_file(self) -> FileRows | None:
        """As in `device.file_rows.InFile`."""
        return self.file

    def blocks(self, num_bytes: int, multiple: int) -> Iterator[QuantBlock]:
        """As in `QuantRows`."""
        unit = math.lcm(self.row_unit, multiple)
        return self.read(unit * max(1, num_bytes // (unit * self.shape[1])))


def row_ranges(count: int, rows: int) -> Iterator[slice]:
    """Yield ranges of `rows` rows, the last perhaps of fewer."""
    for start in range(0, count, rows):
        yield slice(start, min(start + rows, count))


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Return the codes of words [R, W] int32 as [R, W * 32 / bits] uint8; bits: 4 or 8, the lowest are first."""
    packed = words.contiguous()
    if packed.stride(1) != 1:  # one column, to torch contiguous with any stride
        packed = packed.clone(memory_format=torch.contiguous_format)
    return unpack_bytes(packed.view(torch.uint8), bits)


def unpack_bytes(packed: Tensor, bits: int) -> Tensor:
    """Return the codes of bytes [R, B] as [R, B * 8 / bits] uint8; bits: 4 or 8, the lowest are first."""
    if bits == 8:
        return packed
    return torch.stack((packed & 15, packed >> 4), dim=2).flatten(1)


def sorted_columns(tensors: CheckpointTensors, name: str, columns: int, group: int) -> Tensor | None:
    """Return the order of columns that sorts them by their groups, [columns] int64; None: they are in order.

    name: of a tensor [columns] int32 with the group of each column; -1 throughout: in order. Raises LoaderError unless
    each group has `group` columns.
    """
    stored = checked(tensors, name, [(columns,)], [torch.int32])
    groups = tensors.raw(name).long()
    if bool((groups == -1).all()):
        return None
    inside = bool(((groups >= 0) & (groups < columns // group)).all())
    if not inside or not bool((groups.bincount(minlength=columns // group) == group).all()):
        raise LoaderError(f"{stored.path}: tensor {name} does not give {group} columns to each group")
    order = groups.argsort(stable=True)
    return None if bool((order == torch.arange(columns)).all()) else order


def in_order(codes: Tensor, order: Tensor | None) -> Tensor:
    """Return codes [R, K] with their columns in this order."""
    # Twice as fast as index_select along columns.
    return codes if order is None else codes.gather(1, order.expand_as(codes))
