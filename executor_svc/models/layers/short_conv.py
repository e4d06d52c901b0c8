"""A gated short convolution (LFM2, Liquid AI, 2025)."""

from __future__ import annotations

from torch import Tensor

from executor_svc.device.kernels import Linear
from executor_svc.device.states import StateKernels, StateMemory, StatePlan


class ShortConv:
    """One linear into B, C and x, the convolution of B * x, times C, and a linear out of it."""

    def __init__(
        self, into: Linear, weight: Tensor, bias: Tensor | None, output: Linear, kernels: StateKernels
    ) -> None:
        """weight: of the convolution, [taps, channels]; bias: [channels]."""
        self._into, self._weight, self._bias, self._output, self._kernels = into, weight, bias, output, kernels

    def __call__(self, x: Tensor, memory: StateMemory, plan: StatePlan) -> Tensor:
        """Return [T, hidden] for x [T, hidden]; memory: the layer's, of the states of the step's sequences."""
        kernels, size = self._kernels, self._weight.shape[1]
        found = self._into(x)
        inner = kernels.multiply(found[:, :size], found, 2 * size)
        convolved = kernels.causal_conv(inner, 0, self._weight, self._bias, False, memory, plan)
        return self._output(kernels.multiply(convolved, found, size))
