"""A table of embeddings that is a tensor of its own."""

from __future__ import annotations

from torch import Tensor

from executor_svc.device.kernels import Kernels


class TableEmbedding:
    """Implements `device.kernels.Embedding` by `Kernels.embed`."""

    def __init__(self, table: Tensor, kernels: Kernels) -> None:
        """table: [vocabulary, hidden], on the device."""
        self._table = table
        self._kernels = kernels

    def __call__(self, token_ids: Tensor, scale: float) -> Tensor:
        return self._kernels.embed(self._table, token_ids, scale)
