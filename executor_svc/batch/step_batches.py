"""The flat tensors of steps in which the same slots compute one token each: they are kept, and set anew in place.

Making tensors takes long in such a step, as the model's weights leave no cache warm.
"""

from __future__ import annotations

import numpy as np
import torch

from executor_svc.batch.forward_batch import ForwardBatch, build_batch
from executor_svc.batch.scheduled import Scheduled
from executor_svc.batch.slots import Slots
from executor_svc.batch.step_states import StepStates
from executor_svc.plan.arrays import IntArray

_SPARE_BLOCKS = 16
"""Entries of block tables behind those of the longest sequence: as many blocks may come before all is made anew."""


class StepBatches:
    """Builds the batch of each step as `build_batch` does; a batch is valid until the next one."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._decode: DecodeTensors | None = None

    def build(self, scheduled: Scheduled, places: IntArray | None, states: StepStates | None) -> ForwardBatch | None:
        """Arguments as in `build_batch`."""
        plain = scheduled.is_one_each and len(scheduled.slots) and self._slots.limits.num_tables == 1
        if not plain or places is not None or states is not None:
            return build_batch(self._slots, scheduled, places, states)
        decode = self._decode
        if decode is None or decode.scheduled is not scheduled or not decode.set():
            decode = self._decode = DecodeTensors(self._slots, scheduled)
            decode.set()
        return decode.batch


class DecodeTensors:
    """The tensors of one token for each of a step's S slots, without adapters, states and KV groups."""

    def __init__(self, slots: Slots, scheduled: Scheduled) -> None:
        self.scheduled = scheduled
        self._slots, self._rows = slots, scheduled.slots
        num_rows, limits = len(self._rows), slots.limits
        longest = int(slots.num_computed_tokens[self._rows].max()) + 1
        self._width = min(limits.max_blocks_per_seq, -(-longest // limits.block_size) + _SPARE_BLOCKS)
        self._num_prompt_tokens = slots.num_prompt_tokens[self._rows]
        self._token_ids, self._positions, self._mapping, self._rope_lens, self._blocks, self._offsets = (
            np.zeros(num_rows, np.int64) for _ in range(6)
        )
        self._seq_lens = np.zeros(num_rows, np.int32)
        self._tables = np.zeros((num_rows, self._width), np.int32)
        self._tables_of: int | None = None
        self.batch = ForwardBatch(
            token_ids=torch.from_numpy(self._token_ids),
            positions=torch.from_numpy(self._positions),
            slot_mapping=torch.from_numpy(self._mapping),
            query_start_loc=torch.arange(num_rows + 1, dtype=torch.int32),
            seq_lens=torch.from_numpy(self._seq_lens),
            block_tables=torch.from_numpy(self._tables),
            logits_rows=torch.arange(num_rows),
            rope_lens=torch.from_numpy(self._rope_lens),
        )

    def set(self) -> bool:
        """Set the next step; returns False for a sequence that has outgrown the block tables."""
        slots, rows, positions, size = self._slots, self._rows, self._positions, self._slots.limits.block_size
        slots.num_computed_tokens.take(rows, out=positions)
        np.divmod(positions, size, out=(self._blocks, self._offsets))
        if self._blocks.max() >= self._width:
            return False
        if self._tables_of != slots.tables_version:
            self._tables[:] = slots.block_tables[rows, : self._width]
            self._tables_of = slots.tables_version
        self._token_ids[:] = slots.token_ids[rows, positions]
        np.multiply(slots.block_tables[rows, self._blocks], size, out=self._mapping)
        self._mapping += self._offsets
        np.add(positions, 1, out=self._rope_lens)
        self._seq_lens[:] = self._rope_lens
        np.maximum(self._rope_lens, self._num_prompt_tokens, out=self._rope_lens)
        return True
