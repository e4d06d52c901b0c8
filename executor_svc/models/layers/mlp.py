"""Feed-forward layers: gated, with one fused linear for gate and up, or plain."""

from __future__ import annotations

from typing import Protocol, get_args

from torch import Tensor

from executor_svc.device.kernels import GatedActivation, GatedLinear, Kernels, Linear, PlainActivation

Activation = GatedActivation | PlainActivation
GATED: tuple[GatedActivation, ...] = get_args(GatedActivation)
PLAIN: tuple[PlainActivation, ...] = get_args(PlainActivation)


class Mlp(Protocol):
    """A feed-forward layer."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return [T, hidden] for x [T, hidden]."""
        ...


class GatedMlp:
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, gate_up: Linear, down: Linear, activation: GatedActivation, kernels: Kernels) -> None:
        self.gate_up = gate_up
        self.down = down
        self.activation = activation
        self._activate = {"silu": kernels.silu_mul, "gelu_tanh": kernels.gelu_tanh_mul}[activation]

    def __call__(self, x: Tensor) -> Tensor:
        gate_up, down = self.gate_up(x), self.down
        if isinstance(down, GatedLinear):
            return down.of_gated(gate_up, self.activation)
        return down(self._activate(gate_up))


class PlainMlp:
    """down(activation(up(x)))."""

    def __init__(
        self, up: Linear, down: Linear, activation: PlainActivation, scalars: Tensor | None, kernels: Kernels
    ) -> None:
        """scalars: as in `Kernels.activate`."""
        self._up = up
        self._down = down
        self._activation: PlainActivation = activation
        self._scalars = scalars
        self._kernels = kernels

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(self._kernels.activate(self._up(x), self._activation, self._scalars))
