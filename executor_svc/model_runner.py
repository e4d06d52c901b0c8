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
        """Write the batch's keys and values to the cache; return hidden states [T or 2, hidden] of its tokens."""
        with torch.inference_mode():
            plans = [
                self._device.kernels.plan_attention(
                    shape,
                    self._kv_cache.block_size,
                    batch.slot_mapping,
                    batch.query_start_loc,
                    batch.seq_lens,
                    batch.block_tables,
                )
                for shape in self._model.attention_shapes
            ]
            return self._model.forward(
                _at_least_two(batch.token_ids),
                _at_least_two(batch.positions),
                _at_least_two(batch.rope_lens),
                self._kv_cache.layers,
                plans,
            )

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Return the logits [R, vocab_size] fp32 of these rows [R] int64 of hidden states.

        A row's bits do not depend on the others, so many rows can be asked for piece by piece.
        """
        # Made outside of inference mode, so that callers may write into it.
        logits = torch.empty(len(rows), self._vocab_size, device=self._device.torch_device)
        if len(rows):
            with torch.inference_mode():
                wanted = _at_least_two(hidden.index_select(0, rows.to(hidden.device)))
                logits.copy_(self._model.logits(wanted)[: len(rows)])
        return logits
