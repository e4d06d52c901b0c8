"""The executors of the service: each has a plan loop, they serve one model, and requests move between them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from cadenza_common.plan.result import StepResult
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core.lanes.planned_step import PlannedStep
from scheduler_svc.core.outputs import StepOutputs
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.engine.faults import Faults
from scheduler_svc.engine.fleet.executor_member import (
    ExecutorExistsError,
    ExecutorMember,
    LastExecutorError,
    RequestMoves,
    UnknownExecutorError,
)
from scheduler_svc.engine.fleet.fault_report import FaultReport
from scheduler_svc.engine.fleet.listener import ChangeSignal, ExecutorSetListener
from scheduler_svc.engine.fleet.served_executors import ModelListener, ServedExecutors
from scheduler_svc.engine.lane_views import num_held
from scheduler_svc.engine.request_trace import ExecutorIdentity
from scheduler_svc.metrics.adapter_numbers import AdapterMessage
from scheduler_svc.plan_loop.clock import Clock
from scheduler_svc.plan_loop.listener import AdoptModel
from scheduler_svc.plan_loop.plan_loop import PlanLoop
from scheduler_svc.plan_loop.ports import (
    Connect,
    ExecutorFencedError,
    ExecutorLostError,
    ExecutorPort,
    ExecutorState,
    ExecutorStoppedError,
    ModelDescription,
)

_LOG = logging.getLogger(__name__)
HELD_RETRY_S = 1.0
"""Time until an executor that another scheduler holds is described again."""


class ExecutorSet:
    """Adds, drains and removes executors. Implements PlanLoopListener."""

    def __init__(
        self,
        core: Scheduler,
        config: SchedulerConfig,
        clock: Clock,
        listener: ExecutorSetListener,
        models: ModelListener,
        faults: Faults,
        connect: Connect | None = None,
    ) -> None:
        """connect: gives the ports of executors that are added by their address; None: none can be added."""
        self._core = core
        self._config = config
        self._clock = clock
        self._listener = listener
        self._connect = connect
        self._faults = FaultReport(core, faults)
        self._members: dict[int, ExecutorMember] = {}
        self._num_added = 0
        self._running = False
        self._changes = ChangeSignal()
        self._moves = RequestMoves(clock, self._give_up, self._on_change)
        self.served = ServedExecutors(core, config, clock, models, self._members)
        self.started = asyncio.Event()
        """Set once the first session is open, or when none can be opened: see `start_error`."""
        self.start_error: Exception | None = None

    # --- the set -----------------------------------------------------------------------------------------------------

    def add_port(self, port: ExecutorPort) -> None:
        """Add an executor, which takes requests once it answers."""
        index = self._num_added
        self._num_added += 1
        loop = PlanLoop(self._core, index, port, self._config, self, self._clock)
        member = self._members[index] = ExecutorMember(index, port, loop)
        if self._running:
            self._start(member)

    def add(self, target: str) -> None:
        """Add the executor at this address; raises ExecutorExistsError, and ValueError for a bad address."""
        if self._connect is None:
            raise ValueError("executors cannot be added here")
        port = self._connect(self._num_added, target)
        if any(member.target == port.target and not member.loop.leaving for member in self._members.values()):
            raise ExecutorExistsError(f"there is an executor {port.target} already")
        self.add_port(port)
        if self.started.is_set():
            _LOG.info("executor %s is added", port.target, extra={"executor": port.target})

    def start(self) -> None:
        """Connect to the executors."""
        self._running = True
        for member in self._members.values():
            self._start(member)

    async def stop(self) -> None:
        """Close all sessions."""
        members = list(self._members.values())
        tasks = [task for member in members for task in (member.task, member.removal) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for member in members:
            member.cancel_timer()

    def has(self, target: str) -> bool:
        """Whether there is an executor at this address."""
        return any(member.target == target for member in self._present)

    async def drain(self, target: str, timeout_s: float | None) -> int:
        """Give an executor no new requests and move those that it runs; returns once it holds none, or at the timeout.

        Returns the number of requests that it still holds; raises UnknownExecutorError.
        """
        member = self._find(target)
        self._set_draining(member, True)
        try:
            async with self._clock.timeout(timeout_s):
                await self._changes.until(partial(self._is_empty, member))
        except TimeoutError:
            pass
        lane = member.loop.lane
        return num_held(lane) if lane is not None else 0

    def resume(self, target: str) -> None:
        """Let a draining executor take requests again; raises UnknownExecutorError."""
        self._set_draining(self._find(target), False)

    async def remove(self, target: str) -> None:
        """End the session with an executor and forget it; its requests move. Goes on if the caller is cancelled.

        Raises UnknownExecutorError, and LastExecutorError if no other could take them.
        """
        member = self._find(target)
        # An executor that has never served cannot take over requests.
        others = (other for other in self._present if other is not member and not other.fenced)
        if not any(other.loop.lane is not None or member.loop.lane is None for other in others):
            raise LastExecutorError(f"{member.target} is the last executor: add another one first")
        member.loop.leaving = True
        member.removal = asyncio.create_task(self._remove(member), name=f"remove {target}")
        await asyncio.shield(member.removal)

    async def retire(self, target: str) -> None:
        """Drain and remove an executor as soon as another one takes requests, or it is lost itself.

        Does nothing if it is gone by then, and keeps the last one.
        """
        member = self._find(target)

        def may_drain() -> bool:
            others = (other for other in self._present if other is not member)
            return member.loop.leaving or not member.is_live or any(other.takes_requests for other in others)

        await self._changes.until(may_drain)
        if not member.loop.leaving:
            self._set_draining(member, True)
            await self._changes.until(partial(self._is_empty, member))
        if not member.loop.leaving:
            try:
                await self.remove(target)
            except LastExecutorError:
                self._set_draining(member, False)
                raise

    # --- state -------------------------------------------------------------------------------------------------------

    @property
    def model(self) -> ModelDescription:
        """The served model, with the limits of all executors; known once `started` is set."""
        return self.served.model

    @property
    def connected(self) -> bool:
        """Whether a session is open."""
        return any(member.is_live for member in self._present)

    @property
    def can_serve(self) -> bool:
        """Whether an executor takes requests."""
        return any(member.takes_requests for member in self._present)

    @property
    def max_num_seqs(self) -> int:
        """Sequences that all executors that take requests can run at once; of all executors if none does."""
        present = [member for member in self._present if member.loop.lane is not None]
        taking = [member for member in present if member.takes_requests] or present
        return sum(member.loop.lane.spec.max_num_seqs for member in taking if member.loop.lane is not None)

    def states(self) -> list[ExecutorState]:
        """The state of each executor."""
        now = self._clock.monotonic()
        return [member.state(self._core, now) for member in self._present]

    @property
    def _present(self) -> list[ExecutorMember]:
        return [member for member in self._members.values() if not member.loop.leaving]

    def identity_of(self, executor_id: int) -> ExecutorIdentity:
        """The process that an executor is, or was in its last session."""
        return self._members[executor_id].identity

    # --- calls for all loops -----------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Signal a change after which there may be something to plan."""
        for member in self._members.values():
            member.loop.wake()

    def deliver(self) -> None:
        """Deliver all outputs so far: before a request is changed by another call than a result."""
        for member in self._members.values():
            member.loop.deliver()

    # --- events of the plan loops ------------------------------------------------------------------------------------

    def on_outputs(self, outputs: StepOutputs) -> None:
        """Pass the outputs on."""
        self._listener.on_outputs(outputs)
        self._changes.notify()

    def on_planned(self, step: PlannedStep) -> None:
        """Pass the step on. Requests that it preempted may go to an idle executor."""
        self._listener.on_planned(step)
        self._wake_idle()

    def on_applied(
        self, step: PlannedStep, result: StepResult, outputs: StepOutputs, now: float
    ) -> Callable[[], None] | None:
        """Pass the result on."""
        self._wake_idle()
        return self._listener.on_applied(step, result, outputs, now)

    def on_adapters(self, executor_id: int, message: AdapterMessage, now: float) -> None:
        """Count loads and unloads."""
        self._listener.numbers.on_adapters(executor_id, message, now)

    def on_connected(self, executor_id: int) -> None:
        """An executor serves."""
        member = self._members[executor_id]
        self._faults.on_connected(member)
        member.accept()
        member.cancel_timer()
        if member.draining:
            self._core.drain_executor(executor_id, True, self._clock.monotonic())
        self.started.set()
        self._on_change()

    def on_lost(self, executor_id: int, error: ExecutorLostError | None, outputs: StepOutputs) -> None:
        """A session has ended."""
        member = self._members[executor_id]
        self._moves.on_lost(member, stopped=isinstance(error, ExecutorStoppedError))
        self._listener.on_outputs(outputs)
        self._listener.on_session_ended(executor_id)
        if error is not None:
            self._faults.on_lost(member, error, others=self.can_serve)
        self._on_change()

    def on_progress(self, executor_id: int) -> None:
        """An executor has stalled, or makes progress again."""
        self._faults.on_progress(self._members[executor_id])
        self._on_change()

    def on_refused(self, executor_id: int, error: Exception) -> None:
        """An executor that answers cannot be used. The first ones to answer must not all be refused."""
        member = self._members[executor_id]
        if str(error) != member.refusal:
            self._faults.on_refused(member, error, others=self.can_serve)
        member.refuse(error, self._clock.monotonic(), fenced=False)
        refused = [each.error for each in self._present if each.error is not None]
        if not self.started.is_set() and len(refused) == len(self._present):
            self.start_error = refused[0]
            self.started.set()

    async def check_model(self, executor_id: int, model: ModelDescription) -> AdoptModel:
        """As in PlanLoopListener."""
        return await self.served.check(self._members[executor_id], model)

    # --- changes -----------------------------------------------------------------------------------------------------

    def _start(self, member: ExecutorMember) -> None:
        member.task = asyncio.create_task(self._run(member), name=f"executor {member.index}")

    async def _run(self, member: ExecutorMember) -> None:
        held_at: float | None = None
        try:
            while True:
                try:
                    await member.loop.run(held_at)
                except ExecutorFencedError as exc:
                    held_at = self._clock.monotonic()
                    if not self._may_retry_held(member, exc, held_at):
                        self._listener.on_failed(exc)
                        return
                await self._clock.sleep(HELD_RETRY_S)
        except Exception as exc:
            if self.started.is_set():
                self._listener.on_failed(exc)
            else:
                self.start_error = exc
                self.started.set()

    def _may_retry_held(self, member: ExecutorMember, error: ExecutorFencedError, now: float) -> bool:
        """Whether to go on without an executor that another scheduler holds: False if all are held."""
        was_held = member.fenced
        member.refuse(error, now, fenced=True)
        if all(each.fenced and each.is_refused(now) for each in self._present):
            return False
        if not was_held:
            self._faults.on_held(member, error)
            member.moves_at = now
            self._on_change()
        return True

    def _find(self, target: str) -> ExecutorMember:
        for member in self._present:
            if member.target == target:
                return member
        raise UnknownExecutorError(f"there is no executor {target}")

    async def _remove(self, member: ExecutorMember) -> None:
        member.cancel_timer()
        if member.task is not None:
            member.task.cancel()
            await asyncio.gather(member.task, return_exceptions=True)
        self.deliver()
        del self._members[member.index]
        if member.loop.lane is not None:
            self._listener.on_outputs(self._core.remove_executor(member.index, self._clock.monotonic()))
        self.served.on_removed(member)
        _LOG.info("executor %s is removed", member.target, extra={"executor": member.target})
        self._on_change()
        await member.port.aclose()

    def _set_draining(self, member: ExecutorMember, draining: bool) -> None:
        if member.draining == draining:
            return
        member.draining = draining
        if member.loop.lane is not None:
            self.deliver()
            self._core.drain_executor(member.index, draining, self._clock.monotonic())
        self._on_change()

    def _on_change(self) -> None:
        """Some executor has begun or ceased to take requests."""
        self._listener.report_health()
        if self.can_serve:
            self._moves.move(self._present)
        self.wake()
        self._changes.notify()

    def _give_up(self, member: ExecutorMember) -> None:
        """Let the requests of an executor go to those that take requests."""
        self.deliver()
        self._listener.on_outputs(self._core.give_up_executor(member.index, self._clock.monotonic()))
        self._faults.count_suspects(member)

    def _wake_idle(self) -> None:
        """Wake the loops that had nothing to plan, while requests wait, or an adapter: its place may be free now."""
        if len(self._members) > 1 and (self._core.waiting or self._core.adapters.is_awaited):
            for member in self._members.values():
                if member.loop.idle:
                    member.loop.wake()

    def _is_empty(self, member: ExecutorMember) -> bool:
        lane = member.loop.lane
        return member.loop.leaving or lane is None or self._core.holds_nothing(lane.executor_id)
