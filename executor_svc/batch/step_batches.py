"""The flat tensors of steps in which the same slots compute one token each: they are kept, and set anew in place.

Making tensors takes long in such a step, as the model's weights leave no cache warm.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from executor_svc.batch.forward_batch import ForwardBatch, build_batch
from executor_svc.batch.scheduled import Scheduled
from executor_svc.batch.slots import Slots
from executor_svc.batch.step_states import StepStates
from executor_svc.plan.arrays import IntArray

_SPARE_BLOCKS = 16
"""Entries of block tables behind those of the longest sequence: as many blocks may come before all is made anew."""
_FEW_ROWS = 4
"""Rows, at most, that are set one by one: with caches that weights have passed through, an operation of numpy takes
some 20 us, and may leave the interpreter's lock to another thread."""


class StepBatches:
    """Builds the batch of each step as `build_batch` does; a batch is valid until the next one."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._decode: DecodeTensors | None = None

    def build(self, scheduled: Scheduled, places: IntArray | None, states: StepStates | None) -> ForwardBatch | None:
        """Arguments as in `build_batch`."""
        if not scheduled.is_one_each or not len(scheduled.slots):
            return build_batch(self._slots, scheduled, places, states)
        decode = self._decode
        if decode is None or decode.scheduled is not scheduled or not decode.set():
            decode = self._decode = DecodeTensors(self._slots, scheduled)
            decode.set()
        if places is None and states is None:
            return decode.batch
        own = None if places is None else places[scheduled.slots]
        return replace(decode.batch, adapter_places=own, states=states)


class DecodeTensors:
    """The tensors of one token for each of a step's S slots, without adapters and states."""

    def __init__(self, slots: Slots, scheduled: Scheduled) -> None:
        self.scheduled = scheduled
        self._slots, self._rows = slots, scheduled.slots
        num_rows, limits = len(self._rows), slots.limits
        longest = int(slots.num_computed_tokens[self._rows].max()) + 1
        self._width = min(limits.max_blocks_per_seq, -(-longest // limits.block_size) + _SPARE_BLOCKS)
        self._num_prompt_tokens = slots.num_prompt_tokens[self._rows]
        self._each = list(zip(self._rows.tolist(), self._num_prompt_tokens.tolist(), strict=True))
        self._token_ids, self._positions, self._rope_lens = (np.zeros(num_rows, np.int64) for _ in range(3))
        self._mapping = np.zeros((limits.num_tables, num_rows), np.int64)
        self._seq_lens = np.zeros(num_rows, np.int32)
        self._tables = np.zeros((num_rows, limits.num_tables, self._width), np.int32)
        self._tables_of: int | None = None
        only = limits.num_tables == 1
        self.batch = ForwardBatch(
            token_ids=torch.from_numpy(self._token_ids),
            positions=torch.from_numpy(self._positions),
            slot_mapping=torch.from_numpy(self._mapping[0] if only else self._mapping),
            query_start_loc=torch.arange(num_rows + 1, dtype=torch.int32),
            seq_lens=torch.from_numpy(self._seq_lens),
            block_tables=torch.from_numpy(self._tables[:, 0] if only else self._tables),
            logits_rows=torch.arange(num_rows),
            rope_lens=torch.from_numpy(self._rope_lens),
        )

    def set(self) -> bool:
        """Set the next step; returns False for a sequence that has outgrown the block tables."""
        slots = self._slots
        if not (self._set_each() if len(self._each) <= _FEW_ROWS else self._set_all()):
            return False
        if self._tables_of != slots.tables_version:
            self._tables[:] = slots.tables[self._rows, :, : self._width]
            self._tables_of = slots.tables_version
        return True

    def _set_each(self) -> bool:
        """Set all but the tables, row by row."""
        slots, size, mapping = self._slots, self._slots.limits.block_size, self._mapping
        for row, (slot, num_prompt_tokens) in enumerate(self._each):
            position = slots.num_computed_tokens.item(slot)
            block, offset = divmod(position, size)
            if block >= self._width:
                return False
            self._positions[row] = position
            self._token_ids[row] = slots.token_ids.item(slot, position)
            self._seq_lens[row] = position + 1
            self._rope_lens[row] = max(position + 1, num_prompt_tokens)
            for table in range(len(mapping)):
                mapping[table, row] = slots.tables.item(slot, table, block) * size + offset
        return True

    def _set_all(self) -> bool:
        """As `_set_each`, for all rows at once."""
        slots, rows, size = self._slots, self._rows, self._slots.limits.block_size
        positions = slots.num_computed_tokens.take(rows, out=self._positions)
        blocks, offsets = np.divmod(positions, size)
        if blocks.max() >= self._width:
            return False
        self._token_ids[:] = slots.token_ids[rows, positions]
        np.multiply(slots.tables[rows, :, blocks].T, size, out=self._mapping)
        self._mapping += offsets
        np.add(positions, 1, out=self._rope_lens)
        self._seq_lens[:] = self._rope_lens
        np.maximum(self._rope_lens, self._num_prompt_tokens, out=self._rope_lens)
        return True
