"""Runs a model over the flat tensors of a step."""

from __future__ import annotations

import torch
from torch import Tensor

from executor_svc.device import Device
from executor_svc.input_batch import ForwardBatch
from executor_svc.kernels.interface import MIN_ROWS
from executor_svc.kv_cache import KVCache
from executor_svc.loader import LoadedModel


def _at_least_two(rows: Tensor) -> Tensor:
    """Repeat a single row: one alone would be computed by other code, with other bits."""
    return rows if rows.shape[0] >= MIN_ROWS else rows.expand(MIN_ROWS, *rows.shape[1:]).contiguous()


class ModelRunner:
    """A model and its cache on a device; for use by one thread."""

    def __init__(self, loaded: LoadedModel, device: Device, kv_cache: KVCache) -> None:
        self._model = loaded.model
        self._vocab_size = loaded.geometry.vocab_size
        self._device = device
        self._kv_cache = kv_cache

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Write the batch's keys and values to the cache and return logits [R, vocab_size] fp32 of its logits_rows."""
        num_logits = batch.logits_rows.shape[0]
        # Made outside of inference mode, so that callers may write into it.
        logits = torch.empty(num_logits, self._vocab_size, device=self._device.torch_device)
        if not batch.token_ids.shape[0]:
            return logits
        with torch.inference_mode():
            plan = self._device.kernels.plan_attention(
                self._model.attention_shape,
                self._kv_cache.block_size,
                batch.slot_mapping,
                batch.query_start_loc,
                batch.seq_lens,
                batch.block_tables,
            )
            token_ids, positions = _at_least_two(batch.token_ids), _at_least_two(batch.positions)
            hidden = self._model.forward(token_ids, positions, self._kv_cache.layers, plan)
            if num_logits:
                wanted = _at_least_two(hidden.index_select(0, batch.logits_rows))
                logits.copy_(self._model.logits(wanted)[:num_logits])
        return logits
