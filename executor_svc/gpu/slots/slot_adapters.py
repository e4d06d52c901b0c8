"""The adapters of steps of slots on a GPU: the host knows the slots' places, the device sorts the rows of a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from executor_svc.batch.scheduled import Scheduled
from executor_svc.batch.slots import Slots
from executor_svc.device.adapters import AdapterRows
from executor_svc.gpu.kernels.lora.tables import GpuAdapterRows, RowTable, sort_rows, sort_tokens
from executor_svc.gpu.kernels.slots.slots import StepSizes
from executor_svc.gpu.slots.device_slots import DeviceSlots
from executor_svc.models.recorded import RecordedModel
from executor_svc.worker.model_adapters import ModelAdapterLoader


class StepAdapters:
    """Writes the tables of a recorded model's rows, from what is in the step tensors; each call is one launch."""

    def __init__(self, slots: DeviceSlots, recorded: RecordedModel) -> None:
        """recorded: with adapters."""
        tables = recorded.adapter_tables
        assert tables is not None
        self._slots = slots
        self._tokens, self._sampled = _table_of(tables.tokens), _table_of(tables.sampled)
        self._requested = _table_of(tables.requested)
        most = slots.buffers.most.num_tokens
        self._token_places = torch.full((most,), -1, dtype=torch.int32, device=slots.state.words.device)

    def sort_tokens(self, sizes: StepSizes) -> None:
        """Enqueue the table of the tokens of a step of these sizes, whose inputs are built."""
        sort_tokens(self._slots.buffers, sizes, self._slots.state.adapter_places, self._token_places, self._tokens)

    def sort_logits(self, sizes: StepSizes) -> None:
        """Enqueue the table of its rows of logits, after that of its tokens."""
        sort_rows(self._token_places, self._slots.inputs(sizes).logits_rows, self._sampled)

    def sort_requested(self, tokens: Tensor) -> None:
        """Enqueue the table of rows that are requested after it, [R] int64 each one's token."""
        sort_rows(self._token_places, tokens, self._requested)


class SlotAdapters:
    """Finds on the host whether a step has adapters, and sends their places where they have changed."""

    def __init__(self, loader: ModelAdapterLoader | None, slots: DeviceSlots) -> None:
        self._loader, self._slots = loader, slots
        self._everywhere = False

    def choose(self, slots: Slots, scheduled: Scheduled) -> bool:
        """Return whether a scheduled slot has an adapter; then places are filled, and go with the step's changes."""
        if self._everywhere:
            places = np.zeros(len(slots.admitted), np.int64)
        elif self._loader is None or (found := self._loader.places_of(slots)) is None:
            return False
        else:
            places = found
        if not (places[scheduled.slots] >= 0).any():
            return False
        self._slots.set_adapter_places(places)
        return True

    @contextmanager
    def everywhere(self) -> Iterator[None]:
        """Inside, all slots have the adapter of the first place, which is empty at the start: for warm-up."""
        self._everywhere = True
        try:
            yield
        finally:
            self._everywhere = False


def _table_of(rows: AdapterRows) -> RowTable:
    assert isinstance(rows, GpuAdapterRows)
    return rows.table
