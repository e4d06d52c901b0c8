"""The plan loop: keeps a session with one executor and sends it plans, two in flight by default.

A plan is sent as late as possible without letting the executor idle (see pacing). After a result the next plan goes
first, and the result's outputs are delivered while the executor computes. When the session breaks, for any reason, the
core requeues the lane's running sequences, and the loop opens a new session once the executor answers. A scheduler with
several executors has a loop for each.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from functools import partial

from cadenza_common.plan.result import StepResult, StepStatus
from cadenza_common.serving.slices import run_in_slices
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core.errors import InvariantError, LimitsError
from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.scheduler import Scheduler, check_limits
from scheduler_svc.core.types import SessionEnd
from scheduler_svc.plan_loop.clock import Clock
from scheduler_svc.plan_loop.fleet_model import executor_spec
from scheduler_svc.plan_loop.gauges import Load
from scheduler_svc.plan_loop.listener import PlanLoopListener
from scheduler_svc.plan_loop.model_change import ModelRefusedError
from scheduler_svc.plan_loop.opening import open_session
from scheduler_svc.plan_loop.pacing import StepPacer
from scheduler_svc.plan_loop.ports import (
    ExecutorFencedError,
    ExecutorLostError,
    ExecutorPort,
    ExecutorState,
    ExecutorStoppedError,
    ModelDescription,
    PlanStream,
)
from scheduler_svc.plan_loop.progress import ProgressWatch

_LOG = logging.getLogger(__name__)
_RECONNECT_S = 0.2
_REFUSED_S = 1.0
"""Time until the description of an executor that does not fit is read again: another may have replaced it."""
_TIMER_S = 1e-3
"""The step of the event loop's timers (uvloop counts milliseconds): what is due sooner is due now. A timer for less
runs at once, again and again."""
_FEW_OUTPUTS = 32
"""They are delivered in 0.1 ms (measured)."""


class PlanLoop:
    """Drives one executor: its lane of the core, and the session with it."""

    def __init__(
        self,
        core: Scheduler,
        executor_id: int,
        executor: ExecutorPort,
        config: SchedulerConfig,
        listener: PlanLoopListener,
        clock: Clock,
    ) -> None:
        self._core = core
        self._executor_id = executor_id
        self._executor = executor
        self._config = config
        self._listener = listener
        self._clock = clock
        self._wake = asyncio.Event()
        self._pacer = StepPacer()
        self._progress = ProgressWatch(clock, executor.target, partial(listener.on_progress, executor_id))
        self._epoch = 0
        self._last_session_epoch = 0
        """The epoch of the newest session that was opened; `_epoch` may be that of an attempt."""
        self._incarnation = 0
        self._last_done_step_id = 0
        self.failed_step_id = 0
        """The step of the last session that failed; 0: none."""
        self._stream: PlanStream | None = None
        self._undelivered: deque[Callable[[], None]] = deque()
        self._end_reason = ""
        self._ending = asyncio.Event()
        self.model: ModelDescription | None = None
        """The executor's description; None before its first session."""
        self.claimed: int | None = None
        """The incarnation with which it has a session, or is about to open one."""
        self.connected = False
        self.idle = False
        """Whether it waits for something to plan."""
        self.leaving = False
        """Whether the executor is being removed: no request ended its session."""

    @property
    def target(self) -> str:
        """The executor's address."""
        return self._executor.target

    @property
    def lane(self) -> Lane | None:
        """The core's lane of this executor; None before its first session."""
        return self._core.lanes.get(self._executor_id)

    @property
    def epoch(self) -> int:
        """Of the session, or of the last attempt to open one; 0: there was none."""
        return self._epoch

    @property
    def incarnation(self) -> int:
        """Of the last session; 0: there was none."""
        return self._incarnation

    @property
    def stalled(self) -> bool:
        """Whether a step has run for much longer than it should."""
        return self._progress.stall is not None

    def state(self, *, draining: bool, refusal: str, load: Load) -> ExecutorState:
        """The executor's current state; the parameters are what the loop does not know."""
        stall, lane, model = self._progress.stall, self.lane, self.model
        groups = lane.spec.page_groups if lane is not None else ()
        return ExecutorState(
            target=self.target,
            index=self._executor_id,
            connected=self.connected,
            draining=draining,
            refusal=refusal,
            incarnation=self._incarnation,
            epoch=self._epoch,
            device=model.device if model is not None else "",
            block_size=model.block_size if model is not None else 0,
            max_num_seqs=lane.spec.max_num_seqs if lane is not None else 0,
            num_inflight_plans=len(lane.inflight) if lane is not None else 0,
            last_step_id=self._last_done_step_id,
            resident_bytes=self._stream.resident_bytes if self._stream is not None else 0,
            stalled_step_id=stall.step_id if stall is not None else 0,
            stalled_s=self._clock.monotonic() - stall.since if stall is not None else 0.0,
            load=load,
            max_drafts=min(lane.counts.drafts.most, lane.spec.max_drafts) if lane is not None else 0,
            num_loaded_adapters=lane.adapters.num_loaded if lane is not None else 0,
            num_loading_adapters=lane.adapters.num_loading if lane is not None else 0,
            max_loaded_adapters=lane.adapters.max_cpu_loras if lane is not None else 0,
            max_loras=lane.adapters.max_loras if lane is not None else 0,
            kv_group_windows=[group.window or 0 for group in groups],
            kv_group_pages=[group.pages_per_block for group in groups],
            pages_per_state=lane.spec.pages_per_state if lane is not None else 0,
            memory=model.memory if model is not None else (),
        )

    def wake(self) -> None:
        """Signal a change after which there may be something to plan."""
        self._wake.set()

    def deliver(self) -> None:
        """Deliver all outputs so far, in order: before the listener changes a request by a call of its own."""
        while self._undelivered:
            self._undelivered.popleft()()

    def end_session(self, reason: str) -> None:
        """End the session as if the executor were lost; a new one is opened once it answers."""
        self._end_reason = reason
        self._ending.set()

    async def run(self, held_at: float | None = None) -> None:
        """Keep a session open, again and again; raises ExecutorFencedError.

        held_at: when that was last raised, if the executor was not used since.
        """
        while True:
            try:
                await self._session(held_at)
            except ExecutorFencedError:
                raise
            except ExecutorLostError as exc:
                _LOG.warning("executor %s: no session: %s", self.target, exc, extra={"executor": self.target})
            finally:
                self.claimed = None
            held_at = None
            await self._clock.sleep(_RECONNECT_S)

    async def _session(self, held_at: float | None) -> None:
        """Open a session and run it until it breaks; raises ExecutorLostError if none can be opened."""
        model, adopt = await self._describe_until_accepted()
        stream, self._epoch = await open_session(self._executor, self._clock, self._epoch + 1, held_at)
        try:
            if stream.opened.incarnation != model.incarnation:
                raise ExecutorLostError("another executor took its place while the session was opened")
            adopt()
        except (ExecutorLostError, ModelRefusedError) as exc:
            await stream.close()
            raise ExecutorLostError(str(exc)) from exc
        self._open(stream)
        error: ExecutorLostError | None = None
        work = (self._send_plans(stream), self._receive_results(stream), self._until_ended())
        tasks = [asyncio.create_task(each) for each in work]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except ExecutorLostError as exc:
            error = exc
        finally:
            for task in tasks:
                task.cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            await stream.close()
            error = next((each for each in outcomes if isinstance(each, ExecutorStoppedError)), error)
            self._close(stream, error)
        if isinstance(error, ExecutorFencedError):
            raise error

    def _open(self, stream: PlanStream) -> None:
        """Start a session whose stream is open."""
        opened = stream.opened
        same_incarnation = opened.incarnation == self._incarnation
        # Another scheduler may have held the executor in between, and written to its pools.
        keeps_kv = same_incarnation and 0 < opened.sole_since_epoch <= self._last_session_epoch
        self._last_session_epoch = self._epoch
        self._incarnation = opened.incarnation
        # A new incarnation has completed none, and a count never goes back.
        self._last_done_step_id = max(self._last_done_step_id, opened.last_completed_step_id)
        self._listener.on_outputs(
            self._core.session_opened(
                opened.last_completed_step_id,
                executor_id=self._executor_id,
                same_incarnation=same_incarnation,
                keeps_kv=keeps_kv,
                adapters=opened.adapters,
            )
        )
        self._stream, self.failed_step_id = stream, 0
        self._ending.clear()
        self._progress.session_opened(self._incarnation)
        self.connected = True
        self._listener.on_connected(self._executor_id)

    def _close(self, stream: PlanStream, error: ExecutorLostError | None) -> None:
        """Report the end of a session, after all of its outputs."""
        self._stream, self.connected, self.idle = None, False, False
        self._progress.session_closed()
        self.deliver()
        stopped = self.leaving or isinstance(error, ExecutorStoppedError)
        end = SessionEnd(stream.begun_step_id, self.failed_step_id, stopped)
        outputs = self._core.executor_lost(self._executor_id, self._clock.monotonic(), end)
        self._listener.on_lost(self._executor_id, error, outputs)

    async def _until_ended(self) -> None:
        await self._ending.wait()
        raise ExecutorLostError(self._end_reason)

    async def _describe_until_accepted(self) -> tuple[ModelDescription, Callable[[], None]]:
        """Wait for an executor that can be served; returns its description, and the call that adopts it.

        An executor that cannot be served is reported. It is described again until it, or another at its address, fits.
        """
        while True:
            try:
                model = await self._executor.describe()
                return model, await self._check_model(model)
            except (LimitsError, ModelRefusedError) as exc:
                self._listener.on_refused(self._executor_id, exc)
            except ExecutorLostError as exc:
                if self.model is not None:
                    raise
                self._listener.on_refused(self._executor_id, exc)
            self.claimed = None
            await self._clock.sleep(_REFUSED_S)

    async def _check_model(self, model: ModelDescription) -> Callable[[], None]:
        """Prepare for an executor; returns the call that adopts it. Raises LimitsError, ModelRefusedError.

        Nothing has changed yet if it raises, or if no session can be opened.
        """
        spec = executor_spec(model, self._config)
        check_limits(spec)
        self.claimed = model.incarnation
        adopt_model = await self._listener.check_model(self._executor_id, model)

        def adopt() -> None:
            before, lane = self.model, self.lane
            same_numerics = before is not None and before.fingerprint == model.fingerprint
            if before is not None and not same_numerics:
                self._pacer = StepPacer()
            # A new lane has an empty prefix cache: KV of other numerics must never be used.
            if lane is None or spec != lane.spec or not same_numerics:
                self._core.add_executor(self._executor_id, spec)
            self.model = model

        return partial(adopt_model, adopt)

    async def _send_plans(self, stream: PlanStream) -> None:
        while True:
            await self._wait_until_due()
            if len(self._core.waiting):
                await run_in_slices(self._core.look_ahead(self._executor_id, self._clock.monotonic()))
            if commands := self._core.adapter_commands(self._executor_id):
                await stream.send_adapters(commands)
                self._listener.on_adapters(self._executor_id, commands, self._clock.monotonic())
            now = self._clock.monotonic()
            plan = self._core.plan_step(self._executor_id, now)
            self._undelivered.append(partial(self._listener.on_outputs, self._core.take_outputs()))
            if plan is None:
                self.deliver()
                self._wake.clear()
                self.idle = True
                await self._wait_for_outputs(self._core.wakes_at(self._executor_id, now))
                self.idle = False
                continue
            lane = self._core.lanes[self._executor_id]
            self._listener.on_planned(lane.inflight[-1])
            if len(lane.inflight) == 1:
                self._pacer.started(now)
                self._progress.started(lane)
            await stream.send(plan)
            self.deliver()

    async def _wait_until_due(self) -> None:
        """Wait until the next plan is due: at once if the executor idles, late in its step if it is busy."""
        assert self.model is not None
        inflight = self._core.lanes[self._executor_id].inflight
        limit = min(self._config.max_inflight_plans, self.model.max_inflight_plans)
        while True:
            self._wake.clear()
            due: float | None = None
            if len(inflight) < limit:
                if not inflight:
                    return
                due = self._pacer.due(inflight[0].most_tokens)
                if due - self._clock.monotonic() < _TIMER_S:
                    return
            await self._wait_for_outputs(due)

    async def _wait_for_outputs(self, until: float | None) -> None:
        """Wait until `wake` is called, or until this moment on the clock."""
        if until is None:
            await self._wake.wait()
            return
        # Not a timeout: its contexts and its exception take longer than the timer, and nearly every step waits here.
        timer = self._clock.call_later(until - self._clock.monotonic(), self._wake.set)
        try:
            await self._wake.wait()
        finally:
            timer.cancel()

    async def _receive_results(self, stream: PlanStream) -> None:
        async for result in stream.results():
            if not isinstance(result, StepResult):
                self._core.adapter_event(result, self._executor_id)
                self._listener.on_adapters(self._executor_id, result, self._clock.monotonic())
                self._undelivered.append(partial(self._listener.on_outputs, self._core.take_outputs()))
                self.deliver()
                self._wake.set()
                continue
            if result.status is not StepStatus.OK:
                self.failed_step_id = result.step_id
                raise ExecutorLostError(f"step {result.step_id} ended {result.status.name}: {result.error_message}")
            if self._apply(result):
                self.deliver()
            self._wake.set()
            # The other task plans and sends the next step first, if one is due.
            await asyncio.sleep(0)
            self.deliver()
        raise ExecutorLostError("the plan stream ended")

    def _apply(self, result: StepResult) -> bool:
        """Apply a result; returns whether its outputs go before the next plan.

        A first token is waited for most. The outputs of many sequences would hold up the plan.
        """
        now = self._clock.monotonic()
        try:
            step, outputs = self._core.apply_result(self._executor_id, result, now)
        except InvariantError as exc:
            about = {"executor": self.target, "step_id": result.step_id, "epoch": self._epoch}
            _LOG.exception("a result contradicts its plan; the session is closed", extra=about)
            self.failed_step_id = result.step_id
            raise ExecutorLostError(str(exc)) from exc
        self._last_done_step_id = result.step_id
        self._pacer.ended(step.most_tokens, result.timings.total_ns / 1e9, now)
        self._progress.ended()
        self._progress.started(self._core.lanes[self._executor_id])
        self._undelivered.append(partial(self._listener.on_outputs, outputs))
        record = self._listener.on_applied(step, result, outputs, now)
        if record is not None:
            self._undelivered.append(record)
        return step.has_first_tokens and len(step.decode_slots) + len(step.chunks) <= _FEW_OUTPUTS
