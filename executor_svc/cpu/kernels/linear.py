"""A linear layer on the CPU, with its weight in panels, and the same panels as a table of embeddings."""

from __future__ import annotations

import torch
from torch import Tensor

from executor_svc.cpu.kernels.cpu_kernels import CpuKernels
from executor_svc.cpu.kernels.panel_layout import PANEL
from executor_svc.cpu.kernels.panels import new_panels
from executor_svc.device.kernels import WeightRows

BLOCK_BYTES = 1 << 19
"""Of a weight's rows that are read at a time: they stay in the L2 cache until they are in panels."""


class CpuLinear:
    """x @ weight.T + bias, rounded to the dtype of the weight."""

    def __init__(self, weight: Tensor | WeightRows, bias: Tensor | None, kernels: CpuKernels) -> None:
        """weight: [out_features, in_features]; bias: [out_features] or None; both in the model's dtype.

        A weight that is not a tensor is read by `read`.
        """
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else bias.contiguous()
        self.panels = new_panels(self.out_features, self.in_features, weight.dtype)
        self._kernels = kernels
        if isinstance(weight, Tensor):
            kernels.panel_writer.write(self.panels, 0, weight)

    def read(self, weight: WeightRows) -> None:
        """Put the rows of the weight into the panels; any thread may do so."""
        first = 0
        for block in weight.blocks(BLOCK_BYTES, PANEL):
            self._kernels.panel_writer.write(self.panels, first, block)
            first += len(block)

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """Map [rows, in_features], contiguous, to [rows, out_features]; out_dtype: that of x, or float32."""
        return self._kernels.linear(x, self.panels, self.bias, self.out_features, out_dtype or x.dtype)


class PanelEmbedding:
    """Implements `device.kernels.Embedding`: the rows of a linear's weight, from its panels."""

    def __init__(self, linear: CpuLinear, kernels: CpuKernels) -> None:
        self._linear = linear
        self._kernels = kernels

    def __call__(self, token_ids: Tensor, scale: float) -> Tensor:
        linear = self._linear
        return self._kernels.embed_from_panels(linear.panels, linear.in_features, token_ids, scale)
