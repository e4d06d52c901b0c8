"""The attention plan of a step in exact mode."""

from __future__ import annotations

import torch

from executor_svc.device.kernels import AttentionShape
from executor_svc.gpu.kernels.attention.call import AttentionCall
from executor_svc.gpu.kernels.attention.plan import GpuAttentionPlan
from executor_svc.gpu.kernels.attention.segments import SegmentScratch
from executor_svc.gpu.kernels.exact.attention import exact_attention, most_segments, new_scratch


class ExactAttentionPlan(GpuAttentionPlan):
    """As `GpuAttentionPlan`, with exact attention."""

    def __init__(
        self,
        shape: AttentionShape,
        max_model_len: int,
        max_tokens: int,
        max_seqs: int,
        device: torch.device,
        arch: int,
        num_sms: int,
        num_tables: int = 1,
        *,
        wide: bool,
    ) -> None:
        """wide: as of `exact_attention`; others as of `GpuAttentionPlan`."""
        self._wide = wide
        super().__init__(shape, max_model_len, max_tokens, max_seqs, device, arch, num_sms, num_tables)

    def _new_scratch(self, device: torch.device) -> SegmentScratch:
        shape, latent = self.shape, self.shape.latent
        columns = shape.padded_head_size if latent is None else latent
        heads = 1 if latent is not None else shape.num_kv_heads
        segments = most_segments(self._max_model_len, 1, shape.window or shape.chunk or 0)
        return new_scratch(shape.num_heads, heads, columns, segments, self.num_sms, device)

    def _run(self, call: AttentionCall) -> None:
        exact_attention(call, self.arch, self.scratch, self.num_sms, self._wide)
