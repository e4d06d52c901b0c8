"""Gated feed-forward layer with one fused linear for gate and up."""

from __future__ import annotations

from torch import Tensor

from executor_svc.kernels.interface import Kernels, Linear


class GatedMlp:
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, gate_up: Linear, down: Linear, kernels: Kernels) -> None:
        self._gate_up = gate_up
        self._down = down
        self._kernels = kernels

    def __call__(self, x: Tensor) -> Tensor:
        """Return [T, hidden] for x [T, hidden]."""
        return self._down(self._kernels.silu_mul(self._gate_up(x)))
