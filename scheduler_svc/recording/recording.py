"""Records all calls into the core that affect its decisions, with their outcomes (docs/replay.md).

A call is recorded when it returns or raises, so a failed call has its error, and a plan precedes its result. The
session's epoch and failed results, which the core does not see, are recorded at the executor's port.
"""

from __future__ import annotations

import importlib.metadata
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from cadenza_common.plan.plan import StepPlan
from cadenza_common.plan.result import StepResult, StepStatus
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core.adapters.events import AdapterCommands, AdapterEvent, AdapterLoaded, AdapterUnloaded
from scheduler_svc.core.lanes.planned_step import PlannedStep
from scheduler_svc.core.outputs import StepOutputs
from scheduler_svc.core.policies.policies import Policies
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.types import ExecutorSpec, FinishDetail, RequestKey, RequestSpec, SessionEnd
from scheduler_svc.engine.policies_from_options import policies_from_options
from scheduler_svc.plan_loop.ports import ExecutorPort, ModelDescription, PlanStream, SessionOpened
from scheduler_svc.recording import records
from scheduler_svc.recording.plan_log import PlanLogWriter

_LOG = logging.getLogger(__name__)


RecordExecutor = Callable[[int, ExecutorPort], ExecutorPort]
"""Gives the port through which the executor of this index is recorded."""


@contextmanager
def recorded_core(config: SchedulerConfig) -> Iterator[tuple[Scheduler, RecordExecutor]]:
    """Yield a core with these options, and what wraps its executors; with --record all are recorded until exit."""
    if config.record is None:
        yield Scheduler(policies_from_options(config)), lambda _, executor: executor
        return
    log = _Recording(config, config.record)
    try:
        yield _RecordedScheduler(policies_from_options(config), log), partial(_RecordedExecutor, log)
    finally:
        log.close()


class _Recording:
    """The log, and the state of the sessions that its records need."""

    def __init__(self, config: SchedulerConfig, path: str) -> None:
        self._config = config
        self._path = path
        self._writer: PlanLogWriter | None = None
        self._models: dict[int, ModelDescription] = {}
        self._sessions: dict[int, tuple[int, int]] = {}
        self._weights: dict[str, float] = {}
        self._early: list[tuple[AdapterEvent, int]] = []
        """Events of adapters before the header."""

    def open(self) -> None:
        """Open the file unless it is open; raises OSError."""
        if self._writer is None:
            self._writer = PlanLogWriter(self._path)
            _LOG.info("recording to %s", self._path)

    def described(self, executor_id: int, model: ModelDescription) -> None:
        """Write the header, the description of a further executor, or the changed one of a known executor.

        The header's executor is the one that is added without an ExecutorDescribed before.
        """
        is_first, known = not self._models, self._models.get(executor_id)
        self._models[executor_id] = model
        if is_first:
            version, now = importlib.metadata.version("cadenza"), time.time_ns()
            options = self._config.model_dump()
            self.write(lambda: records.header(options, model, cadenza_version=version, started_unix_ns=now))
            if self._weights:
                self.write(lambda: records.set_weights(self._weights))
            for event in self._early:
                self.write(partial(records.adapter_event, *event))
        elif known != model:
            self.write(lambda: records.executor_described(executor_id, model))

    def weighted(self, weights: Mapping[str, float]) -> None:
        """Write the fair order's weights, or keep them for after the header."""
        changed, self._weights = self._weights != weights, dict(weights)
        if changed and self._models:
            self.write(lambda: records.set_weights(weights))

    def keep(self, event: AdapterEvent, executor_id: int) -> bool:
        """Keep an event of an adapter for after the header; False if the header is written."""
        if self._models:
            return False
        self._early.append((event, executor_id))
        return True

    def opened(self, executor_id: int, epoch: int, incarnation: int) -> None:
        """Keep the epoch and the incarnation of a session."""
        self._sessions[executor_id] = epoch, incarnation

    def session(self, executor_id: int) -> tuple[int, int]:
        """Epoch and incarnation of an executor's last session."""
        return self._sessions.get(executor_id, (0, 0))

    def write(self, make: records.MakeRecord) -> None:
        """Write a record; never raises."""
        if self._writer is not None:
            self._writer.write(make)

    @contextmanager
    def call(self, make: records.MakeRecord) -> Iterator[None]:
        """Write the record of a call into the core after it returned or raised."""
        error = ""
        try:
            yield
        except Exception as exc:
            error = records.error_text(exc)
            raise
        finally:
            self.write(lambda: records.with_error(make(), error))

    def close(self) -> None:
        """Close the log."""
        if self._writer is not None:
            self._writer.close()


class _RecordedScheduler(Scheduler):
    """The core with its calls recorded, except those that only read state or take outputs."""

    def __init__(self, policies: Policies, log: _Recording) -> None:
        super().__init__(policies)
        self._log = log

    def add_executor(self, executor_id: int, spec: ExecutorSpec) -> None:
        with self._log.call(lambda: records.add_executor(executor_id, spec)):
            super().add_executor(executor_id, spec)

    def session_opened(
        self,
        last_completed_step_id: int,
        *,
        executor_id: int = 0,
        same_incarnation: bool = False,
        keeps_kv: bool = False,
        adapters: Collection[AdapterLoaded] = (),
    ) -> StepOutputs:
        log, last = self._log, last_completed_step_id
        known: dict[str, Any] = {
            "same_incarnation": same_incarnation, "keeps_kv": keeps_kv, "adapters": adapters,
        }  # fmt: skip
        with log.call(lambda: records.session_opened(executor_id, last, *log.session(executor_id), **known)):
            return super().session_opened(last, executor_id=executor_id, **known)

    def executor_lost(self, executor_id: int, now: float, end: SessionEnd | None = None) -> StepOutputs:
        with self._log.call(lambda: records.executor_lost(executor_id, now, end)):
            return super().executor_lost(executor_id, now, end)

    def give_up_executor(self, executor_id: int, now: float) -> StepOutputs:
        with self._log.call(lambda: records.give_up_executor(executor_id, now)):
            return super().give_up_executor(executor_id, now)

    def drain_executor(self, executor_id: int, draining: bool, now: float) -> None:
        with self._log.call(lambda: records.drain_executor(executor_id, draining, now)):
            super().drain_executor(executor_id, draining, now)

    def remove_executor(self, executor_id: int, now: float) -> StepOutputs:
        with self._log.call(lambda: records.remove_executor(executor_id, now)):
            return super().remove_executor(executor_id, now)

    def add_request(self, spec: RequestSpec, now: float) -> None:
        with self._log.call(lambda: records.add_request(spec, now)):
            super().add_request(spec, now)

    def abort(self, key: RequestKey, detail: FinishDetail) -> StepOutputs:
        with self._log.call(lambda: records.abort(key, detail)):
            return super().abort(key, detail)

    def stop_sample(self, key: RequestKey, sample_index: int) -> None:
        with self._log.call(lambda: records.stop_sample(key, sample_index)):
            super().stop_sample(key, sample_index)

    def drain(self, draining: bool) -> None:
        with self._log.call(lambda: records.drain(draining)):
            super().drain(draining)

    def flush_prefix_caches(self, most: int) -> int:
        with self._log.call(lambda: records.flush_prefix_caches(most)):
            return super().flush_prefix_caches(most)

    def set_weights(self, weights: Mapping[str, float]) -> None:
        self._log.weighted(weights)
        super().set_weights(weights)

    def adapter_event(self, event: AdapterEvent, executor_id: int = 0) -> None:
        if self._log.keep(event, executor_id):
            super().adapter_event(event, executor_id)
            return
        with self._log.call(lambda: records.adapter_event(event, executor_id)):
            super().adapter_event(event, executor_id)

    def adapter_commands(self, executor_id: int) -> AdapterCommands:
        commands = super().adapter_commands(executor_id)
        if commands:
            self._log.write(lambda: records.adapter_commands(executor_id, commands))
        return commands

    def plan_step(self, executor_id: int, now: float) -> StepPlan | None:
        plan: StepPlan | None = None
        with self._log.call(lambda: records.plan_step(executor_id, now, plan, self._log.session(executor_id)[0])):
            plan = super().plan_step(executor_id, now)
        return plan

    def apply_result(self, executor_id: int, result: StepResult, now: float) -> tuple[PlannedStep, StepOutputs]:
        log = self._log
        with log.call(lambda: records.apply_result(executor_id, now, result, *log.session(executor_id))):
            return super().apply_result(executor_id, result, now)


class _RecordedExecutor:
    """An ExecutorPort that records its description and its sessions."""

    def __init__(self, log: _Recording, executor_id: int, executor: ExecutorPort) -> None:
        self.target = executor.target
        self._executor_id = executor_id
        self._executor = executor
        self._log = log

    async def describe(self) -> ModelDescription:
        """Wait for the description; raises OSError if the file of the log cannot be opened."""
        # Before the wait for the executor, which may take minutes: a bad path fails at once.
        self._log.open()
        model = await self._executor.describe()
        self._log.described(self._executor_id, model)
        return model

    async def open(self, epoch: int) -> PlanStream:
        """Open a session."""
        stream = await self._executor.open(epoch)
        self._log.opened(self._executor_id, epoch, stream.opened.incarnation)
        return _RecordedStream(stream, self._log, self._executor_id)

    async def aclose(self) -> None:
        """Close the connection."""
        await self._executor.aclose()


class _RecordedStream:
    """A PlanStream that records the results of failed steps."""

    def __init__(self, stream: PlanStream, log: _Recording, executor_id: int) -> None:
        self.opened: SessionOpened = stream.opened
        self._executor_id = executor_id
        self._stream = stream
        self._log = log

    @property
    def begun_step_id(self) -> int:
        """Return the newest step that the executor is known to have begun."""
        return self._stream.begun_step_id

    @property
    def resident_bytes(self) -> int:
        """Return the resident memory of the executor's process in bytes."""
        return self._stream.resident_bytes

    async def send(self, plan: StepPlan) -> None:
        """Send the next plan."""
        await self._stream.send(plan)

    async def send_adapters(self, commands: AdapterCommands) -> None:
        """Send loads and unloads of adapters."""
        await self._stream.send_adapters(commands)

    async def results(self) -> AsyncIterator[StepResult | AdapterLoaded | AdapterUnloaded]:
        """Yield results in plan order, and answers about adapters."""
        log, executor_id = self._log, self._executor_id
        async for result in self._stream.results():
            if isinstance(result, StepResult) and result.status is not StepStatus.OK:
                log.write(partial(records.step_failed, executor_id, result, *log.session(executor_id)))
            yield result

    async def close(self) -> None:
        """End the session."""
        await self._stream.close()
