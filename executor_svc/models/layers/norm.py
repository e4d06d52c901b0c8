"""Norms with their weights: of rows, or of the sum of an output and the residual."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from executor_svc.device.kernels import Kernels


class Norm(Protocol):
    """A norm of rows [T, hidden]."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return the normalized rows of x."""
        ...

    def of_sum(self, x: Tensor, residual: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return the normalized rows of x * scale + residual, and that sum; may write into x and residual."""
        ...


class RmsNorm:
    """Implements `Norm` by the root mean square."""

    def __init__(self, weight: Tensor, eps: float, kernels: Kernels) -> None:
        """weight: [hidden], in the model's dtype or in fp32, with the meaning described in `Kernels.rms_norm`."""
        self.weight, self.eps, self._kernels = weight, eps, kernels

    def __call__(self, x: Tensor) -> Tensor:
        return self._kernels.rms_norm(x, self.weight, self.eps)

    def of_sum(self, x: Tensor, residual: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        return self._kernels.add_rms_norm(x, residual, self.weight, self.eps, scale)

    def plus(self, x: Tensor, into: Tensor) -> Tensor:
        """Return the normalized rows of x, plus those of into, rounded after each; may write into both."""
        return self._kernels.add_normed_groups(x, into, self.weight, self.eps, 1.0, 1.0)


class LayerNorm:
    """Implements `Norm` by mean and variance."""

    def __init__(self, weight: Tensor, bias: Tensor, eps: float, kernels: Kernels) -> None:
        """weight, bias: [hidden] fp32."""
        self._weight, self._bias, self._eps, self._kernels = weight, bias, eps, kernels

    def __call__(self, x: Tensor) -> Tensor:
        return self._kernels.layer_norm(x, self._weight, self._bias, self._eps)

    def of_sum(self, x: Tensor, residual: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        return self._kernels.add_layer_norm(x, residual, self._weight, self._bias, self._eps, scale)
