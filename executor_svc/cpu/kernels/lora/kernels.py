"""The CPU's operations of adapters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from executor_svc.cpu.kernels.lora.launches import AdapterLaunches
from executor_svc.cpu.kernels.lora.places import CpuAdapterPlaces, CpuEmbeddingPlaces
from executor_svc.cpu.kernels.lora.rows import CpuAdapterRows
from executor_svc.device.adapters import AdapterPlaces, AdapterRows, EmbeddingPlaces
from executor_svc.device.host_memory import new_memory


class CpuAdapterKernels:
    """The part of `device.adapters.AdapterKernels` that other kernels do not have, but for `scale_rows`."""

    def new_adapter_memory(self, num_bytes: int) -> Tensor:
        return new_memory(num_bytes)

    def new_adapter_rows(self, max_rows: int) -> CpuAdapterRows:
        return CpuAdapterRows(max_rows)

    def new_adapter_places(
        self,
        num_places: int,
        max_rank: int,
        in_features: int,
        part_columns: Sequence[int],
        dtype: torch.dtype,
        replaces_rows: bool = False,
    ) -> CpuAdapterPlaces:
        return CpuAdapterPlaces(num_places, max_rank, in_features, part_columns, dtype, replaces_rows)

    def new_embedding_places(
        self, num_places: int, max_rank: int, hidden_size: int, dtype: torch.dtype
    ) -> CpuEmbeddingPlaces:
        return CpuEmbeddingPlaces(num_places, max_rank, hidden_size, dtype)

    def add_adapters(self, x: Tensor, y: Tensor, places: AdapterPlaces, rows: AdapterRows) -> Tensor:
        assert isinstance(places, CpuAdapterPlaces)
        assert isinstance(rows, CpuAdapterRows)
        self._adapters.linear(x, y, places, rows)
        return y

    def add_embedding_adapters(
        self, token_ids: Tensor, y: Tensor, places: EmbeddingPlaces, rows: AdapterRows
    ) -> Tensor:
        assert isinstance(places, CpuEmbeddingPlaces)
        assert isinstance(rows, CpuAdapterRows)
        self._adapters.embedding(token_ids, y, places, rows)
        return y

    @property
    def _adapters(self) -> AdapterLaunches:
        """The launches of adapters on these kernels."""
        raise NotImplementedError
