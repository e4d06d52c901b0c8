"""Runs a model on a GPU: steps of decodes by graphs of fixed sizes, all others launch by launch."""

from __future__ import annotations

import torch
from torch import Tensor

from executor_svc.cuda_graphs import CudaGraphs, DirectReplayer, Replayer, fitting, graph_sizes
from executor_svc.device import Device
from executor_svc.input_batch import ForwardBatch
from executor_svc.kernels.gpu.attention_plan import GpuAttentionPlan
from executor_svc.kv_cache import KVCache
from executor_svc.loader import LoadedModel
from executor_svc.plan import IntArray, Limits
from executor_svc.recorded_model import RecordedModel
from executor_svc.row_math import argmax


class GpuModelRunner:
    """Implements `step.Runner`; for use by one thread. Results are its own memory, as those of `ModelRunner`."""

    def __init__(self, loaded: LoadedModel, device: Device, kv_cache: KVCache, limits: Limits) -> None:
        """Record the model, and capture its graphs where the device has such."""
        self._model = loaded.model
        self._recorded = RecordedModel(loaded.model, device.kernels, kv_cache, limits, device.torch_device)
        self._most_logits = limits.max_num_seqs
        self._batch_rows = self._recorded.sampled[:0]
        self._own_rows = torch.arange(limits.max_num_seqs, device=device.torch_device)
        sizes = [size for size in graph_sizes(limits.max_num_seqs) if size <= limits.max_num_seqs]
        make: type[CudaGraphs | DirectReplayer] = CudaGraphs if device.torch_device.type == "cuda" else DirectReplayer
        self._replayer: Replayer = make(sizes, self._decode)

    @property
    def _plans(self) -> list[GpuAttentionPlan]:
        return [plan for plan in self._recorded.plans if isinstance(plan, GpuAttentionPlan)]

    def _decode(self, size: int) -> None:
        """Enqueue a step of one token for each of so many sequences, some of which may be empty."""
        for plan in self._plans:
            plan.become(size)
        self._recorded.run(size, size)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Tensor:
        """Write the batch's keys and values to the cache; return hidden states [T, hidden] of its tokens."""
        recorded, num_tokens, num_sampled = self._recorded, len(batch.token_ids), len(batch.logits_rows)
        self._batch_rows = batch.logits_rows
        for into, given in ((recorded.token_ids, batch.token_ids), (recorded.positions, batch.positions)):
            into[:num_tokens].copy_(given, non_blocking=True)
        self._model.fill_ropes(batch.positions, batch.rope_lens, recorded.ropes)
        for plan in recorded.plans:
            plan.fill(batch.slot_mapping, batch.query_start_loc, batch.seq_lens, batch.block_tables)
        size = fitting(self._replayer.sizes, num_tokens) if num_sampled == num_tokens else None
        if size is None:
            num_sampled = num_sampled if num_sampled <= self._most_logits else 0
            recorded.sampled[:num_sampled].copy_(batch.logits_rows[:num_sampled], non_blocking=True)
            recorded.run(num_tokens, num_sampled)
        else:
            # As many logits rows as tokens: each sequence has one token.
            recorded.sampled[:size].copy_(self._own_rows[:size])
            recorded.positions[num_tokens:size] = 0
            for plan in self._plans:
                plan.empty_behind(num_tokens, size)
            self._replayer.replay(size)
        return recorded.hidden[:num_tokens]

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Return the logits [R, vocab_size] fp32 of these rows [R] int64 of the last `forward`'s hidden states."""
        recorded, num_rows = self._recorded, rows.shape[0]
        if num_rows > self._most_logits:
            return torch.cat([self.logits(hidden, part).clone() for part in rows.split(self._most_logits)])
        if rows is self._batch_rows:
            return recorded.sampled_logits[:num_rows]
        recorded.asked[:num_rows].copy_(rows, non_blocking=True)
        recorded.run_logits(num_rows)
        return recorded.asked_logits[:num_rows]

    def argmax(self, logits: Tensor) -> IntArray:
        """Return the most likely token [R] of each row of what `logits` returned last, as `row_math.argmax` does."""
        if logits.data_ptr() == self._recorded.sampled_logits.data_ptr():
            return self._recorded.best[: len(logits)].cpu().numpy()
        return argmax(logits)
