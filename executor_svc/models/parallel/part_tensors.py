"""A rank's part of a linear in few bits, read from the file alone: its tensors, cut as its rows or columns are.

A checkpoint stores codes, scales and zero points in tensors of their own, in which an element may stand for several
rows or columns. Readers of formats see tensors of a smaller linear.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from executor_svc.device.stored_linear import QuantRows
from executor_svc.models.parallel.part import Part
from executor_svc.models.quantized.rows import LazyRows, row_ranges
from executor_svc.models.quantized.tensors import CheckpointTensors
from executor_svc.models.safetensors_file import StoredTensor, TensorRows

_OUT, _IN = 0, 1
_AXES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("weight", "weight_packed", "weight_scale", "weight_scale_inv", "weight_zero_point"), (_OUT, _IN)),
    **dict.fromkeys(("qweight", "qzeros", "scales"), (_IN, _OUT)),
    **dict.fromkeys(("g_idx", "weight_g_idx"), (_IN,)),
}
"""What the dimensions of a linear's tensors are."""
_SHAPE = "weight_shape"
_GROUPS = "g_idx"
_PACKED = (1, 2, 4, 8)
"""Numbers in an element of a packed tensor."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Elements of a tensor along one dimension, 0 or 1; without ranges: all of it."""

    axis: int = 0
    ranges: tuple[range, ...] = ()

    def shape_of(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of what is cut out."""
        if not self.ranges:
            return whole
        count = sum(map(len, self.ranges))
        return (count, *whole[1:]) if self.axis == 0 else (whole[0], count)

    def blocks(self, stored: TensorRows, rows: int) -> Iterator[Tensor]:
        """Yield it from the file, `rows` rows at a time; a block is valid until the next one."""
        if not self.ranges:
            yield from stored.blocks(rows)
        elif self.axis == 0:
            total = sum(map(len, self.ranges))
            for block in row_ranges(total, rows):
                pieces = [next(stored.row_blocks(each, len(each))) for each in within(self.ranges, block)]
                yield pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        else:
            for blocks in zip(*(stored.column_blocks(each, rows) for each in self.ranges), strict=True):
                yield blocks[0] if len(blocks) == 1 else torch.cat(blocks, 1)


class CutReader(CheckpointTensors, Protocol):
    """The tensors of a checkpoint of which parts are read alone."""

    def cut_blocks(self, name: str, cut: Cut, rows: int, elements: int) -> Iterator[Tensor]:
        """As `raw_blocks`, of what is cut out."""
        ...


class PartTensors:
    """Implements `quantized.tensors.CheckpointTensors` for a rank's part of one linear."""

    def __init__(self, tensors: CutReader, prefix: str, whole: LazyRows, part: Part) -> None:
        """whole: of the linear in the checkpoint."""
        self._tensors, self._prefix, self._whole, self._part = tensors, prefix, whole, part

    def is_possible(self) -> bool:
        """Return whether all tensors of the linear can be cut where the part begins and ends."""
        return all(
            _cut(stored, axes, self._whole, self._part) is not None
            for ending, axes in _AXES.items()
            if (stored := self._tensors.find(f"{self._prefix}.{ending}")) is not None
        )

    def find(self, name: str) -> StoredTensor | None:
        """As in `CheckpointTensors`, like the following methods."""
        stored = self._tensors.find(name)
        return None if stored is None else replace(stored, shape=self._cut_of(name).shape_of(stored.shape))

    def require(self, name: str) -> StoredTensor:
        stored = self._tensors.require(name)
        return replace(stored, shape=self._cut_of(name).shape_of(stored.shape))

    def raw_blocks(self, name: str, rows: int, elements: int = 0) -> Iterator[Tensor]:
        of_whole = elements * self._part.total // self._part.count
        return self._tensors.cut_blocks(name, self._cut_of(name), rows, of_whole)

    def raw(self, name: str, elements: int = 0) -> Tensor:
        if name == f"{self._prefix}.{_SHAPE}":
            return torch.tensor(self._part.shape_of(self._whole.shape))
        shape = self.require(name).shape
        if not self._cut_of(name).ranges or not shape:
            return self._tensors.raw(name, elements * self._part.total // self._part.count)
        (found,) = self.raw_blocks(name, shape[0], elements)
        # Groups are counted from the part's first one.
        return found - found.min().clamp(min=0) if name.endswith(_GROUPS) else found

    def skip(self, name: str) -> None:
        self._tensors.skip(name)

    def _cut_of(self, name: str) -> Cut:
        prefix, _, ending = name.rpartition(".")
        axes = _AXES.get(ending) if prefix == self._prefix else None
        if axes is None:
            return Cut()
        cut = _cut(self._tensors.require(name), axes, self._whole, self._part)
        assert cut is not None, f"{name} cannot be cut"
        return cut


def is_same_format(part: QuantRows, expected: QuantRows) -> bool:
    """Return whether a part that is read alone has the format of one that is cut in memory."""
    return (part.shape, part.format) == (expected.shape, expected.format)


def _cut(stored: StoredTensor, axes: tuple[int, ...], whole: LazyRows, part: Part) -> Cut | None:
    """Return the elements that stand for the part's numbers; None if some stand for others, too."""
    wanted = _IN if part.of_columns else _OUT
    if wanted not in axes or axes.index(wanted) >= len(stored.shape):
        return Cut()
    axis = axes.index(wanted)
    count = stored.shape[axis]
    if count == 1:
        return Cut()  # one for all
    shared = whole.format.group if part.of_columns else whole.scale_rows
    each, rest = divmod(part.total, count)
    possible = (1, shared) if shared > 1 and not part.of_columns else (*_PACKED, shared)
    if (
        rest
        or each not in possible
        or any(edge % each for chosen in part.ranges for edge in (chosen.start, chosen.stop))
    ):
        return None
    return Cut(axis, tuple(range(chosen.start // each, chosen.stop // each) for chosen in part.ranges))


def within(ranges: tuple[range, ...], chosen: slice) -> Iterator[range]:
    """Yield the parts of ranges, joined, that lie at these places."""
    first = 0
    for each in ranges:
        start, stop = max(first, chosen.start) - first, min(first + len(each), chosen.stop) - first
        if start < stop:
            yield each[start:stop]
        first += len(each)
