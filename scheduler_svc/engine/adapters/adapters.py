"""The adapters that requests can name: loads, unloads, and the requests that cannot have theirs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core.adapters.events import AdapterDue, AdapterFailure
from scheduler_svc.core.adapters.lane_adapters import FAILED_PRECONDITION, AdapterState
from scheduler_svc.core.errors import PreconditionError, RequestRejectedError, SchedulerError, UnknownAdapterError
from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.types import RequestKey, SequenceState
from scheduler_svc.engine.adapters.names import AdapterNames
from scheduler_svc.engine.fleet.listener import ChangeSignal
from scheduler_svc.engine.journal import Journal
from scheduler_svc.engine.live_request import LiveRequest
from scheduler_svc.plan_loop.clock import Clock, ScheduledCall
from scheduler_svc.plan_loop.ports import EngineRequest
from scheduler_svc.tenants.errors import AdapterForbiddenError
from scheduler_svc.tenants.registry import Registry

FIELD = "adapter"
"""The field of GenerateRequest that names an adapter."""
NOT_FOUND = 5
"""The number of the gRPC status code."""
LOOKS = 8
"""How often in its time limit a request is looked at: one that runs may wait for its adapter again. The adapter of one
that is seen to wait is due at the next look."""
_ROUNDING_S = 1e-6
"""Of a timer."""


@dataclass(frozen=True, slots=True)
class NamedAdapter:
    """An adapter that has a name; fields as in admin.proto."""

    name: str
    path: str
    index: int
    content_hash: bytes
    num_requests: int
    states: Sequence[tuple[int, AdapterState | None, str]]
    """On each executor that has adapters: its id, the state (None: not loaded), the error."""


@dataclass(slots=True)
class AdapterRequests:
    """The unfinished requests of an adapter."""

    name: str
    num_running: int = 0
    num_waiting: int = 0
    """Preempted requests count too, and so do requests that wait until the adapter is loaded."""


@dataclass(frozen=True, slots=True)
class _Wait:
    """How a request was seen to wait for its adapter."""

    number: int
    """As in the core: another one if the adapter was there meanwhile."""
    since: float
    """When its time limit began: not while the adapter only waits for the place of another one."""
    is_due: bool = False
    awaits_place: bool = False


class Adapters:
    """Gives adapters names and indexes, and ends requests whose adapter no executor can load, or none has in time."""

    def __init__(
        self,
        core: Scheduler,
        clock: Clock,
        config: SchedulerConfig,
        registry: Registry,
        journal: Journal,
        unfinished: Mapping[RequestKey, LiveRequest],
        fail: Callable[[LiveRequest, Exception], None],
        wake: Callable[[], None],
    ) -> None:
        """registry: has the tenants' rights. journal: keeps the adapters that operators load. unfinished: the
        engine's own, which changes. fail: ends an unfinished request with an error. wake: lets executors see what has
        changed."""
        self.names = AdapterNames(core, config.lora_dir)
        self.refusals: Counter[str] = Counter()
        """Requests that were refused, or ended, for their adapter, by reason: forbidden, unknown, failed, timeout."""
        self._core = core
        self._clock = clock
        self._unfinished = unfinished
        self._fail = fail
        self._wake = wake
        self._registry = registry
        self._journal = journal
        self._loaded: dict[str, str] = {}
        """Paths by name of the adapters that operators have loaded."""
        self._load_timeout_s = config.lora_load_timeout_s
        self._num_answers = 0
        self._lanes: list[Lane] = []
        """The executors at the last look at the requests."""
        self._changes = ChangeSignal()
        self._timers: dict[RequestKey, ScheduledCall] = {}
        """For the next look at each unfinished request that has an adapter."""

    # --- names -------------------------------------------------------------------------------------------------------

    def load(self, name: str, path: str) -> None:
        """Give an adapter a name as an operator does, and load it; raises AdapterExistsError."""
        self.names.register(name, path, wanted=True)
        self._loaded[name] = path
        self._journal.on_adapters(self._loaded)

    def unload(self, name: str) -> None:
        """Take an adapter's name away; raises UnknownAdapterError. Its requests go on."""
        self.names.remove(name)
        if self._loaded.pop(name, None) is not None:
            self._journal.on_adapters(self._loaded)

    async def loaded(self, name: str) -> NamedAdapter:
        """Wait until an executor has loaded an adapter; raises RequestRejectedError if none can, and takes its name."""
        index = self.names.find(name)
        if index is None:
            raise UnknownAdapterError(name, "name")
        await self._changes.until(lambda: self._is_settled(index))
        error = self._error(index)
        if error is not None:
            if self.names.find(name) == index:
                self.unload(name)
            kind = PreconditionError if error.code == FAILED_PRECONDITION else RequestRejectedError
            raise kind("path", error.message)
        return self._info(name, index)

    def infos(self) -> list[NamedAdapter]:
        """The adapters that have names."""
        return [self._info(name, index) for name, index in self.names]

    def names_by_hash(self) -> dict[bytes, str]:
        """The names of loaded adapters, by the hash of what they compute."""
        infos = self.infos() if len(self.names) else []
        return {info.content_hash: info.name for info in infos if info.content_hash}

    def uses(self) -> list[AdapterRequests]:
        """The adapters that unfinished requests use, the one with the most requests first, then by name."""
        uses: dict[int, AdapterRequests] = {}
        table = self._core.adapters
        if not table.users:
            return []
        for group in self._core.groups.values():
            index = group.spec.adapter_index
            if index:
                use = uses.setdefault(index, AdapterRequests(table.adapters[index].registered.name))
                runs = any(each.state is SequenceState.RUNNING for each in group.sequences)
                use.num_running += runs
                use.num_waiting += not runs
        return sorted(uses.values(), key=lambda use: (-use.num_running - use.num_waiting, use.name))

    # --- requests ----------------------------------------------------------------------------------------------------

    @contextmanager
    def admitting(self, request: EngineRequest) -> Iterator[EngineRequest]:
        """Give a new request its adapter's index; the body queues it.

        Raises AdapterForbiddenError, whether or not there is such an adapter, UnknownAdapterError, and
        PreconditionError if no executor can load it.
        """
        name = request.adapter
        if not name:
            yield request
            return
        tenant = self._registry.find(request.spec.tenant)
        if tenant is not None and not tenant.may_use_adapter(name):
            self.refusals["forbidden"] += 1
            raise AdapterForbiddenError(name, FIELD)
        is_new = self.names.find(name) is None
        request = self._with_index(request)
        index = request.spec.adapter_index
        try:
            error = self._core.adapter_refusal(index)
            if error is not None:
                raise self._refused(name, index, error)
            misfit = self._core.adapter_misfit(request.spec)
            if misfit is not None:
                raise _too_large(name, misfit)
            yield request
        except SchedulerError:
            if is_new:
                self.names.forget(name, index)
            raise

    def restored(self, request: EngineRequest) -> EngineRequest:
        """A request of an earlier process with its adapter's index; raises UnknownAdapterError, PreconditionError."""
        if not request.adapter:
            return request
        request = self._with_index(request)
        spec = request.spec
        error = self._core.adapter_refusal(spec.adapter_index, spec.adapter_hash)
        if error is not None:
            raise self._refused(request.adapter, spec.adapter_index, error)
        return request

    def _with_index(self, request: EngineRequest) -> EngineRequest:
        try:
            index = self.names.use(request.adapter)
        except UnknownAdapterError:
            self.refusals["unknown"] += 1
            raise
        return replace(request, spec=replace(request.spec, adapter_index=index))

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
        failed: dict[str, int] = {}
        for live in self._perhaps_refused():
            spec = live.request.spec
            error = self._core.adapter_refusal(spec.adapter_index, spec.adapter_hash)
            if error is not None:
                if self._core.adapter_refusal(spec.adapter_index) is not None:
                    failed[live.request.adapter] = spec.adapter_index
                self._fail(live, self._refused(live.request.adapter, spec.adapter_index, error))
            elif (misfit := self._core.misfit(spec.key)) is not None:
                self._fail(live, _too_large(live.request.adapter, misfit))
        for name, index in failed.items():
            self.names.forget(name, index)
        self._changes.notify()
        return True

    def _perhaps_refused(self) -> list[LiveRequest]:
        """Unfinished requests of adapters that some executor cannot have, or that must have the content of a former
        process; all when the executors are others. Looking at each at every answer would take long."""
        lanes = list(self._core.lanes.values())
        are_others, self._lanes = lanes != self._lanes, lanes
        refused = {
            index for index in self._core.adapters.users if not all(lane.adapters.may_have(index) for lane in lanes)
        }
        return [
            live
            for live in self._unfinished.values()
            if (index := live.request.spec.adapter_index)
            and (are_others or index in refused or live.request.spec.adapter_hash)
        ]

    def _refused(self, name: str, index: int, error: AdapterFailure) -> SchedulerError:
        """The error of a request whose adapter no executor can load."""
        if error.code == NOT_FOUND and self.names.is_from_first_use(name, index):
            self.refusals["unknown"] += 1
            return UnknownAdapterError(name)
        self.refusals["failed"] += 1
        return PreconditionError(FIELD, error.message)

    def _watch(self, key: RequestKey, arrival_ns: int, wait: _Wait | None = None) -> None:
        """Look at a request again. wait: as it was seen to wait for its adapter; None: it did not."""
        now, limit_s = self._clock.monotonic(), self._load_timeout_s
        if wait is None and (number := self._wait_number(key)) is not None:
            wait = _Wait(number, now)
        delay_s = limit_s / LOOKS
        if wait is not None and wait.is_due:
            delay_s = min(delay_s, max(0.0, wait.since + limit_s - now))
        self._timers[key] = self._clock.call_later(delay_s, partial(self._look, key, arrival_ns, wait))

    def _look(self, key: RequestKey, arrival_ns: int, wait: _Wait | None) -> None:
        """Let the adapter of a request that has waited for it be due; end it once it has waited for too long."""
        live = self._unfinished.get(key)
        if live is None or live.times.arrival_ns != arrival_ns:
            return
        now, index = self._clock.monotonic(), live.request.spec.adapter_index
        lanes = [lane for lane in self._core.lanes.values() if lane.is_open]
        if wait is None or not lanes or self._wait_number(key) != wait.number:
            self._watch(key, arrival_ns)
        elif not wait.is_due:
            self._core.adapter_event(AdapterDue(index))
            self._wake()
            self._watch(key, arrival_ns, replace(wait, is_due=True))
        elif any(self._core.adapters.awaits_place(lane.adapters, index) for lane in lanes):
            self._watch(key, arrival_ns, replace(wait, since=now, awaits_place=True))
        elif wait.awaits_place:
            self._watch(key, arrival_ns, replace(wait, since=now, awaits_place=False))
        elif now < wait.since + self._load_timeout_s - _ROUNDING_S:
            self._watch(key, arrival_ns, wait)
        else:
            self.refusals["timeout"] += 1
            text = f"adapter {live.request.adapter!r} was not loaded within {self._load_timeout_s:g} s"
            self._fail(live, PreconditionError(FIELD, text))

    def _wait_number(self, key: RequestKey) -> int | None:
        """Which of all waits for adapters this request is in; None: it does not wait for its adapter."""
        group = self._core.groups.get(key)
        parked = None if group is None else self._core.adapters.parked.get(group)
        return None if parked is None else parked.number

    # --- states ------------------------------------------------------------------------------------------------------

    def _is_settled(self, index: int) -> bool:
        adapter = self._core.adapters.adapters.get(index)
        # A loaded adapter may have given its place away at once.
        return adapter is None or bool(adapter.content_hash) or self._error(index) is not None

    def _error(self, index: int) -> AdapterFailure | None:
        """Why an adapter cannot be loaded by any executor."""
        if index not in self._core.adapters.adapters:
            return AdapterFailure(0, "the adapter was unloaded")
        return self._core.adapter_refusal(index)

    def _info(self, name: str, index: int) -> NamedAdapter:
        adapter = self._core.adapters.adapters[index]
        states = []
        for executor_id, lane in self._core.lanes.items():
            found = lane.adapters.state(index)
            error = "" if found is None or found.error is None else found.error.message
            if lane.adapters.max_loras:
                states.append((executor_id, None if found is None else found.state, error))
        num_requests = self._core.adapters.users.get(index, 0)
        return NamedAdapter(name, adapter.registered.path, index, adapter.content_hash, num_requests, states)


def _too_large(name: str, misfit: RequestRejectedError) -> PreconditionError:
    """The error of a request that only executors could hold which cannot load its adapter."""
    return PreconditionError(misfit.field, f"no executor that may load adapter {name!r} can hold it: {misfit}")
