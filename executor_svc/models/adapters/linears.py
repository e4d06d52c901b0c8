"""Linears and tables of embeddings that add what the adapters of a step's rows add."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from executor_svc.device.adapters import AdapterKernels, AdapterPlaces, AdapterRows, EmbeddingPlaces
from executor_svc.device.kernels import Embedding, Linear


class AdapterSwitch:
    """Whether what is called or recorded now has adapters, and for which rows."""

    def __init__(self) -> None:
        self.rows: AdapterRows | None = None
        """None: without adapters, as the base model computes it."""

    @contextmanager
    def on(self, rows: AdapterRows) -> Iterator[None]:
        """Inside, rows have the adapters that a table gives them."""
        before, self.rows = self.rows, rows
        try:
            yield
        finally:
            self.rows = before


class AdaptedLinear:
    """Implements `device.kernels.Linear`: a linear, then its adapters where they are on."""

    def __init__(self, base: Linear, places: AdapterPlaces, kernels: AdapterKernels, switch: AdapterSwitch) -> None:
        self.in_features, self.out_features = base.in_features, base.out_features
        self.base, self.places = base, places
        self._kernels, self._switch = kernels, switch

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        y = self.base(x, out_dtype)
        rows = self._switch.rows
        return y if rows is None else self._kernels.add_adapters(x, y, self.places, rows)


class AdaptedEmbedding:
    """Implements `device.kernels.Embedding`: a table of embeddings, then its adapters where they are on."""

    def __init__(
        self, base: Embedding, places: EmbeddingPlaces, kernels: AdapterKernels, switch: AdapterSwitch
    ) -> None:
        self.base, self.places = base, places
        self._kernels, self._switch = kernels, switch

    def __call__(self, token_ids: Tensor, scale: float) -> Tensor:
        rows = self._switch.rows
        if rows is None:
            return self.base(token_ids, scale)
        # The base's rows are scaled as numbers of the model's dtype: for rows without adapters the bits are the same.
        y = self._kernels.add_embedding_adapters(token_ids, self.base(token_ids, 1.0), self.places, rows)
        return y if scale == 1.0 else self._kernels.scale_rows(y, scale)
