"""Recurrent states of slots on the device: the pages of each, and the saves of a step, among the words of the slots.

Where states stand is in their pages alone, and read there by a step's kernels. What a step saves is decided there too:
the host sends the saves that a step may come to, since drafts that it does not know of may be accepted by then.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from executor_svc.batch.step_states import StepStates
from executor_svc.gpu.kernels.slots.slots import padded
from executor_svc.gpu.kernels.states.saves import SaveTensors
from executor_svc.gpu.slots.staging import StagedChanges
from executor_svc.plan.limits import Limits


class DeviceStates:
    """Empty tensors for a model without states."""

    def __init__(self, limits: Limits, words: Tensor) -> None:
        """words: [num_words(limits)] int32 of the slots' state, zeros."""
        pages, slots = limits.pages_per_state, limits.num_slots
        tables, saves = words.split((padded(slots * pages), len(words) - padded(slots * pages)))
        self.tables = tables[: slots * pages].view(slots, pages)
        """[num_slots, P] int32."""
        self.saves = SaveTensors.of(saves, limits.max_num_seqs, _most_saves(limits), pages)
        self._sent = False

    @staticmethod
    def num_words(limits: Limits) -> int:
        """Return the words of the state that they take."""
        pages = limits.pages_per_state
        if not pages:
            return SaveTensors.num_words(limits.max_num_seqs, 0, 0)
        saves = SaveTensors.num_words(limits.max_num_seqs, _most_saves(limits), pages)
        return padded(limits.num_slots * pages) + saves

    def put_saves(self, states: StepStates | None, changes: StagedChanges) -> None:
        """Add the saves of the next step, if they differ from those of the last: mostly, both have none.

        states: with all that the step may come to; None: none. Raises ValueError for more saves than the pool holds.
        """
        count = 0 if states is None else len(states.save_positions)
        if not count and not self._sent:
            return
        starts = np.zeros(len(self.saves.starts), np.int32)
        if states is not None and count:
            if count > len(self.saves.positions):
                raise ValueError(f"{count} states to save in a step: the pool has room for {len(self.saves.positions)}")
            given = states.save_starts.numpy()
            starts[: len(given)], starts[len(given) :] = given, count
            changes.write(int(self.saves.positions.storage_offset()), states.save_positions.numpy())
            changes.write(int(self.saves.tables.storage_offset()), states.save_tables.numpy().ravel())
        changes.write(int(self.saves.starts.storage_offset()), starts)
        self._sent = count > 0


def _most_saves(limits: Limits) -> int:
    """Return the most saves that have pages of their own."""
    return limits.num_device_blocks // limits.pages_per_state if limits.pages_per_state else 0
