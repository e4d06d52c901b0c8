"""A linear of the CPU whose weight stays in its file: products make panels of its rows as they need them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from executor_svc.cpu.kernels.experts.kernels import CpuExpertKernels, CpuExpertLinear
from executor_svc.cpu.kernels.linear import BLOCK_BYTES
from executor_svc.cpu.kernels.panel_layout import PANEL, UNIT_BYTES
from executor_svc.cpu.kernels.quantized.files.panels import DENSE, FilePanels, reader_of
from executor_svc.cpu.kernels.quantized.launches import DensePart, PackedWeightPart, Part
from executor_svc.cpu.kernels.quantized.layout import PackedLayout
from executor_svc.cpu.stored_linear import QuantizedActivations, has_kernel, int8_rows
from executor_svc.device.experts import Router
from executor_svc.device.file_rows import FileRows, InFile, MappedFiles, NotInPlaceError
from executor_svc.device.kernels import WeightRows
from executor_svc.device.stored_linear import QuantRows

_ONE_EXPERT = Router(1, 1)


class CpuFileLinear:
    """Implements `device.kernels.Linear` for an expert: the bits are those of its weight in memory."""

    def __init__(
        self,
        sources: Sequence[QuantRows | WeightRows],
        dtype: torch.dtype,
        bias: Tensor | None,
        kernels: CpuExpertKernels,
        files: MappedFiles,
        quantized_activations: QuantizedActivations,
    ) -> None:
        """sources: one below the other. Raises NotInPlaceError for one that cannot be used as it lies in its file."""
        self.in_features, self.out_features = sources[0].shape[1], sum(source.shape[0] for source in sources)
        self.bias = None if bias is None else bias.contiguous()
        self._sources, self._dtype, self._kernels, self._files = list(sources), dtype, kernels, files
        self._quantized_activations = quantized_activations
        self.parts: list[Part] = [self._part(source) for source in sources]

    def read(self) -> None:
        """Read the weight once and keep nothing: it is checked, and counts in the digest, as one in memory does."""
        for source in self._sources:
            for _ in source.blocks(BLOCK_BYTES, PANEL):
                pass
        self._sources.clear()

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """As the only expert of all rows."""
        assert out_dtype in (None, x.dtype)
        routes = self._kernels.route(torch.zeros(len(x), 1), _ONE_EXPERT, x.dtype)
        return CpuExpertLinear([self], self._kernels)(self._kernels.take_routed(x, routes), routes)

    def _part(self, source: QuantRows | WeightRows) -> Part:
        found = source.in_file() if isinstance(source, InFile) else None
        if found is None:
            raise NotInPlaceError("its numbers do not lie in the file as they are used")
        panels, (rows, columns) = -(-source.shape[0] // PANEL), source.shape
        if isinstance(source, QuantRows):
            layout = PackedLayout(source.format, columns)
            reader = reader_of(found.stored_as)
            if reader is None or not has_kernel(source.format, columns, self._kernels.isa):
                raise NotInPlaceError(f"there is no kernel that reads {source.format.name} from a file")
            own = layout.num_blocks * reader.num_bytes
            made = FilePanels(found.stored_as, rows, found.stride or own, layout.panel_bytes, layout)
            memory, scales = self._place(found, rows, made.row_bytes, own)[:panels], None
            if found.scales is not None:
                own = layout.num_blocks * reader.scale_bytes
                made = replace(made, scales_row_bytes=found.scales.stride or own)
                scales = self._place(found.scales, rows, made.scales_row_bytes, own)
            int8 = int8_rows(self._kernels.isa, layout, source.whole_row_activations, self._quantized_activations)
            return PackedWeightPart(layout, memory, rows, None, int8, made, scales)
        dtype = self._kernels.matrix_dtype or self._dtype
        row_bytes = columns * dtype.itemsize
        if DENSE.get(found.stored_as) != str(dtype).removeprefix("torch."):
            raise NotInPlaceError(f"it is {found.stored_as} in the file, and the model runs in {dtype}")
        if row_bytes % UNIT_BYTES:
            raise NotInPlaceError(f"a row of {columns} numbers is no whole number of pairs")
        made = FilePanels(found.stored_as, rows, row_bytes, row_bytes * PANEL, None)
        # What stands for so many panels: as many bytes from the weight's address on.
        return DensePart(self._place(found, rows, row_bytes, row_bytes)[:panels], rows, made, dtype)

    def _place(self, found: FileRows, rows: int, stride: int, row_bytes: int) -> Tensor:
        """Return the memory of rows."""
        assert found.num_bytes == (rows - 1) * stride + row_bytes, f"{found}: {rows} rows of {row_bytes} bytes"
        return self._files.memory(found)
