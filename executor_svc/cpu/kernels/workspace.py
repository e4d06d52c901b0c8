"""Scratch memory of recorded launches, at fixed addresses."""

from __future__ import annotations

import torch
from torch import Tensor


class Workspace:
    """Named buffers, one for each name, shape and dtype; the next use of a buffer overwrites it."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, tuple[int, ...], torch.dtype], Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized contiguous tensor of this shape."""
        key = name, shape, dtype
        if key not in self._buffers:
            self._buffers[key] = torch.empty(shape, dtype=dtype)
        return self._buffers[key]
