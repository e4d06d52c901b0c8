"""Weights in few bits whose rows are heads, each widened to the padded size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from torch import Tensor

from executor_svc.device.stored_linear import QuantBlock, QuantRows
from executor_svc.models.layers.attention import pad_heads


class PaddedHeads:
    """Implements `QuantRows`: rows of zeros after those of each head.

    All their numbers are 0: with a scale of 0 every code is zero, and where scales are powers of 2 the code 0 is.
    """

    def __init__(self, rows: QuantRows, head_size: int, padded_head_size: int) -> None:
        """rows: [heads * head_size, in_features]."""
        self._rows = rows
        self._sizes = head_size, padded_head_size
        self.shape = rows.shape[0] // head_size * padded_head_size, rows.shape[1]
        self.format = rows.format
        self.column_order = rows.column_order
        self.whole_row_activations = rows.whole_row_activations

    def blocks(self, num_bytes: int, multiple: int) -> Iterator[QuantBlock]:
        """As in `QuantRows`; whole heads at a time."""
        for block in self._rows.blocks(num_bytes, self._sizes[0]):
            planes: dict[str, Any] = {each.name: self._padded(getattr(block, each.name)) for each in fields(block)}
            yield QuantBlock(**planes)

    def _padded(self, plane: Tensor | None) -> Tensor | None:
        return None if plane is None else pad_heads(plane, *self._sizes)
