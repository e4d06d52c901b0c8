"""The scheduler core: requests in, plans out, results in, tokens out.

Pure: no clock, no randomness, no I/O. Each step (1) allocates blocks for the next tokens of running sequences and
preempts victims, in the policy's order, where blocks run out, (2) schedules decodes, beams and prefill chunks,
(3) admits waiting groups, new or preempted, within the token budget, the free slots and the free blocks, (4) releases
finished sequences. One rule covers prompts, decodes and recomputation after a preemption: a sequence has tokens without
KV, and a step computes some of them.

This module holds the public calls; `planning` plans a step, `results` applies its result, `request_table` holds the
requests.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping

from cadenza_common.plan.plan import StepPlan
from cadenza_common.plan.result import StepResult
from scheduler_svc.core.adapters.events import AdapterCommands, AdapterEvent, AdapterFailure, AdapterLoaded
from scheduler_svc.core.adapters.table import AdapterTable
from scheduler_svc.core.errors import InvariantError, LimitsError, RequestExistsError, RequestRejectedError
from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.lanes.lane_counts import LaneCounts
from scheduler_svc.core.lanes.lane_integrity import check_lane
from scheduler_svc.core.lanes.planned_step import PlannedStep
from scheduler_svc.core.memory.prefix_cache import PrefixCounts
from scheduler_svc.core.outputs import StepOutputs
from scheduler_svc.core.placement.candidates import may_continue
from scheduler_svc.core.policies.policies import Policies
from scheduler_svc.core.queues.queues import WaitingQueue
from scheduler_svc.core.request_table import RequestTable
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup
from scheduler_svc.core.steps import adapter_changes, lane_changes
from scheduler_svc.core.steps.admission import check_fits
from scheduler_svc.core.steps.beam_scheduling import finish_early, start_beam_search
from scheduler_svc.core.steps.drafted_results import observe_drafts
from scheduler_svc.core.steps.kept_kv import forget_kv
from scheduler_svc.core.steps.look_ahead import look_ahead
from scheduler_svc.core.steps.planning import plan_step
from scheduler_svc.core.steps.results import check_result, take_result
from scheduler_svc.core.steps.suspects import clear_passed
from scheduler_svc.core.types import (
    ExecutorSpec,
    Finish,
    FinishDetail,
    RequestKey,
    RequestSpec,
    SequenceState,
    SessionEnd,
)


def check_limits(spec: ExecutorSpec) -> None:
    """Raise LimitsError for limits of an executor that would not allow progress."""
    if spec.max_num_batched_tokens < spec.max_num_seqs:
        raise LimitsError(
            f"max_num_batched_tokens ({spec.max_num_batched_tokens}) must be at least max_num_seqs "
            f"({spec.max_num_seqs}): a step gives every decoding sequence a token"
        )
    if spec.num_slots < spec.max_num_seqs:
        raise LimitsError(f"num_slots ({spec.num_slots}) must be at least max_num_seqs ({spec.max_num_seqs})")


class Scheduler:
    """Makes every scheduling decision and holds every request's state."""

    def __init__(self, policies: Policies | None = None) -> None:
        self._requests = RequestTable(policies or Policies())
        self._num_arrivals = 0
        self._num_sequences = 0
        self._executors: list[ExecutorSpec] = []
        """The limits of each executor."""
        self._max_model_len = 0
        """The largest of them."""

    @property
    def waiting(self) -> WaitingQueue:
        """Waiting groups."""
        return self._requests.waiting

    @property
    def groups(self) -> dict[RequestKey, SequenceGroup]:
        """All unfinished groups."""
        return self._requests.groups

    @property
    def lanes(self) -> dict[int, Lane]:
        """The lane of each executor."""
        return self._requests.lanes

    @property
    def num_swapped(self) -> int:
        """Number of groups that are swapped out."""
        return len({sequence.group for lane in self.lanes.values() for sequence in lane.swapped})

    @property
    def counts(self) -> LaneCounts:
        """Counts since the start over all executors, also those that were removed; without a last step."""
        return self._requests.counts

    @property
    def num_steps(self) -> int:
        """Number of steps since the start."""
        return self.counts.num_steps

    @property
    def num_output_tokens(self) -> int:
        """Number of output tokens since the start."""
        return self.counts.num_output_tokens

    @property
    def num_preemptions(self) -> int:
        """Number of preemptions since the start."""
        return self.counts.num_preemptions

    @property
    def num_suspected(self) -> int:
        """Number of times that a request was suspected of the death of an executor, since the start."""
        return self._requests.num_suspected

    @property
    def prefix_counts(self) -> PrefixCounts:
        """Counts of prefix cache lookups since the start."""
        return self.counts.prefixes

    def num_waiting(self, executor_id: int) -> int:
        """Number of groups that wait for this executor; groups that wait for any count for none of several."""
        return self._requests.placer.num_waiting(executor_id)

    # --- executors ---------------------------------------------------------------------------------------------------

    def add_executor(self, executor_id: int, spec: ExecutorSpec) -> None:
        """Create an executor's lane, or replace the lane of a lost executor by an empty one with these limits.

        Requests go on within the new limits; `misfit` names those beyond. Raises LimitsError, as `check_limits`.
        """
        check_limits(spec)
        policies = self._requests.policies
        lane = Lane(executor_id, spec, policies.order, prefix_caching=policies.prefix_caching)
        former = self.lanes.get(executor_id)
        if former is not None:
            forget_kv(self._requests, former)
            lane.succeed(former)
        self.lanes[executor_id] = lane
        adapter_changes.sort_waiting(self._requests)
        self._note_limits()
        self._requests.placer.on_lane_changed(executor_id)

    def executor_lost(self, executor_id: int, now: float, end: SessionEnd | None = None) -> StepOutputs:
        """The session with an executor ended: its plans in flight are gone, and their pending tokens are dropped.

        With `end` the KV that is certain to be computed stays until `session_opened` states whether the executor still
        has it, or until `give_up_executor`; requests that may have caused the end are remembered. Without `end` all KV
        is given up at once and no request is suspected.
        """
        lane_changes.close(self._requests, self.lanes[executor_id], end)
        return self.take_outputs()

    def session_opened(
        self,
        last_completed_step_id: int,
        *,
        executor_id: int = 0,
        same_incarnation: bool = False,
        keeps_kv: bool = False,
        adapters: Collection[AdapterLoaded] = (),
    ) -> StepOutputs:
        """A session was opened: step ids continue after those that the executor ran, perhaps for an earlier scheduler.

        `same_incarnation`: the executor's, as in the last session; otherwise that one has died, and a request that is
        found to kill executors finishes with EXECUTOR_ERROR (see `suspects`). `keeps_kv`: it is the same, and no other
        scheduler has used it since. `adapters`: the executor has loaded these.
        """
        lane = self.lanes[executor_id]
        lane.counts.last_step_id = max(lane.counts.last_step_id, last_completed_step_id)
        known = {"same_incarnation": same_incarnation, "keeps_kv": keeps_kv}
        lane_changes.open_again(self._requests, lane, **known, adapters=adapters)
        return self.take_outputs()

    def give_up_executor(self, executor_id: int, now: float) -> StepOutputs:
        """Wait no longer for a lost executor: its KV is given up, and its requests may go on elsewhere.

        The executor counts as dead: requests that may have killed it are suspected. Raises InvariantError while there
        is a session.
        """
        lane = self.lanes[executor_id]
        if lane.is_open:
            raise InvariantError(f"executor {executor_id} is given up although its session is open")
        lane_changes.open_again(self._requests, lane, same_incarnation=False, keeps_kv=False, opens=False)
        return self.take_outputs()

    def drain_executor(self, executor_id: int, draining: bool, now: float) -> None:
        """Start or end the drain of one executor: its next plans move its requests to others that can go on with them.

        It takes no more; requests that no other open executor can hold finish there. See `holds_nothing`.
        """
        self.lanes[executor_id].draining = draining
        self._requests.placer.on_lane_changed(executor_id)

    def flush_prefix_caches(self, most: int) -> int:
        """Remove at most so many blocks from the prefix caches of all executors; returns how many it has removed.

        Sequences keep their blocks, and cache them again when they have more.
        """
        num_removed = 0
        for lane in self.lanes.values():
            num_removed += lane.blocks.tiers.flush(most - num_removed)
        return num_removed

    def holds_nothing(self, executor_id: int) -> bool:
        """Whether nothing runs on an executor, is swapped out there or is to go on there, and no plan is in flight."""
        return self.lanes[executor_id].is_empty and not self._requests.placer.num_placed(executor_id)

    def remove_executor(self, executor_id: int, now: float) -> StepOutputs:
        """Forget an executor: its KV is given up, its requests go on elsewhere; `stranded` names the ones left over."""
        lane_changes.remove(self._requests, self.lanes[executor_id])
        self._note_limits()
        return self.take_outputs()

    @property
    def stranded(self) -> list[RequestKey]:
        """Requests that no executor, open or not, can go on with: each lacks a feature or has other numerics."""
        lanes = self.lanes.values()
        return [key for key, group in self.groups.items() if not any(may_continue(lane, group) for lane in lanes)]

    def _note_limits(self) -> None:
        """Note the limits of the present executors: each new request is checked against them."""
        self._executors = [lane.spec for lane in self.lanes.values()]
        self._max_model_len = max((executor.max_model_len for executor in self._executors), default=0)

    # --- requests ----------------------------------------------------------------------------------------------------

    def add_request(self, spec: RequestSpec, now: float) -> None:
        """Queue a request; raises RequestRejectedError, RequestExistsError."""
        if spec.key in self._requests.groups:
            raise RequestExistsError(f"request {spec.request_id!r} is being served already")
        if spec.adapter_index and spec.adapter_index not in self.adapters.adapters:
            raise RequestRejectedError("adapter", "the adapter was unloaded")
        count = spec.num_sequences
        check_fits(spec, self._executors, count)
        group = SequenceGroup(spec, self._num_arrivals, now, self._max_model_len)
        self._num_arrivals += 1
        for index in range(count):
            self._num_sequences += 1
            group.sequences.append(Sequence(self._num_sequences, group, index))
        if spec.beams is not None:
            start_beam_search(group)
        if spec.known_outputs:
            _restore_outputs(group)
        self._requests.add(group)

    def abort(self, key: RequestKey, detail: FinishDetail) -> StepOutputs:
        """Finish a request now; a beam search returns its beams as they are. Does nothing if the request is unknown."""
        group = self.groups.get(key)
        if group is not None:
            finish_early(self._requests, group, detail)
        return self.take_outputs()

    def stop_sample(self, key: RequestKey, sample_index: int) -> None:
        """Finish a sample whose stop string the engine found, without an output, and free what it holds."""
        group = self.groups.get(key)
        if group is not None and group.sequences[sample_index].state is not SequenceState.FINISHED:
            self._requests.finish(group.sequences[sample_index], Finish(FinishDetail.STOP_STRING), report=False)

    def misfit(self, key: RequestKey) -> RequestRejectedError | None:
        """Why an unfinished request can never run within the present limits; None if it can, or is unknown.

        With an adapter the limits are those of executors that may load it, if there are any. None too for samples with
        output: planning ends each one that is too long, with MAX_MODEL_LEN or KV_CAPACITY.
        """
        group = self.groups.get(key)
        if group is None:
            return None
        # Samples after their fork are admitted one by one.
        count = 1 if group.can_admit_partially else group.spec.num_sequences
        return adapter_changes.group_misfit(self._requests, group, count)

    def take_outputs(self) -> StepOutputs:
        """The outputs since the last call."""
        return self._requests.take_outputs()

    def take_finished(self) -> list[Sequence]:
        """The sequences that ended since the last call."""
        return self._requests.take_finished()

    def drain(self, draining: bool) -> None:
        """Start or end draining: while draining, batching policies do not wait for further requests."""
        self._requests.draining = draining

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Replace the weights of tenants in the fair order, over 0; 1 for all others."""
        self._requests.policies.order.set_weights(weights)

    # --- adapters ----------------------------------------------------------------------------------------------------

    @property
    def adapters(self) -> AdapterTable:
        """All adapters, and the requests that wait for theirs."""
        return self._requests.adapters

    def adapter_refusal(self, index: int, content_hash: bytes = b"") -> AdapterFailure | None:
        """Why no executor can ever run requests with a known adapter, or one with this content; None: one may."""
        return adapter_changes.refusal(self._requests, index, content_hash) if index else None

    def adapter_misfit(self, spec: RequestSpec) -> RequestRejectedError | None:
        """Why no executor that may load a new request's adapter can hold it, while others can; None otherwise."""
        return adapter_changes.adapter_misfit(self._requests, spec)

    def adapter_event(self, event: AdapterEvent, executor_id: int = 0) -> None:
        """Something happened to an adapter; executor_id: where it was loaded or unloaded."""
        adapter_changes.apply_event(self._requests, event, self.lanes.get(executor_id))

    def adapter_commands(self, executor_id: int) -> AdapterCommands:
        """The loads and unloads that go to an executor with a session before its next plan."""
        return adapter_changes.commands(self._requests, self.lanes[executor_id])

    # --- steps -------------------------------------------------------------------------------------------------------

    def look_ahead(self, executor_id: int, now: float) -> Generator[None, None, None]:
        """Look up the cached prefixes that the next plan needs; pauses after each slice of under 1 ms.

        Without it the plan is the same, but may take longer: a lookup of 131,072 tokens takes up to 8 ms.
        """
        return look_ahead(self._requests, self.lanes[executor_id], now)

    def plan_step(self, executor_id: int, now: float) -> StepPlan | None:
        """Plan the next step; None if it would be empty. Finishes that planning causes are in `take_outputs`."""
        lane = self.lanes[executor_id]
        step = plan_step(self._requests, lane, StepPlan(lane.counts.last_step_id + 1, executor_id), now)
        self._requests.placer.on_lane_used(executor_id)
        if step is None:
            return None
        step.num_planned_tokens = step.total_tokens
        lane.counts.last_step_id = step.plan.step_id
        lane.counts.num_steps += 1
        lane.inflight.append(step)
        return step.plan

    def wakes_at(self, executor_id: int, now: float) -> float | None:
        """When `plan_step` may return a plan without another call in between; None: never."""
        batching, lane = self._requests.policies.batching, self.lanes[executor_id]
        moments = [batching.wakes_at(lane, self.waiting, now), self._requests.placer.wakes_at(now)]
        return min((moment for moment in moments if moment is not None), default=None)

    def apply_result(self, executor_id: int, result: StepResult, now: float) -> tuple[PlannedStep, StepOutputs]:
        """Apply the result of the oldest plan in flight, with status OK; returns that plan and the outputs.

        Raises InvariantError for a result of another step or status; the session must then be closed.
        """
        lane = self.lanes[executor_id]
        if not lane.inflight or lane.inflight[0].plan.step_id != result.step_id:
            raise InvariantError(f"result of step {result.step_id} was not expected")
        check_result(lane, lane.inflight[0], result)
        step = lane.inflight.popleft()
        lane.counts.num_output_tokens += take_result(self._requests, lane, step, result)
        if self._requests.suspects:
            clear_passed(self._requests, step)
        lane.on_result(result.step_id)
        lane.update_rates(step, result)
        observe_drafts(lane, step, result)
        outputs = self.take_outputs()
        lane.counts.num_output_tokens += sum(len(output.token_ids) for output in outputs.hypotheses)
        lane.update_turnover(len(outputs.finishes) + len(outputs.hypotheses), now)
        self._requests.placer.on_lane_used(executor_id)
        return step, outputs

    def check_integrity(self) -> None:
        """Prove that every block, slot and group is accounted for; raises InvariantError."""
        for lane in self.lanes.values():
            check_lane(lane)
            if any(sequence.group.lane_id != lane.executor_id for sequence in (*lane.running, *lane.swapped)):
                raise InvariantError("a lane holds a sequence of a group that another lane holds")
        self._requests.placer.check_integrity()
        queued = {id(group) for group in self.waiting}
        for lane in self.lanes.values():
            queued |= {id(sequence.group) for sequence in (*lane.running, *lane.finishing)}
        queued |= {id(group) for group in self.adapters.parked}
        self.adapters.check_integrity(self.groups.values())
        if queued != {id(group) for group in self.groups.values()}:
            raise InvariantError("a group is in no queue, or a queue holds an unknown group")
        suspected = {sequence for suspicion in self._requests.suspects.values() for sequence in suspicion.positions}
        unfinished = {sequence for group in self.groups.values() for sequence in group.sequences}
        if {sequence for sequence in unfinished if sequence.suspected is not None} != suspected & unfinished:
            raise InvariantError("a sequence is suspected that its request's suspicion does not name, or the reverse")


def _restore_outputs(group: SequenceGroup) -> None:
    """Give samples the output that they had in an earlier process. As after a preemption, no KV is there."""
    for sequence, output in zip(group.sequences, group.spec.known_outputs, strict=True):
        sequence.set_output(list(output))
        sequence.reset_computed_tokens()
    group.forked = True
