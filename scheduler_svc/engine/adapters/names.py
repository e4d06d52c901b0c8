"""The names of adapters. Options and operators give names; a first use gives an adapter a name too."""

from __future__ import annotations

import os.path
from collections.abc import Iterable, Iterator

from scheduler_svc.core.adapters.events import AdapterRegistered, AdapterRemoved
from scheduler_svc.core.errors import UnknownAdapterError
from scheduler_svc.core.scheduler import Scheduler

MAX_FIRST_USES = 1024
"""Names from first use that are kept while no request uses them, or as many as an executor has loaded, if those are
more. The least recently used go first."""


class AdapterExistsError(Exception):
    """There is an adapter of this name."""


class AdapterNames:
    """The index of each name. With a folder for first use every name that could be one of its folders is known."""

    def __init__(self, core: Scheduler, folder: str | None = None) -> None:
        """folder: where executors look for an adapter whose name is new; None: they do not."""
        self._core = core
        self._folder = None if folder is None else os.path.abspath(os.path.expanduser(folder))
        self._indexes: dict[str, int] = {}
        self._first_uses: dict[str, None] = {}
        """The names that came by first use, the least recently used first."""
        self._last_index = 0

    def __iter__(self) -> Iterator[tuple[str, int]]:
        """Names and indexes, in the order in which they came."""
        return iter(self._indexes.items())

    def __len__(self) -> int:
        return len(self._indexes)

    def find(self, name: str) -> int | None:
        """The index of a name; None: there is no such adapter yet."""
        return self._indexes.get(name)

    def register(self, name: str, path: str, *, wanted: bool = False) -> int:
        """Give an adapter a name; returns its index. Raises AdapterExistsError."""
        if name in self._indexes:
            raise AdapterExistsError(f"there is an adapter {name!r} already: unload it first")
        self._last_index += 1
        self._indexes[name] = self._last_index
        self._core.adapter_event(AdapterRegistered(self._last_index, name, path, wanted))
        return self._last_index

    def register_all(self, entries: Iterable[str]) -> None:
        """Give adapters names at the start: NAME=PATH each."""
        for entry in entries:
            name, _, path = entry.partition("=")
            self.register(name, path)

    def remove(self, name: str) -> int:
        """Take a name away; returns the index that it had. Raises UnknownAdapterError."""
        index = self._indexes.pop(name, None)
        if index is None:
            raise UnknownAdapterError(name, "name")
        self._first_uses.pop(name, None)
        self._core.adapter_event(AdapterRemoved(index))
        return index

    def use(self, name: str) -> int:
        """The index of a name that a request has, which may be its first use; raises UnknownAdapterError."""
        index = self._indexes.get(name)
        if index is not None and name not in self._first_uses:
            return index
        if index is not None and self._core.adapter_refusal(index) is not None:
            # Its folder may be another one by now.
            self.remove(name)
            index = None
        if index is None:
            if self._folder is None or not _is_folder_name(name):
                raise UnknownAdapterError(name)
            index = self.register(name, os.path.join(self._folder, name))
        self._first_uses.pop(name, None)
        self._first_uses[name] = None
        self._forget_oldest(name)
        return index

    def is_from_first_use(self, name: str, index: int) -> bool:
        """Whether a name has this index, and came by first use."""
        return name in self._first_uses and self._indexes[name] == index

    def forget(self, name: str, index: int) -> None:
        """Take a name away that has this index, if it came by first use."""
        if self.is_from_first_use(name, index):
            self.remove(name)

    def _forget_oldest(self, newest: str) -> None:
        """Keep the number of unused names from first use within its bound."""
        most = max([MAX_FIRST_USES, *(lane.adapters.max_cpu_loras for lane in self._core.lanes.values())])
        num_over = len(self._first_uses) - most
        if num_over <= 0:
            return
        users = self._core.adapters.users
        unused = (each for each in self._first_uses if each != newest and self._indexes[each] not in users)
        for name in [name for name, _ in zip(unused, range(num_over), strict=False)]:
            self.remove(name)


def _is_folder_name(name: str) -> bool:
    """Whether a name is one part of a path, not hidden, and may stand in lists of names."""
    return bool(name) and not name.startswith(".") and not any(mark in name for mark in "/\\\0,=")
