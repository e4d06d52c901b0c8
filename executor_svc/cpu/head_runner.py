"""Runs a draft head on the CPU, over the states that its target's runner has just computed."""

from __future__ import annotations

import torch
from torch import Tensor

from executor_svc.batch.forward_batch import ForwardBatch
from executor_svc.device.interface import Device
from executor_svc.device.kv_cache import KVCache
from executor_svc.models.heads.head import DraftHead
from executor_svc.plan.arrays import IntArray
from executor_svc.plan.limits import Limits


class CpuHeadRunner:
    """Implements `worker.head_source.HeadRunner`; for use by one thread. It returns views of its own memory."""

    def __init__(self, head: DraftHead, device: Device, kv_cache: KVCache, limits: Limits, states: Tensor) -> None:
        """Record the head for steps of max_num_batched_tokens rows and logits of max_num_seqs.

        states: those of the target's runner, [max_num_batched_tokens, layers * hidden].
        """
        most, max_seqs = limits.max_num_batched_tokens, limits.max_num_seqs
        self.functions = device.functions
        self.hidden_size = head.hidden_size
        self.dtype = states.dtype
        self._head = head
        self._token_ids, self._positions = (torch.zeros(most, dtype=torch.int64) for _ in range(2))
        self._ropes = head.new_ropes(self._positions)
        kernels = device.kernels
        self._plans = [
            kernels.new_attention_plan(shape, limits.max_model_len, most, max_seqs, limits.num_tables)
            for shape in head.attention_shapes
        ]
        self._hidden = torch.zeros(most, head.hidden_size, dtype=states.dtype)
        self._results = torch.zeros(max_seqs, head.hidden_size, dtype=states.dtype)
        with kernels.recording() as recording:
            recording.rows = "head states"
            self._combined = head.combine(states)
            self._combine = recording.program()
        with kernels.recording() as recording:
            recording.rows = "head rows"
            layers, tables = kv_cache.draft_layers, kv_cache.draft_tables
            self._output = head.forward(self._token_ids, self._hidden, self._ropes, layers, self._plans, tables)
            self._forward = recording.program()
        with kernels.recording() as recording:
            recording.rows = "head logits"
            self._logits = head.logits(self._results)
            self._best = kernels.argmax(self._logits)
            self._sample = recording.program()

    @torch.inference_mode()
    def combine(self, num_tokens: int) -> Tensor:
        """As in `HeadRunner`."""
        self._combine.run(**{"head states": num_tokens})
        return self._combined[:num_tokens]

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, hidden: Tensor) -> Tensor:
        """As in `HeadRunner`."""
        num_tokens = len(batch.token_ids)
        self._token_ids.numpy()[:num_tokens] = batch.token_ids.numpy()
        self._positions.numpy()[:num_tokens] = batch.positions.numpy()
        self._hidden[:num_tokens] = hidden
        self._head.fill_ropes(batch.positions, batch.rope_lens, self._ropes)
        for plan in self._plans:
            plan.fill(batch.slot_mapping, batch.query_start_loc, batch.seq_lens, batch.block_tables)
        self._forward.run(**{"head rows": num_tokens}, **{plan.name: plan.num_tiles for plan in self._plans})
        return self._output[:num_tokens]

    @torch.inference_mode()
    def logits(self, results: Tensor) -> tuple[Tensor, IntArray]:
        """As in `HeadRunner`."""
        num_rows = len(results)
        self._results[:num_rows] = results
        self._sample.run(**{"head logits": num_rows})
        best = self._best[:num_rows]
        ids = torch.where(best < 0, best, self._head.to_target(best.clamp(min=0)))
        return self._logits[:num_rows], ids.numpy()

    def spread(self, logits: Tensor) -> Tensor:
        """As in `HeadRunner`."""
        return self._head.spread(logits)
