"""What the engine measures: plain numbers, updated on the event loop for each step and each request, not each token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

from cadenza_common.plan.result import StepResult
from scheduler_svc.core.lanes.planned_step import PlannedStep
from scheduler_svc.core.outputs import StepOutputs
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequences.sequence import Sequence
from scheduler_svc.core.types import SequenceState
from scheduler_svc.metrics.adapter_numbers import AdapterMessage
from scheduler_svc.metrics.lane_numbers import LaneNumbers
from scheduler_svc.metrics.request_numbers import RequestNumbers
from scheduler_svc.plan_loop.ports import ExecutorState

MAX_LANES = 256
"""Numbers are kept for so many lanes, removed ones included. Beyond it the lane that was added first is forgotten."""


class EngineNumbers:
    """Counts and times since the start. The activity log reads them too."""

    def __init__(
        self, core: Scheduler, is_tenant: Callable[[str], bool], executors: Callable[[], list[ExecutorState]]
    ) -> None:
        """is_tenant: as in RequestNumbers. executors: gives the state of those that are there."""
        self.requests = RequestNumbers(is_tenant)
        self.lanes: dict[int, LaneNumbers] = {}
        """By executor index, which is never used again; removed executors stay."""
        self.refusals: Counter[str] = Counter()
        """Requests that were refused and never ran, by status code."""
        self._core = core
        self._executors = executors
        self._stalled: dict[Sequence, float] = {}
        """Of unfinished sequences that lost their place in a batch: about when their last token came, if one did."""

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens computed since the start, recomputed ones included."""
        return sum(each.num_prompt_tokens for each in self.lanes.values())

    def on_admitted(self, tenant: str) -> None:
        """A request was queued."""
        self.requests.of(tenant).num_admitted += 1

    def on_planned(self, step: PlannedStep) -> None:
        """A step was planned."""
        if step.preempted and (numbers := self.lanes.get(step.plan.executor_id)) is not None:
            last_result_at = numbers.last_result_at
            self._stalled.update(dict.fromkeys(step.preempted, last_result_at))

    def on_applied(self, step: PlannedStep, result: StepResult, outputs: StepOutputs, now: float) -> None:
        """A step's result was applied."""
        executor_id = step.plan.executor_id
        numbers = self.lanes.get(executor_id) or self._of(executor_id)
        numbers.on_applied(step, result, outputs, now, self._stalled)
        numbers.had_work = len(self._core.lanes[executor_id].running) > 0

    def on_adapters(self, executor_id: int, message: AdapterMessage, now: float) -> None:
        """Loads and unloads were sent, or one was answered and the core has the answer."""
        lane = self._core.lanes.get(executor_id)
        if lane is not None:
            self._of(executor_id).adapters.on_message(message, lane.adapters, self._core.adapters, now)

    def on_session_ended(self, executor_id: int) -> None:
        """A session has ended: its sequences have stalled since the last result."""
        if executor_id not in self._core.lanes:
            return
        numbers = self._of(executor_id)
        numbers.num_sessions_ended += 1
        numbers.had_work = False
        numbers.adapters.on_session_ended()
        for group in self._core.groups.values():
            if group.lane_id == executor_id:
                for sequence in group.sequences:
                    if sequence.state is not SequenceState.FINISHED:
                        self._stalled[sequence] = numbers.last_result_at

    def on_finished(self, sequences: Collection[Sequence]) -> None:
        """Sequences have ended."""
        if self._stalled:
            for sequence in sequences:
                self._stalled.pop(sequence, None)

    def _of(self, executor_id: int) -> LaneNumbers:
        """The numbers of an executor that is there."""
        numbers = self.lanes.get(executor_id)
        if numbers is None:
            # One that is being removed, and has never run a step, has no address any more.
            target = next((state.target for state in self._executors() if state.index == executor_id), "")
            numbers = self.lanes[executor_id] = LaneNumbers(target, self._core.lanes[executor_id].counts)
            while len(self.lanes) > MAX_LANES:
                del self.lanes[next(iter(self.lanes))]
        return numbers
