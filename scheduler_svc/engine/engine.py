"""The engine: owns the core. The front submits requests to it; the plan loops of the executors run them.

Everything here runs on one event loop. The core is called only from here, from the executor set and from the plan
loops, never across an await.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from cadenza_common.plan.result import StepResult
from cadenza_common.telemetry.spans import SpanSink
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core.errors import DrainingError, RequestExistsError, UnknownRequestError
from scheduler_svc.core.lanes.planned_step import PlannedStep
from scheduler_svc.core.outputs import StepOutputs
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.types import FinishDetail, RequestKey
from scheduler_svc.engine.activity_log import ActivityLog
from scheduler_svc.engine.adapters.adapters import Adapters
from scheduler_svc.engine.apply_outputs import apply_outputs
from scheduler_svc.engine.deadlines import Deadlines
from scheduler_svc.engine.faults import FaultKind, Faults
from scheduler_svc.engine.fleet.executor_set import ExecutorSet
from scheduler_svc.engine.freed_memory import FreedMemory, release_finished
from scheduler_svc.engine.journal import Journal, NoJournal
from scheduler_svc.engine.kept_requests import KeptRequests
from scheduler_svc.engine.kv_events.hub import KvEvents
from scheduler_svc.engine.lane_views import block_tables, retry_after_s
from scheduler_svc.engine.live_request import Listener, LiveRequest, record_planned
from scheduler_svc.engine.model_events import ModelEvents
from scheduler_svc.engine.restored_requests import RestoredRequests
from scheduler_svc.engine.served_model import ServedModel
from scheduler_svc.engine.step_records import StepRecords
from scheduler_svc.engine.step_watch import StepRecordWatch
from scheduler_svc.engine.tracing.request_traces import request_traces
from scheduler_svc.metrics.numbers import EngineNumbers
from scheduler_svc.plan_loop.clock import Clock
from scheduler_svc.plan_loop.gauges import Load, current_load, num_queued
from scheduler_svc.plan_loop.ports import (
    Connect,
    EngineRequest,
    ExecutorFencedError,
    ExecutorState,
    ModelDescription,
    SequenceBlockTable,
)
from scheduler_svc.tenants.quotas import Quotas, TenantLoad
from scheduler_svc.tenants.registry import Registry

_LOG = logging.getLogger(__name__)


class Engine:
    """Turns requests into live requests and feeds them with outputs. Implements ExecutorSetListener."""

    def __init__(
        self,
        config: SchedulerConfig,
        core: Scheduler,
        clock: Clock,
        *,
        connect: Connect | None = None,
        release_memory: Callable[[], None] | None = None,
        journal: Journal | None = None,
        quotas: Quotas | None = None,
        spans: SpanSink | None = None,
    ) -> None:
        """connect: gives the ports of added executors. release_memory: called when most memory has become free.

        spans: gets the spans of requests; None: they are not traced.
        """
        self.journal: Journal = journal or NoJournal()
        self.quotas = quotas or Quotas(Registry(), clock, config.max_queued_requests)
        self._config = config
        self._core = core
        self.clock = clock
        self.faults = Faults(clock)
        self.numbers = EngineNumbers(core, self.quotas.registry.has, self.executor_infos)
        self._live: dict[RequestKey, LiveRequest] = {}
        self.served_model = ServedModel(core, allow_fingerprint_change=config.allow_fingerprint_change)
        models = ModelEvents(core, self.served_model, self.journal, self._live, self.fail)
        self.executors = ExecutorSet(core, config, clock, self, models, self.faults, connect)
        registry, wake = self.quotas.registry, self.executors.wake
        self.adapters = Adapters(core, clock, config, registry, self.journal, self._live, self.fail, wake)
        self._traces = request_traces(clock, spans, self.executors)
        self._deadlines = Deadlines(clock, partial(self.abort, detail=FinishDetail.DEADLINE))
        self.kept = KeptRequests(
            clock,
            max_bytes=int(config.max_kept_results_mb * 1e6),
            max_grace_s=config.max_resume_grace_s,
            abort=self.abort,
            on_forgotten=self._on_forgotten,
        )
        self.restored = RestoredRequests(clock, self.kept, self.abort)
        self._idle = asyncio.Event()
        self._idle.set()
        self._started_ns = clock.monotonic_ns()
        self.records = StepRecords(core, self._live, self.numbers, self._traces, self._started_ns)
        """Of all steps."""
        self._log = ActivityLog(clock, self.load, self.numbers, config)
        self._freed_memory = FreedMemory(clock, release_memory)
        self.kv_events = KvEvents(core, clock)
        self._health_listeners: list[Callable[[bool], None]] = []
        self.draining = False
        self.fenced = asyncio.Event()
        """Set when the engine has stopped permanently: fenced by another scheduler, or crashed; see `failure`."""
        self.failure: Exception | None = None

    # --- start and stop ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Connect to the executors; returns once the first one has a session.

        Raises LimitsError for options that contradict every executor's limits, ExecutorLostError if no executor can be
        used, ExecutorFencedError if another scheduler holds them.
        """
        self.adapters.names.register_all(self._config.lora)
        self.executors.start()
        await self.executors.started.wait()
        error = self.failure or self.executors.start_error
        if error is not None:
            raise error

    async def stop(self) -> None:
        """Finish all requests with ABORTED and close the session."""
        self.draining = True
        for tenant, request_id in list(self._live):
            self.abort(tenant, request_id)
        self.kept.stop()
        self._log.stop()
        self._traces.stop()
        self.restored.stop()
        self._freed_memory.stop()
        self.kv_events.stop()
        await self.executors.stop()

    def on_failed(self, error: Exception) -> None:
        """End all requests: no executor can ever be used again, or a plan loop crashed."""
        is_fenced = isinstance(error, ExecutorFencedError)
        _LOG.error("the engine stops: %s", error, exc_info=None if is_fenced else error)
        self.failure = error
        self.draining = True
        for tenant, request_id in list(self._live):
            self.abort(tenant, request_id, FinishDetail.EXECUTOR_ERROR)
        self.executors.started.set()
        self.fenced.set()

    @property
    def model(self) -> ModelDescription:
        """The served model, with the limits of all executors; known after `start`."""
        return self.executors.model

    @property
    def connected(self) -> bool:
        """Whether a session with an executor is open."""
        return self.executors.connected

    @property
    def healthy(self) -> bool:
        """Whether requests are accepted and an executor takes them."""
        return self.executors.can_serve and not self.draining and not self.journal.problem

    @property
    def num_unfinished(self) -> int:
        """Number of requests that have not ended."""
        return len(self._live)

    @property
    def uptime_s(self) -> float:
        """Seconds since the engine was created."""
        return (self.clock.monotonic_ns() - self._started_ns) / 1e9

    def add_health_listener(self, callback: Callable[[bool], None]) -> None:
        """Call `callback(healthy)` whenever `healthy` may have changed: the session, a stalled step, a drain."""
        self._health_listeners.append(callback)

    # --- requests ----------------------------------------------------------------------------------------------------

    def submit(self, request: EngineRequest) -> LiveRequest:
        """Queue a request; if one with the same id and body is unfinished or kept, it is returned instead.

        Raises RequestRejectedError, PreconditionError, QueueFullError, RequestExistsError, DrainingError,
        ModelChangedError, JournalUnavailableError, AdapterForbiddenError, UnknownAdapterError.
        """
        spec = request.spec
        known = self.find(*spec.key)
        if known is not None:
            if known.request.body_digest != request.body_digest:
                raise RequestExistsError(f"request id {spec.request_id!r} is in use with another body")
            return known
        if self.draining:
            raise DrainingError("the service is draining and takes no new requests")
        self.quotas.check(spec, num_queued(self._core), retry_after_s(self._core, self.executors.max_num_seqs))
        self.served_model.check(request, self.model)
        self.journal.check_admission()
        with self.adapters.admitting(request) as admitted:
            live = LiveRequest(admitted, self.clock.monotonic_ns())
            self.add(live)
        self.quotas.charge(spec)
        self.journal.on_admitted(live, self.model)
        if request.deadline is not None and request.deadline <= self.clock.monotonic():
            # Before any step: what has cost its time may be that its grammar was never compiled.
            self.abort(*spec.key, detail=FinishDetail.DEADLINE)
        return live

    def add(self, live: LiveRequest) -> None:
        """Queue a live request, which may have output already; raises RequestRejectedError, RequestExistsError."""
        spec = live.request.spec
        self._log.on_arrival()
        self._core.add_request(spec, self.clock.monotonic())
        for index, sample in enumerate(live.samples):
            if sample.finish is not None:
                self._core.stop_sample(spec.key, index)
        self._live[spec.key] = live
        self._traces.begin(live)
        self.numbers.on_admitted(spec.tenant)
        self.quotas.on_added(spec)
        self._freed_memory.on_arrival(spec)
        self._idle.clear()
        self._deadlines.set(live.request)
        self.adapters.on_added(live)
        self.executors.wake()

    def find(self, tenant: str, request_id: str) -> LiveRequest | None:
        """The unfinished, kept or restored request with this id; None if there is none."""
        key = (tenant, request_id)
        return self._live.get(key) or self.kept.find(key) or self.restored.find(key)

    def keeps(self, key: RequestKey) -> bool:
        """Whether the results of an ended request with this key are kept."""
        return self.kept.find(key) is not None or self.restored.has_ended(key)

    def attach(self, tenant: str, request_id: str) -> LiveRequest:
        """The unfinished or kept request with this id; raises UnknownRequestError."""
        live = self.find(tenant, request_id)
        if live is None:
            raise UnknownRequestError(
                f"no request {request_id!r} runs or is kept: there was none, or its grace is over"
            )
        return live

    def listen(self, live: LiveRequest, listener: Listener) -> None:
        """Attach a stream to a request; it takes the place of the request's present stream."""
        self._traces.on_attached(live)
        live.subscribe(listener)
        self.kept.on_attached(live)

    def abort(self, tenant: str, request_id: str, detail: FinishDetail = FinishDetail.ABORTED) -> bool:
        """Finish a request now and free what it holds; False if none was unfinished.

        The results of a request that is aborted are not kept; with another detail they are.
        """
        self.executors.deliver()
        is_unfinished = (tenant, request_id) in self._live
        if is_unfinished:
            self.on_outputs(self._core.abort((tenant, request_id), detail))
            self.executors.wake()
        if detail is FinishDetail.ABORTED:
            self.kept.forget((tenant, request_id))
            self.restored.forget((tenant, request_id))
        return is_unfinished

    def detach(self, live: LiveRequest, listener: Listener, *, handed_over: bool) -> None:
        """Detach a stream that has ended, unless another one has taken its place.

        A request without a stream is aborted unless it has a grace. `handed_over`: the stream took the whole output.
        """
        if live.unsubscribe(listener):
            self.kept.on_detached(live, handed_over=handed_over)

    def fail(self, live: LiveRequest, error: Exception) -> None:
        """End an unfinished request with an error; readers raise it after the output so far."""
        key = live.request.spec.key
        live.error = error
        self._close(key, live, self.clock.monotonic_ns())
        self.on_outputs(self._core.abort(key, FinishDetail.EXECUTOR_ERROR))
        live.notify()

    async def drain(self, timeout_s: float | None) -> int:
        """Reject new requests until `resume` and wait for the others; returns the number left at the timeout."""
        self._set_draining(True)
        with suppress(TimeoutError):
            async with self.clock.timeout(timeout_s):
                await self._idle.wait()
        return len(self._live)

    def resume(self) -> None:
        """Accept new requests again."""
        self._set_draining(False)

    # --- state -------------------------------------------------------------------------------------------------------

    def load(self) -> Load:
        """The current state of queues and memory."""
        return current_load(self._core)

    def tenant_loads(self) -> list[TenantLoad]:
        """The load of each tenant."""
        return self.quotas.loads(self._core.waiting)

    def executor_infos(self) -> list[ExecutorState]:
        """The state of each executor."""
        return self.executors.states()

    def block_tables(self, tenant: str, request_id: str) -> list[SequenceBlockTable] | None:
        """The block tables of a request's unfinished sequences; None if the request is unknown."""
        return block_tables(self._core, (tenant, request_id))

    def watch(self, *, include_block_tables: bool = False) -> StepRecordWatch:
        """A watch that yields the records of all steps from now on."""
        return self.records.watch(include_block_tables=include_block_tables)

    # --- events of the executors -------------------------------------------------------------------------------------

    def on_outputs(self, outputs: StepOutputs) -> None:
        """Apply outputs to the live requests, then notify each one's listener once."""
        if outputs:
            self._apply(outputs)
        self.kv_events.on_change()
        if self.adapters.on_outputs():
            self.executors.wake()
        # At once: there may be no executor, and no result for hours.
        finished = self._core.take_finished()
        self.records.on_finished(finished)
        release_finished(finished)

    def _apply(self, outputs: StepOutputs) -> None:
        now = self.clock.monotonic_ns()
        self.quotas.on_outputs(outputs)
        touched, finished = apply_outputs(outputs, self._live, self._core.stop_sample)
        self.journal.on_outputs(touched)
        for live in touched:
            if not live.times.first_token_ns and live.num_completion_tokens:
                live.times.first_token_ns = now
                self.records.on_first_token(live, now)
            if live in finished and live.finish_if_all_ended():
                self._close(live.request.spec.key, live, now)
            listener = live.listener
            if listener is not None and not live.shows_later:
                listener(live)

    def on_planned(self, step: PlannedStep) -> None:
        """Record times and preemption counts of the step's requests."""
        now_ns = self.clock.monotonic_ns()
        started, moved = record_planned(step, self._live, now_ns)
        self.records.on_planned(step, now_ns)
        for live in started:
            self.quotas.on_started(live.request.spec.key)
            self.journal.on_started(live)
        if moved:
            self.faults.record(FaultKind.REQUEST_MOVED, count=len(moved))

    def on_applied(
        self, step: PlannedStep, result: StepResult, outputs: StepOutputs, now: float
    ) -> Callable[[], None] | None:
        """Record the step; returns the call that goes on with that once its outputs are delivered."""
        return self.records.on_applied(step, result, outputs, now)

    def on_session_ended(self, executor_id: int) -> None:
        """Forget what was recorded for the plans in flight."""
        self.records.on_session_ended(executor_id)

    def _close(self, key: RequestKey, live: LiveRequest, now_ns: int) -> None:
        live.ended = True
        live.times.end_ns = now_ns
        del self._live[key]
        self.quotas.on_ended(key)
        self._deadlines.cancel(key)
        self.adapters.on_ended(key)
        self.journal.on_ended(live)
        self.restored.on_ended(live)
        self._log.on_ended(live)
        self._traces.on_ended(live)
        self.numbers.requests.on_ended(live.request.spec, live.times, live.num_completion_tokens, live.detail)
        if live.failed:
            self.faults.record(FaultKind.REQUEST_FAILED)
        if not self.kept.on_finished(live):
            self._on_forgotten(live)
        if not self._live:
            self._idle.set()

    def _on_forgotten(self, live: LiveRequest) -> None:
        self._freed_memory.on_ended(live.request.spec)

    def _set_draining(self, draining: bool) -> None:
        self.draining = draining
        self._core.drain(draining)
        self.executors.wake()
        self.report_health()

    def report_health(self) -> None:
        """Call the health listeners."""
        for callback in self._health_listeners:
            callback(self.healthy)
