"""The gated delta rule (Yang et al., 2024, arXiv 2412.06464), also Kimi's, with a decay for each key index (2025)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from executor_svc.device.kernels import Linear
from executor_svc.device.states import GatedNormKind, StateKernels, StateMemory, StatePlan
from executor_svc.plan.state_sizes import DeltaState


@dataclass(frozen=True, slots=True)
class LowRankGates:
    """Linears out of low ranks, to the decay and to the output's gate."""

    decay: Linear
    gate: Linear


@dataclass(frozen=True, slots=True)
class DeltaTensors:
    """What a layer has beside its linears."""

    conv: Tensor
    """[taps, channels]"""
    decay: Tensor
    """[value heads] fp32: -exp(A_log)."""
    dt_bias: Tensor
    """[value heads] fp32, or [value heads * key size] with a decay for each key index."""
    norm: Tensor
    """[value size]"""


class GatedDelta:
    """One linear into all, convolution of queries, keys and values, the recurrence, a gated norm, output linear."""

    def __init__(
        self,
        shape: DeltaState,
        into: Linear,
        low_rank: LowRankGates | None,
        tensors: DeltaTensors,
        eps: float,
        output: Linear,
        kernels: StateKernels,
    ) -> None:
        """Take the parts of a layer.

        into: to queries, keys and values, then the output's gate, beta and decay; with low_rank beta, and the ranks of
        decay and gate. eps: of the norm.
        """
        self._shape, self._into, self._low_rank, self._tensors = shape, into, low_rank, tensors
        self._eps, self._output, self._kernels = eps, output, kernels
        self._values = shape.value_heads * shape.value_size
        self._channels = 2 * shape.key_heads * shape.key_size + self._values
        self._kind: GatedNormKind = "norm then silu" if low_rank is None else "norm then sigmoid"

    def __call__(self, x: Tensor, memory: StateMemory, plan: StatePlan) -> Tensor:
        """Return [T, hidden] for x [T, hidden]; memory: the layer's, of the states of the step's sequences."""
        kernels, shape, tensors, low_rank = self._kernels, self._shape, self._tensors, self._low_rank
        found = self._into(x)
        qkv = kernels.causal_conv(found, 0, tensors.conv, None, True, memory, plan)
        heads, first = shape.value_heads, self._channels + (self._values if low_rank is None else 0)
        beta, last = found[:, first : first + heads], first + heads
        gates = found[:, last:] if low_rank is None else self._of_rank(low_rank.decay, found, last)
        mixed = kernels.gated_delta(qkv, gates, beta, tensors.decay, tensors.dt_bias, shape, memory, plan)
        gate, column = found, self._channels
        if low_rank is not None:  # not before: both linears have one memory when they are recorded
            gate, column = self._of_rank(low_rank.gate, found, last + low_rank.decay.in_features), 0
        return self._output(
            kernels.gated_norm(mixed, gate, column, tensors.norm, self._eps, shape.value_size, self._kind)
        )

    def _of_rank(self, linear: Linear, found: Tensor, column: int) -> Tensor:
        rank = self._kernels.new_rows("rank of gates", len(found), linear.in_features, found.dtype)
        return linear(self._kernels.copy_columns(found, column, rank, 0, linear.in_features))
