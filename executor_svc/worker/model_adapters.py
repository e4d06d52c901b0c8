"""The adapters of a model: read and packed beside steps, and put into the few places of a step when slots need them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from cadenza_common.plan.errors import InvalidPlan
from cadenza_common.plan.plan import StepPlan
from executor_svc.batch.slots import Slots
from executor_svc.device.adapters import NO_PLACE
from executor_svc.models.adapters.contents import AdapterLimits
from executor_svc.models.adapters.places import ModelAdapters, PackedAdapter
from executor_svc.models.adapters.reading import BaseTable, read_adapter
from executor_svc.models.folder import LoaderError
from executor_svc.plan.arrays import IntArray
from executor_svc.worker.adapters import AdapterRefused, LoadedAdapter, find_folder


@dataclass(frozen=True, slots=True)
class _HeldAdapter:
    adapter: LoadedAdapter
    packed: PackedAdapter


class ModelAdapterLoader:
    """Implements `AdapterLoader`. The device's thread asks for places between steps; one other thread loads."""

    def __init__(
        self,
        adapters: ModelAdapters,
        max_loaded: int,
        *,
        roots: Sequence[Path] | None = None,
        base_table: BaseTable | None = None,
    ) -> None:
        """roots: folders below which adapters may be read; None: any. base_table: as in `read_adapter`."""
        self.num_places = adapters.sizes.num_places
        self.max_loaded = max_loaded
        self.max_bytes = max_loaded * adapters.bytes_of_rank(adapters.sizes.max_rank)
        """What so many adapters of the largest rank take, packed; more is never taken."""
        self._adapters = adapters
        self._roots = roots
        self._base_table = base_table
        self._held: dict[int, _HeldAdapter] = {}
        self._dropped: dict[int, _HeldAdapter] = {}
        """Adapters that `drop` was called for. They stay until a step finds that no slot uses them."""
        self._lock = threading.Lock()
        self._places: dict[int, int] = {}
        """Places by index, the least recently used first."""
        self._free = list(range(self.num_places))

    @property
    def loaded(self) -> list[LoadedAdapter]:
        """The loaded adapters."""
        with self._lock:
            return [held.adapter for held in self._held.values()]

    def load(self, index: int, name: str, path: str) -> LoadedAdapter:
        """Read an adapter's files and pack them; raises AdapterRefused."""
        with self._lock:
            known, count = self._held.get(index), len(self._held)
        if known is not None:
            return known.adapter
        if count >= self.max_loaded:
            raise AdapterRefused("full", f"adapter {name}: max_cpu_loras = {self.max_loaded} adapters are loaded")
        torch.set_num_threads(1)  # of this thread, and of those that start later: the others are for the steps
        held = self._read(index, name, path)
        with self._lock:
            self._check_room(name, held)
            self._held[index] = held
        return held.adapter

    def unload(self, index: int) -> None:
        """As in `AdapterLoader`."""
        self._leave_place(index)
        with self._lock:
            self._held.pop(index, None)

    def drop(self, index: int) -> None:
        """As `unload`, on any thread beside steps: the first one after it in which no slot has the adapter empties its
        place."""
        with self._lock:
            held = self._held.pop(index, None)
            if held is not None:
                self._dropped[index] = held

    def clear(self) -> None:
        """As in `AdapterLoader`."""
        for adapter in self.loaded:
            self.unload(adapter.index)

    def check(self, plan: StepPlan) -> None:
        """Raise InvalidPlan for a plan that admits a sequence whose adapter is not loaded."""
        for sequence in plan.admitted:
            index = sequence.adapter_index
            if index and index not in self._held:
                raise InvalidPlan(f"admitted: adapter {index} is not loaded")

    def places_of(self, slots: Slots) -> IntArray | None:
        """Return [num_slots] the place of each slot's adapter, NO_PLACE without one; None: no slot has one.

        An adapter without a place takes a free one, or the place of the least recently used adapter that no slot has.
        """
        if not (self._held or self._dropped):  # `check` lets no other adapter in
            return None
        indexes = np.where(slots.admitted, slots.adapter_index, 0)
        if self._dropped:
            self._empty_dropped(indexes)
        if not indexes.any():
            return None
        used, which = np.unique(indexes, return_inverse=True)
        places = np.array([NO_PLACE if not index else self._place(index, used) for index in used.tolist()], np.int64)
        return places[which]

    def _place(self, index: int, used: IntArray) -> int:
        """Return an adapter's place, filled with it. used: the indexes of all slots' adapters."""
        place = self._places.pop(index, None)
        if place is None:
            if not self._free:
                self._free.append(self._places.pop(next(each for each in self._places if each not in used)))
            place = self._free.pop()
            held = self._held.get(index) or self._dropped[index]
            self._adapters.load(place, held.packed)
        self._places[index] = place
        return place

    def _empty_dropped(self, used: IntArray) -> None:
        """Empty the places of what was dropped. used: the indexes of all slots' adapters."""
        with self._lock:
            # What is loaded again has another content: the index is of another scheduler, after all slots were cleared.
            gone = [index for index in self._dropped if index not in used or index in self._held]
            for index in gone:
                del self._dropped[index]
        for index in gone:
            self._leave_place(index)

    def _leave_place(self, index: int) -> None:
        place = self._places.pop(index, None)
        if place is not None:
            self._adapters.clear(place)
            self._free.append(place)

    def _check_room(self, name: str, new: _HeldAdapter) -> None:
        """Raise AdapterRefused for an adapter that would take memory which was not set aside."""
        taken = sum(held.packed.num_bytes for held in self._held.values())
        left = max(0, self.max_bytes - taken)
        if new.packed.num_bytes > left:
            raise AdapterRefused(
                "full",
                f"adapter {name} takes {new.packed.num_bytes} bytes: {left} are left of those for --max-cpu-loras "
                "adapters of --max-lora-rank",
            )

    def _read(self, index: int, name: str, path: str) -> _HeldAdapter:
        folder = find_folder(name, path, self._roots)
        limits = AdapterLimits(max_rank=self._adapters.sizes.max_rank)
        try:
            adapter = read_adapter(folder, self._adapters.spec, limits, base_table=self._base_table, roots=self._roots)
            packed = self._adapters.pack(adapter)
        except (LoaderError, ValueError) as error:
            raise AdapterRefused("invalid", f"{name}: {error}") from error
        loaded = LoadedAdapter(index, adapter.content_hash, packed.num_bytes, adapter.max_rank)
        return _HeldAdapter(loaded, packed)
