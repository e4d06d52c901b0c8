"""The launches of adapters: those of one linear, or of a table of embeddings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import LANES
from executor_svc.cpu.kernels.codegen.team import KernelLaunch
from executor_svc.cpu.kernels.dense_launches import DTYPES
from executor_svc.cpu.kernels.lora.expand import expand
from executor_svc.cpu.kernels.lora.places import CpuAdapterPlaces, CpuEmbeddingPlaces
from executor_svc.cpu.kernels.lora.rows import TILE_ROWS, CpuAdapterRows
from executor_svc.cpu.kernels.lora.shrink import HALVES, shrink
from executor_svc.cpu.kernels.lora.tables import replace_rows, replaced_columns, take_sums
from executor_svc.cpu.kernels.matmul_tiles import Output
from executor_svc.cpu.kernels.workspace import Workspace


@dataclass(frozen=True, slots=True)
class AdapterLaunches:
    """What adds adapters to rows of a step, by what it needs of `CpuKernels`."""

    code: Code
    workspace: Workspace
    launch: Callable[[KernelLaunch, int], None]
    """Runs or records a launch, for so many tiles."""
    scratch: Callable[[int], Tensor]
    """Returns memory of so many bytes for each thread, which the next launch may overwrite."""

    def linear(self, x: Tensor, y: Tensor, places: CpuAdapterPlaces, rows: CpuAdapterRows) -> None:
        """As `AdapterKernels.add_adapters`."""
        assert (x.shape[1], y.shape[1]) == (places.in_features, places.out_features)
        assert x.is_contiguous()
        output, read = Output(DTYPES[x.dtype], DTYPES[y.dtype], False), (x.data_ptr(), x.shape[1])
        if places.replaces_rows:
            scratch = self.scratch(TILE_ROWS * LANES * 4).data_ptr()
            held = places.table.address, places.table.row_bytes, scratch
            self._each_tile(replaced_columns(self.code, output), rows, (*read, *_written(y), *held))
        self._add(shrink(self.code, output.dtype), read, output, y, places, rows)

    def embedding(self, token_ids: Tensor, y: Tensor, places: CpuEmbeddingPlaces, rows: CpuAdapterRows) -> None:
        """As `AdapterKernels.add_embedding_adapters`."""
        assert y.shape[1] == places.hidden_size
        dtype = DTYPES[y.dtype]
        read, held = (token_ids.data_ptr(),), (places.table.address, places.table.row_bytes)
        replace = replace_rows(self.code, dtype, places.hidden_size)
        self._each_tile(replace, rows, (*read, y.data_ptr(), *held))
        self._add(take_sums(self.code, dtype), read, Output(dtype, dtype, False), y, places, rows)

    def _add(
        self,
        kernel: str,
        read: tuple[int, ...],
        output: Output,
        y: Tensor,
        places: CpuAdapterPlaces | CpuEmbeddingPlaces,
        rows: CpuAdapterRows,
    ) -> None:
        """Launch a kernel that computes sums of what it reads, then what adds their products with b to y.

        The first runs together with what was launched before, which writes y.
        """
        sums = self.workspace.take("adapter sums", (rows.max_rows, HALVES, places.max_sums), torch.float32)
        half_bytes = places.max_sums * sums.element_size()
        held = places.table.address, places.table.row_bytes, sums.data_ptr(), half_bytes
        self._each_tile(kernel, rows, (*read, *held), joins=True)
        scratch_bytes = TILE_ROWS * half_bytes
        scratch = self.scratch(scratch_bytes).data_ptr(), scratch_bytes
        self._each_tile(expand(self.code, output), rows, (*_written(y), *held, *scratch))

    def _each_tile(self, kernel: str, rows: CpuAdapterRows, arguments: tuple[int, ...], joins: bool = False) -> None:
        tables = rows.tiles.ctypes.data, rows.order.ctypes.data
        self.launch(KernelLaunch(kernel, rows.name, 1, HALVES, (*tables, *arguments), joins=joins), rows.num_tiles)


def _written(y: Tensor) -> tuple[int, int]:
    assert y.is_contiguous()
    return y.data_ptr(), y.shape[1] * y.element_size()
