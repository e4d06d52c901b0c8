"""The rows of a step that have adapters, on a GPU: sorted by place on the device."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from executor_svc.gpu.kernels.lora.tables import RowTable, num_tiles, sort_rows
from executor_svc.plan.arrays import IntArray

_names = itertools.count()


class GpuAdapterRows:
    """Implements `device.adapters.AdapterRows`; for steps of slots, `slot_adapters.StepAdapters` writes the table."""

    def __init__(self, max_rows: int, num_places: int, device: torch.device) -> None:
        """Take the memory of the table. Raises ValueError naming the option."""
        self.name = f"adapter tiles{next(_names)}"
        self.num_tiles = 0
        self.table = RowTable.empty(max_rows, num_places, device)
        self._device = device

    def fill(self, places: IntArray) -> None:
        """As in `AdapterRows`; enqueues the sort, and a copy."""
        self.num_tiles = 0
        if (places >= 0).any():
            self.num_tiles = num_tiles(len(places), self.table.max_loras)
            there = torch.from_numpy(places.astype(np.int32)).to(self._device)
            sort_rows(there, torch.arange(len(places), device=self._device), self.table)
