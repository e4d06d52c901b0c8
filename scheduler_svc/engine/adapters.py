"""The adapters that requests can name: loads, unloads, and the requests that cannot have theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from scheduler_svc.core.adapters.events import AdapterError, AdapterRegistered, AdapterRemoved
from scheduler_svc.core.adapters.lane_adapters import FAILED_PRECONDITION, AdapterState
from scheduler_svc.core.errors import PreconditionError, RequestRejectedError, UnknownAdapterError
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.types import RequestKey, RequestSpec
from scheduler_svc.engine.fleet.changes import Changes
from scheduler_svc.engine.live_request import LiveRequest
from scheduler_svc.plan_loop.clock import Clock, Timer

FIELD = "adapter"
"""The field of GenerateRequest that names an adapter."""


class AdapterExistsError(Exception):
    """There is an adapter of this name."""


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """An adapter that has a name; fields as in admin.proto."""

    name: str
    path: str
    index: int
    content_hash: bytes
    num_requests: int
    states: Sequence[tuple[int, AdapterState | None, str]]
    """On each executor that has adapters: its id, the state (None: not loaded), the error."""


class Adapters:
    """Gives adapters names and indexes, and ends requests whose adapter no executor can load, or none has in time."""

    def __init__(
        self,
        core: Scheduler,
        clock: Clock,
        unfinished: Mapping[RequestKey, LiveRequest],
        fail: Callable[[LiveRequest, Exception], None],
        *,
        load_timeout_s: float,
    ) -> None:
        """unfinished: the engine's own, which changes. fail: ends an unfinished request with an error."""
        self._core = core
        self._clock = clock
        self._unfinished = unfinished
        self._fail = fail
        self._load_timeout_s = load_timeout_s
        self._names: dict[str, int] = {}
        self._last_index = 0
        self._num_answers = 0
        self._changes = Changes()
        self._timers: dict[RequestKey, Timer] = {}
        """For the next look at each unfinished request that has an adapter."""

    # --- names -------------------------------------------------------------------------------------------------------

    def register(self, name: str, path: str, *, wanted: bool = False) -> int:
        """Give an adapter a name; executors load it from now on, while they have places, or first if it is `wanted`.

        Returns its index; raises AdapterExistsError.
        """
        if name in self._names:
            raise AdapterExistsError(f"there is an adapter {name!r} already: unload it first")
        self._last_index += 1
        self._names[name] = self._last_index
        self._core.adapter_event(AdapterRegistered(self._last_index, name, path, wanted))
        return self._last_index

    def register_all(self, entries: Iterable[str]) -> None:
        """Give adapters names at the start: NAME=PATH each."""
        for entry in entries:
            name, _, path = entry.partition("=")
            self.register(name, path)

    def unload(self, name: str) -> None:
        """Take an adapter's name away; raises UnknownAdapterError. Its requests go on."""
        index = self._names.pop(name, None)
        if index is None:
            raise UnknownAdapterError(name, "name")
        self._core.adapter_event(AdapterRemoved(index))

    def index_of(self, name: str) -> int:
        """The index of the adapter with this name; raises UnknownAdapterError."""
        index = self._names.get(name)
        if index is None:
            raise UnknownAdapterError(name)
        return index

    async def loaded(self, name: str) -> AdapterInfo:
        """Wait until an executor has loaded an adapter; raises RequestRejectedError if none can, and takes its name."""
        index = self.index_of(name)
        await self._changes.until(lambda: self._is_settled(index))
        error = self._error(index)
        if error is not None:
            if self._names.get(name) == index:
                self.unload(name)
            kind = PreconditionError if error.code == FAILED_PRECONDITION else RequestRejectedError
            raise kind("path", error.message)
        return self._info(name, index)

    def infos(self) -> list[AdapterInfo]:
        """The adapters that have names."""
        return [self._info(name, index) for name, index in self._names.items()]

    # --- requests ----------------------------------------------------------------------------------------------------

    def check(self, spec: RequestSpec) -> None:
        """Raise PreconditionError for a request whose adapter no executor can load."""
        if spec.adapter_index in self._core.adapters.adapters:
            error = self._core.adapter_refusal(spec.adapter_index, spec.adapter_hash)
            if error is not None:
                raise _refused(error)

    def on_added(self, live: LiveRequest) -> None:
        """A request was queued, or waits for its adapter: for so long."""
        if live.request.spec.adapter_index:
            self._watch(live.request.spec.key, live.times.arrival_ns)

    def on_ended(self, key: RequestKey) -> None:
        """A request has ended."""
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()

    def on_outputs(self) -> bool:
        """End the requests whose adapter no executor can load; whether executors have answered since the last call."""
        num_answers = self._core.adapters.num_answers
        if num_answers == self._num_answers:
            return False
        self._num_answers = num_answers
        if self._core.adapters.users:
            for live in list(self._unfinished.values()):
                spec = live.request.spec
                error = self._core.adapter_refusal(spec.adapter_index, spec.adapter_hash)
                if error is not None:
                    self._fail(live, _refused(error))
        self._changes.notify()
        return True

    def _watch(self, key: RequestKey, arrival_ns: int) -> None:
        was_waiting = self._waits(key)
        self._timers[key] = self._clock.call_later(
            self._load_timeout_s, partial(self._look, key, arrival_ns, was_waiting)
        )

    def _look(self, key: RequestKey, arrival_ns: int, was_waiting: bool) -> None:
        """End a request that has waited for its adapter for this long; look again at one that began to wait later."""
        live = self._unfinished.get(key)
        if live is None or live.times.arrival_ns != arrival_ns:
            return
        is_connected = any(lane.is_open for lane in self._core.lanes.values())
        if was_waiting and is_connected and self._waits(key):
            name = self._core.adapters.adapters[live.request.spec.adapter_index].registered.name
            text = f"adapter {name!r} was not loaded within {self._load_timeout_s:g} s"
            self._fail(live, PreconditionError(FIELD, text))
        else:
            self._watch(key, arrival_ns)

    def _waits(self, key: RequestKey) -> bool:
        group = self._core.groups.get(key)
        return group is not None and group in self._core.adapters.parked

    # --- states ------------------------------------------------------------------------------------------------------

    def _is_settled(self, index: int) -> bool:
        adapter = self._core.adapters.adapters.get(index)
        if adapter is None or self._error(index) is not None:
            return True
        return any(lane.adapters.has(index) for lane in self._core.lanes.values())

    def _error(self, index: int) -> AdapterError | None:
        """Why an adapter cannot be loaded by any executor."""
        if index not in self._core.adapters.adapters:
            return AdapterError(0, "the adapter was unloaded")
        return self._core.adapter_refusal(index)

    def _info(self, name: str, index: int) -> AdapterInfo:
        adapter = self._core.adapters.adapters[index]
        states = []
        for executor_id, lane in self._core.lanes.items():
            found = lane.adapters.state(index)
            error = "" if found is None or found.error is None else found.error.message
            if lane.adapters.max_loras:
                states.append((executor_id, None if found is None else found.state, error))
        num_requests = self._core.adapters.users.get(index, 0)
        return AdapterInfo(name, adapter.registered.path, index, adapter.content_hash, num_requests, states)


def _refused(error: AdapterError) -> PreconditionError:
    return PreconditionError(FIELD, error.message)
