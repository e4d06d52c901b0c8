"""Runs a model over the flat tensors of a step: operations are recorded once and replayed on each step's rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from executor_svc.batch.forward_batch import ForwardBatch
from executor_svc.device.interface import Device
from executor_svc.device.kv_cache import KVCache
from executor_svc.device.states import StatePlan
from executor_svc.models.adapters.places import ModelAdapters
from executor_svc.models.base import CausalLM
from executor_svc.models.recorded import RecordedModel
from executor_svc.plan.arrays import IntArray
from executor_svc.plan.limits import Limits
from executor_svc.sampling.row_math import argmax


class ModelRunner:
    """A model and its cache on the CPU; for use by one thread.

    It returns views of its own memory. Hidden states, and the logits of the batch's own logits_rows, which are computed
    with them, are valid until the next `forward`; other logits are valid until the next `logits`.
    """

    def __init__(
        self,
        model: CausalLM,
        device: Device,
        kv_cache: KVCache,
        limits: Limits,
        *,
        is_draft: bool = False,
        state_layers: Sequence[int] = (),
        adapters: ModelAdapters | None = None,
    ) -> None:
        """Record the model for steps of max_num_batched_tokens tokens and logits of max_num_seqs rows.

        is_draft: the model drafts beside its target, with the cache's draft layers. state_layers: a head reads
        the states of these layers, as `RecordedModel` takes them. adapters: the model was built with these; a batch's
        adapter_places choose among them.
        """
        self._model = model
        self._headers = None if is_draft else kv_cache.state_headers
        self.functions = device.functions
        sizes = (limits.max_num_batched_tokens, limits.max_num_batched_tokens, limits.max_num_seqs)
        tensors = (torch.zeros(size, dtype=torch.int64) for size in sizes)
        self._recorded = RecordedModel(
            model,
            device.kernels,
            kv_cache,
            limits,
            *tensors,
            is_draft=is_draft,
            state_layers=state_layers,
            name="draft " if is_draft else "",
            adapters=adapters,
        )
        # Through numpy: PyTorch's copy releases the interpreter's lock, and the step would wait to get it back.
        self._sampled, self._token_ids, self._positions, self._best = (
            tensor.numpy()
            for tensor in (
                self._recorded.sampled,
                self._recorded.token_ids,
                self._recorded.positions,
                self._recorded.best,
            )
        )
        self._places: IntArray | None = None
        self.states = self._recorded.states
        """The states of the last step for a head; None without state_layers."""
        self._max_logits = limits.max_num_seqs
        self._batch_rows = self._recorded.sampled[:0]
        self._batch: ForwardBatch | None = None
        self._arrays: tuple[NDArray[np.int64], ...] = ()
        """The logits rows, token ids and positions of the last batch, as arrays: decodes come in the same memory."""
        self._num_tokens = self._num_sampled = 0
        self._hidden, self._logits = self._recorded.hidden[:0], self._recorded.sampled_logits[:0]

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Write the batch's keys and values to the cache and return the hidden states [T, hidden] of its tokens.

        Recurrent states stand at the batch's ends then, in their headers too, and the batch's copies of them are made.
        """
        if torch.is_inference_mode_enabled():  # To enter it again takes longer than to ask.
            return self._forward(batch)
        with torch.inference_mode():
            return self._forward(batch)

    def _forward(self, batch: ForwardBatch) -> Tensor:
        if batch is not self._batch:
            self._batch, self._batch_rows = batch, batch.logits_rows
            self._arrays = batch.logits_rows.numpy(), batch.token_ids.numpy(), batch.positions.numpy()
        recorded, (rows, token_ids, positions) = self._recorded, self._arrays
        num_tokens, num_sampled = len(token_ids), len(rows)
        if num_sampled > self._max_logits:
            num_sampled = 0
        if (num_tokens, num_sampled) != (self._num_tokens, self._num_sampled):
            self._num_tokens, self._num_sampled = num_tokens, num_sampled
            self._hidden, self._logits = recorded.hidden[:num_tokens], recorded.sampled_logits[:num_sampled]
        self._sampled[:num_sampled] = rows[:num_sampled]
        self._token_ids[:num_tokens] = token_ids
        self._positions[:num_tokens] = positions
        self._model.fill_ropes(batch.positions, batch.rope_lens, recorded.ropes)
        for plan in recorded.plans:
            plan.fill(batch.slot_mapping, batch.query_start_loc, batch.seq_lens, batch.block_tables)
        if recorded.state_plan is not None:
            _fill_states(recorded.state_plan, batch)
        self._set_adapters(batch, num_sampled)
        recorded.run(num_tokens, num_sampled)
        if self._headers is not None and batch.states is not None:
            self._headers.write(batch.states.tables, batch.states.ends)
            self._headers.write(batch.states.save_tables, batch.states.save_positions)
        return self._hidden

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Return the logits [R, vocab_size] fp32 of these rows [R] int64 of the last `forward`'s hidden states.

        A row's bits do not depend on the other rows, so many rows are computed in pieces.
        """
        if rows is self._batch_rows and self._num_sampled:
            return self._logits
        recorded, num_rows = self._recorded, rows.shape[0]
        if num_rows > self._max_logits:
            return torch.cat([self.logits(hidden, part).clone() for part in rows.split(self._max_logits)])
        recorded.requested[:num_rows] = rows
        recorded.run_logits(num_rows, None if self._places is None else self._places[rows.numpy()])
        return recorded.requested_logits[:num_rows]

    def _set_adapters(self, batch: ForwardBatch, num_sampled: int) -> None:
        places = batch.adapter_places
        sampled = None if places is None else places[batch.logits_rows.numpy()[:num_sampled]]
        self._places = places if self._recorded.set_adapters(places, sampled) else None

    def argmax(self, logits: Tensor) -> IntArray:
        """Return the most likely token [R] of each row of the last logits, as `row_math.argmax` does."""
        if logits is self._logits:
            return self._best[: self._num_sampled]
        return argmax(logits)


def _fill_states(plan: StatePlan, batch: ForwardBatch) -> None:
    states = batch.states
    assert states is not None, "a model with recurrent layers needs the states of a batch"
    plan.fill(
        batch.query_start_loc,
        states.context_lens,
        states.folded,
        states.tables,
        states.save_starts,
        states.save_positions,
        states.save_tables,
    )
