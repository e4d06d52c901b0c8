"""Runs a model over the flat tensors of a step: its operations, recorded once, are replayed on each step's rows."""

from __future__ import annotations

import torch
from torch import Tensor

from executor_svc.device import Device
from executor_svc.input_batch import ForwardBatch
from executor_svc.kv_cache import KVCache
from executor_svc.loader import LoadedModel
from executor_svc.plan import IntArray, Limits
from executor_svc.row_math import argmax


class ModelRunner:
    """A model and its cache on a device; for use by one thread.

    What it returns is its own memory: hidden states, and logits of the batch's own logits_rows, which are computed with
    them, stay until the next `forward`, other logits until the next `logits`.
    """

    def __init__(self, loaded: LoadedModel, device: Device, kv_cache: KVCache, limits: Limits) -> None:
        """Record the model for steps of max_num_batched_tokens tokens and logits of max_num_seqs rows."""
        model, kernels = loaded.model, device.kernels
        most = limits.max_num_batched_tokens
        self._model = model
        self._kv_cache = kv_cache  # whose addresses the programs have
        self._most_logits = limits.max_num_seqs
        self._token_ids, self._positions = (torch.zeros(most, dtype=torch.int64) for _ in range(2))
        self._sampled, self._asked = (torch.zeros(self._most_logits, dtype=torch.int64) for _ in range(2))
        self._batch_rows = self._sampled[:0]
        self._ropes = model.new_ropes(self._positions)
        max_model_len = loaded.geometry.max_model_len
        self._plans = [kernels.new_attention_plan(shape, max_model_len, most) for shape in model.attention_shapes]
        with kernels.recording() as recording:
            self._hidden = model.forward(self._token_ids, self._ropes, kv_cache.layers, self._plans)
            recording.rows = "sampled"
            self._sampled_logits = model.logits(kernels.take_rows(self._hidden, self._sampled))
            self._best = kernels.argmax(self._sampled_logits)
            self._forward = recording.program()
        with kernels.recording() as recording:
            recording.rows = "asked"
            self._asked_logits = model.logits(kernels.take_rows(self._hidden, self._asked))
            self._logits = recording.program()

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Tensor:
        """Write the batch's keys and values to the cache; return hidden states [T, hidden] of its tokens."""
        num_tokens, num_sampled = len(batch.token_ids), len(batch.logits_rows)
        if num_sampled > self._most_logits:
            num_sampled = 0
        self._batch_rows = batch.logits_rows
        # Through numpy: PyTorch's copy lets other threads take the interpreter's lock, which a step then waits for.
        self._sampled.numpy()[:num_sampled] = batch.logits_rows.numpy()[:num_sampled]
        self._token_ids.numpy()[:num_tokens] = batch.token_ids.numpy()
        self._positions.numpy()[:num_tokens] = batch.positions.numpy()
        self._model.fill_ropes(batch.positions, batch.rope_lens, self._ropes)
        for plan in self._plans:
            plan.fill(batch.slot_mapping, batch.query_start_loc, batch.seq_lens, batch.block_tables)
        tiles = {plan.name: plan.num_tiles for plan in self._plans}
        self._forward.run(rows=num_tokens, sampled=num_sampled, **tiles)
        return self._hidden[:num_tokens]

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Return the logits [R, vocab_size] fp32 of these rows [R] int64 of the last `forward`'s hidden states.

        A row's bits do not depend on the others, so many rows can be asked for piece by piece.
        """
        num_rows = rows.shape[0]
        if num_rows > self._most_logits:
            return torch.cat([self.logits(hidden, part).clone() for part in rows.split(self._most_logits)])
        if rows is self._batch_rows:
            return self._sampled_logits[:num_rows]
        self._asked[:num_rows] = rows
        self._logits.run(asked=num_rows)
        return self._asked_logits[:num_rows]

    def argmax(self, logits: Tensor) -> IntArray:
        """Return the most likely token [R] of each row of what `logits` returned last, as `row_math.argmax` does."""
        if logits.data_ptr() == self._sampled_logits.data_ptr():
            return self._best.numpy()[: len(logits)]
        return argmax(logits)
