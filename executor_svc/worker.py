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

from executor_svc.plan import InvalidPlan, Limits, StepPlan, StepResult, StepStatus, StepTimings

_log = logging.getLogger(__name__)


class Executor(Protocol):
    """What runs plans: `step.Executor`, or a simulated one."""

    limits: Limits

    def clear(self) -> None:
        """Free all slots; KV stays."""
        ...

    def execute(self, plan: StepPlan, received_ns: int) -> StepResult:
        """Run one step; received_ns is the plan's arrival on the monotonic clock.

        Raises InvalidPlan before anything is computed or moved, and whatever the device raises.
        """
        ...

    def is_out_of_memory(self, exc: Exception) -> bool:
        """Did `execute` raise this for want of device memory."""
        ...

    def is_lost(self, exc: Exception) -> bool:
        """Does this error of `execute` mean that the device is lost for this process."""
        ...


class Session:
    """What one plan stream has open. Made and ended by the worker; only its thread changes failed and last_step_id."""

    def __init__(self, epoch: int, on_result: Callable[[StepResult], None]) -> None:
        self.epoch = epoch
        self.on_result = on_result
        self.closed = False
        self.failed = False
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

    def _run(self) -> None:
        if not self.ready.set_running_or_notify_cancel():
            return
        try:
            executor = self._build()
        except BaseException as exc:
            self.ready.set_exception(exc)
            return
        self.ready.set_result(executor)
        while (item := self._next()) is not None:
            if isinstance(item, _Open):
                if item.last_completed_step_id.set_running_or_notify_cancel():
                    executor.clear()
                    item.last_completed_step_id.set_result(self._last_completed)
            else:
                self._answer(item, self._step(executor, item))

    def _next(self) -> _Open | _Step | None:
        with self._changed:
            while not self._queue and not self._stopping:
                self._changed.wait()
            return None if self._stopping else self._queue.popleft()

    def _answer(self, item: _Step, result: StepResult) -> None:
        with self._changed:
            item.session.num_unanswered -= 1
            if item.session.closed:
                return
        item.session.on_result(result)

    def _step(self, executor: Executor, item: _Step) -> StepResult:
        """Run one plan; every failure becomes a result, after which the session runs nothing more."""
        session, plan = item.session, item.plan
        started = time.monotonic_ns()
        status, message = StepStatus.SKIPPED, "an earlier step of this session failed"
        if not session.failed:
            self._running = (plan.step_id, started)
            try:
                result = executor.execute(self._checked(session, plan), item.received_ns)
            except InvalidPlan as exc:
                status, message = StepStatus.INVALID_PLAN, str(exc)
                _log.error("step %d: invalid plan: %s", plan.step_id, message)
            except Exception as exc:
                status, message = self._failure(executor, plan.step_id, exc)
            else:
                self._last_completed = plan.step_id
                return result
            finally:
                self._running = None
            session.failed = True
        timings = StepTimings(started - item.received_ns, 0, 0, time.monotonic_ns() - started)
        return StepResult(step_id=plan.step_id, status=status, error_message=message, timings=timings)

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
        if executor.is_lost(exc) and not self.lost.done():
            self.lost.set_result(exc)
        return StepStatus.FAILED, message
