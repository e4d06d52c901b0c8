"""The one thread that owns the device, its queue of plans, and the sessions they belong to."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from executor_svc.plan.plan import InvalidPlan, Limits, StepPlan, StepResult, StepStatus, StepTimings
from executor_svc.worker.step_tracing import StepTracing

_log = logging.getLogger(__name__)

_MOST_BEGUN = 2
"""Steps that a device has at once: it goes on with the second while the first is answered."""
_POLL_S = 5e-5
"""How often a device is asked whether its one step is done, while another plan may come."""
_AFTER_FAILURE = "an earlier step of this session failed"


class Launched(Protocol):
    """A step that has begun."""

    def is_done(self) -> bool:
        """Would `result` return at once."""
        ...

    def result(self) -> StepResult:
        """Wait until it has run. Raises whatever the device raises."""
        ...


class Executor(Protocol):
    """What runs plans: `step.Executor`, or a simulated one."""

    limits: Limits

    def clear(self) -> None:
        """Free all slots, after the steps that have begun; KV stays."""
        ...

    def launch(self, plan: StepPlan, received_ns: int) -> Launched:
        """Begin one step; received_ns is the plan's arrival on the monotonic clock.

        Steps that have begun run in order. Raises InvalidPlan before anything is computed or moved, and whatever the
        device raises.
        """
        ...

    def is_out_of_memory(self, exc: Exception) -> bool:
        """Did a step raise this for want of device memory."""
        ...

    def is_lost(self, exc: Exception) -> bool:
        """Does this error of a step mean that the device is lost for this process."""
        ...

    def start_trace(self) -> Callable[[], bytes]:
        """Record a trace of the steps from here on; returns what ends it and gives it: Chrome's format, gzip.

        Raises NotImplementedError where there is nothing to trace.
        """
        ...


class Session:
    """What one plan stream has open. Made and ended by the worker.

    Its thread alone changes failed, failed_running and last_step_id.
    """

    def __init__(self, epoch: int, on_result: Callable[[StepResult], None]) -> None:
        self.epoch = epoch
        self.on_result = on_result
        self.closed = False
        self.failed = False
        # Has a step failed after it had begun.
        self.failed_running = False
        self.num_unanswered = 0
        self.last_step_id: int | None = None


@dataclass(frozen=True, slots=True)
class RejectedPlan:
    """A plan that could not be read; it is answered INVALID_PLAN in its turn."""

    step_id: int
    message: str


@dataclass(frozen=True, slots=True)
class Activity:
    """What the device thread is doing. step_id 0: no step runs."""

    step_id: int
    age_ns: int
    num_queued: int


@dataclass(frozen=True, slots=True)
class _Open:
    session: Session
    last_completed_step_id: Future[int]


@dataclass(frozen=True, slots=True)
class _Step:
    session: Session
    plan: StepPlan | RejectedPlan
    received_ns: int


@dataclass(frozen=True, slots=True)
class _Begun:
    """A step that is to be answered: what was launched, or why it was not."""

    step: _Step
    started_ns: int
    launched: Launched | None
    status: StepStatus = StepStatus.OK
    message: str = ""

    def is_done(self) -> bool:
        """Would it be answered at once. A device that fails may say so when it is asked: to be told with the result."""
        try:
            return self.launched is None or self.launched.is_done()
        except Exception:
            return True


class Worker:
    """Owns the device thread. Its methods may be called from any thread and do not wait, but for `stop`."""

    def __init__(self, build: Callable[[], Executor]) -> None:
        """`build` makes the executor, on the device thread; its result or error is in `ready`."""
        self.ready: Future[Executor] = Future()
        # Set when the device is lost for this process, as after an illegal access on a GPU.
        self.lost: Future[BaseException] = Future()
        self._build = build
        self._changed = threading.Condition()
        self._queue: deque[_Open | _Step] = deque()
        self._session: Session | None = None
        self._stopping = False
        self._running: tuple[int, int] | None = None
        self._last_completed = 0
        self._tracing = StepTracing()
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)

    def start(self) -> None:
        """Start the thread; `ready` tells when the executor is built."""
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Drop what is queued and end after the running step; False if it still runs at the timeout."""
        with self._changed:
            self._stopping = True
            self._queue.clear()
            self._changed.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def open_session(self, epoch: int, on_result: Callable[[StepResult], None]) -> tuple[Session, Future[int]]:
        """End the session before this one, drop every queued plan, and clear the slots after the running step.

        Returns the session, and the last completed step id once it stands. on_result is called on the device thread,
        in the order of plans.
        """
        session, opened = Session(epoch, on_result), Future[int]()
        with self._changed:
            # Also the session whose step is running: its result must not arrive any more.
            if self._session is not None:
                self._session.closed = True
            self._session = session
            for item in self._queue:
                if isinstance(item, _Open):
                    item.last_completed_step_id.cancel()
            self._queue.clear()
            self._queue.append(_Open(session, opened))
            self._changed.notify()
        return session, opened

    def submit(self, session: Session, plan: StepPlan | RejectedPlan, received_ns: int) -> None:
        """Queue a plan; dropped if its session has ended. A plan over the limit in flight is answered INVALID_PLAN."""
        with self._changed:
            if session.closed:
                return
            limit = self.ready.result().limits.max_inflight_plans
            if session.num_unanswered >= limit:
                plan = RejectedPlan(
                    plan.step_id, f"over max_inflight_plans {limit}: {session.num_unanswered} in flight"
                )
            session.num_unanswered += 1
            self._queue.append(_Step(session, plan, received_ns))
            self._changed.notify()

    def close_session(self, session: Session) -> None:
        """Drop the session's queued plans; results that are still to come are not delivered."""
        with self._changed:
            session.closed = True
            kept = [item for item in self._queue if item.session is not session]
            self._queue.clear()
            self._queue.extend(kept)

    def activity(self) -> Activity:
        """What runs now, for heartbeats."""
        running, queued = self._running, len(self._queue)
        if running is None:
            return Activity(0, 0, queued)
        return Activity(running[0], time.monotonic_ns() - running[1], queued)

    def trace(self, num_steps: int) -> Future[bytes]:
        """Record the next steps; as `step_tracing.StepTracing.ask` has it."""
        return self._tracing.ask(num_steps)

    def _run(self) -> None:
        if not self.ready.set_running_or_notify_cancel():
            return
        try:
            executor = self._build()
        except BaseException as exc:
            self.ready.set_exception(exc)
            return
        self.ready.set_result(executor)
        begun: deque[_Begun] = deque()
        while (item := self._next(begun)) is not None:
            if isinstance(item, _Open):
                # The session of what had begun has ended.
                begun.clear()
                self._open(executor, item.last_completed_step_id)
            elif isinstance(item, _Step):
                self._tracing.before_step(executor.start_trace)
                begun.append(self._begin(executor, item))
            else:
                self._answer(item.step, self._finish(executor, item))
                self._tracing.after_step()
            self._running = (begun[0].step.plan.step_id, begun[0].started_ns) if begun else None

    def _next(self, begun: deque[_Begun]) -> _Open | _Step | _Begun | None:
        """What to do next: finish the first step that has begun, begin another, open a session; None: stop."""
        with self._changed:
            while not self._stopping:
                if begun and begun[0].is_done():
                    return begun.popleft()
                if self._queue and (len(begun) < _MOST_BEGUN or isinstance(self._queue[0], _Open)):
                    return self._queue.popleft()
                if len(begun) == _MOST_BEGUN:
                    # Nothing else can be done, so its result is waited for: no polling.
                    return begun.popleft()
                self._changed.wait(_POLL_S if begun else None)
            return None

    def _open(self, executor: Executor, opened: Future[int]) -> None:
        """Clear the slots, and say what step was the last."""
        if not opened.set_running_or_notify_cancel():
            return
        try:
            executor.clear()
        except Exception as exc:
            _log.error("the slots can not be cleared", exc_info=exc)
            self._tell_if_lost(executor, exc)
            opened.set_exception(exc)
        else:
            opened.set_result(self._last_completed)

    def _answer(self, item: _Step, result: StepResult) -> None:
        with self._changed:
            item.session.num_unanswered -= 1
            if item.session.closed:
                return
        item.session.on_result(result)

    def _begin(self, executor: Executor, item: _Step) -> _Begun:
        """Launch one plan; every failure becomes a result, after which the session launches nothing more."""
        session, plan, started_ns = item.session, item.plan, time.monotonic_ns()
        if session.failed:
            return _Begun(item, started_ns, None, StepStatus.SKIPPED, _AFTER_FAILURE)
        self._running = self._running or (plan.step_id, started_ns)
        try:
            return _Begun(item, started_ns, executor.launch(self._checked(session, plan), item.received_ns))
        except InvalidPlan as exc:
            _log.error("step %d: invalid plan: %s", plan.step_id, exc)
            begun = _Begun(item, started_ns, None, StepStatus.INVALID_PLAN, str(exc))
        except Exception as exc:
            begun = _Begun(item, started_ns, None, *self._failure(executor, plan.step_id, exc))
        session.failed = True
        return begun

    def _finish(self, executor: Executor, begun: _Begun) -> StepResult:
        """Wait for a step; where it fails, those that began after it mean nothing either."""
        session, step_id, status, message = begun.step.session, begun.step.plan.step_id, begun.status, begun.message
        if begun.launched is not None and session.failed_running:
            status, message = StepStatus.SKIPPED, _AFTER_FAILURE
        elif begun.launched is not None:
            try:
                result = begun.launched.result()
            except Exception as exc:
                status, message = self._failure(executor, step_id, exc)
                session.failed = session.failed_running = True
            else:
                self._last_completed = step_id
                return result
        received_ns, ended_ns = begun.step.received_ns, time.monotonic_ns()
        timings = StepTimings(begun.started_ns - received_ns, 0, 0, ended_ns - begun.started_ns)
        return StepResult(step_id=step_id, status=status, error_message=message, timings=timings)

    def _checked(self, session: Session, plan: StepPlan | RejectedPlan) -> StepPlan:
        """The plan, if it can be read and comes in its turn."""
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

    def _failure(self, executor: Executor, step_id: int, exc: Exception) -> tuple[StepStatus, str]:
        _log.error("step %d failed", step_id, exc_info=exc)
        message = f"{type(exc).__name__}: {exc}"
        if executor.is_out_of_memory(exc):
            return StepStatus.OUT_OF_MEMORY, message
        self._tell_if_lost(executor, exc)
        return StepStatus.FAILED, message

    def _tell_if_lost(self, executor: Executor, exc: Exception) -> None:
        if executor.is_lost(exc) and not self.lost.done():
            self.lost.set_result(exc)
