"""Products of 1 to 16 rows with what stands beside them in a layer, fused and apart, beside cuBLAS and the bandwidth.

Apart: cuBLAS, with norm, activation or sum as kernels of their own, as layers that are not fused launch them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from benchmarks.gpu.cases import Bench, Case, Goal, Group, Metrics
from benchmarks.gpu.kernels.attention.attention_launch import arch_and_sms

if TYPE_CHECKING:
    from executor_svc.gpu.kernels.skinny.tiles import SkinnyPlan

_ROWS, _TINY_ROWS = (1, 2, 4, 8, 16), (3,)
_TUNED_ROWS = (1, 16)
_EPS = 1e-5
_LARGEST_ERROR = 0.02
"""Relative error of a row beside the kernels apart, by L2 norm: both round each intermediate result to bf16."""


@dataclass(frozen=True, slots=True)
class Place:
    """A product's place in a layer."""

    kind: str
    """qkv and gate_up read a norm, output and down are added to the residual."""
    in_features: int
    out_features: int

    @property
    def gated(self) -> bool:
        return self.kind == "gate_up"

    @property
    def stored(self) -> int:
        """Rows of the weight."""
        return (1 + self.gated) * self.out_features


PLACES = {
    "8b qkv": Place("qkv", 4096, 6144), "8b output": Place("output", 4096, 4096),
    "8b gate_up": Place("gate_up", 4096, 14336), "8b down": Place("down", 14336, 4096),
    "0.6b qkv": Place("qkv", 1024, 4096), "0.6b output": Place("output", 2048, 1024),
    "0.6b gate_up": Place("gate_up", 1024, 3072), "0.6b down": Place("down", 3072, 1024),
}  # fmt: skip
_TINY = {"tiny gate_up": Place("gate_up", 528, 64), "tiny down": Place("down", 1040, 64)}


def cases(tiny: bool) -> Sequence[Case]:
    """Every place, by rows."""
    places, counts = (_TINY, _TINY_ROWS) if tiny else (PLACES, _ROWS)
    return [_case(name, places[name], rows) for rows in counts for name in places]


def _case(name: str, place: Place, rows: int) -> Case:
    params = {"layer": name, "rows": rows, "in_features": place.in_features, "out_features": place.out_features}
    goal = Goal("speedup", at_least=1.0)
    return Case(f"{name}, {rows} rows", params, partial(_time, place=place, rows=rows), 2.0, goal)


def tuning_cases(tiny: bool) -> Sequence[Case]:
    """Every plan of every place, on a GPU of 132 multiprocessors."""
    from executor_svc.gpu.kernels.skinny.tiles import SkinnyPlan

    places, counts = (_TINY, _TINY_ROWS) if tiny else (PLACES, _TUNED_ROWS)
    found = []
    for name, place in places.items():
        for plan in SkinnyPlan.candidates(place.out_features, place.in_features, place.gated, 132):
            for rows in counts:
                params = {"layer": name, "rows": rows, "features": plan.tile.features, "parts": plan.parts}
                title = f"{name}, {rows} rows, {plan.tile.features} features, {plan.parts} parts"
                found.append(Case(title, params, partial(_time, place=place, rows=rows, plan=plan), 1.5))
    return found


class _Layer:
    """The tensors of a place, and both ways to compute it."""

    def __init__(self, bench: Bench, place: Place, rows: int, plan: SkinnyPlan | None) -> None:
        from executor_svc.gpu.kernels.skinny.product import square_rows
        from executor_svc.gpu.kernels.skinny.tiles import SkinnyPlan, SkinnyScratch

        generator = torch.Generator(bench.device).manual_seed(place.in_features + place.stored)

        def random(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, device=bench.device).to(torch.bfloat16)

        num_sms = arch_and_sms(bench.device)[1]
        self.place, self.weight = place, random(place.stored, place.in_features).mul_(0.02)
        self.x, self.norm_weight, self.out = random(rows, place.in_features), random(place.in_features), None
        self.residual = random(rows, place.out_features)
        self.plan = plan or SkinnyPlan.of(place.out_features, place.in_features, place.gated, num_sms)
        self.scratch = SkinnyScratch.of(self.plan.sums_size(place.gated), self.plan.num_tiles, bench.device)
        before = SkinnyPlan.of(place.in_features, place.in_features, False, num_sms)
        self.before, self.after = (
            torch.zeros(tiles, 16, device=bench.device) for tiles in (before.num_tiles, self.plan.num_tiles)
        )
        square_rows(self.x, self.before, before)
        self.fused_out = torch.empty_like(self.residual)
        self.product = self.x.new_empty(rows, place.stored)
        self.normed, self.apart_out = torch.empty_like(self.x), torch.empty_like(self.residual)

    def fused(self, into: Tensor) -> None:
        """One launch; into: where the residual stands, or the result."""
        from executor_svc.gpu.kernels.skinny.product import RowNorm, skinny_product

        place, norm = self.place, RowNorm(self.norm_weight, _EPS, self.before)
        arguments = self.x, self.weight, into, self.scratch, self.plan
        if place.kind in ("output", "down"):
            skinny_product(*arguments, squares=self.after)
        else:
            skinny_product(*arguments, norm, activation="silu" if place.gated else None)

    def cublas(self, x: Tensor) -> None:
        torch.mm(x, self.weight.t(), out=self.product)

    def apart(self, into: Tensor) -> None:
        """The same, launch by launch."""
        from executor_svc.gpu.kernels.activation import silu_mul
        from executor_svc.gpu.kernels.norm import add, rms_norm

        if self.place.kind in ("output", "down"):
            self.cublas(self.x)
            add(self.product, into)
            return
        rms_norm(self.x, self.norm_weight, _EPS, self.normed)
        self.cublas(self.normed)
        if self.place.gated:
            silu_mul(self.product, into)
        else:
            into.copy_(self.product)


def _time(bench: Bench, place: Place, rows: int, plan: SkinnyPlan | None = None) -> Metrics:
    layer = _Layer(bench, place, rows, plan)
    fused, apart = (_result(layer.residual, run) for run in (layer.fused, layer.apart))
    error = float((fused - apart).norm() / apart.norm())
    if not error < _LARGEST_ERROR:
        raise RuntimeError(f"fused products are wrong: relative error {error:.3g} beside kernels apart")
    work = layer.fused_out if place.kind in ("qkv", "gate_up") else layer.residual
    # Of a plain product the copy is left out: cuBLAS would have written there.
    apart_work: Callable[[], object] = partial(layer.apart, work)
    if place.kind == "qkv":
        apart_work = partial(_norm_and_product, layer)
    seconds, apart_s, cublas_s = (
        bench.clock.seconds(each) for each in (partial(layer.fused, work), apart_work, partial(layer.cublas, layer.x))
    )
    return {
        "us": 1e6 * seconds,
        "apart_us": 1e6 * apart_s,
        "cublas_us": 1e6 * cublas_s,
        "speedup": apart_s / seconds,
        "percent_of_copy": 100 * layer.weight.nbytes / seconds / bench.ceilings.copy,
        "cublas_percent_of_copy": 100 * layer.weight.nbytes / cublas_s / bench.ceilings.copy,
        "programs": layer.plan.num_tiles * layer.plan.parts,
    }


def _norm_and_product(layer: _Layer) -> None:
    from executor_svc.gpu.kernels.norm import rms_norm

    rms_norm(layer.x, layer.norm_weight, _EPS, layer.normed)
    layer.cublas(layer.normed)


def _result(residual: Tensor, run: Callable[[Tensor], None]) -> Tensor:
    found = residual.clone()
    run(found)
    return found.float()


GROUP = Group("skinny", "products of 1 to 16 rows, fused with their neighbours and apart", cases, limit_s=90)
TUNE = Group("tune-skinny", "tiles and parts of products of 1 to 16 rows", tuning_cases, limit_s=90)
