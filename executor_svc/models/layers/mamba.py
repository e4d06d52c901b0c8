"""Mamba-2 (Dao and Gu, 2024, arXiv 2405.21060)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from executor_svc.device.kernels import Linear
from executor_svc.device.ranks import GatedNormRanks
from executor_svc.device.states import GatedNormKind, StateKernels, StateMemory, StatePlan
from executor_svc.plan.state_sizes import MambaState


@dataclass(frozen=True, slots=True)
class MambaTensors:
    """What a layer has beside its linears."""

    conv: Tensor
    """[taps, channels]"""
    conv_bias: Tensor | None
    """[channels]"""
    decay: Tensor
    """[heads] fp32: -exp(A_log); like the following two."""
    dt_bias: Tensor
    d: Tensor
    norm: Tensor | None
    """[heads * head size]; None: there is no norm, only the gate."""


class Mamba:
    """One linear into gate, x, B, C and dt, convolution of x, B and C, the recurrence, the gate, output linear."""

    def __init__(
        self,
        shape: MambaState,
        into: Linear,
        tensors: MambaTensors,
        limits: tuple[float, float],
        eps: float,
        norm: GatedNormKind,
        output: Linear,
        kernels: StateKernels,
        ranks: GatedNormRanks | None = None,
        groups_of_all: int = 0,
    ) -> None:
        """limits: of dt; eps, norm: of the norm of each group's columns.

        ranks, groups_of_all: those that have parts of groups, which are normalized together, and how many there are.
        """
        self._shape, self._into, self._tensors, self._limits = shape, into, tensors, limits
        self._eps, self._norm, self._output, self._kernels = eps, norm, output, kernels
        self._ranks, self._groups_of_all = ranks, groups_of_all
        self._inner = shape.heads * shape.head_size
        self._channels = self._inner + 2 * shape.groups * shape.state_size

    def __call__(self, x: Tensor, memory: StateMemory, plan: StatePlan) -> Tensor:
        """Return [T, hidden] for x [T, hidden]; memory: the layer's, of the states of the step's sequences."""
        kernels, shape, tensors, inner = self._kernels, self._shape, self._tensors, self._inner
        found = self._into(x)
        xbc = kernels.causal_conv(found, inner, tensors.conv, tensors.conv_bias, True, memory, plan)
        mixed = kernels.mamba(
            xbc,
            found[:, inner + self._channels :],
            tensors.decay,
            tensors.dt_bias,
            tensors.d,
            self._limits,
            shape,
            memory,
            plan,
        )
        return self._output(self._gated(mixed, found))

    def _gated(self, mixed: Tensor, found: Tensor) -> Tensor:
        kernels, inner, norm = self._kernels, self._inner, self._tensors.norm
        if norm is not None and self._ranks is not None:
            return self._ranks.norm_groups(mixed, found, norm, self._eps, self._groups_of_all, self._norm)
        if norm is not None:
            return kernels.gated_norm(mixed, found, 0, norm, self._eps, inner // self._shape.groups, self._norm)
        both = kernels.new_rows("gate of mamba", len(mixed), 2 * inner, mixed.dtype)
        kernels.copy_columns(found, 0, both, 0, inner)
        return kernels.silu_mul(kernels.copy_columns(mixed, 0, both, inner, inner))
