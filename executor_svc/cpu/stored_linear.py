"""A linear of the CPU whose weight is stored in parts, in few bits or dense, and the same weight as embeddings."""

from __future__ import annotations

import logging
from typing import Literal

import torch
from torch import Tensor

from executor_svc.cpu.kernels.codegen.isa import Isa
from executor_svc.cpu.kernels.cpu_kernels import CpuKernels
from executor_svc.cpu.kernels.linear import BLOCK_BYTES
from executor_svc.cpu.kernels.panel_layout import PANEL
from executor_svc.cpu.kernels.panels import new_panels
from executor_svc.cpu.kernels.quantized.int8_steps import has_int8, row_steps
from executor_svc.cpu.kernels.quantized.launches import DensePart, PackedWeightPart, Part, may_be_gated
from executor_svc.cpu.kernels.quantized.layout import PackedLayout, is_supported
from executor_svc.cpu.kernels.quantized.many_rows import MOST_STEPS
from executor_svc.cpu.kernels.quantized.packing import QuantPanelWriter, new_packed
from executor_svc.cpu.kernels.quantized.row_steps import RowSteps
from executor_svc.device.dense_rows import DequantizedRows
from executor_svc.device.kernels import GatedActivation, WeightRows
from executor_svc.device.stored_linear import QuantBlock, QuantFormat, QuantRows, StoredLinear

_log = logging.getLogger(__name__)
QuantizedActivations = Literal["auto", "off", "int8"]


def has_kernel(kind: QuantFormat, columns: int, isa: Isa) -> bool:
    """Return whether products of a format are computed from its codes; else its numbers are kept as floats."""
    if not is_supported(kind, columns) or (kind.values in ("e2m1", "table") and not isa.has("avx2")):
        return False
    layout = PackedLayout(kind, columns)
    return layout.whole_row or layout.steps_per_block <= MOST_STEPS


class CpuStoredLinear:
    """x @ weight.T + bias, rounded to the model's dtype."""

    def __init__(
        self,
        name: str,
        weight: StoredLinear,
        bias: Tensor | None,
        kernels: CpuKernels,
        quantized_activations: QuantizedActivations = "off",
    ) -> None:
        """bias: [out_features] in the model's dtype, or None. `read` reads the weight."""
        self._quantized_activations = quantized_activations
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else bias.contiguous()
        self.dtype, self._kernels = weight.dtype, kernels
        prepared = [self._part(name, source) for source in weight.parts]
        self.parts, self._sources = [part for part, _ in prepared], [source for _, source in prepared]
        self._writers = {
            part.layout: QuantPanelWriter(kernels.code, part.layout)
            for part in self.parts
            if isinstance(part, PackedWeightPart)
        }

    def _part(self, name: str, source: QuantRows | WeightRows) -> tuple[Part, QuantRows | WeightRows]:
        """Return room for a part, and what fills it."""
        rows, columns = source.shape
        if isinstance(source, QuantRows):
            if has_kernel(source.format, columns, self._kernels.isa):
                layout, order = PackedLayout(source.format, columns), source.column_order
                packed = new_packed(rows, layout)
                int8 = int8_rows(self._kernels.isa, layout, source.whole_row_activations, self._quantized_activations)
                return PackedWeightPart(
                    layout, packed, rows, None if order is None else order.contiguous(), int8
                ), source
            _log.warning("%s: no kernel for %s, kept in %s", name, source.format.name, self.dtype)
            source = DequantizedRows(source, self.dtype, torch.device("cpu"))
        return DensePart(new_panels(rows, columns, self._kernels.matrix_dtype or self.dtype), rows), source

    def read(self) -> None:
        """Read the weight into memory; any thread may do so, once."""
        for part, source in zip(self.parts, self._sources, strict=True):
            first = 0
            for block in source.blocks(BLOCK_BYTES, PANEL):
                if isinstance(part, PackedWeightPart):
                    assert isinstance(block, QuantBlock)
                    self._writers[part.layout].write(part.packed, first, block)
                else:
                    assert isinstance(block, Tensor)
                    self._kernels.panel_writer.write(part.panels, first, block.to(part.panels.dtype))
                first += len(block)
        self._sources.clear()

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """Map [rows, in_features], contiguous, to [rows, out_features]; out_dtype: that of x, or float32."""
        return self._kernels.stored_linear(x, self.parts, self.bias, self.out_features, out_dtype or x.dtype)

    def of_gated(self, gate_up: Tensor, activation: GatedActivation) -> Tensor:
        """As in `device.kernels.GatedLinear`; where it can, activation and conversion to int8 are one launch."""
        if not may_be_gated(self.parts):
            activate = {"silu": self._kernels.silu_mul, "gelu_tanh": self._kernels.gelu_tanh_mul}[activation]
            return self(activate(gate_up))
        out = self.bias, self.out_features, gate_up.dtype
        return self._kernels.stored_linear(gate_up, self.parts, *out, activation)


class StoredEmbedding:
    """Implements `device.kernels.Embedding`: the rows of a stored linear's weight."""

    @staticmethod
    def is_possible(weight: StoredLinear) -> bool:
        """Return whether a weight is of one part, its columns in order."""
        return len(weight.parts) == 1 and getattr(weight.parts[0], "column_order", None) is None

    def __init__(self, linear: CpuStoredLinear, kernels: CpuKernels) -> None:
        """linear: of one part, without another order of columns."""
        (self._part,) = linear.parts
        assert isinstance(self._part, DensePart) or self._part.order is None
        self._dtype, self._hidden, self._kernels = linear.dtype, linear.in_features, kernels

    def __call__(self, token_ids: Tensor, scale: float) -> Tensor:
        if isinstance(self._part, DensePart):
            return self._kernels.embed_from_panels(self._part.panels, self._hidden, token_ids, scale, self._dtype)
        return self._kernels.embed_from_packed(self._part, token_ids, scale, self._dtype)


def int8_rows(
    isa: Isa, layout: PackedLayout, whole_row: bool, option: QuantizedActivations = "auto"
) -> RowSteps | None:
    """Return the int8 form of the rows of x that a packed weight multiplies; None: it multiplies rows as they are.

    auto and int8: every format that has integer products, on every level of x86-64.
    """
    if option == "off" or not isa.has("avx2") or not has_int8(layout.kind, whole_row):
        return None
    return row_steps(isa, layout, whole_row)
