"""A head's tensors by the names of a decoder's, so that what reads decoders reads it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from executor_svc.device.stored_linear import QuantRows
from executor_svc.models.base import StoredWeight, WeightSource


class NamedTensors:
    """Implements `models.base.WeightSource` over a source whose names begin otherwise."""

    def __init__(self, source: WeightSource, replaced: Mapping[str, str]) -> None:
        """replaced: beginnings of a decoder's names and what stands for them in the source; the first that fits."""
        self._source = source
        self._replaced = replaced

    def stored(self, name: str) -> str:
        """Return a tensor's name in the source; name: as in a decoder's."""
        for prefix, instead in self._replaced.items():
            if name.startswith(prefix):
                return instead + name.removeprefix(prefix)
        return name

    def open(self, name: str, shape: tuple[int, ...]) -> StoredWeight:
        """As in `WeightSource`, like the following methods."""
        return self._source.open(self.stored(name), shape)

    def open_linear(self, prefix: str, shape: tuple[int, int]) -> StoredWeight | QuantRows:
        return self._source.open_linear(self.stored(prefix), shape)

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        return self._source.get(self.stored(name), shape, dtype)
