"""Gated feed-forward layer with one fused linear for gate and up."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from executor_svc.device.kernels import Kernels, Linear

Activation = Literal["silu", "gelu_tanh"]


class GatedMlp:
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, gate_up: Linear, down: Linear, activation: Activation, kernels: Kernels) -> None:
        self._gate_up = gate_up
        self._down = down
        self._activate = {"silu": kernels.silu_mul, "gelu_tanh": kernels.gelu_tanh_mul}[activation]

    def __call__(self, x: Tensor) -> Tensor:
        """Return [T, hidden] for x [T, hidden]."""
        return self._down(self._activate(self._gate_up(x)))
