"""Layers of steps of 1 to 16 rows in five launches each: products with what stands beside them, and attention.

A launch each for norm, q, k and v; rotation, write and attention; output and residual; norm, gate and up; down and
residual. See decision 0078.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from executor_svc.device.kernels import AttentionPlan, AttentionShape, Linear, Rope
from executor_svc.gpu.expert_linear import StackableLinear
from executor_svc.gpu.kernels.attention.config import DECODE_ROWS
from executor_svc.gpu.kernels.attention.plan import GpuAttentionPlan
from executor_svc.gpu.kernels.skinny.attention import NewKeys, attention_of_new, may_attend_new
from executor_svc.gpu.kernels.skinny.product import MOST_SQUARES, RowNorm, skinny_product, square_rows
from executor_svc.gpu.kernels.skinny.tiles import ROWS, SkinnyPlan, SkinnyScratch
from executor_svc.gpu.linear import PlainLinear
from executor_svc.gpu.skinny.recording import EitherKernels
from executor_svc.models.layers.fused import FusableLayer

_LARGEST_HEAD = 256


@dataclass(frozen=True, slots=True)
class _SkinnyLinear:
    """A linear, as a skinny product multiplies with it."""

    weight: Tensor
    bias: Tensor | None
    plan: SkinnyPlan

    @property
    def gated(self) -> bool:
        return len(self.weight) > self.plan.num_tiles * self.plan.tile.features


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer, and where the sums of squares stand that its norms read."""

    parts: FusableLayer
    qkv: _SkinnyLinear
    output: _SkinnyLinear
    gate_up: _SkinnyLinear
    down: _SkinnyLinear
    before: Tensor
    """Of the residual before the layer, after attention, and after the layer: [tiles, 16] float32 each."""
    between: Tensor
    after: Tensor


def fused(layers: Sequence[FusableLayer], kernels: EitherKernels, num_sms: int) -> SkinnyLayers | None:
    """Return what computes these layers; None if a part of them is not of a kind that the kernels compute."""
    if not layers or not all(_fits(each) for each in layers):
        return None
    return SkinnyLayers(layers, kernels, num_sms)


class SkinnyLayers:
    """Implements `models.layers.fused.FusedLayers`."""

    def __init__(self, layers: Sequence[FusableLayer], kernels: EitherKernels, num_sms: int) -> None:
        """layers: each of a kind that `fused` knows."""
        self._kernels, self._num_sms = kernels, num_sms
        self._layers: list[_Layer] = []
        device = layers[0].attention_norm.device
        squares: dict[tuple[str, int], Tensor] = {}

        def of(name: str, product: _SkinnyLinear) -> Tensor:
            tiles = product.plan.num_tiles
            if (name, tiles) not in squares:
                squares[name, tiles] = torch.zeros(tiles, ROWS, dtype=torch.float32, device=device)
            return squares[name, tiles]

        for parts in layers:
            qkv, output, down = (self._product(each) for each in (parts.qkv, parts.output, parts.down))
            gate_up, after = self._product(parts.gate_up, gated=True), of("after a layer", down)
            before = self._layers[-1].after if self._layers else after
            between = of("after attention", output)
            self._layers.append(_Layer(parts, qkv, output, gate_up, down, before, between, after))
        products = [each for layer in self._layers for each in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        most_sums = max(each.plan.sums_size(each.gated) for each in products)
        self._what = _text_of(layers)
        self._scratch = SkinnyScratch.of(most_sums, max(each.plan.num_tiles for each in products), device)

    def _product(self, linear: Linear, gated: bool = False) -> _SkinnyLinear:
        found = _plain(linear)
        assert found is not None
        features = found.out_features // (1 + gated)
        return _SkinnyLinear(found.weight, found.bias, SkinnyPlan.of(features, found.in_features, gated, self._num_sms))

    def begin(self, residual: Tensor) -> None:
        first = self._layers[0]
        # As if the layer's own last product had left them: its tiles are those of the same columns.
        kernels, plan = self._kernels, first.down.plan
        kernels.run(residual, lambda n: square_rows(residual[:n], first.after, plan, kernels.dependent))

    def run(
        self, index: int, residual: Tensor, rope: Rope, kv_layer: Tensor, plan: AttentionPlan, table: int = 0
    ) -> None:
        assert isinstance(plan, GpuAttentionPlan)
        layer, kernels = self._layers[index], self._kernels
        parts, shape, dtype = layer.parts, layer.parts.shape, residual.dtype
        rows, heads = min(ROWS, len(residual)), shape.num_heads * shape.padded_head_size
        qkv = kernels.new("skinny qkv", (rows, len(layer.qkv.weight)), dtype)
        attended = kernels.new("skinny attended", (rows, heads), dtype)
        activated = kernels.new("skinny activated", (rows, len(layer.gate_up.weight) // 2), dtype)

        def attend(n: int) -> None:
            size = shape.padded_head_size
            call = plan.call(qkv[:n].view(n, -1, size)[:, : shape.num_heads], kv_layer, attended[:n], table=table)
            turned = rope._replace(rows=rope.rows[:n])
            new = NewKeys(qkv[:n], turned, plan.slot_mappings[table, :n], parts.head_norms)
            attention_of_new(call, new, plan.arch, plan.scratch, plan.num_sms, dependent=kernels.dependent)

        first = RowNorm(parts.attention_norm, parts.eps, layer.before)
        second = RowNorm(parts.mlp_norm, parts.eps, layer.between)
        scratch = self._scratch

        def project(n: int) -> None:
            product = layer.qkv
            skinny_product(
                residual[:n], product.weight, qkv[:n], scratch, product.plan, first, product.bias,
                dependent=kernels.dependent,
            )  # fmt: skip

        def add(product: _SkinnyLinear, x: Tensor, into: Tensor, squares: Tensor) -> None:
            skinny_product(
                x, product.weight, into, scratch, product.plan, bias=product.bias, squares=squares,
                scale=parts.residual_scale, dependent=kernels.dependent,
            )  # fmt: skip

        def add_attended(n: int) -> None:
            add(layer.output, attended[:n], residual[:n], layer.between)

        def gate(n: int) -> None:
            product = layer.gate_up
            skinny_product(
                residual[:n], product.weight, activated[:n], scratch, product.plan, second, product.bias,
                parts.activation, dependent=kernels.dependent,
            )  # fmt: skip

        def add_fed_forward(n: int) -> None:
            add(layer.down, activated[:n], residual[:n], layer.after)

        for operation in (project, attend, add_attended, gate, add_fed_forward):
            kernels.run(residual, operation)

    def either(
        self,
        residual: Tensor,
        kv_layers: Sequence[Tensor],
        plans: Sequence[AttentionPlan],
        fused: Callable[[], None],
        apart: Callable[[], Tensor],
    ) -> Tensor:
        if any(layer.dtype != residual.dtype for layer in kv_layers):
            return apart()

        def fits(n: int) -> bool:
            return n <= ROWS and all(isinstance(plan, GpuAttentionPlan) and _takes(plan) for plan in plans)

        return self._kernels.either(residual, fits, fused, apart, self._what)


def _takes(plan: GpuAttentionPlan) -> bool:
    return may_attend_new(plan.shape, plan.num_seqs, plan.max_query_len, plan.num_sms)


def _text_of(layers: Sequence[FusableLayer]) -> str:
    """Return all that kernels of these layers depend on, beside the rows and the cache, as text."""
    parts = []
    for layer in layers:
        linears = [_plain(each) for each in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        shapes = [None if each is None else (each.weight.shape, each.bias is None) for each in linears]
        norms = None if layer.head_norms is None else layer.head_norms.eps
        parts.append((shapes, layer.shape, layer.eps, norms, layer.activation, layer.residual_scale))
    norm = layers[0].attention_norm
    digest = hashlib.sha256(repr((norm.dtype, parts)).encode()).hexdigest()[:16]
    return f"{len(layers)} of {len(norm)} numbers in {str(norm.dtype).removeprefix('torch.')}, {digest}"


def _plain(linear: Linear) -> PlainLinear | None:
    """Return a linear with a weight in 16 bits that nothing wraps."""
    found = linear.linear if isinstance(linear, StackableLinear) else None
    if not isinstance(found, PlainLinear) or found.weight.dtype not in (torch.bfloat16, torch.float16):
        return None
    return None if found.in_features % 16 else found


def _fits(layer: FusableLayer) -> bool:
    linears = [_plain(each) for each in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    if any(each is None for each in linears):
        return False
    narrowest = 32
    hidden = layer.attention_norm.shape[0]
    norms = layer.head_norms
    own = norms is None or (norms.kind == "heads" and norms.v is None)
    return own and _attends(layer.shape) and hidden <= narrowest * MOST_SQUARES


def _attends(shape: AttentionShape) -> bool:
    return shape.latent is None and shape.group <= DECODE_ROWS and shape.padded_head_size <= _LARGEST_HEAD
