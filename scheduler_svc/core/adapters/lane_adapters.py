"""The adapters of one executor: which it has loaded, loads, unloads, or cannot load."""

from __future__ import annotations

from collections.abc import Collection, Container
from dataclasses import dataclass
from enum import Enum, auto

from scheduler_svc.core.adapters.events import AdapterFailure, AdapterLoaded
from scheduler_svc.core.adapters.turns import AdapterTurns
from scheduler_svc.core.sequences.sequence import SequenceGroup

FAILED_PRECONDITION = 9
"""The number of the gRPC status code."""
NO_ADAPTERS = AdapterFailure(
    FAILED_PRECONDITION,
    "the executor has no LoRA adapters: --max-loras is 0, or was not given on a GPU, or the model runs through "
    "transformers' own code, or is a GGUF file of Falcon-H1",
)


class AdapterState(Enum):
    """The state of an adapter on an executor. One without a state is not loaded."""

    LOADING = auto()
    LOADED = auto()
    UNLOADING = auto()
    FAILED = auto()


@dataclass(slots=True)
class LaneAdapter:
    """One adapter on one executor."""

    state: AdapterState
    error: AdapterFailure | None = None
    """Why it is FAILED, or is so after its unload: the executor takes none of its requests."""


class LaneAdapters:
    """The states by index. Loaded adapters are kept in order of use, the least recently used first."""

    def __init__(self, max_loras: int, max_cpu_loras: int) -> None:
        """max_loras: the most distinct adapters of running groups; 0: the executor has no adapters. max_cpu_loras: the
        most that are loaded, or being loaded or unloaded."""
        self.max_loras = max_loras
        self.max_cpu_loras = max_cpu_loras
        self.turns = AdapterTurns(max_loras)
        self._states: dict[int, LaneAdapter] = {}
        self._has_changed = True
        self._num_changes = 0
        """The changes of all adapters that the last commands took into account."""

    def take_change(self, num_changes: int) -> bool:
        """Whether anything has changed here, or of all adapters, since the last call. num_changes: of all adapters."""
        has_changed = self._has_changed or self._num_changes != num_changes
        self._has_changed, self._num_changes = False, num_changes
        return has_changed

    def state(self, index: int) -> LaneAdapter | None:
        """An adapter's state; None: not loaded."""
        return self._states.get(index)

    def has(self, index: int) -> bool:
        """Whether plans may name an adapter; 0, none, always."""
        found = self._states.get(index)
        return not index or (found is not None and found.state is AdapterState.LOADED and found.error is None)

    def has_place(self, group: SequenceGroup, running: Collection[int], now: float) -> bool:
        """Whether a group may be admitted now as far as its adapter goes. running: adapters of running groups."""
        index = group.spec.adapter_index
        return not index or (self.has(index) and self.turns.admits(group, running, now))

    def may_have(self, index: int) -> bool:
        """Whether plans may name an adapter, now or once it is loaded."""
        found = self._states.get(index)
        return not index or (self.max_loras > 0 and (found is None or found.error is None))

    @property
    def num_places(self) -> int:
        """Number of adapters that could be loaded now without an unload."""
        held = sum(each.state is not AdapterState.FAILED for each in self._states.values())
        return self.max_cpu_loras - held

    @property
    def num_loaded(self) -> int:
        """Number of adapters that plans may name."""
        return sum(each.state is AdapterState.LOADED and each.error is None for each in self._states.values())

    @property
    def num_loading(self) -> int:
        """Number of loads without an answer."""
        return sum(each.state is AdapterState.LOADING for each in self._states.values())

    @property
    def num_unloading(self) -> int:
        """Number of unloads without an answer: places that are about to be free."""
        return sum(each.state is AdapterState.UNLOADING for each in self._states.values())

    def start_load(self, index: int) -> None:
        """A load is sent."""
        self._states[index] = LaneAdapter(AdapterState.LOADING)

    def start_unload(self, index: int) -> None:
        """An unload is sent."""
        self._states[index].state = AdapterState.UNLOADING

    def on_loaded(self, answer: AdapterLoaded, known_hash: bytes) -> bool:
        """Take the answer to a load; returns whether plans may name the adapter from now on.

        known_hash: what the first executor answered, empty if this is the first. With another content the adapter is
        refused here, and is unloaded.
        """
        found = self._states.get(answer.index)
        if found is None or found.state is not AdapterState.LOADING:
            return False
        self._has_changed = True
        if answer.error is not None:
            found.state, found.error = AdapterState.FAILED, answer.error
            return False
        found.state = AdapterState.LOADED
        if known_hash and answer.content_hash != known_hash:
            message = (
                f"its files have changed: the executor loaded {answer.content_hash.hex()[:16]}, and the adapter is "
                f"{known_hash.hex()[:16]}"
            )
            found.error = AdapterFailure(FAILED_PRECONDITION, message)
            return False
        self.touch(answer.index)
        return True

    def on_unloaded(self, index: int) -> None:
        """Take the answer to an unload."""
        found = self._states.get(index)
        if found is None or found.state is not AdapterState.UNLOADING:
            return
        self._has_changed = True
        if found.error is None:
            del self._states[index]
        else:
            found.state = AdapterState.FAILED

    def touch(self, index: int) -> None:
        """An adapter is used now."""
        self._states[index] = self._states.pop(index)

    def on_admitted(self, group: SequenceGroup) -> None:
        """A group with an adapter, or a part of it, was admitted."""
        self.touch(group.spec.adapter_index)
        self.turns.on_admitted(group)

    def forget_errors(self, known: Container[int]) -> None:
        """Forget why adapters failed that are not known any more."""
        for index in [index for index, each in self._states.items() if each.state is AdapterState.FAILED]:
            if index not in known:
                del self._states[index]

    def reset(self) -> None:
        """The executor is another one: it has none."""
        self._states.clear()
        self._has_changed = True

    def to_unload(self, users: Container[int], names: Container[int]) -> list[int]:
        """Loaded adapters to unload whether or not their places are needed: refused ones, and unused ones without a
        name."""
        return [
            index
            for index, each in self._states.items()
            if each.state is AdapterState.LOADED
            and (each.error is not None or (index not in users and index not in names))
        ]

    def least_recently_used(self, users: Container[int]) -> list[int]:
        """Loaded adapters that no request uses, the least recently used first."""
        return [
            index
            for index, each in self._states.items()
            if each.state is AdapterState.LOADED and each.error is None and index not in users
        ]
