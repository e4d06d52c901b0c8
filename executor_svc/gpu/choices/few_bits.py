"""How weights in few bits are multiplied, by the number of rows: as on an H100, or as the start has measured.

Programs with all rows have run on no GPU, so nothing takes them unless `--few-bits-products measured` has the start
compare every way with a reference, for each shape, and time those that agree.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from executor_svc.gpu.choices.ways import KernelCheck, KernelChecks, Tolerance, Way
from executor_svc.gpu.kernels.experts.blocks import BLOCK_ROWS, RowBlocks
from executor_svc.gpu.kernels.few_bits import all_rows
from executor_svc.gpu.kernels.few_bits import linear as tiles
from executor_svc.gpu.kernels.few_bits.all_rows_of_experts import experts_all_rows
from executor_svc.gpu.kernels.few_bits.all_rows_tiles import MOST_ROWS, TILE_ROWS
from executor_svc.gpu.kernels.few_bits.layout import FewBitsWeight
from executor_svc.gpu.kernels.few_bits.widening import rows_at_once, widen
from executor_svc.gpu.linear import PlainLinear, SumsWorkspace

_log = logging.getLogger(__name__)
FewBitsWay = Literal["tiles", "widened", "all rows"]
"""Tiles of rows of x; the weight widened to 16 bits, then cuBLAS; programs that have all rows of x."""
_MEASURED = TILE_ROWS
"""Numbers of rows at which ways are compared, each for those from the one before it on."""
_EXPECTED_ROWS = 4096
"""Rows of a weight that a reference widens at a time."""
_COMPARED = 8192
"""Results of a row that are compared at most: of a head with its whole vocabulary too many would go to the host."""
_ALL_ROWS_MAJOR = 9
"""Compute capability of GPUs whose tensor cores `all_rows` is written for."""
_CODES_ALONE = 16
"""Up to so many rows codes are multiplied as they are: there is no other way."""
_BLOCKS = 16
"""Of experts that are measured: each has a full one."""
_Write = Callable[[FewBitsWay, Tensor, Tensor], None]
"""Writes the product of the second argument, rows, to the third."""


@dataclass(slots=True)
class FewBitsWays:
    """How weights of one shape are multiplied."""

    counters: Tensor | None = None
    """Zeros for `linear_all_rows`, if it may be chosen."""
    chosen: dict[int, FewBitsWay] = field(default_factory=dict)
    """What the start has found, by the most rows that it is for, ascending."""
    of_experts: Callable[[FewBitsWeight], FewBitsWays] | None = None
    """Makes the ways of several such weights together, those of experts, if the start measures."""

    def of(self, rows: int) -> FewBitsWay:
        """Return the way for so many rows."""
        if rows > _CODES_ALONE:
            for most, way in self.chosen.items():
                if rows <= most:
                    return way
        return "tiles" if rows <= tiles.MOST_ROWS else "widened"

    def text(self) -> str:
        """Return what was found, as "32: tiles, 64: all rows"."""
        return ", ".join(f"{most}: {way}" for most, way in self.chosen.items())


@dataclass(frozen=True, slots=True)
class FewBitsProduct:
    """A weight, what is added to its products, and the memory of the stream that they share."""

    weight: FewBitsWeight
    bias: Tensor | None
    """In the model's dtype."""
    added: Tensor
    """The bias, or zeros, in float32."""
    workspace: SumsWorkspace
    num_sms: int
    counters: Tensor | None

    def write(self, way: FewBitsWay, x: Tensor, out: Tensor) -> None:
        """Write x @ weight.T + bias to out, in its dtype."""
        memory = self.workspace.memory
        if way == "tiles":
            tiles.linear_few_bits(x, self.weight, self.added, out, memory, self.num_sms)
        elif way == "all rows":
            assert memory is not None
            assert self.counters is not None, "only the start chooses this way, with counters"
            all_rows.linear_all_rows(x, self.weight, self.added, out, memory, self.counters, self.num_sms)
        else:
            self._write_widened(x, out)

    def _write_widened(self, x: Tensor, out: Tensor) -> None:
        assert self.workspace.memory is not None, "linears in few bits have reserved it"
        memory, weight, count = self.workspace.memory.view(x.dtype), self.weight, rows_at_once(self.weight)
        for first in range(0, weight.rows, count):
            last = min(first + count, weight.rows)
            wide = memory[: (last - first) * weight.columns].view(last - first, weight.columns)
            widen(weight, first, wide)
            bias = None if self.bias is None else self.bias[first:last]
            PlainLinear(wide, bias)(x, out[:, first:last], out.dtype)


def write_of_experts(
    way: FewBitsWay, x: Tensor, weight: FewBitsWeight, added: Tensor, out: Tensor, blocks: RowBlocks
) -> None:
    """Write x @ weight[expert].T + added[expert] to out, in its dtype, for the rows of each block; never widened."""
    multiply = experts_all_rows if way == "all rows" else tiles.few_bits_of_experts
    multiply(x, weight, added, out, blocks)


@dataclass(frozen=True, slots=True)
class _Shape:
    """Weights of one shape, one of which is measured if it is still there."""

    name: str
    weight: weakref.ref[FewBitsWeight]
    dtype: torch.dtype
    """Of rows."""
    ways: FewBitsWays


class FewBitsChoices:
    """The ways of all weights in few bits of a device, of which those of one shape have the same."""

    def __init__(self, workspace: SumsWorkspace, arch: int, num_sms: int) -> None:
        """arch: compute capability, such as 90."""
        self._workspace, self._num_sms = workspace, num_sms
        self._ways: tuple[FewBitsWay, ...] = tuple(
            way for way in get_args(FewBitsWay) if way != "all rows" or arch // 10 == _ALL_ROWS_MAJOR
        )
        self._counters = torch.zeros(0, dtype=torch.int32, device=workspace.device)
        self._shapes: dict[Hashable, _Shape] = {}

    def ways_of(self, name: str, weight: FewBitsWeight, dtype: torch.dtype) -> FewBitsWays:
        """Return the ways of a weight with rows of this dtype, and reserve what any of them needs."""
        key = weight.layout, weight.rows, weight.num_experts, dtype
        known = self._shapes.get(key)
        if known is None or known.weight() is None:
            if weight.num_experts is None:
                self._workspace.reserve(all_rows.all_rows_sums_size(weight, self._num_sms))
            ways = self._new_ways(name, weight, dtype) if known is None else known.ways
            self._shapes[key] = known = _Shape(name, weakref.ref(weight), dtype, ways)
        return known.ways

    def _new_ways(self, name: str, weight: FewBitsWeight, dtype: torch.dtype) -> FewBitsWays:
        ways = FewBitsWays(self._zeros(all_rows.all_rows_counters(weight)))
        if weight.num_experts is None:
            ways.of_experts = lambda together: self.ways_of(f"experts like {name}", together, dtype)
        return ways

    def _zeros(self, count: int) -> Tensor:
        """Return counters that all linears of a stream share: they are zeros between two launches."""
        if len(self._counters) < count:
            self._counters = torch.zeros(count, dtype=torch.int32, device=self._workspace.device)
        return self._counters

    def ways_for(self, rows: int, of_experts: bool = False) -> list[FewBitsWay]:
        """Return the ways in which this GPU can multiply so many rows, or blocks of them with experts."""
        most = {"tiles": tiles.MOST_ROWS, "all rows": MOST_ROWS} | ({"widened": 0} if of_experts else {})
        known = self._ways if rows > _CODES_ALONE else ("tiles", "widened")
        return [way for way in known if rows <= most.get(way, rows)]

    def choose(self, checks: KernelChecks, max_rows: int) -> tuple[str, ...]:
        """Measure the shapes that were not, for up to max_rows rows; return what was found, a line for each.

        Raises KernelError, naming the linear, if no way is right.
        """
        for shape in self._shapes.values():
            weight = shape.weight()
            if weight is None or shape.ways.chosen or max_rows <= _CODES_ALONE:
                continue
            for above, most in zip((_CODES_ALONE, *_MEASURED), _MEASURED, strict=False):
                if above < max_rows and (weight.num_experts is None or most in BLOCK_ROWS):
                    rows = min(most, max_rows) if weight.num_experts is None else most
                    shape.ways.chosen[most] = self._chosen(checks, shape, weight, rows)
            _log.info("products in few bits: %s: rows up to %s", _described(weight), shape.ways.text())
        known = [(shape.weight(), shape.ways) for shape in self._shapes.values() if shape.ways.chosen]
        found = (f"{_described(weight)}: {ways.text()}" for weight, ways in known if weight is not None)
        return tuple(sorted(found))

    def _chosen(self, checks: KernelChecks, shape: _Shape, weight: FewBitsWeight, rows: int) -> FewBitsWay:
        device, count = self._workspace.device, min(weight.num_experts or 1, _BLOCKS)
        generator = torch.Generator(device).manual_seed(rows)
        x = torch.randn(count * rows, weight.columns, generator=generator, device=device).to(shape.dtype)
        out = torch.empty(len(x), weight.rows, dtype=shape.dtype, device=device)
        every = -(-weight.rows // _COMPARED)
        write = self._writer(shape, weight, count, rows)

        def run(way: FewBitsWay) -> Callable[[], Tensor]:
            def written() -> Tensor:
                write(way, x, out)
                return out[:, ::every]

            return written

        def expected() -> Tensor:
            if weight.num_experts is None:
                return _expected(x, weight)[:, ::every]
            return torch.cat([_expected(some, weight.of_expert(index)) for index, some in enumerate(x.split(rows))])[
                :, ::every
            ]

        ways = self.ways_for(rows, weight.num_experts is not None)
        name = f"{shape.name} {_described(weight)} {shape.dtype}, {rows} rows"
        tolerance = Tolerance.of(shape.dtype, shape.dtype)
        found = checks.choose(KernelCheck(name, [Way(way, run(way)) for way in ways], expected, tolerance, timed=True))
        return next(way for way in ways if way == found)

    def _writer(self, shape: _Shape, weight: FewBitsWeight, count: int, rows: int) -> _Write:
        """Return what multiplies: so many rows, or as many of each of the first experts."""
        device = self._workspace.device
        if weight.num_experts is None:
            added = torch.zeros(weight.rows, device=device)
            return FewBitsProduct(weight, None, added, self._workspace, self._num_sms, shape.ways.counters).write
        of_each = torch.zeros(weight.num_experts, weight.rows, device=device)
        table = torch.tensor([[index, index * rows, rows, 0] for index in range(count)], dtype=torch.int32)
        number = torch.tensor([count], dtype=torch.int32, device=device)
        blocks = RowBlocks(table.to(device), number, count, rows)
        return lambda way, x, out: write_of_experts(way, x, weight, of_each, out, blocks)


def _described(weight: FewBitsWeight) -> str:
    experts = "" if weight.num_experts is None else f" of {weight.num_experts} experts"
    return f"{weight.layout.kind.name} {weight.columns} to {weight.rows}{experts}"


def _expected(x: Tensor, weight: FewBitsWeight) -> Tensor:
    """Return the product of the weight's numbers rounded to the dtype of x, in float32; some rows at a time."""
    found = []
    for first in range(0, weight.rows, _EXPECTED_ROWS):
        wide = torch.empty(min(_EXPECTED_ROWS, weight.rows - first), weight.columns, dtype=x.dtype, device=x.device)
        widen(weight, first, wide)
        found.append(x.float() @ wide.float().t())
    return torch.cat(found, 1)
