"""A draft head's operations, recorded once for comparing them: over states that stand for those of its target."""

from __future__ import annotations

import torch
from torch import Tensor

from executor_svc.device.interface import Device
from executor_svc.device.kv_cache import KVCache
from executor_svc.models.heads.head import DraftHead
from executor_svc.plan.limits import Limits


class RecordedHead:
    """As `models.recorded.RecordedModel`, whose attributes it has; operations run one by one, in their order."""

    state_plan = None

    def __init__(
        self,
        head: DraftHead,
        device: Device,
        kv_cache: KVCache,
        limits: Limits,
        width: int,
        token_ids: Tensor,
        positions: Tensor,
        sampled: Tensor,
    ) -> None:
        """Record rows over token_ids and positions [max_tokens], and logits of the rows `sampled`; all int64.

        width: of the target's states of a token, side by side.
        """
        self.kv_cache, kernels = kv_cache, device.kernels
        self.token_ids, self.positions, self.sampled = token_ids, positions, sampled
        most, max_seqs = limits.max_num_batched_tokens, limits.max_num_seqs
        self.states = torch.zeros(most, width, dtype=device.dtype, device=positions.device)
        """[max_tokens, width]; what runs may overwrite them."""
        self.ropes = head.new_ropes(positions)
        self.plans = [
            kernels.new_attention_plan(shape, limits.max_model_len, most, max_seqs, limits.num_tables)
            for shape in head.attention_shapes
        ]
        with kernels.recording() as recording:
            recording.rows = "rows"
            hidden = head.combine(self.states)
            layers, tables = kv_cache.draft_layers, kv_cache.draft_tables
            hidden = head.forward(token_ids, hidden, self.ropes, layers, self.plans, tables)
            recording.rows = "sampled"
            self.best = kernels.argmax(head.logits(kernels.take_rows(hidden, sampled)))

    def fill_states(self, num_tokens: int) -> None:
        """Set random states of a step's tokens, as large as normed ones are."""
        generator = torch.Generator().manual_seed(num_tokens)
        numbers = torch.randn(num_tokens, self.states.shape[1], generator=generator)
        self.states[:num_tokens].copy_(numbers)
