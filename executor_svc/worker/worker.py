"""The thread that owns the device, its queue of plans, and their sessions."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from cadenza_common.plan.errors import InvalidPlan
from cadenza_common.plan.plan import StepPlan
from cadenza_common.plan.result import StepResult, StepStatus, StepTimings
from executor_svc.plan.limits import Limits
from executor_svc.worker.adapters import AdapterLoader
from executor_svc.worker.session import Activity, PlanSession, RejectedPlan
from executor_svc.worker.step_numbers import StepNumbers
from executor_svc.worker.trace_requests import StartTrace, TraceRequests

_log = logging.getLogger(__name__)

_MAX_LAUNCHED_STEPS = 2
"""Steps launched at once: the device runs the second while the first is answered."""
_POLL_S = 5e-5
"""Interval at which the thread polls a single launched step, while another plan may arrive."""
_AFTER_FAILURE = "an earlier step of this session failed"


class Launched(Protocol):
    """A launched step."""

    def is_done(self) -> bool:
        """Return whether `result` would return at once."""
        ...

    def result(self) -> StepResult:
        """Wait until the step has run. Raises any error of the device."""
        ...


class Executor(Protocol):
    """Runs plans: a `step.StepExecutor`, or a simulated executor."""

    limits: Limits

    @property
    def adapters(self) -> AdapterLoader | None:
        """Loads adapters that plans may name; None: it has none."""
        ...

    def clear(self) -> None:
        """Free all slots, after the launched steps; KV stays."""
        ...

    def launch(self, plan: StepPlan, received_ns: int) -> Launched:
        """Launch one step; received_ns is the plan's arrival on the monotonic clock.

        Launched steps run in order. Raises InvalidPlan before anything is computed or moved, and any error of the
        device.
        """
        ...

    def is_out_of_memory(self, exc: Exception) -> bool:
        """Return whether this error of a step means that the device is out of memory."""
        ...

    def is_lost(self, exc: Exception) -> bool:
        """Return whether this error of a step means that this process has lost the device."""
        ...

    @property
    def start_trace(self) -> StartTrace | None:
        """Starts to trace steps: returns a function that stops and returns the trace, Chrome's format, gzip.

        None for an executor that cannot be traced.
        """
        ...


@dataclass(frozen=True, slots=True)
class _SessionOpening:
    session: PlanSession
    last_completed_step_id: Future[int]


@dataclass(frozen=True, slots=True)
class _ReceivedPlan:
    session: PlanSession
    plan: StepPlan | RejectedPlan
    received_ns: int


@dataclass(frozen=True, slots=True)
class _Action:
    """Something that is done between two steps."""

    session: PlanSession
    act: Callable[[], None]
    done: Callable[[], None]


@dataclass(frozen=True, slots=True)
class _LaunchedStep:
    """A step that has not been answered: its launch, or the reason that it was not launched."""

    step: _ReceivedPlan
    started_ns: int
    launched: Launched | None
    status: StepStatus = StepStatus.OK
    message: str = ""

    def is_done(self) -> bool:
        """Return whether the step can be answered at once. An error here counts as done: `result` raises it again."""
        try:
            return self.launched is None or self.launched.is_done()
        except Exception:
            return True


class Worker:
    """Owns the device thread. Methods may be called from any thread; none waits, except `stop`."""

    def __init__(self, build: Callable[[], Executor]) -> None:
        """build: builds the executor, on the device thread; `ready` holds its result or error."""
        self.ready: Future[Executor] = Future()
        # Set when this process has lost the device, as after an illegal access on a GPU.
        self.lost: Future[BaseException] = Future()
        self._build = build
        self._changed = threading.Condition()
        self._queue: deque[_SessionOpening | _ReceivedPlan | _Action] = deque()
        self._session: PlanSession | None = None
        self._scheduler_id = ""
        self._stopping = False
        # Set to end the work: done when every launched step is answered.
        self._finished: Future[None] | None = None
        self._running: tuple[int, int] | None = None
        self._last_completed = 0
        self._tracing = TraceRequests()
        self.numbers = StepNumbers()
        """Counts and times of the steps; changed on the device thread."""
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)

    def start(self) -> None:
        """Start the thread; `ready` is done when the executor is built."""
        self._thread.start()

    def finish(self) -> Future[None]:
        """Drop queued plans and launch no more; the future is done when every launched step is answered."""
        with self._changed:
            self._finished = self._finished or Future()
            self._queue.clear()
            self._changed.notify()
            return self._finished

    def stop(self, timeout_s: float) -> bool:
        """Drop queued plans and end after the running step; return False if it still runs at the timeout."""
        with self._changed:
            self._stopping = True
            self._queue.clear()
            self._changed.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def open_session(
        self,
        epoch: int,
        on_result: Callable[[StepResult], None],
        announce: Callable[[int], Future[None]] | None = None,
        *,
        scheduler_id: str = "",
    ) -> tuple[PlanSession, Future[int]]:
        """End the previous session, drop every queued plan, and clear the slots after the running step.

        Returns the session, and a future of the last completed step id, done once the slots are clear. on_result is
        called on the device thread, in the order of plans. announce sends a heartbeat that names a step; its future is
        done when the heartbeat is written.
        """
        session, opened = PlanSession(epoch, on_result, announce), Future[int]()
        with self._changed:
            # Also the session of the running step, whose result must no longer be delivered.
            if self._session is not None:
                self._session.closed = True
                if scheduler_id == self._scheduler_id:
                    session.sole_since_epoch = self._session.sole_since_epoch
            self._session, self._scheduler_id = session, scheduler_id
            for item in self._queue:
                if isinstance(item, _SessionOpening):
                    item.last_completed_step_id.cancel()
            self._queue.clear()
            self._queue.append(_SessionOpening(session, opened))
            self._changed.notify()
        return session, opened

    def submit(self, session: PlanSession, plan: StepPlan | RejectedPlan, received_ns: int) -> None:
        """Queue a plan; drop it if its session has ended, or after `finish`.

        The answer to a plan over max_inflight_plans is INVALID_PLAN.
        """
        with self._changed:
            if session.closed or self._finished is not None:
                return
            limit = self.ready.result().limits.max_inflight_plans
            if session.num_unanswered >= limit:
                plan = RejectedPlan(
                    plan.step_id, f"over max_inflight_plans {limit}: {session.num_unanswered} in flight"
                )
            session.num_unanswered += 1
            self._queue.append(_ReceivedPlan(session, plan, received_ns))
            self._changed.notify()

    def submit_action(self, session: PlanSession, act: Callable[[], None], done: Callable[[], None]) -> None:
        """Queue what is done on the device thread after the plans so far, and before those that come; drop it if the
        session has ended. `done` is called after it; `done` may not raise.
        """
        with self._changed:
            if session.closed or self._finished is not None:
                return
            self._queue.append(_Action(session, act, done))
            self._changed.notify()

    def close_session(self, session: PlanSession) -> None:
        """Drop the session's queued plans; results of its running steps are not delivered."""
        with self._changed:
            session.closed = True
            kept = [item for item in self._queue if item.session is not session]
            self._queue.clear()
            self._queue.extend(kept)

    def activity(self) -> Activity:
        """Return the current work, for heartbeats."""
        running, queued = self._running, len(self._queue)
        if running is None:
            return Activity(0, 0, queued)
        return Activity(running[0], time.monotonic_ns() - running[1], queued)

    def trace(self, num_steps: int) -> Future[bytes]:
        """Request a trace of the next steps, as `trace_requests.TraceRequests.request` does; the executor is built.

        Raises NotImplementedError for an executor that cannot be traced.
        """
        if self.ready.result().start_trace is None:
            raise NotImplementedError("a simulated executor has nothing to trace")
        return self._tracing.request(num_steps)

    def _run(self) -> None:
        if not self.ready.set_running_or_notify_cancel():
            return
        try:
            executor = self._build()
        except BaseException as exc:
            self.ready.set_exception(exc)
            return
        self.ready.set_result(executor)
        begun: deque[_LaunchedStep] = deque()
        ended_ns = 0
        while (item := self._next(begun)) is not None:
            if isinstance(item, _SessionOpening):
                # The session of the launched steps has ended.
                begun.clear()
                self._open(executor, item.last_completed_step_id)
            elif isinstance(item, _ReceivedPlan):
                if executor.start_trace is not None:
                    self._tracing.before_step(executor.start_trace)
                begun.append(self._begin(executor, item))
            elif isinstance(item, _Action):
                self._act(executor, item)
            else:
                result = self._finish(executor, item)
                self.numbers.on_result(result)
                self._answer(item.step, result)
                self._tracing.after_step()
                ended_ns = time.monotonic_ns()
            # A step that was launched ahead starts when the one before it has ended.
            self._running = (begun[0].step.plan.step_id, max(begun[0].started_ns, ended_ns)) if begun else None

    def _act(self, executor: Executor, item: _Action) -> None:
        """Do what is to be done between steps; after an error the session launches nothing more."""
        try:
            item.act()
        except Exception as exc:
            _log.error("work between steps has failed", exc_info=exc)
            self._report_if_lost(executor, exc)
            item.session.failed = True
        item.done()

    def _next(self, begun: deque[_LaunchedStep]) -> _SessionOpening | _ReceivedPlan | _Action | _LaunchedStep | None:
        """Wait for the next work: a step to finish, a step to launch, an action, or a session to open; None: stop."""
        with self._changed:
            while not self._stopping:
                if begun and begun[0].is_done():
                    return begun.popleft()
                if self._queue and isinstance(self._queue[0], _Action) and begun:
                    # No step may run meanwhile.
                    return begun.popleft()
                if self._queue and (len(begun) < _MAX_LAUNCHED_STEPS or isinstance(self._queue[0], _SessionOpening)):
                    return self._queue.popleft()
                if self._finished is not None and not begun and not self._finished.done():
                    self._finished.set_result(None)
                if len(begun) == _MAX_LAUNCHED_STEPS:
                    # No other work is possible: wait for its result without polling.
                    return begun.popleft()
                self._changed.wait(_POLL_S if begun else None)
            return None

    def _open(self, executor: Executor, opened: Future[int]) -> None:
        """Clear the slots, and set the id of the last completed step."""
        if not opened.set_running_or_notify_cancel():
            return
        try:
            executor.clear()
        except Exception as exc:
            _log.error("the slots cannot be cleared", exc_info=exc)
            self._report_if_lost(executor, exc)
            opened.set_exception(exc)
        else:
            opened.set_result(self._last_completed)

    def _answer(self, item: _ReceivedPlan, result: StepResult) -> None:
        with self._changed:
            item.session.num_unanswered -= 1
            if item.session.closed:
                return
        item.session.on_result(result)

    def _begin(self, executor: Executor, item: _ReceivedPlan) -> _LaunchedStep:
        """Launch one plan; every failure becomes a result, and the session launches nothing more after it."""
        session, plan, started_ns = item.session, item.plan, time.monotonic_ns()
        if session.failed:
            return _LaunchedStep(item, started_ns, None, StepStatus.SKIPPED, _AFTER_FAILURE)
        self._running = self._running or (plan.step_id, started_ns)
        if isinstance(plan, StepPlan) and plan.announces_start:
            session.announce_step(plan.step_id)
        try:
            return _LaunchedStep(item, started_ns, executor.launch(self._checked(session, plan), item.received_ns))
        except InvalidPlan as exc:
            begun = _LaunchedStep(item, started_ns, None, *self._invalid(session, plan.step_id, exc))
        except Exception as exc:
            begun = _LaunchedStep(item, started_ns, None, *self._failure(executor, plan.step_id, exc))
        session.failed = True
        return begun

    def _finish(self, executor: Executor, begun: _LaunchedStep) -> StepResult:
        """Wait for a step and return its result; if it fails, the results of later steps are SKIPPED."""
        session, step_id, status, message = begun.step.session, begun.step.plan.step_id, begun.status, begun.message
        if begun.launched is not None and session.failed_running:
            status, message = StepStatus.SKIPPED, _AFTER_FAILURE
        elif begun.launched is not None:
            try:
                result = begun.launched.result()
            except InvalidPlan as exc:  # found out by the device
                status, message = self._invalid(session, step_id, exc)
                session.failed = session.failed_running = True
            except Exception as exc:
                status, message = self._failure(executor, step_id, exc)
                session.failed = session.failed_running = True
            else:
                self._last_completed = step_id
                return result
        received_ns, ended_ns = begun.step.received_ns, time.monotonic_ns()
        timings = StepTimings(begun.started_ns - received_ns, 0, 0, ended_ns - begun.started_ns)
        return StepResult(step_id=step_id, status=status, error_message=message, timings=timings)

    def _checked(self, session: PlanSession, plan: StepPlan | RejectedPlan) -> StepPlan:
        """Return the plan; raises InvalidPlan if it was unreadable, of another epoch or out of order."""
        if isinstance(plan, RejectedPlan):
            raise InvalidPlan(plan.message)
        if plan.epoch != session.epoch:
            raise InvalidPlan(f"the plan is of epoch {plan.epoch}, the session of epoch {session.epoch}")
        last = session.last_step_id
        if last is None and plan.step_id <= self._last_completed:
            raise InvalidPlan(f"step_id {plan.step_id} is not above the last completed step {self._last_completed}")
        if last is not None and plan.step_id != last + 1:
            raise InvalidPlan(f"step_id {plan.step_id} does not follow {last}")
        session.last_step_id = plan.step_id
        return plan

    def _invalid(self, session: PlanSession, step_id: int, exc: InvalidPlan) -> tuple[StepStatus, str]:
        _log.error("step %d: invalid plan: %s", step_id, exc, extra={"step_id": step_id, "epoch": session.epoch})
        return StepStatus.INVALID_PLAN, str(exc)

    def _failure(self, executor: Executor, step_id: int, exc: Exception) -> tuple[StepStatus, str]:
        _log.error("step %d failed", step_id, exc_info=exc, extra={"step_id": step_id})
        message = f"{type(exc).__name__}: {exc}"
        if executor.is_out_of_memory(exc):
            return StepStatus.OUT_OF_MEMORY, message
        self._report_if_lost(executor, exc)
        return StepStatus.FAILED, message

    def _report_if_lost(self, executor: Executor, exc: Exception) -> None:
        if executor.is_lost(exc) and not self.lost.done():
            self.lost.set_result(exc)
