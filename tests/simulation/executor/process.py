"""A simulated executor process: one incarnation, its queue of plans, and the session that holds it."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Protocol

from cadenza_common.plan.plan import StepPlan
from cadenza_common.plan.result import StepResult, StepStatus, StepTimings
from scheduler_svc.core.adapters.events import AdapterCommands, AdapterLoaded, AdapterUnloaded
from scheduler_svc.plan_loop.ports import ModelDescription
from tests.simulation.executor.adapting import AdapterFiles, AdapterLoads
from tests.simulation.executor.pools import PlanError

_AFTER_FAILURE = "an earlier step of this session failed"


class Runner(Protocol):
    """What runs the plans: a PlanRunner, or the executor that the service simulates."""

    def clear(self) -> None:
        """Free all slots."""

    def run(self, plan: StepPlan, non_finite: int | None = None) -> StepResult:
        """Run one plan."""

    def spoil(self, plan: StepPlan) -> None:
        """Fail in the middle of a plan."""

    def spoil_pages(self, pages: list[int]) -> None:
        """Leave garbage in device pages."""

    def load_adapter(self, index: int, content: int) -> None:
        """Later plans may name an adapter."""

    def unload_adapter(self, index: int) -> None:
        """No later plan names an adapter."""

    @property
    def num_slots_used(self) -> int:
        """Slots that hold a sequence."""

    @property
    def computed_seeds(self) -> frozenset[int]:
        """Seeds of the requests that the last plan computed; empty if the runner does not know them."""


@dataclass(slots=True, eq=False)
class Session:
    """One session, as the process sees it."""

    epoch: int
    deliver: Callable[[StepResult | AdapterLoaded | AdapterUnloaded], None]
    announce: Callable[[int], None]
    """Sends a heartbeat with a step that is about to run."""
    announce_end: Callable[[], None]
    """Sends that a signal stops the process."""
    closed: bool = False
    failed: bool = False
    last_step_id: int | None = None
    lost_at: float = math.inf
    """When the scheduler's end lost it: its steps count for nothing from then on."""


@dataclass(slots=True)
class NextStep:
    """What becomes of the next step that begins."""

    seconds: float = 0.0
    """It takes so much longer."""
    status: StepStatus = StepStatus.OK
    non_finite: int | None = None
    """This sampling slot, if there are so many, has logits that are not finite."""
    dies: bool = False
    """The process dies in it."""


class ExecutorProcess:
    """One incarnation. It runs one step after another and answers each; a dead one does nothing any more."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        rng: Random,
        model: ModelDescription,
        runner: Runner,
        files: AdapterFiles,
        load_s: float,
        *,
        on_error: Callable[[Exception], None],
        on_death: Callable[[Session | None], None],
        on_step: Callable[[StepPlan, bool], None],
        on_computed: Callable[[Session, float], None],
        on_change: Callable[[], None],
        is_poisoned: Callable[[StepPlan], bool],
        unused: Callable[[StepPlan], list[int]],
    ) -> None:
        """on_death: called with the session whose peer knows already. on_step: called when a step begins (False) and
        ends (True). on_computed: called when it has computed, with the time at which it began. on_change: called when
        one hangs, goes on or fails. unused: the device pages that nobody had when a plan was made."""
        self.model = model
        self.runner = runner
        self.alive = True
        self.loads = AdapterLoads(loop, rng, files, load_s, runner.load_adapter)
        self.forgets: Callable[[int], bool] | None = None
        """Which of its adapters it has no more when the next session opens."""
        self.session: Session | None = None
        self.last_epoch = 0
        self.last_completed = 0
        self.num_answered = 0
        """Results that have arrived at the scheduler."""
        self.num_slow_steps = 0
        self.next_step: NextStep | None = None
        self.hanging = False
        """Whether a step runs that takes much too long."""
        self._loop, self._rng = loop, rng
        self._on_error, self._on_death, self._on_step, self._is_poisoned = on_error, on_death, on_step, is_poisoned
        self._on_change, self._on_computed, self._unused = on_change, on_computed, unused
        self._queue: deque[tuple[Session, StepPlan | AdapterUnloaded]] = deque()
        self._running: tuple[Session, StepPlan, NextStep] | None = None
        self._began_at = 0.0
        self._opening: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._ended_while_stopped = False
        self._base_s = rng.choice([0.003, 0.01, 0.02])

    @property
    def stopped(self) -> bool:
        """Suspended, as by SIGSTOP."""
        return self.loads.stopped

    @property
    def running(self) -> bool:
        """Whether a step runs."""
        return self._running is not None

    @property
    def num_running_tokens(self) -> int:
        """Tokens of the running step, without the decode batch."""
        return sum(self._running[1].scheduled_num_tokens) if self._running is not None else 0

    def running_step_id(self, session: Session) -> int:
        """The step of this session that runs; 0: none."""
        return self._running[1].step_id if self._running is not None and self._running[0] is session else 0

    def open_session(self, session: Session, opened: Callable[[int, tuple[AdapterLoaded, ...]], None]) -> None:
        """End the session before; once the running step has ended and the slots are clear, call `opened`."""
        if self.session is not None:
            self.session.closed = True
        self.session, self.last_epoch = session, session.epoch
        self._queue.clear()
        self.loads.drop_waiting()

        def clear() -> None:
            self.runner.clear()
            self.loads.open_session(answer)

        def answer() -> None:
            self._forget_adapters()
            opened(self.last_completed, self.loads.answers())

        self._opening = clear
        if self._running is None:
            self._open()

    def _open(self) -> None:
        opening, self._opening = self._opening, None
        if opening is not None:
            opening()

    def close_session(self, session: Session) -> None:
        """Drop the session's queued plans; the running step goes on, and nothing is answered."""
        session.closed = True
        self._queue = deque(item for item in self._queue if item[0] is not session)
        if self.session is session:
            self.session = None
            self._opening = None
            self.loads.drop_waiting()

    def submit(self, session: Session, plan: StepPlan) -> None:
        """Queue a plan."""
        if session.closed or not self.alive:
            return
        num_queued = sum(isinstance(work, StepPlan) for _, work in self._queue)
        if num_queued + self.running >= self.model.max_inflight_plans + 1:
            self._on_error(PlanError(f"more than {self.model.max_inflight_plans} plans in flight"))
        self._queue.append((session, plan))
        if self._running is None:
            self._begin()

    def submit_adapters(self, session: Session, commands: AdapterCommands) -> None:
        """Queue unloads behind the plans so far, and begin loads."""
        if session.closed or not self.alive:
            return
        if not self.model.max_loras:
            self._on_error(PlanError("an executor without adapters is to load some"))
            return
        self._queue += [(session, AdapterUnloaded(index)) for index in commands.unloads]
        if self._running is None:
            self._begin()
        for registered in commands.loads:
            if registered.index in self.loads.loaded:
                self._on_error(PlanError(f"adapter {registered.index} is loaded again"))
            if self.loads.num_held >= self.model.max_cpu_loras:
                self._on_error(PlanError(f"over {self.model.max_cpu_loras} adapters are loaded"))
            self.loads.load(registered, partial(self._answer, session))

    def _answer(self, session: Session, answer: AdapterLoaded | AdapterUnloaded) -> None:
        if not session.closed:
            session.deliver(answer)

    def _unload(self, index: int) -> None:
        if self.loads.loaded.pop(index, None) is not None:
            self.runner.unload_adapter(index)

    def _forget_adapters(self) -> None:
        forgets, self.forgets = self.forgets, None
        for index in list(self.loads.loaded):
            if forgets is not None and forgets(index):
                self._unload(index)

    def terminate(self) -> None:
        """End by a signal: the peer of the session learns of it, after all results so far."""
        informed = None if self.stopped else self.session
        if informed is not None and self.alive:
            informed.announce_end()
        self._die(informed)

    def kill(self) -> None:
        """End at once."""
        self._die(None)

    def _die(self, informed: Session | None) -> None:
        if not self.alive:
            return
        self.alive = self.hanging = False
        if self._timer is not None:
            self._timer.cancel()
        self._queue.clear()
        self.loads.stop()
        self._running = None
        self._on_death(informed)

    def resume(self) -> None:
        """Go on after a suspension."""
        self.loads.resume()
        if self._ended_while_stopped:
            self._ended_while_stopped = False
            self._end()

    def _begin(self) -> None:
        """Begin the next step, after the unloads before it."""
        while self._queue:
            session, work = self._queue.popleft()
            if isinstance(work, AdapterUnloaded):
                self._unload(work.index)
                self._answer(session, work)
            elif session.failed:
                session.deliver(StepResult(work.step_id, StepStatus.SKIPPED, _AFTER_FAILURE))
            else:
                self._start(session, work)
                return

    def _start(self, session: Session, plan: StepPlan) -> None:
        self._check_order(session, plan)
        fault, self.next_step = self.next_step or NextStep(), None
        if self._is_poisoned(plan):
            fault = NextStep(dies=True)
        seconds = self._base_s * (0.5 + self._rng.random()) + 0.0002 * sum(plan.scheduled_num_tokens)
        self._running, self._began_at = (session, plan, fault), self._loop.time()
        self.hanging = fault.seconds > 1.0
        if plan.announces_start:
            session.announce(plan.step_id)
        self._on_step(plan, False)
        if self.hanging:
            self._on_change()
        self._timer = self._loop.call_later(seconds + fault.seconds, self._end)

    def _check_order(self, session: Session, plan: StepPlan) -> None:
        last = session.last_step_id
        if plan.step_id <= self.last_completed if last is None else plan.step_id != last + 1:
            self._on_error(PlanError(f"step {plan.step_id} follows {last or self.last_completed}"))
        session.last_step_id = plan.step_id

    def _end(self) -> None:
        if self.stopped:
            self._ended_while_stopped = True
            return
        assert self._running is not None
        session, plan, fault = self._running
        if fault.dies:
            self.kill()
            return
        self._running = None
        self.num_slow_steps += fault.seconds > 0
        self._on_step(plan, True)
        if self.hanging or fault.status is not StepStatus.OK:
            self.hanging = False
            self._on_change()
        result = self._run(session, plan, fault)
        if result is None:
            return
        if not session.closed:
            session.deliver(result)
        if self._opening is not None:
            self._open()
        else:
            self._begin()

    def _run(self, session: Session, plan: StepPlan, fault: NextStep) -> StepResult | None:
        # What a session that has ended meant to run is run: the step had begun.
        try:
            if fault.status is not StepStatus.OK:
                self.runner.spoil(plan)
                session.failed = True
                return StepResult(plan.step_id, fault.status, "an injected failure")
            result = self.runner.run(plan, fault.non_finite)
            self.runner.spoil_pages(self._unused(plan))
        except Exception as exc:
            self._on_error(exc)
            return None
        self._on_computed(session, self._began_at)
        self.last_completed = plan.step_id
        num_tokens = sum(plan.scheduled_num_tokens) + len(result.slots)
        num_moved = len(plan.swap_out) + len(plan.swap_in)
        device_ns = 100_000 + 10_000 * num_tokens
        return replace(
            result,
            timings=StepTimings(device_ns=device_ns, moves_ns=20_000 * num_moved, total_ns=round(self._base_s * 1e9)),
        )
