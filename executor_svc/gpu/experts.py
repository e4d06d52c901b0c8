"""The GPU's operations of layers of experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from executor_svc.device.experts import Router, Routes
from executor_svc.device.kernels import Linear
from executor_svc.device.ranks import WHOLE, Share
from executor_svc.gpu.expert_linear import StackableLinear, StackedExperts
from executor_svc.gpu.kernels import activation
from executor_svc.gpu.kernels.exact.attention_probe import ExactAttention
from executor_svc.gpu.kernels.exact.tiles import EXPERT_ROWS
from executor_svc.gpu.kernels.experts.blocks import (
    BLOCK_WORDS,
    RowBlocks,
    block_rows,
    most_blocks,
    tokens_of_blocks,
)
from executor_svc.gpu.kernels.experts.choose import choose, rows_at_once, scratch_size
from executor_svc.gpu.kernels.experts.combine import combine, spread
from executor_svc.gpu.kernels.gpu_kernels import GpuKernels, Operation


@dataclass(slots=True)
class GpuRoutes:
    """Implements `device.experts.Routes`; also where the routed rows are, in blocks of one expert each."""

    ids: Tensor
    weights: Tensor
    places: Tensor
    """[T, K] int64: the routed row of each choice."""
    sources: Tensor
    """[T * K] int64: the token of each routed row."""
    blocks: Tensor
    num_blocks: Tensor
    num_experts: int
    share: Share = WHOLE
    fixed_rows: int | None = None
    """Of a block, in exact mode; else the step's sizes decide."""

    @property
    def num_chosen(self) -> int:
        """K"""
        return self.ids.shape[1]

    def blocks_of(self, num_tokens: int) -> RowBlocks:
        """Return the blocks of a step of so many tokens."""
        sizes = num_tokens, self.num_experts, self.num_chosen
        rows = self.fixed_rows or block_rows(*sizes)
        return RowBlocks(self.blocks, self.num_blocks, most_blocks(*sizes, rows), rows)


class GpuExpertLinear:
    """Implements `device.experts.ExpertLinear`."""

    def __init__(self, experts: StackedExperts, kernels: GpuExpertKernels) -> None:
        self._experts = experts
        self._kernels = kernels

    def __call__(self, x: Tensor, routes: Routes) -> Tensor:
        return self._kernels.multiply_routed(self._experts, x, routes)


class GpuExpertKernels(GpuKernels):
    """Implements `device.experts.ExpertKernels`."""

    def __init__(self, device: torch.device, arch: int, num_sms: int, exact: ExactAttention | None = None) -> None:
        """As of `GpuKernels`."""
        super().__init__(device, arch, num_sms, exact)
        self._times = 1
        """Rows of what is run for each row of the step."""
        self.tokens_of_tiles: set[int] = set()
        """The most tokens of steps that choose experts, and multiply with them, by kernels of their own."""

    def as_float32(self, x: Tensor) -> Tensor:
        y = self.new("in float32", tuple(x.shape), torch.float32)
        return self.run(y, lambda n: _nothing(y[:n].copy_(x[:n])))

    def route(
        self,
        logits: Tensor,
        router: Router,
        dtype: torch.dtype,
        bias: Tensor | None = None,
        scales: Tensor | None = None,
        share: Share = WHOLE,
    ) -> GpuRoutes:
        assert share.size == 1, "experts are not divided among GPUs"
        routes, num_chosen = self._new_routes(len(logits), router), router.num_chosen
        size = scratch_size(len(logits), router.num_experts)
        scratch = self.new("counts of chosen", (size,), torch.int32)
        if self.exact is None:
            self.tokens_of_tiles.update(tokens_of_blocks(router.num_experts, num_chosen))
        self.tokens_of_tiles.add(rows_at_once(router.num_experts))

        def run(n: int) -> None:
            written = routes.ids[:n], routes.weights[:n], routes.places[:n], routes.sources[: n * num_chosen]
            choose(logits[:n], router, dtype, bias, scales, scratch, *written, routes.blocks_of(n))

        self.run(routes.ids, run)
        return routes

    def _new_routes(self, num_rows: int, router: Router) -> GpuRoutes:
        chosen, routed = (num_rows, router.num_chosen), num_rows * router.num_chosen
        return GpuRoutes(
            ids=self.new("chosen", chosen, torch.int64),
            weights=self.new("weights of chosen", chosen, torch.float32),
            places=self.new("places of chosen", chosen, torch.int64),
            sources=self.new("sources of routed", (routed,), torch.int64),
            blocks=self.new("blocks", (routed, BLOCK_WORDS), torch.int32),
            num_blocks=self.new("number of blocks", (1,), torch.int32),
            num_experts=router.num_experts,
            fixed_rows=None if self.exact is None else EXPERT_ROWS,
        )

    def take_routed(self, x: Tensor, routes: Routes, weighed: bool = False) -> Tensor:
        assert isinstance(routes, GpuRoutes)
        if not weighed:
            with self.routed(routes):
                return self.take_rows(x, routes.sources, "routed")
        places, weights, num_chosen = routes.places, routes.weights, routes.num_chosen
        y = self.new("routed", (len(routes.sources), x.shape[1]), x.dtype)
        self.run(x, lambda n: spread(x[:n], places[:n], weights[:n], y[: n * num_chosen]))
        return y

    @contextmanager
    def routed(self, routes: Routes) -> Iterator[None]:
        before, self._times = self._times, routes.ids.shape[1]
        try:
            yield
        finally:
            self._times = before

    def clipped_swiglu(self, gate_up: Tensor, alpha: float, limit: float) -> Tensor:
        y = self.new("activated", (len(gate_up), gate_up.shape[1] // 2), gate_up.dtype)
        return self.run(y, lambda n: activation.clipped_swiglu(gate_up[:n], alpha, limit, y[:n]))

    def expert_linear(self, linears: Sequence[Linear]) -> GpuExpertLinear:
        return GpuExpertLinear(StackedExperts([_prepared(each) for each in linears]), self)

    def multiply_routed(self, experts: StackedExperts, x: Tensor, routes: Routes) -> Tensor:
        """As of `ExpertLinear`: return the rows of x [T * K, in_features] times the weights of their experts."""
        assert isinstance(routes, GpuRoutes)
        rows, num_chosen = len(x), routes.num_chosen
        y = self.new(f"experts {experts.out_features}", (rows, experts.out_features), x.dtype)
        narrow = scales = ordered = x
        if experts.has_orders:
            ordered = self.new("ordered rows", tuple(x.shape), x.dtype)
        if experts.narrow_rows:
            narrow = self.new("narrow rows", (rows, experts.in_features), torch.float8_e4m3fn)
            scales = self.new("scales of narrow rows", (rows,), torch.float32)

        def multiply(n: int) -> None:
            blocks = routes.blocks_of(n // num_chosen)
            experts.multiply(x[:n], y[:n], blocks, narrow[:n], scales[:n], ordered[:n])

        with self.routed(routes):
            return self.run(y, multiply)

    def combine(
        self, rows: Tensor, routes: Routes, router: Router, beside: Tensor | None = None, gate: Tensor | None = None
    ) -> Tensor:
        assert isinstance(routes, GpuRoutes)
        tokens, num_chosen = routes.places.shape
        y = self.new("combined", (tokens, rows.shape[1]), rows.dtype)

        def run(n: int) -> None:
            more, opened = (None if each is None else each[:n] for each in (beside, gate))
            places, weights = routes.places[:n], routes.weights[:n]
            weighed = not router.weighs_inputs
            combine(rows[: n * num_chosen], places, weights, weighed, router.rounded, more, opened, y[:n])

        return self.run(y, run)

    def run(self, result: Tensor, operation: Operation) -> Tensor:
        """As of `GpuKernels`; inside `routed`, on so many times the rows of the step."""
        times = self._times
        return super().run(result, operation if self._recording is None else lambda n: operation(n * times))


def _prepared(linear: Linear) -> StackableLinear:
    assert isinstance(linear, StackableLinear), f"no linear of an expert: {linear}"
    return linear


def _nothing(_: Tensor) -> None:
    """Ignore the result of an operation of PyTorch."""
