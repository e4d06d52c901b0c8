"""The CPU's operations of latent attention."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from executor_svc.cpu.kernels.attention_plan import CpuAttentionPlan
from executor_svc.cpu.kernels.codegen.team import KernelLaunch
from executor_svc.cpu.kernels.experts.blocks import BLOCK_WORDS, head_blocks
from executor_svc.cpu.kernels.experts.kernels import CpuExpertKernels, CpuRoutes
from executor_svc.cpu.kernels.experts.weights import ExpertWeights
from executor_svc.cpu.kernels.latent import rows
from executor_svc.cpu.kernels.latent.attention import latent_attention, scratch_bytes
from executor_svc.cpu.kernels.latent.rows import HeadColumns
from executor_svc.cpu.kernels.panel_layout import PANEL, ROWS_AT_ONCE
from executor_svc.cpu.kernels.panels import new_panels
from executor_svc.cpu.kernels.quantized.launches import DensePart
from executor_svc.cpu.kernels.rope import Rotation
from executor_svc.cpu.kernels.tensors import addresses as _addresses
from executor_svc.cpu.kernels.tensors import cache_arguments
from executor_svc.cpu.kernels.tensors import dtype_of as _dtype
from executor_svc.device.kernels import AttentionPlan, AttentionShape, KVScales, Rope
from executor_svc.device.latent import HeadLinear, padded_latent
from executor_svc.plan.arrays import IntArray

_ALL = 1 << 40
"""Of a share: the launch has one item."""


class _HeadWeight:
    """Implements `experts.weights.StoredExpert`: the weight of a head."""

    bias: Tensor | None = None

    def __init__(self, panels: Tensor, out_features: int, in_features: int) -> None:
        self.in_features, self.out_features = in_features, out_features
        self.parts = [DensePart(panels, out_features)]


class CpuHeadLinear:
    """Implements `device.latent.HeadLinear`: columns of rows by head are padded to whole vectors, in and out."""

    def __init__(self, weight: Tensor, kernels: CpuExpertKernels) -> None:
        """weight: [H, out_features, in_features]"""
        self.num_heads, self.out_features, self.in_features = weight.shape
        self.padded_in, self.padded_out = padded_latent(self.in_features), padded_latent(self.out_features)
        each = -(-self.padded_out // PANEL)
        weight = weight.to(kernels.matrix_dtype or weight.dtype)
        panels = new_panels(self.num_heads * each * PANEL, self.padded_in, weight.dtype)
        missing = self.padded_in - self.in_features
        for head, rows_of_head in enumerate(weight):
            own = panels[head * each : (head + 1) * each]
            kernels.panel_writer.write(own, 0, functional.pad(rows_of_head, (0, missing)).contiguous())
        heads = panels.split(each)
        self._weights = ExpertWeights([_HeadWeight(own, self.padded_out, self.padded_in) for own in heads])
        self._kernels = kernels
        self._arguments: list[IntArray | Tensor] = []
        """Kept for recorded programs."""

    def __call__(self, x: Tensor, heads: CpuRoutes) -> Tensor:
        """Return rows by head [H * T, padded_out] for rows by head x [H * T, padded_in]."""
        y, arguments = self._kernels.each_expert(x, heads, self._weights)
        self._arguments += arguments
        return y


class CpuLatentKernels(CpuExpertKernels):
    """Implements `device.latent.LatentKernels`."""

    def new_attention_plan(
        self,
        shape: AttentionShape,
        max_model_len: int,
        max_tokens: int,
        max_seqs: int | None = None,
        num_tables: int = 1,
    ) -> CpuAttentionPlan:
        """Return a plan for steps of at most max_tokens tokens."""
        if shape.latent is None:
            return super().new_attention_plan(shape, max_model_len, max_tokens, max_seqs, num_tables)
        scratch = torch.empty(scratch_bytes(shape) * self.num_threads, dtype=torch.uint8)
        return CpuAttentionPlan(shape, max_model_len, max_tokens, self.num_threads, scratch, num_tables)

    def head_linear(self, weight: Tensor) -> CpuHeadLinear:
        return CpuHeadLinear(weight, self)

    def write_latents(
        self,
        kv: Tensor,
        norm: Tensor,
        eps: float,
        rope: Rope,
        kv_layer: Tensor,
        shape: AttentionShape,
        plan: AttentionPlan,
        scales: KVScales | None = None,
        table: int = 0,
    ) -> None:
        assert isinstance(plan, CpuAttentionPlan)
        assert scales is None, "there is no cache in fp8 here"
        kinds = (_dtype(kv), _dtype(kv_layer)), _dtype(norm), shape, _dtype(rope.cos)
        kernel = rows.write_latents(self.code, *kinds, kv_layer.shape[3], eps)
        first, stride, _ = cache_arguments(kv_layer)
        arguments = (*_columns(kv), *_addresses(norm, rope.cos, rope.sin, rope.rows))
        arguments += (plan.slots_of[table].ctypes.data, first, stride)
        self._launch(KernelLaunch(kernel, "rows", rows.ROWS_AT_ONCE, 1, arguments), len(kv))

    def latent_attention(
        self,
        q: Tensor,
        rope: Rope,
        absorb: HeadLinear,
        expand: HeadLinear,
        kv_layer: Tensor,
        shape: AttentionShape,
        plan: AttentionPlan,
        scales: KVScales | None = None,
        table: int = 0,
    ) -> Tensor:
        assert isinstance(plan, CpuAttentionPlan)
        assert isinstance(absorb, CpuHeadLinear)
        assert isinstance(expand, CpuHeadLinear)
        heads = HeadColumns(shape.num_heads, q.shape[1] // shape.num_heads, absorb.in_features, absorb.padded_in)
        routes = self._head_routes(len(q), shape.num_heads)
        absorbed = absorb(self._split(q, rope, heads), routes)
        found = self._new("attended latents", tuple(absorbed.shape), q.dtype)
        kernel = latent_attention(self.code, (_dtype(q), _dtype(kv_layer)), shape, kv_layer.shape[3])
        size, (first, stride, _) = q.element_size(), cache_arguments(kv_layer)
        rotated = q.data_ptr() + heads.first * size, q.stride(0) * size, heads.all * size
        arguments = (absorbed.data_ptr(), *rotated, first, stride, found.data_ptr(), plan.table[table].ctypes.data)
        self._launch(KernelLaunch(kernel, plan.name, 1, 1, arguments), plan.num_tiles)
        values = expand(found, routes)
        joined = HeadColumns(shape.num_heads, expand.out_features, expand.out_features, expand.padded_out)
        out = self._new("attended", (len(q), shape.num_heads * expand.out_features), q.dtype)
        kernel = rows.join_heads(self.code, _dtype(q), joined)
        self._launch(KernelLaunch(kernel, "rows", 1, 1, _addresses(values, out)), len(q))
        return out

    def _split(self, q: Tensor, rope: Rope, heads: HeadColumns) -> Tensor:
        """Rotate queries in place; return their first columns by head, [H * T, padded]."""
        scale_dtype = None if rope.query_scales is None else _dtype(rope.query_scales)
        rotation = Rotation(rope.cos.shape[1], _dtype(rope.cos), scale_dtype)
        kernel = rows.split_queries(self.code, _dtype(q), heads, rotation)
        y = self._new("queries by head", (heads.num_heads * len(q), heads.padded), q.dtype)
        factors = 0 if rope.query_scales is None else rope.query_scales.data_ptr()
        arguments = (*_columns(q), *_addresses(rope.cos, rope.sin, rope.rows), factors, y.data_ptr())
        self._launch(KernelLaunch(kernel, "rows", 1, 1, arguments), len(q))
        return y

    def _head_routes(self, num_rows: int, num_heads: int) -> CpuRoutes:
        """Return where rows by head are, as those of experts that every token chooses; nothing else of it is there."""
        most = num_heads * -(-num_rows // ROWS_AT_ONCE)
        blocks = self._new("blocks of heads", (most, BLOCK_WORDS), torch.int64)
        number = self._new("number of blocks of heads", (1,), torch.int64)
        kernel = head_blocks(self.code, num_heads)
        self._launch(KernelLaunch(kernel, "rows", _ALL, 1, _addresses(blocks, number)), num_rows)
        nothing = torch.empty(num_heads * num_rows, 0, dtype=torch.int64)
        return CpuRoutes(nothing, nothing, nothing, nothing, blocks, number)


def _columns(x: Tensor) -> tuple[int, int]:
    """Return the address of columns of rows, and the bytes from a row to the next."""
    assert x.stride(1) == 1
    return x.data_ptr(), x.stride(0) * x.element_size()
