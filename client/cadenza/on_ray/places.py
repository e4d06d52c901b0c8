"""The placement groups of executors."""

from __future__ import annotations

from collections.abc import Container
from functools import partial
from typing import Any

from cadenza.on_ray.cluster import Cluster, Group
from cadenza.on_ray.replica import Replica


class Places:
    """Gives each executor its actors.

    Executors of one rank share a group that has a place for each of the least number of executors, which Ray spreads
    over its machines; each further one has a group of its own, so that it can be taken away. Executors of several ranks
    have a group each, with a place for each rank, on one machine.
    """

    def __init__(self, cluster: Cluster, bundle: dict[str, float], size: int, placement: str, least: int) -> None:
        """bundle: what each rank has; size: ranks of an executor; placement: the option ray_placement."""
        self._cluster, self._bundle, self._size = cluster, bundle, size
        default = "SPREAD" if size == 1 else "STRICT_PACK"
        self._strategy = default if placement == "auto" else placement.replace("-", "_").upper()
        self._base = cluster.place(bundle, least, self._strategy) if size == 1 else None
        self._least = least
        self._groups: dict[str, Group] = {}
        self._kept: set[str] = set()

    def take(self, name: str) -> Replica:
        """Return an executor that is added; the first ones stay."""
        index = len(self._kept)
        if index < self._least:
            self._kept.add(name)
            if self._base is not None:
                return Replica(name, 1, partial(self._in_base, index), self._asked_for)
        group = self._groups[name] = self._cluster.place(self._bundle, self._size, self._strategy)
        return Replica(name, self._size, group.actor, self._asked_for)

    def _in_base(self, index: int, _rank: int) -> Any:
        assert self._base is not None
        return self._base.actor(index)

    def may_go(self, name: str, leaving: Container[str]) -> bool:
        """Whether an executor is beyond the least number, and does not leave already."""
        return name not in self._kept and name not in leaving

    def release(self, name: str) -> None:
        """Take the group of an executor away, if it has one of its own."""
        group = self._groups.pop(name, None)
        if group is not None:
            group.release()

    @property
    def _asked_for(self) -> str:
        """What Ray is asked for, for an executor."""
        needs = ", ".join(f"{count:g} {name}" for name, count in self._bundle.items())
        return needs if self._size == 1 else f"{needs} for each of {self._size} ranks ({self._strategy})"
