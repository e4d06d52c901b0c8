"""A rank's part of a dense tensor of a file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from executor_svc.models.parallel.part import Part


class PartReader(Protocol):
    """A source that reads parts of dense tensors, and nothing else of them."""

    def part_blocks(self, name: str, shape: tuple[int, ...], part: Part, rows: int) -> Iterator[Tensor]:
        """Yield a part of a tensor of this shape in the model's dtype, `rows` rows at a time."""
        ...


@dataclass(frozen=True, slots=True)
class PartOfFile:
    """Implements `models.base.StoredWeight`: some rows or columns of a tensor of a file."""

    source: PartReader
    name: str
    whole_shape: tuple[int, ...]
    part: Part
    dtype: torch.dtype
    torch_device: torch.device

    @property
    def shape(self) -> tuple[int, ...]:
        return self.part.shape_of(self.whole_shape)

    def blocks(self, rows: int) -> Iterator[Tensor]:
        """As in `StoredWeight`: blocks of `rows` rows, the last one perhaps smaller."""
        return self.source.part_blocks(self.name, self.whole_shape, self.part, rows)

    def whole(self) -> Tensor:
        """As in `StoredWeight`."""
        whole, first = torch.empty(self.shape, dtype=self.dtype), 0
        for block in self.blocks(max(1, whole.shape[0])):
            whole[first : first + len(block)] = block
            first += len(block)
        return whole.to(self.torch_device)
