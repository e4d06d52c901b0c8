"""A clock that stands still until a test moves it, and an executor whose steps take time on that clock."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace

from cadenza_common.plan.plan import StepPlan
from cadenza_common.plan.result import Candidates, StepResult, StepTimings
from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.plan_loop.clock import Clock
from scheduler_svc.plan_loop.ports import ExecutorLostError, ModelDescription, PlanStream, SessionOpened

_NUM_TURNS = 50
"""Turns of the event loop after which every task waits again for this clock."""
_CANDIDATES = Candidates(tuple(range(9, 17)), tuple(-0.1 * rank for rank in range(1, 9)))


@dataclass(order=True)
class _Timer:
    when_ns: int
    number: int
    callback: Callable[[], object] | None = field(compare=False)

    def cancel(self) -> None:
        self.callback = None


class FakeClock(Clock):
    """Virtual time: timers run in the order of their moments, then in the order in which they were set.

    It starts at 1 s, since a time of 0 means "not yet" in a request's times.
    """

    def __init__(self) -> None:
        self.now_ns = 1_000_000_000
        self._timers: list[_Timer] = []
        self._num_timers = 0

    def monotonic_ns(self) -> int:
        return self.now_ns

    def wall_time_ns(self) -> int:
        return 1_000_000_000_000 + self.now_ns

    def call_later(self, delay_s: float, callback: Callable[[], object]) -> _Timer:
        self._num_timers += 1
        # A delay that rounds to nothing would never let time pass.
        delay_ns = max(1, round(delay_s * 1e9)) if delay_s > 0 else 0
        timer = _Timer(self.now_ns + delay_ns, self._num_timers, callback)
        heapq.heappush(self._timers, timer)
        return timer

    @property
    def has_timers(self) -> bool:
        """Whether anything waits for this clock."""
        return any(timer.callback is not None for timer in self._timers)

    async def advance(self, seconds: float) -> None:
        """Move on by this much: run the timers that come due, and between them every task that can go on."""
        end_ns = self.now_ns + round(seconds * 1e9)
        await _settle()
        while self._timers and self._timers[0].when_ns <= end_ns:
            timer = heapq.heappop(self._timers)
            if timer.callback is not None:
                self.now_ns = max(self.now_ns, timer.when_ns)
                timer.callback()
                await _settle()
        self.now_ns = end_ns

    def suspend(self, seconds: float) -> None:
        """Let time pass in which this process does not run: timers that come due are late."""
        self.now_ns += round(seconds * 1e9)


async def _settle() -> None:
    for _ in range(_NUM_TURNS):
        await asyncio.sleep(0)


class TimedExecutor:
    """An ExecutorPort in this process: each step takes `step_s` on the clock, and every slot samples token 9.

    A beam has tokens 9 to 16 as candidates.
    """

    target = "virtual"
    num_steps_before = 0
    """Steps that it completed for an earlier scheduler."""

    def __init__(self, clock: Clock, model: ModelDescription, step_s: float) -> None:
        self.clock, self.model, self.step_s = clock, model, step_s
        self.lane: Lane | None = None
        """The core's lane of this executor, which knows which slots of a plan sample."""
        self.incarnation = 1
        self.hangs = False
        """While set, steps do not end: their results wait for `go_on`."""
        self.opened_at: list[float] = []
        self.stream: TimedStream | None = None

    async def describe(self) -> ModelDescription:
        return replace(self.model, incarnation=self.incarnation)

    async def open(self, epoch: int) -> PlanStream:
        self.opened_at.append(self.clock.monotonic())
        self.stream = TimedStream(self)
        return self.stream

    def result_of(self, plan: StepPlan, lane: Lane) -> StepResult:
        """The result of a plan; lane: the core's, in which the plan is in flight."""
        step = next(step for step in lane.inflight if step.plan.step_id == plan.step_id)
        beams = set(step.candidate_slots)
        slots = [slot for slot in step.sampling_slots if slot not in beams]
        return StepResult(
            plan.step_id,
            slots=slots,
            token_ids=[9] * len(slots),
            candidates=dict.fromkeys(beams, _CANDIDATES),
            timings=StepTimings(total_ns=round(self.step_s * 1e9)),
        )

    def go_on(self) -> None:
        """End the steps that hang."""
        self.hangs = False
        assert self.stream is not None
        self.stream.deliver_held()


class TimedStream:
    """One session with a TimedExecutor: steps run one after another."""

    resident_bytes = 0
    begun_step_id = 0

    def __init__(self, executor: TimedExecutor) -> None:
        self._executor = executor
        self.opened = SessionOpened(executor.incarnation, executor.num_steps_before)
        self._free_at = executor.clock.monotonic()
        self._results: asyncio.Queue[StepResult | None] = asyncio.Queue()
        self._held: list[StepResult] = []
        self.planned_at: list[float] = []

    async def send(self, plan: StepPlan) -> None:
        executor, now = self._executor, self._executor.clock.monotonic()
        assert executor.lane is not None
        step = next(step for step in executor.lane.inflight if step.plan.step_id == plan.step_id)
        self.planned_at.append(step.planned_at)
        result = executor.result_of(plan, executor.lane)
        self._free_at = max(now, self._free_at) + executor.step_s
        executor.clock.call_later(self._free_at - now, lambda: self._deliver(result))

    def _deliver(self, result: StepResult) -> None:
        if self._executor.hangs:
            self._held.append(result)
        else:
            self._results.put_nowait(result)

    def deliver_held(self) -> None:
        """Deliver the results that waited."""
        for result in self._held:
            self._results.put_nowait(result)
        self._held.clear()

    async def results(self) -> AsyncIterator[StepResult]:
        while (result := await self._results.get()) is not None:
            yield result
        raise ExecutorLostError("the test broke the stream")

    async def close(self) -> None:
        """Nothing is held."""

    def break_off(self) -> None:
        """End the stream as an executor that is gone does."""
        self._results.put_nowait(None)
