"""A model's operations, recorded once over tensors that stay: a step fills these and runs the programs."""

from __future__ import annotations

import torch
from torch import Tensor

from executor_svc.device.kernels import Kernels
from executor_svc.device.kv_cache import KVCache
from executor_svc.models.base import CausalLM
from executor_svc.plan.plan import Limits


class RecordedModel:
    """Tensors of the largest step on the model's device, and the programs over them."""

    def __init__(
        self,
        model: CausalLM,
        kernels: Kernels,
        kv_cache: KVCache,
        limits: Limits,
        token_ids: Tensor,
        positions: Tensor,
        sampled: Tensor,
    ) -> None:
        """Record steps over token_ids and positions [most tokens] and logits of the rows `sampled`, all int64."""
        most, most_seqs = limits.max_num_batched_tokens, limits.max_num_seqs
        self.kv_cache = kv_cache  # whose addresses the programs have
        self.token_ids, self.positions = token_ids, positions
        self.sampled, self.asked = sampled, torch.zeros_like(sampled)
        """Rows of hidden states whose logits are wanted with the step, and after it."""
        self.ropes = model.new_ropes(self.positions)
        self.plans = [
            kernels.new_attention_plan(shape, limits.max_model_len, most, most_seqs) for shape in model.attention_shapes
        ]
        with kernels.recording() as recording:
            self.hidden = model.forward(self.token_ids, self.ropes, kv_cache.layers, self.plans)
            recording.rows = "sampled"
            self.sampled_logits = model.logits(kernels.take_rows(self.hidden, self.sampled))
            self.best = kernels.argmax(self.sampled_logits)
            self._forward = recording.program()
        with kernels.recording() as recording:
            recording.rows = "asked"
            self.asked_logits = model.logits(kernels.take_rows(self.hidden, self.asked))
            self._logits = recording.program()

    def run(self, num_tokens: int, num_sampled: int) -> None:
        """Compute the hidden states of so many tokens, then logits and the most likely tokens of `sampled`; 0: not."""
        tiles = {plan.name: plan.num_tiles for plan in self.plans}
        self._forward.run(rows=num_tokens, sampled=num_sampled, **tiles)

    def run_logits(self, num_asked: int) -> None:
        """Compute the logits of `asked`."""
        self._logits.run(asked=num_asked)
