"""Linears whose results are multiplied with factors (Falcon-H1)."""

from __future__ import annotations

import torch
from torch import Tensor

from executor_svc.device.kernels import Linear
from executor_svc.device.states import StateKernels


class ScaledLinear:
    """Implements `device.kernels.Linear`: each column of a linear's results times a factor of its own."""

    def __init__(self, base: Linear, factors: Tensor, kernels: StateKernels) -> None:
        """factors: [out_features] in the model's dtype."""
        self.in_features, self.out_features = base.in_features, base.out_features
        self._base, self._factors, self._kernels = base, factors, kernels

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        assert out_dtype is None, "results are rounded before they are multiplied"
        y = self._base(x)
        return self._kernels.multiply(y, self._factors.expand(len(y), -1), 0)
