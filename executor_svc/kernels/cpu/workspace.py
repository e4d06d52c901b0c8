"""Scratch memory that is kept between calls: fresh pages for large temporaries cost more than the work on them."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Workspace:
    """Named buffers that grow as needed; what a view holds is lost at the next `take` of the same name."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized contiguous tensor of this shape."""
        size = math.prod(shape)
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < size:
            buffer = torch.empty(size, dtype=dtype)
            self._buffers[name, dtype] = buffer
        return buffer[:size].view(shape)
