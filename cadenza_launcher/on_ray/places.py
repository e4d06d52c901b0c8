"""The placement groups of executors."""

from __future__ import annotations

from collections.abc import Container
from functools import partial
from typing import Any

from cadenza_launcher.on_ray.cluster import PlacementGroup, RayCluster
from cadenza_launcher.on_ray.replica import Replica
from cadenza_launcher.on_ray.shares import Placement


class Places:
    """Gives each executor its actors.

    Executors with one actor share a group that has a place for each of the least number of executors; each further one
    has a group of its own, so that it can be taken away. Executors of several actors have a group each, with a place
    for each of these.
    """

    def __init__(self, cluster: RayCluster, placement: Placement, least: int) -> None:
        self._cluster, self._placement, self._least = cluster, placement, least
        self._base = self._group(least) if placement.num_actors == 1 else None
        self._groups: dict[str, PlacementGroup] = {}
        self._kept: set[str] = set()

    def take(self, name: str) -> Replica:
        """Return an executor that is added; the first ones stay."""
        index = len(self._kept)
        if index < self._least:
            self._kept.add(name)
            if self._base is not None:
                return Replica(name, 1, partial(self._in_base, index), self._asked_for)
        group = self._groups[name] = self._group(self._placement.num_actors)
        return Replica(name, self._placement.num_actors, group.actor, self._asked_for)

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

    def _group(self, count: int) -> PlacementGroup:
        return self._cluster.place(self._placement.bundle, count, self._placement.strategy)

    @property
    def _asked_for(self) -> str:
        """What Ray is asked for, for an executor."""
        asked = self._placement
        needs = ", ".join(f"{count:g} {name}" for name, count in asked.bundle.items())
        return needs if asked.num_actors == 1 else f"{needs} for each of {asked.num_actors} ranks ({asked.strategy})"
