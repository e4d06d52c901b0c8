"""A linear layer on the CPU, with its weight in panels."""

from __future__ import annotations

import torch
from torch import Tensor

from executor_svc.cpu.kernels.cpu_kernels import CpuKernels
from executor_svc.cpu.kernels.matmul import pack


class CpuLinear:
    """x @ weight.T + bias, rounded to the dtype of the weight."""

    def __init__(self, weight: Tensor, bias: Tensor | None, kernels: CpuKernels) -> None:
        """weight: [out_features, in_features]; bias: [out_features] or None; both in the model's dtype."""
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else bias.contiguous()
        self.panels = pack(weight)
        self._kernels = kernels

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """Map [rows, in_features], contiguous, to [rows, out_features]; out_dtype: that of x, or float32."""
        return self._kernels.linear(x, self.panels, self.bias, self.out_features, out_dtype or x.dtype)
