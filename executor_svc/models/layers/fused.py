"""What a device may compute in fewer operations than a layer has: a plain layer's parts, and who runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from executor_svc.device.kernels import AttentionPlan, AttentionShape, GatedActivation, HeadNorms, Linear, Rope


@dataclass(frozen=True, slots=True)
class FusableLayer:
    """A layer of attention and a gated feed-forward; each reads an RMS norm of the residual and is added to it."""

    shape: AttentionShape
    attention_norm: Tensor
    """As `Kernels.rms_norm` takes it."""
    qkv: Linear
    head_norms: HeadNorms | None
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    activation: GatedActivation
    down: Linear
    eps: float
    residual_scale: float
    """What the results of attention and of feed-forward are multiplied with before they are added."""


class FusedLayers(Protocol):
    """Computes the layers of a model in fewer operations, in steps of few rows."""

    def begin(self, residual: Tensor) -> None:
        """Prepare the first layer's rows [T, hidden]."""
        ...

    def run(
        self, index: int, residual: Tensor, rope: Rope, kv_layer: Tensor, plan: AttentionPlan, table: int = 0
    ) -> None:
        """Add a layer's results to the residual [T, hidden], in its memory; arguments as of `Attention`."""
        ...

    def either(
        self,
        residual: Tensor,
        kv_layers: Sequence[Tensor],
        plans: Sequence[AttentionPlan],
        fused: Callable[[], None],
        apart: Callable[[], Tensor],
    ) -> Tensor:
        """Run or record one of two ways to compute all layers, by the step's sizes; return the residual.

        Both leave their result in the memory of the residual.
        """
        ...


@runtime_checkable
class FusingKernels(Protocol):
    """The operations of a device that may fuse layers."""

    def fuse(self, layers: Sequence[FusableLayer]) -> FusedLayers | None:
        """Return what computes these layers, all of a model; None: this device does not compute such layers so."""
        ...
