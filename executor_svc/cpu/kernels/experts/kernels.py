"""The CPU's operations of layers of experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from executor_svc.cpu.kernels import activation
from executor_svc.cpu.kernels.codegen.team import KernelLaunch
from executor_svc.cpu.kernels.cpu_kernels import CpuKernels
from executor_svc.cpu.kernels.dense_launches import widened
from executor_svc.cpu.kernels.experts.blocks import BLOCK_WORDS, COUNTS, BlockArgument, each_block, group, most_blocks
from executor_svc.cpu.kernels.experts.choose import choose, scratch_bytes
from executor_svc.cpu.kernels.experts.combine import combine, spread
from executor_svc.cpu.kernels.experts.weights import ExpertWeights, StoredExpert
from executor_svc.cpu.kernels.panel_layout import ROWS_AT_ONCE, Coming
from executor_svc.cpu.kernels.quantized.files.panels import FilePanels
from executor_svc.cpu.kernels.tensors import addresses as _addresses
from executor_svc.cpu.kernels.tensors import dtype_of as _dtype
from executor_svc.device.experts import Router, Routes
from executor_svc.device.kernels import Linear
from executor_svc.device.ranks import WHOLE, Share
from executor_svc.plan.arrays import IntArray

_BY_BLOCK = ("tiles_", "int8_blocks_")
"""What the names of memory begin with that has the rows of a block in tiles."""
_ALL = 1 << 40
"""Of a share: the launch has one item."""


@dataclass(frozen=True, slots=True)
class CpuRoutes:
    """Implements `device.experts.Routes`; also where the routed rows are, in blocks of one expert each."""

    ids: Tensor
    weights: Tensor
    places: Tensor
    """[T, K] int64: the routed row of each choice."""
    sources: Tensor
    """[T * K] int64: the token of each routed row."""
    blocks: Tensor
    counts: Tensor
    share: Share = WHOLE


@dataclass(slots=True)
class _Call:
    """A call of the linears of experts, whose kernels are launched for each block."""

    routes: CpuRoutes
    weights: ExpertWeights
    num_rows: int
    """Of a block at most, and so of what is launched."""
    advances: list[tuple[Tensor, BlockArgument]] = field(default_factory=list)
    """Tensors with the rows of all blocks: how an address in their first row goes on."""
    arguments: list[IntArray | Tensor] = field(default_factory=list)
    """Of the kernels, and the counts; the launches have their addresses."""


class CpuExpertLinear:
    """Implements `device.experts.ExpertLinear`."""

    def __init__(self, linears: Sequence[StoredExpert], kernels: CpuExpertKernels) -> None:
        self._weights = ExpertWeights(linears)
        self._kernels = kernels
        self._arguments: list[IntArray | Tensor] = []
        """Kept for recorded programs."""

    def __call__(self, x: Tensor, routes: Routes) -> Tensor:
        assert isinstance(routes, CpuRoutes)
        y, arguments = self._kernels.each_expert(x, routes, self._weights)
        self._arguments += arguments
        return y


class CpuExpertKernels(CpuKernels):
    """Implements `device.experts.ExpertKernels`."""

    _call: _Call | None = None
    _counted: Mapping[int, int] = MappingProxyType({})
    """Where the items of a launch are counted in memory, by the rows of an item; empty: all rows are there."""

    def as_float32(self, x: Tensor) -> Tensor:
        wide, columns = widened(self.host, x, x.dtype), x.shape[1]
        if wide.shape == x.shape:
            return wide
        return self.copy_columns(wide, 0, self._new("as float32", x.shape, torch.float32), 0, columns)

    def route(
        self,
        logits: Tensor,
        router: Router,
        dtype: torch.dtype,
        bias: Tensor | None = None,
        scales: Tensor | None = None,
        share: Share = WHOLE,
    ) -> CpuRoutes:
        routes = replace(self._new_routes(len(logits), router), share=share)
        kernel = choose(self.code, router, _dtype(logits), "bfloat16" if dtype == torch.bfloat16 else "float32")
        num_bytes = scratch_bytes(router)
        given = (0 if each is None else each.data_ptr() for each in (bias, scales))
        arguments = (logits.data_ptr(), *given, *_addresses(routes.ids, routes.weights))
        arguments += (self._scratch(num_bytes).data_ptr(), num_bytes)
        self._launch(KernelLaunch(kernel, "rows", 1, 1, arguments), len(logits))
        written = _addresses(routes.places, routes.sources, routes.blocks, routes.counts)
        firsts = self._new("firsts of experts", (router.num_experts,), torch.int64)
        kernel = group(self.code, router.num_experts, router.num_chosen, share)
        arguments = (routes.ids.data_ptr(), *written, firsts.data_ptr())
        self._launch(KernelLaunch(kernel, "rows", _ALL, 1, arguments), len(logits))
        return routes

    def _new_routes(self, num_rows: int, router: Router) -> CpuRoutes:
        routed = num_rows * router.num_chosen

        def whole(name: str, *shape: int) -> Tensor:
            return self._new(name, shape, torch.int64)

        return CpuRoutes(
            ids=whole("chosen", num_rows, router.num_chosen),
            weights=self._new("weights of chosen", (num_rows, router.num_chosen), torch.float32),
            places=whole("places of chosen", num_rows, router.num_chosen),
            sources=whole("sources of routed", routed),
            blocks=whole("blocks", most_blocks(routed, router.num_experts), BLOCK_WORDS),
            # Of its own in each layer: a thread that is late reads it when others are layers ahead.
            counts=torch.zeros(COUNTS, dtype=torch.int64),
        )

    def take_routed(self, x: Tensor, routes: Routes, weighed: bool = False) -> Tensor:
        assert isinstance(routes, CpuRoutes)
        if not weighed:
            with self.routed(routes):
                return self.take_rows(x, routes.sources, "routed")
        y = self._new("routed", (len(routes.sources), x.shape[1]), x.dtype)
        kernel = spread(self.code, _dtype(x), x.shape[1], routes.ids.shape[1])
        self._launch(KernelLaunch(kernel, "rows", 1, 1, _addresses(x, routes.places, routes.weights, y)), len(x))
        return y

    @contextmanager
    def routed(self, routes: Routes) -> Iterator[None]:
        assert isinstance(routes, CpuRoutes)
        before, self._times = self._times, routes.ids.shape[1]
        if routes.share.size > 1:
            counts = routes.counts.data_ptr()
            self._counted = {1: counts + 8, activation.ROWS_AT_ONCE: counts + 16}
        try:
            yield
        finally:
            self._times, self._counted = before, {}

    def clipped_swiglu(self, gate_up: Tensor, alpha: float, limit: float) -> Tensor:
        width = gate_up.shape[1] // 2
        y = self._new("activated", (len(gate_up), width), gate_up.dtype)
        kernel = activation.clipped_swiglu(self.code, _dtype(gate_up), width, alpha, limit)
        self._launch(KernelLaunch(kernel, "rows", activation.ROWS_AT_ONCE, 1, _addresses(gate_up, y)), len(gate_up))
        return y

    def expert_linear(self, linears: Sequence[Linear]) -> CpuExpertLinear:
        return CpuExpertLinear([_stored(each) for each in linears], self)

    def combine(
        self, rows: Tensor, routes: Routes, router: Router, beside: Tensor | None = None, gate: Tensor | None = None
    ) -> Tensor:
        assert isinstance(routes, CpuRoutes)
        num_rows, width = len(routes.ids), rows.shape[1]
        partial = routes.share.size > 1
        y = self._new("combined", (num_rows, width), torch.float32 if partial else rows.dtype)
        assert beside is None or beside.dtype == y.dtype
        kinds = not router.weighs_inputs, router.rounded, beside is not None, gate is not None, partial
        kernel = combine(self.code, _dtype(rows), width, router.num_chosen, *kinds)
        more = (0 if each is None else _addresses(each)[0] for each in (beside, gate))
        arguments = (*_addresses(rows, routes.places, routes.weights), *more, y.data_ptr())
        self._launch(KernelLaunch(kernel, "rows", 1, 1, arguments), num_rows)
        return y

    # ------------------------------------------------------------------ kernels for each block

    def each_expert(
        self, x: Tensor, routes: CpuRoutes, weights: ExpertWeights
    ) -> tuple[Tensor, list[IntArray | Tensor]]:
        """Return the rows of experts' linears for routed rows x, and memory that a recording keeps addresses of.

        The first expert's linear is launched over the rows of one block, and every launch becomes one over all blocks.
        """
        first = weights.first
        call = self._call = _Call(routes, weights, min(len(x), ROWS_AT_ONCE))
        call.arguments.append(routes.counts)
        call.advances.append((x, BlockArgument(0, row_bytes=x.nbytes // len(x))))
        try:
            y = self.stored_linear(x[: call.num_rows], first.parts, first.bias, first.out_features, x.dtype)
        finally:
            self._call = None
        return next(made for made, _ in call.advances if made.data_ptr() == y.data_ptr()), call.arguments

    def _new(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        call = self._call
        if call is None:
            return super()._new(name, shape, dtype)
        rows, blocks = len(call.routes.sources), len(call.routes.blocks)
        if name.startswith(_BY_BLOCK):
            made = super()._new(name, (blocks, *shape), dtype)
            call.advances.append((made, BlockArgument(0, block_bytes=made.nbytes // blocks)))
            return made[0]
        assert shape[0] == call.num_rows, name
        # Not the memory of a linear of tokens: of one expert each, what all tokens share has as many rows.
        made = super()._new(f"routed {name}", (rows, *shape[1:]), dtype)
        call.advances.append((made, BlockArgument(0, row_bytes=made.nbytes // rows)))
        return made[: call.num_rows]

    def _launch_product(self, launch: KernelLaunch, count: int, coming: Coming) -> None:
        if self._call is None:
            super()._launch_product(launch, count, coming)
            return
        if self._recording is not None:
            self._recording.announce(None)
        weights = self._call.weights
        launch = replace(launch, arguments=(*launch.arguments, *coming))
        following = BlockArgument(coming.address, by_next_expert=weights.table(coming.address))
        last = [following, BlockArgument(coming.stride)]
        self._each_block(self._call, launch, last, weights.file_at(coming.address))

    def _launch(self, launch: KernelLaunch, count: int) -> None:
        if self._call is None:
            if self._counted:
                launch = replace(launch, counted_at=self._counted[launch.share], joins=False)
            super()._launch(launch, count)
        else:
            self._each_block(self._call, launch, [])

    def _each_block(
        self,
        call: _Call,
        launch: KernelLaunch,
        last: list[BlockArgument],
        in_file: tuple[FilePanels, int] | None = None,
    ) -> None:
        """Launch a kernel for each block; last: its last arguments, if they are made otherwise than the others.

        in_file: as of `ExpertWeights.file_at`, of the weight of a product.
        """
        given = launch.arguments[: len(launch.arguments) - len(last)]
        made, file = [*(self._argument(call, each) for each in given), *last], None
        num_arguments = 1 + len(made)
        if in_file is not None:
            file, scales = in_file
            made.append(BlockArgument(scales, by_expert=call.weights.table(scales) if scales else 0))
        arguments = np.array([each.words for each in made], np.int64)
        call.arguments.append(arguments)
        kernel = each_block(self.code, num_arguments, file)
        how = launch.share, launch.groups, launch.least
        places: tuple[int, ...] = (self.code.address(launch.kernel), arguments.ctypes.data, *how)
        places += (call.routes.blocks.data_ptr(),)
        if file is not None:
            panels = self._workspace.take("panels of files", (self.num_threads, file.panel_bytes), torch.uint8)
            places += (panels.data_ptr(),)
        counted = call.routes.counts.data_ptr()
        over_all = KernelLaunch(kernel, "rows", _ALL, launch.groups, places, counted_at=counted)
        super()._launch(over_all, len(call.routes.sources))

    def _argument(self, call: _Call, value: int) -> BlockArgument:
        """Return what becomes of an argument: of an address in rows, or in the first expert's weight."""
        for tensor, advance in call.advances:
            if 0 <= value - tensor.data_ptr() < (advance.row_bytes or advance.block_bytes):
                return replace(advance, value=value)
        return BlockArgument(value, by_expert=call.weights.table(value))


def _stored(linear: Linear) -> StoredExpert:
    assert isinstance(linear, StoredExpert), f"no linear of an expert: {linear}"
    return linear
