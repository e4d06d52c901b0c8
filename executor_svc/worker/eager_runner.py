"""Runs a model whose operations cannot be recorded: each step calls its code."""

from __future__ import annotations

import torch
from torch import Tensor

from executor_svc.batch.forward_batch import ForwardBatch
from executor_svc.device.interface import Device
from executor_svc.device.kv_cache import KVCache
from executor_svc.models.loading import LoadedModel
from executor_svc.plan.arrays import IntArray
from executor_svc.plan.limits import Limits
from executor_svc.sampling.row_math import argmax


class EagerRunner:
    """Implements `step.Runner`, as `cpu.runner.ModelRunner` does; for use by one thread."""

    def __init__(self, loaded: LoadedModel, device: Device, kv_cache: KVCache, limits: Limits) -> None:
        """Take a model and its cache, for steps of max_num_batched_tokens tokens."""
        model, most = loaded.model, limits.max_num_batched_tokens
        self.functions = device.functions
        self._model = model
        self._torch_device = device.torch_device
        self._kv_layers, self._tables = kv_cache.layers, kv_cache.tables
        self._max_logits = limits.max_num_seqs
        self._positions = torch.zeros(most, dtype=torch.int64, device=device.torch_device)
        self._ropes = model.new_ropes(self._positions)
        max_model_len, max_seqs = loaded.geometry.max_model_len, limits.max_num_seqs
        self._plans = [
            device.kernels.new_attention_plan(shape, max_model_len, most, max_seqs, limits.num_tables)
            for shape in model.attention_shapes
        ]

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Tensor:
        """Write the batch's keys and values to the cache and return the hidden states [T, hidden] of its tokens."""
        num_tokens = len(batch.token_ids)
        self._positions[:num_tokens] = batch.positions
        self._model.fill_ropes(batch.positions, batch.rope_lens, self._ropes)
        for plan in self._plans:
            plan.fill(batch.slot_mapping, batch.query_start_loc, batch.seq_lens, batch.block_tables)
        token_ids = batch.token_ids.to(self._torch_device)
        return self._model.forward(token_ids, self._ropes, self._kv_layers, self._plans, self._tables)

    @torch.inference_mode()
    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Return the logits [R, vocab_size] fp32 of these rows [R] int64 of hidden states."""
        if not rows.numel():
            return torch.empty(0, self._model.vocab_size, device=hidden.device)
        taken = hidden[rows.to(hidden.device)]
        # In pieces: this limits memory to the logits of a full step of decodes.
        parts = [self._model.logits(part) for part in taken.split(self._max_logits)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def argmax(self, logits: Tensor) -> IntArray:
        """Return the most likely token [R] of each row of logits, as `row_math.argmax` does."""
        return argmax(logits)
