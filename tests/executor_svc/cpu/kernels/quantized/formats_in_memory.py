"""Weights in few bits that are in memory, as a device reads them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from executor_svc.device.stored_linear import QuantBlock, QuantFormat


class BlockRows:
    """Implements `device.stored_linear.QuantRows`: one block, handed out in pieces."""

    whole_row_activations = False

    def __init__(self, kind: QuantFormat, block: QuantBlock, order: Tensor | None = None, piece: int = 37) -> None:
        self.format, self.column_order = kind, order
        self.shape = (len(block), block.codes.shape[1])
        self._block, self._piece = block, piece

    def blocks(self, num_bytes: int, multiple: int) -> Iterator[QuantBlock]:
        for start in range(0, len(self._block), self._piece):
            yield part_of(self._block, start, start + self._piece)


def part_of(block: QuantBlock, start: int, stop: int) -> QuantBlock:
    """Return some rows of a block."""
    fields = (getattr(block, name) for name in QuantBlock.__slots__)
    return QuantBlock(*(None if field is None else field[start:stop] for field in fields))
