"""A feed-forward layer of experts, of which each token chooses some, perhaps beside one that all tokens share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from executor_svc.device.experts import ExpertKernels, ExpertLinear, Router, Routes
from executor_svc.device.kernels import Linear
from executor_svc.device.ranks import WHOLE, RankKernels
from executor_svc.models.layers.mlp import Mlp
from executor_svc.models.layers.norm import Norm, RmsNorm


@dataclass(frozen=True, slots=True)
class ClippedSwiglu:
    """The activation of gpt-oss: (up + 1) * gate * sigmoid(alpha * gate), with gate and up clipped by `limit`."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class ExpertChoice:
    """How rows choose experts: the linear of their logits, and what follows."""

    linear: Linear
    router: Router
    in_float32: bool
    """Whether rows become float32 for the linear, whose weight is."""
    bias: Tensor | None = None
    """As of `ExpertKernels.route`, like `scales`."""
    scales: Tensor | None = None


class Experts:
    """Implements `layers.mlp.Mlp`."""

    def __init__(
        self,
        choice: ExpertChoice,
        gate_up: ExpertLinear,
        down: ExpertLinear,
        activate: Callable[[Tensor], Tensor],
        shared: Mlp | None,
        shared_gate: Linear | None,
        kernels: ExpertKernels,
        ranks: RankKernels | None = None,
    ) -> None:
        """shared: what all tokens have beside their experts; shared_gate: [1, hidden], its sigmoid multiplies that.

        ranks: those among which the experts are divided; of what is shared, results are then parts of a sum.
        """
        self._choice = choice
        self._gate_up, self._down = gate_up, down
        self._activate = activate
        self._shared, self._shared_gate = shared, shared_gate
        self._kernels, self._ranks = kernels, ranks
        self._share = WHOLE if ranks is None else ranks.share

    def __call__(self, x: Tensor) -> Tensor:
        return self.compute(x, self.choose(x))

    def choose(self, x: Tensor) -> Routes:
        """Return what the rows of x choose."""
        kernels, choice = self._kernels, self._choice
        read = kernels.as_float32(x) if choice.in_float32 else x
        logits = choice.linear(read, torch.float32 if choice.in_float32 else None)
        return kernels.route(logits, choice.router, x.dtype, choice.bias, choice.scales, self._share)

    def compute(self, x: Tensor, routes: Routes) -> Tensor:
        """Return what the chosen make of the rows of x."""
        kernels, choice = self._kernels, self._choice
        gate_up = self._gate_up(kernels.take_routed(x, routes, choice.router.weighs_inputs), routes)
        with kernels.routed(routes):
            activated = self._activate(gate_up)
        rows = self._down(activated, routes)
        shared = None if self._shared is None else self._shared(x)
        gate = None if self._shared_gate is None else self._shared_gate(x)
        summed = kernels.combine(rows, routes, choice.router, shared, gate)
        return summed if self._ranks is None else self._ranks.sum_partials(summed, None, x.dtype, "sum of experts")


class ExpertsBeside:
    """Experts beside an MLP, which read and choose by norms of their own of what the MLP's norm reads (Gemma 4)."""

    def __init__(
        self, experts: Experts, chooses_by: Norm, before: Norm, after: RmsNorm, after_mlp: Norm, kernels: ExpertKernels
    ) -> None:
        self._experts, self._kernels = experts, kernels
        self._chooses_by, self._before, self._after, self._after_mlp = chooses_by, before, after, after_mlp

    def __call__(self, of_mlp: Tensor, residual: Tensor) -> Tensor:
        """Return the norm of what the MLP returned plus that of what experts return; may write into of_mlp."""
        # A norm's result is valid until the next one: each is used up before.
        routes = self._experts.choose(self._chooses_by(residual))
        found = self._experts.compute(self._before(residual), routes)
        return self._after.plus(found, self._after_mlp(of_mlp))
