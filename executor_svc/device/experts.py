"""Mixtures of experts: how rows choose, and the operations of a device that compute what they chose.

Sizes: T tokens of the step, E experts, K experts that each token chooses, T * K routed rows: the rows of tokens once
for each expert that they chose, those of one expert side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from executor_svc.device.kernels import Kernels, Linear
from executor_svc.device.ranks import WHOLE, Share

Scores = Literal["softmax", "sigmoid", "logits"]
Weighing = Literal["scores", "shares", "softmax", "sigmoid", "sparsemixer"]


@dataclass(frozen=True, slots=True)
class Router:
    """How a row chooses its experts from one logit of each, in the order of the fields.

    Those with the highest scores are chosen, in descending order, and among equal ones that of the lower index.
    """

    num_experts: int
    num_chosen: int
    scores: Scores = "softmax"
    """Of a row's logits, in fp32; of the sigmoid each alone."""
    rounded_scores: bool = False
    """Whether scores are rounded to the model's dtype."""
    groups: int = 1
    """Experts are chosen within the best of so many groups of neighbours."""
    kept_groups: int = 1
    two_best: bool = True
    """A group is as good as the sum of its two best, or as its best."""
    weighing: Weighing = "shares"
    """The weights of the chosen: their scores; these divided by their sum; the softmax of their logits; the sigmoid of
    each; of each its share among those near it that were not chosen before it (SparseMixer: Liu et al., 2023)."""
    jitter: float = 0.0
    """Near, for sparsemixer: below the best by at most twice this share of the larger magnitude of the two."""
    epsilon: float = 0.0
    """Added to the sum."""
    least_sum: float = 0.0
    """What the sum is at least."""
    factor: float = 1.0
    rounded: bool = True
    """Whether weights are rounded to the model's dtype, and so are the products of expert and weight."""
    weighs_inputs: bool = False
    """Whether weights multiply what experts read, which is rounded, and not what they return (Llama 4)."""


class Routes(Protocol):
    """What the rows of a step chose; specific to the device."""

    @property
    def ids(self) -> Tensor:
        """[T, K] int64, in descending order of scores."""
        ...

    @property
    def weights(self) -> Tensor:
        """[T, K] float32."""
        ...

    @property
    def share(self) -> Share:
        """Of a rank that has the experts `own_experts`: the rows that chose them are the first of the routed ones here,
        and the others have no meaning."""
        ...


def own_experts(num_experts: int, share: Share) -> range:
    """Return the experts of a rank: one of every `size` neighbours, so that it has its part of each group of them."""
    return range(share.rank, num_experts, share.size)


class ExpertLinear(Protocol):
    """The linears of all experts in one place of a layer, or of a rank's own."""

    def __call__(self, x: Tensor, routes: Routes) -> Tensor:
        """Return for routed rows x [T * K, in_features] the rows of their experts' linears [T * K, out_features].

        Bits are those of the expert's linear alone, whatever other rows it has.
        """
        ...


@runtime_checkable
class ExpertKernels(Kernels, Protocol):
    """The operations of layers of experts. `device.reference` defines each."""

    def as_float32(self, x: Tensor) -> Tensor:
        """Return x [T, hidden] as float32."""
        ...

    def route(
        self,
        logits: Tensor,
        router: Router,
        dtype: torch.dtype,
        bias: Tensor | None = None,
        scales: Tensor | None = None,
        share: Share = WHOLE,
    ) -> Routes:
        """Choose experts by logits [T, E] in the model's dtype, which is `dtype`, or in float32.

        bias: [E] float32, added to scores for the choice alone; scales: [E] float32, factors of the chosen's weights.
        """
        ...

    def take_routed(self, x: Tensor, routes: Routes, weighed: bool = False) -> Tensor:
        """Return the routed rows [T * K, hidden] of x [T, hidden]; weighed: times their weights, rounded."""
        ...

    def routed(self, routes: Routes) -> AbstractContextManager[None]:
        """Inside, operations are on routed rows, such as activations."""
        ...

    def clipped_swiglu(self, gate_up: Tensor, alpha: float, limit: float) -> Tensor:
        """Return (up + 1) * gate * sigmoid(alpha * gate) of gate_up [T * K, 2 * intermediate].

        gate is at most limit, up between -limit and limit; rounded after each operation.
        """
        ...

    def expert_linear(self, linears: Sequence[Linear]) -> ExpertLinear:
        """Return the linears of experts 0 to E - 1, or of a rank's own, of one shape and one format each place."""
        ...

    def combine(
        self, rows: Tensor, routes: Routes, router: Router, beside: Tensor | None = None, gate: Tensor | None = None
    ) -> Tensor:
        """Return the sum [T, hidden] of each token's routed rows times their weights, unless these weigh inputs.

        It is a sum in fp32 in the order of choice, rounded once. beside: [T, hidden], added to that, and rounded; gate:
        [T, 1], whose sigmoid multiplies it first, both rounded.

        Of a share of several ranks it is the part of its own experts, in float32, and so is `beside`: of all that the
        ranks' sum alone is rounded.
        """
        ...
