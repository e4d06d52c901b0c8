"""The GPU's operations of latent attention."""

from __future__ import annotations

import torch
from torch import Tensor

from executor_svc.device.kernels import AttentionPlan, AttentionShape, KVScales, Rope
from executor_svc.device.latent import HeadLinear
from executor_svc.gpu.experts import GpuExpertKernels
from executor_svc.gpu.kernels import latents
from executor_svc.gpu.kernels.attention.plan import GpuAttentionPlan
from executor_svc.gpu.kernels.exact.product import exact_product_of_heads


class GpuHeadLinear:
    """Implements `device.latent.HeadLinear`: all heads in one product, with strides in place of copies.

    By cuBLAS, or in exact mode by a kernel of ours.
    """

    def __init__(self, weight: Tensor, exact: bool) -> None:
        """weight: [H, out_features, in_features]"""
        self.num_heads, self.out_features, self.in_features = weight.shape
        self.weight, self._exact = weight.contiguous(), exact
        self._turned = self.weight.transpose(1, 2)

    def into(self, x: Tensor, out: Tensor) -> None:
        """Write [T, H, out_features] for x [T, H, in_features]; both may be columns of wider rows."""
        if self._exact:
            exact_product_of_heads(x, self.weight, out)
        else:
            torch.bmm(x.transpose(0, 1), self._turned, out=out.transpose(0, 1))


class GpuLatentKernels(GpuExpertKernels):
    """Implements `device.latent.LatentKernels`."""

    def head_linear(self, weight: Tensor) -> GpuHeadLinear:
        return GpuHeadLinear(weight, self.exact is not None)

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
        assert isinstance(plan, GpuAttentionPlan)
        used = plan.scales(kv_layer, scales)
        scale = None if used is None else used.k

        def run(n: int) -> None:
            rows = rope._replace(rows=rope.rows[:n])
            latents.write_latents(kv[:n], norm, eps, rows, kv_layer, plan.slot_mappings[table, :n], scale)

        self.run(kv, run)

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
        assert isinstance(plan, GpuAttentionPlan)
        assert isinstance(absorb, GpuHeadLinear)
        assert isinstance(expand, GpuHeadLinear)
        assert shape.latent is not None
        heads, latent, used = shape.num_heads, shape.latent, plan.scales(kv_layer, scales)
        queries = self.new("latent queries", (len(q), heads, shape.padded_head_size), q.dtype)
        found = self.new("attended latents", (len(q), heads * latent), q.dtype)
        out = self.new("attended", (len(q), heads * expand.out_features), q.dtype)
        if used is not None:  # of one row, which is key and value
            used = KVScales(used.k, used.k)

        def run(n: int) -> None:
            latents.rotate_queries(q[:n], rope._replace(rows=rope.rows[:n]), heads, queries[:n], latent)
            plain = q[:n].unflatten(1, (heads, -1))[..., : absorb.in_features]
            absorb.into(plain, queries[:n, :, :latent])
            plan.attend(queries[:n], kv_layer, found[:n], used, None, table)
            expand.into(found[:n].unflatten(1, (heads, -1)), out[:n].unflatten(1, (heads, -1)))

        return self.run(out, run)
