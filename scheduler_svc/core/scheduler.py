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

from scheduler_svc.core.errors import InvariantError, LimitsError, RequestExistsError, RequestRejectedError
from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.lanes.planned_step import PlannedStep
from scheduler_svc.core.memory.prefix_cache import PrefixCounts
from scheduler_svc.core.outputs import StepOutputs
from scheduler_svc.core.policies.policies import Policies
from scheduler_svc.core.queues.queues import WaitingQueue
from scheduler_svc.core.request_table import RequestTable
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup
from scheduler_svc.core.steps.beam_scheduling import finish_early, start_beam_search
from scheduler_svc.core.steps.budget import MAX_ADMITTED_VALUES
from scheduler_svc.core.steps.kept_kv import forget_kv, keep_kv
from scheduler_svc.core.steps.planning import plan_step
from scheduler_svc.core.steps.results import check_result, take_result
from scheduler_svc.core.steps.suspects import begun_steps, clear_passed, record_death
from scheduler_svc.core.types import (
    ExecutorSpec,
    Finish,
    FinishDetail,
    RequestKey,
    RequestSpec,
    SequenceState,
    SessionEnd,
    StepPlan,
    StepResult,
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
        self.last_step_id = 0
        # Counts since the start, over all executors: they never decrease, whatever becomes of an executor.
        self.num_steps = 0
        self.num_output_tokens = 0
        self.prefix_counts = PrefixCounts()
        self._num_arrivals = 0
        self._num_sequences = 0

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
    def num_preemptions(self) -> int:
        """Number of preemptions since the start."""
        return self._requests.num_preemptions

    # --- executors ---------------------------------------------------------------------------------------------------

    def add_executor(self, executor_id: int, spec: ExecutorSpec) -> None:
        """Create an executor's lane, or replace the lane of a lost executor by an empty one with these limits.

        Requests go on within the new limits; `misfit` names those that cannot. Raises LimitsError, as `check_limits`.
        """
        check_limits(spec)
        policies = self._requests.policies
        if executor_id in self.lanes:
            forget_kv(self._requests, self.lanes[executor_id])
        self.lanes[executor_id] = Lane(
            spec, policies.order, prefix_caching=policies.prefix_caching, prefix_counts=self.prefix_counts
        )

    def executor_lost(self, executor_id: int, now: float, end: SessionEnd | None = None) -> StepOutputs:
        """The session with an executor ended: its plans in flight are gone, and their pending tokens are dropped.

        With `end` the KV that is certain to be computed stays until `session_opened` states whether the executor still
        has it, and requests that may have caused the end are remembered. Without `end` all KV is given up at once and
        no request is suspected.
        """
        lane = self.lanes[executor_id]
        if end is None:
            forget_kv(self._requests, lane)
            return self.take_outputs()
        begun = begun_steps(lane, end)
        keep_kv(self._requests, lane)
        if end.failed_step_id:
            record_death(self._requests, lane, begun)
        else:
            self._requests.begun[executor_id] = begun
        return self.take_outputs()

    def session_opened(
        self,
        last_completed_step_id: int,
        *,
        executor_id: int = 0,
        same_incarnation: bool = False,
        keeps_kv: bool = False,
    ) -> StepOutputs:
        """A session was opened: step ids continue after those that the executor ran, perhaps for an earlier scheduler.

        `same_incarnation`: the executor's, as in the last session; otherwise that one has died, and a request that is
        found to kill executors finishes with EXECUTOR_ERROR (see `suspects`). `keeps_kv`: it is the same, and no other
        scheduler has used it since.
        """
        self.last_step_id = max(self.last_step_id, last_completed_step_id)
        begun = self._requests.begun.pop(executor_id, None)
        lane = self.lanes[executor_id]
        if not keeps_kv:
            forget_kv(self._requests, lane)
        if begun is not None and not same_incarnation:
            record_death(self._requests, lane, begun)
        return self.take_outputs()

    # --- requests ----------------------------------------------------------------------------------------------------

    def add_request(self, spec: RequestSpec, now: float) -> None:
        """Queue a request; raises RequestRejectedError, RequestExistsError."""
        if spec.key in self.groups:
            raise RequestExistsError(f"request {spec.request_id!r} is being served already")
        self._check_fits(spec)
        group = SequenceGroup(spec, self._num_arrivals, now)
        self._num_arrivals += 1
        max_model_len = max(lane.spec.max_model_len for lane in self.lanes.values())
        for index in range(spec.num_sequences):
            self._num_sequences += 1
            group.sequences.append(Sequence(self._num_sequences, group, index, max_model_len))
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

        None too for samples with output: planning ends each one that is too long, with MAX_MODEL_LEN or KV_CAPACITY.
        """
        group = self.groups.get(key)
        if group is None:
            return None
        # Samples after their fork are admitted one by one.
        count = 1 if group.can_admit_partially else group.spec.num_sequences
        try:
            self._check_count_fits(group.spec, count)
            if not any(sequence.num_output_tokens for sequence in group.sequences):
                self._check_length_fits(group.spec)
                self._check_blocks_fit(group.spec, count)
        except RequestRejectedError as exc:
            return exc
        return None

    def take_outputs(self) -> StepOutputs:
        """The outputs since the last call."""
        return self._requests.take_outputs()

    def take_finished(self) -> list[Sequence]:
        """The sequences that ended since the last call."""
        return self._requests.take_finished()

    def drain(self, draining: bool) -> None:
        """Start or end draining: while draining, batching policies do not wait for further requests."""
        self._requests.draining = draining

    # --- steps -------------------------------------------------------------------------------------------------------

    def plan_step(self, executor_id: int, now: float) -> StepPlan | None:
        """Plan the next step; None if it would be empty. Finishes that planning causes are in `take_outputs`."""
        lane = self.lanes[executor_id]
        step = plan_step(self._requests, lane, StepPlan(self.last_step_id + 1, executor_id), now)
        if step is None:
            return None
        self.last_step_id = step.plan.step_id
        self.num_steps += 1
        lane.inflight.append(step)
        return step.plan

    def wakes_at(self, executor_id: int, now: float) -> float | None:
        """When `plan_step` may return a plan without another call in between; None: never."""
        return self._requests.policies.batching.wakes_at(self.lanes[executor_id], self.waiting, now)

    def apply_result(self, executor_id: int, result: StepResult, now: float) -> tuple[PlannedStep, StepOutputs]:
        """Apply the result of the oldest plan in flight, with status OK; returns that plan and the outputs.

        Raises InvariantError for a result of another step or status; the session must then be closed.
        """
        lane = self.lanes[executor_id]
        if not lane.inflight or lane.inflight[0].plan.step_id != result.step_id:
            raise InvariantError(f"result of step {result.step_id} was not expected")
        check_result(lane, lane.inflight[0], result)
        step = lane.inflight.popleft()
        self.num_output_tokens += take_result(self._requests, lane, step, result)
        if self._requests.suspects:
            clear_passed(self._requests, lane, step)
        lane.on_result(result.step_id)
        lane.update_rates(step, result)
        outputs = self.take_outputs()
        self.num_output_tokens += sum(len(output.token_ids) for output in outputs.hypotheses)
        return step, outputs

    def check_integrity(self) -> None:
        """Prove that every block, slot and group is accounted for; raises InvariantError."""
        for lane in self.lanes.values():
            lane.check_integrity()
        queued = {id(group) for group in self.waiting}
        for lane in self.lanes.values():
            queued |= {id(sequence.group) for sequence in (*lane.running, *lane.finishing)}
        if queued != {id(group) for group in self.groups.values()}:
            raise InvariantError("a group is in no queue, or a queue holds an unknown group")
        suspected = {sequence for suspicion in self._requests.suspects.values() for sequence in suspicion.positions}
        unfinished = {sequence for group in self.groups.values() for sequence in group.sequences}
        if {sequence for sequence in unfinished if sequence.suspected is not None} != suspected & unfinished:
            raise InvariantError("a sequence is suspected that its request's suspicion does not name, or the reverse")

    def _check_fits(self, spec: RequestSpec) -> None:
        """Reject a request that no executor can hold; the message has the numbers."""
        if not spec.prompt_token_ids:
            raise RequestRejectedError("prompt", "the prompt has no tokens")
        self._check_length_fits(spec)
        count, num_prompt = spec.num_sequences, len(spec.prompt_token_ids)
        self._check_count_fits(spec, count)
        # Sequences after the first take the prompt from its slot.
        if count > 1 and num_prompt + count * spec.sampling.num_values > MAX_ADMITTED_VALUES:
            raise RequestRejectedError(
                _count_field(spec),
                f"{num_prompt} prompt tokens and {count} sequences with {spec.sampling.num_values} numbers each in "
                f"their sampling parameters exceed {MAX_ADMITTED_VALUES} numbers in a plan",
            )
        self._check_blocks_fit(spec, count)

    def _check_length_fits(self, spec: RequestSpec) -> None:
        num_prompt, longest = len(spec.prompt_token_ids), max(lane.spec.max_model_len for lane in self.lanes.values())
        if num_prompt + 1 > longest:
            raise RequestRejectedError(
                "prompt", f"{num_prompt} prompt tokens and one of output exceed max_model_len = {longest}"
            )

    def _check_count_fits(self, spec: RequestSpec, count: int) -> None:
        """Reject `count` sequences, which must run together, if they are more than a step can have."""
        most = max(lane.spec.max_num_seqs for lane in self.lanes.values())
        if count > most:
            raise RequestRejectedError(_count_field(spec), f"{count} sequences exceed max_num_seqs = {most}")

    def _check_blocks_fit(self, spec: RequestSpec, count: int) -> None:
        """Reject a prompt that, with `count` sequences that share it, needs more blocks than the pool has."""
        block_size, num_prompt = next(iter(self.lanes.values())).spec.block_size, len(spec.prompt_token_ids)
        needed = num_prompt // block_size + count
        largest = max(lane.spec.num_blocks for lane in self.lanes.values())
        if needed > largest:
            needs = f"{num_prompt} prompt tokens and {f'{count} sequences' if count > 1 else 'one of output'}"
            raise RequestRejectedError(
                "prompt", f"{needs} need {needed} KV blocks of {block_size} tokens; the pool has {largest}"
            )


def _restore_outputs(group: SequenceGroup) -> None:
    """Give samples the output that they had in an earlier process. As after a preemption, no KV is there."""
    for sequence, output in zip(group.sequences, group.spec.known_outputs, strict=True):
        sequence.set_output(list(output))
        sequence.reset_computed_tokens()
    group.forked = True


def _count_field(spec: RequestSpec) -> str:
    return "sampling_params.beam_width" if spec.beams else "sampling_params.n"
