"""The scheduler core: requests in, plans out, results in, tokens out.

Pure: no clock, no randomness, no I/O. Each step (1) makes room for the tokens of those that run, preempting the order's
first victims where blocks run out, (2) gives decodes, beams and prefill chunks their tokens, (3) lets in groups that
wait, new or put out before, as token budget, slots and blocks allow, (4) releases what ended. A sequence is the same
whether its tokens are a prompt's, a decode's or computed again after a preemption: it has tokens without KV, and a step
computes some of them.

Here are the calls; `planning` plans a step, `results` takes its result in, `requests` knows where each request is.
"""

from __future__ import annotations

from scheduler_svc.core.errors import InvariantError, LimitsError, RequestExistsError, RequestRejectedError
from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.lanes.planned_step import PlannedStep
from scheduler_svc.core.outputs import StepOutputs
from scheduler_svc.core.policies.policies import Policies
from scheduler_svc.core.queues.queues import WaitingQueue
from scheduler_svc.core.request_table import RequestTable
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup
from scheduler_svc.core.steps.beam_scheduling import end_early, start_beam_search
from scheduler_svc.core.steps.budget import MAX_ADMITTED_VALUES
from scheduler_svc.core.steps.planning import plan_step
from scheduler_svc.core.steps.results import check_result, context_lens, record_failed_step, take_result
from scheduler_svc.core.types import (
    ExecutorSpec,
    Finish,
    FinishDetail,
    RequestKey,
    RequestSpec,
    SequenceState,
    StepPlan,
    StepResult,
)

MAX_FAILED_STEPS = 5
"""A group that was part of this many failed steps without getting any further in between is ended."""


class Scheduler:
    """Every decision, and every request's state."""

    def __init__(self, policies: Policies | None = None) -> None:
        self._requests = RequestTable(policies or Policies())
        self.last_step_id = 0
        self.num_output_tokens = 0
        self._num_arrivals = 0
        self._num_sequences = 0

    @property
    def waiting(self) -> WaitingQueue:
        """Groups that wait."""
        return self._requests.waiting

    @property
    def groups(self) -> dict[RequestKey, SequenceGroup]:
        """All groups that have not ended."""
        return self._requests.groups

    @property
    def lanes(self) -> dict[int, Lane]:
        """The books of each executor."""
        return self._requests.lanes

    @property
    def num_swapped(self) -> int:
        """Groups that are swapped out."""
        return len({sequence.group for lane in self.lanes.values() for sequence in lane.swapped})

    @property
    def num_preemptions(self) -> int:
        """Since the beginning."""
        return self._requests.num_preemptions

    # --- executors ---------------------------------------------------------------------------------------------------

    def add_executor(self, executor_id: int, spec: ExecutorSpec) -> None:
        """Make a lane for an executor; raises LimitsError for limits that could not make progress."""
        if spec.max_num_batched_tokens < spec.max_num_seqs:
            raise LimitsError(
                f"max_num_batched_tokens ({spec.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({spec.max_num_seqs}): a step gives every decoding sequence a token"
            )
        if spec.num_slots < spec.max_num_seqs:
            raise LimitsError(f"num_slots ({spec.num_slots}) must be at least max_num_seqs ({spec.max_num_seqs})")
        policies = self._requests.policies
        self.lanes[executor_id] = Lane(spec, policies.order, prefix_caching=policies.prefix_caching)

    def session_opened(self, last_completed_step_id: int) -> None:
        """An executor may have run steps for a scheduler before this one: step ids go on rising from there."""
        self.last_step_id = max(self.last_step_id, last_completed_step_id)

    def executor_lost(self, executor_id: int, now: float) -> StepOutputs:
        """The session with an executor ended with plans in flight: all that ran there waits again, in its old place.

        Confirmed tokens stay, pending ones are forgotten and will be computed again. Groups of the oldest plan in
        flight, the one that ran, get a strike; with MAX_FAILED_STEPS in a row they end with EXECUTOR_ERROR.
        """
        lane = self.lanes[executor_id]
        groups_with_failed_steps = context_lens(lane, lane.inflight[0]) if lane.inflight else {}
        touched = {sequence for step in lane.inflight for sequence in context_lens(lane, step)}
        stranded = [*lane.running, *lane.finishing, *lane.swapped]
        lane.reset()
        for sequence in touched.difference(stranded):
            sequence.drop_pending_tokens()
            sequence.group.drop_candidates()
        for sequence in stranded:
            sequence.forget_executor_state()
            sequence.group.drop_candidates()
            self._requests.requeue(sequence)
        for group in record_failed_step(self._requests, groups_with_failed_steps, MAX_FAILED_STEPS):
            self._requests.end_group(group, Finish(FinishDetail.EXECUTOR_ERROR))
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
        self._requests.add(group)

    def abort(self, key: RequestKey, detail: FinishDetail) -> StepOutputs:
        """End a request at once, a beam search with its beams as they are; nothing happens if it is not known."""
        group = self.groups.get(key)
        if group is not None:
            end_early(self._requests, group, detail)
        return self.take_outputs()

    def stop_sample(self, key: RequestKey, sample_index: int) -> None:
        """The engine has found a stop string: end a sample quietly, what it holds is freed."""
        group = self.groups.get(key)
        if group is not None and group.sequences[sample_index].state is not SequenceState.FINISHED:
            self._requests.end(group.sequences[sample_index], Finish(FinishDetail.STOP_STRING), report=False)

    def take_outputs(self) -> StepOutputs:
        """What happened to samples since the last call."""
        return self._requests.take_outputs()

    def take_finished(self) -> list[Sequence]:
        """The sequences that ended since the last call."""
        return self._requests.take_finished()

    def drain(self, draining: bool) -> None:
        """Say that no request will come for now, or that they may come again: who waits for company need not."""
        self._requests.draining = draining

    # --- steps -------------------------------------------------------------------------------------------------------

    def plan_step(self, executor_id: int, now: float) -> StepPlan | None:
        """Plan the next step; None if there is nothing to do or to tell. Ends of requests come by `take_outputs`."""
        lane = self.lanes[executor_id]
        step = plan_step(self._requests, lane, StepPlan(self.last_step_id + 1, executor_id), now)
        if step is None:
            return None
        self.last_step_id = step.plan.step_id
        lane.inflight.append(step)
        return step.plan

    def wakes_at(self, executor_id: int, now: float) -> float | None:
        """When `plan_step` may find something to do that it does not find now; None: only after other calls."""
        return self._requests.policies.batching.wakes_at(self.lanes[executor_id], self.waiting, now)

    def apply_result(self, executor_id: int, result: StepResult, now: float) -> tuple[PlannedStep, StepOutputs]:
        """Take in the result of the oldest plan in flight, which must have gone well; returns that plan and the news.

        Raises InvariantError for a result of another step or status: the session is then to be given up.
        """
        lane = self.lanes[executor_id]
        if not lane.inflight or lane.inflight[0].plan.step_id != result.step_id:
            raise InvariantError(f"result of step {result.step_id} was not expected")
        check_result(lane, lane.inflight[0], result)
        step = lane.inflight.popleft()
        self.num_output_tokens += take_result(self._requests, lane, step, result)
        lane.slots.result_seen(result.step_id)
        lane.observe(step, result)
        outputs = self.take_outputs()
        self.num_output_tokens += sum(len(output.token_ids) for output in outputs.hypotheses)
        return step, outputs

    def check_integrity(self) -> None:
        """Prove that every block, slot and group is accounted for; raises InvariantError."""
        for lane in self.lanes.values():
            lane.check_integrity()
        homes = {id(group) for group in self.waiting}
        for lane in self.lanes.values():
            homes |= {id(sequence.group) for sequence in (*lane.running, *lane.finishing)}
        if homes != {id(group) for group in self.groups.values()}:
            raise InvariantError("a group is in no queue, or a queue holds a group that is not known")

    def _check_fits(self, spec: RequestSpec) -> None:
        """Refuse at the door what no executor could ever hold; the message has the numbers."""
        num_prompt = len(spec.prompt_token_ids)
        if num_prompt == 0:
            raise RequestRejectedError("prompt", "the prompt has no tokens")
        longest = max(lane.spec.max_model_len for lane in self.lanes.values())
        if num_prompt + 1 > longest:
            raise RequestRejectedError(
                "prompt", f"{num_prompt} prompt tokens and one of output exceed max_model_len = {longest}"
            )
        self._check_group_fits(spec)

    def _check_group_fits(self, spec: RequestSpec) -> None:
        """A group's sequences run together, or at least begin so."""
        count, num_prompt = spec.num_sequences, len(spec.prompt_token_ids)
        field = "sampling_params.beam_width" if spec.beams else "sampling_params.n"
        most = max(lane.spec.max_num_seqs for lane in self.lanes.values())
        if count > most:
            raise RequestRejectedError(field, f"{count} sequences exceed max_num_seqs = {most}")
        if count > 1 and count * (num_prompt + spec.sampling.num_values) > MAX_ADMITTED_VALUES:
            raise RequestRejectedError(
                field, f"{count} sequences of {num_prompt} prompt tokens exceed {MAX_ADMITTED_VALUES} numbers in a plan"
            )
        block_size = next(iter(self.lanes.values())).spec.block_size
        needed = num_prompt // block_size + count
        largest = max(lane.spec.num_blocks for lane in self.lanes.values())
        if needed > largest:
            who = f"{num_prompt} prompt tokens" + (f" and {count} sequences" if count > 1 else "")
            raise RequestRejectedError(
                "prompt", f"{who} need {needed} KV blocks of {block_size} tokens; the pool has {largest}"
            )
