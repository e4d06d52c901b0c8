"""Which models to load and to unload: a pure function of what is loaded, asked for and used."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gateway_svc.several.wire import Bounds, LoadState, ModelStatus

_PATIENCE_S = 2.0
"""So long a request waits for another model to be idle; then a busy one takes no more requests, and leaves once it has
none."""
_STAY_S = 5.0
"""A busy model is not asked to leave sooner after its load: else two models that do not fit would only be loaded."""
_PRESENT = (LoadState.LOADING, LoadState.LOADED, LoadState.UNLOADING)
_ABSENT = (LoadState.UNLOADED, LoadState.FAILED)


@dataclass(eq=False, slots=True)
class ListedModel:
    """One model of the list."""

    status: ModelStatus
    num_running: int = 0
    """Requests that have it, as far as they came through the gateway one by one."""
    num_sessions: int = 0
    """Open sessions of gRPC clients, of any number of requests, or none."""
    num_in_sessions: int = 0
    """Requests of these, as the scheduler said last."""
    num_waiting: int = 0
    """Requests that wait for it."""
    wanted_at: float = 0.0
    """Since when the first of these waits, in seconds of a monotonic clock, as the others."""
    used_at: float = 0.0
    loaded_at: float = 0.0
    failed_at: float = 0.0
    num_failures: int = 0
    is_leaving: bool = False
    """Whether it takes no more requests, as others wait for its place."""
    is_ordered: bool = False
    """Whether the launcher has not yet said that it has heard the last order."""

    @property
    def is_ready(self) -> bool:
        """Whether it takes requests."""
        return self.status.state is LoadState.LOADED and not self.is_leaving

    @property
    def is_wanted(self) -> bool:
        """Whether it is to be loaded: a failure is the answer to those who waited before it."""
        has_failed = self.status.state is LoadState.FAILED and self.failed_at >= self.wanted_at
        return bool(self.num_waiting) and self.status.state in _ABSENT and not has_failed

    @property
    def is_empty(self) -> bool:
        """Whether it is loaded and no request has it."""
        return self.status.state is LoadState.LOADED and not (self.num_running or self.num_in_sessions)

    @property
    def is_idle(self) -> bool:
        """Whether nobody is about to have it either, as those are for whom it has just been loaded."""
        return self.is_empty and not self.num_waiting


@dataclass(frozen=True, slots=True)
class Orders:
    """What is to be done now."""

    load: Sequence[ListedModel] = ()
    unload: Sequence[ListedModel] = ()
    leave: Sequence[ListedModel] = ()
    """Those that are to take no more requests; they are unloaded when they have none."""


def plan(models: Iterable[ListedModel], bounds: Bounds, now: float) -> Orders:
    """The orders of this moment.

    Models are loaded in the order of their first requests, and none overtakes another that waits for a place. Whoever
    is idle and was used longest ago makes room first. A model that does not fit is loaded when nothing else is there.
    """
    models = list(models)
    wanted = sorted((m for m in models if m.is_wanted), key=lambda m: m.wanted_at)
    leaving = [m for m in models if m.is_leaving and m.is_empty]
    unload = leaving + [m for m in models if m not in leaving and _is_overdue(m, bounds, now)]
    present = [m for m in models if m.status.state in _PRESENT and m not in unload]
    staying = [m for m in present if m.status.state is not LoadState.UNLOADING and not m.is_leaving]
    load: list[ListedModel] = []
    for model in wanted:
        if _fits(model, [*present, *unload, *load], bounds):
            load.append(model)
            continue
        room = [*staying, *load]
        idle = sorted((m for m in staying if m.is_idle), key=lambda m: m.used_at)
        while idle and not _fits(model, room, bounds):
            unload.append(idle[0])
            room.remove(idle.pop(0))
        return Orders(load, unload, [] if _fits(model, room, bounds) else _busy(model, room, bounds, now))
    return Orders(load, unload)


def _busy(wanted: ListedModel, room: list[ListedModel], bounds: Bounds, now: float) -> list[ListedModel]:
    """Those that are to leave with requests still in them, the one that was used longest ago first."""
    if now - wanted.wanted_at < _PATIENCE_S:
        return []
    loaded = [m for m in room if m.status.state is LoadState.LOADED and now - m.loaded_at >= _STAY_S]
    chosen: list[ListedModel] = []
    for model in sorted(loaded, key=lambda m: m.used_at):
        if _fits(wanted, [m for m in room if m not in chosen], bounds):
            break
        chosen.append(model)
    return chosen


def _fits(model: ListedModel, beside: Sequence[ListedModel], bounds: Bounds) -> bool:
    if not beside:
        return True
    if bounds.max_loaded and len(beside) >= bounds.max_loaded:
        return False
    taken = sum(m.status.memory_bytes for m in beside)
    return not bounds.memory_bytes or taken + model.status.memory_bytes <= bounds.memory_bytes


def _is_overdue(model: ListedModel, bounds: Bounds, now: float) -> bool:
    return bool(bounds.unload_after_s) and model.is_idle and now - model.used_at >= bounds.unload_after_s
