"""Multi-head latent attention (DeepSeek-V2, 2024, arXiv 2405.04434), in its absorbed form for all rows."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from executor_svc.device.kernels import AttentionPlan, AttentionShape, KVScales, Linear, Rope
from executor_svc.device.latent import HeadLinear, LatentKernels


@dataclass(frozen=True, slots=True)
class LatentQueries:
    """How queries are made of their latent."""

    norm: Tensor
    """[A]"""
    linear: Linear
    """[A, H * (N + R)]"""


class LatentAttention:
    """One linear into latents, a row for each token in the cache, attention among latents, output linear."""

    def __init__(
        self,
        shape: AttentionShape,
        down: Linear,
        queries: LatentQueries | None,
        norm: Tensor,
        eps: float,
        absorb: HeadLinear,
        expand: HeadLinear,
        output: Linear,
        scales: KVScales | None,
        kernels: LatentKernels,
    ) -> None:
        """Take the parts of a layer.

        down: to queries or their latent, then the latent and key of the cache. queries: None: they have no latent.
        norm, eps: of latents. absorb, expand: as in `LatentKernels`.
        """
        self._shape, self._down, self._queries, self._norm, self._eps = shape, down, queries, norm, eps
        self._absorb, self._expand, self._output = absorb, expand, output
        self._scales, self._kernels = scales, kernels

    def __call__(self, x: Tensor, rope: Rope, kv_layer: Tensor, plan: AttentionPlan, table: int = 0) -> Tensor:
        """Return [T, hidden] for x [T, hidden]; write this step's rows to kv_layer.

        table: as in `Kernels.rope_write_kv`.
        """
        kernels, shape, queries = self._kernels, self._shape, self._queries
        found = self._down(x)
        first = found.shape[1] - shape.head_size
        where = kv_layer, shape, plan, self._scales, table
        kernels.write_latents(found[:, first:], self._norm, self._eps, rope, *where)
        q = found[:, :first]
        if queries is not None:
            latent = kernels.new_rows("query latents", len(x), first, x.dtype)
            kernels.copy_columns(found, 0, latent, 0, first)
            q = queries.linear(kernels.rms_norm(latent, queries.norm, self._eps))
        return self._output(kernels.latent_attention(q, rope, self._absorb, self._expand, *where))
