"""The adapters of the core over a real executor, moved on step by step: loads that take some steps, and unloads."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from executor_svc.worker.adapters import LoadedAdapter
from executor_svc.worker.model_adapters import ModelAdapterLoader
from scheduler_svc.core.adapters.events import AdapterLoaded, AdapterRegistered, AdapterUnloaded
from scheduler_svc.core.scheduler import Scheduler

_MOST_STEPS = 4
"""That a load takes."""


class CoreAdapters:
    """Loads and unloads what the core wants, on its only lane."""

    def __init__(self, core: Scheduler, folders: Mapping[int, Path], make: Callable[[], ModelAdapterLoader]) -> None:
        """folders: by index."""
        self._core, self._make = core, make
        self._rng = random.Random(5)
        self._loads: deque[tuple[int, AdapterRegistered]] = deque()
        """Steps that are left, and what is loaded then."""
        self.loader = make()
        self.num_unloads = 0
        for index, folder in sorted(folders.items()):
            core.adapter_event(AdapterRegistered(index, f"adapter {index}", str(folder)))

    def step(self, settle: Callable[[], None]) -> None:
        """Carry out commands. settle: runs the plans in flight, which come before an unload."""
        commands = self._core.adapter_commands(0)
        for index in commands.unloads:
            settle()
            self.loader.unload(index)
            self.num_unloads += 1
            self._core.adapter_event(AdapterUnloaded(index))
        self._loads.extend((self._rng.randint(0, _MOST_STEPS), each) for each in commands.loads)
        for _ in range(len(self._loads)):
            left, registered = self._loads.popleft()
            if left:
                self._loads.append((left - 1, registered))
                continue
            found = self.loader.load(registered.index, registered.name, registered.path)
            self._core.adapter_event(_answer(found))

    def restart(self) -> None:
        """A new executor has none."""
        self.loader = self._make()

    def open_session(self, same: bool) -> None:
        """Tell the core of a new session what is loaded; same: with the same executor, which has its memory."""
        self._loads.clear()
        loaded = [_answer(each) for each in self.loader.loaded]
        self._core.session_opened(0, same_incarnation=same, keeps_kv=same, adapters=loaded)


def _answer(found: LoadedAdapter) -> AdapterLoaded:
    return AdapterLoaded(found.index, found.content_hash, found.num_bytes, found.rank)
