"""The scheduler core: requests in, plans out, results in, tokens out.

Pure: no clock, no randomness, no I/O. Each step (1) releases what ended, (2) gives running sequences their next
tokens, decodes before prefill chunks, preempting from the end of the order where blocks run out, (3) admits waiting
groups while token budget, slots and blocks allow. A sequence is the same whether its tokens are a prompt's, a decode's
or computed again after a preemption: it has tokens without KV, and a step computes some of them.
"""

from __future__ import annotations

from scheduler_svc.core.budget import StepBudget
from scheduler_svc.core.errors import InvariantError, LimitsError, RequestExistsError, RequestRejectedError
from scheduler_svc.core.lane import Lane, PlannedStep, held_slot
from scheduler_svc.core.policy import FcfsOrder, OrderPolicy, WaitingQueue
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.core.types import (
    AdmittedSequence,
    ExecutorSpec,
    Finish,
    FinishDetail,
    RequestKey,
    RequestSpec,
    SampleDelta,
    SequenceState,
    StepPlan,
    StepResult,
    StepStatus,
)

MAX_STRIKES = 5
"""A group that was part of this many failed steps without getting any further in between is ended."""


class Scheduler:
    """Every decision, and every request's state."""

    def __init__(self, policy: OrderPolicy | None = None) -> None:
        self._policy = policy or FcfsOrder()
        self.waiting = WaitingQueue(self._policy)
        self.groups: dict[RequestKey, SequenceGroup] = {}
        self.lanes: dict[int, Lane] = {}
        self.last_step_id = 0
        self.num_output_tokens = 0
        self.num_preemptions = 0
        self._num_arrivals = 0
        self._num_sequences = 0
        self._deltas: list[SampleDelta] = []
        self._ended: list[Sequence] = []

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
        self.lanes[executor_id] = Lane(spec, self._policy)

    def session_opened(self, last_completed_step_id: int) -> None:
        """An executor may have run steps for a scheduler before this one: step ids go on rising from there."""
        self.last_step_id = max(self.last_step_id, last_completed_step_id)

    def executor_lost(self, executor_id: int, now: float) -> list[SampleDelta]:
        """The session with an executor ended with plans in flight: all that ran there waits again, in its old place.

        Confirmed tokens stay, pending ones are forgotten and will be computed again. Groups of the oldest plan in
        flight, the one that ran, get a strike; with MAX_STRIKES in a row they end with EXECUTOR_ERROR.
        """
        lane = self.lanes[executor_id]
        suspects = lane.inflight[0] if lane.inflight else None
        stranded = [*lane.running, *lane.finishing]
        inflight = list(lane.inflight)
        lane.reset()
        for sequence in stranded:
            sequence.slot = None
            sequence.block_ids = []
            self._wait_again(sequence)
        for step in inflight:
            for sequence in step.sequences:
                sequence.num_pending = 0
        if suspects is not None:
            self._strike(suspects)
        return self.take_deltas()

    def _strike(self, step: PlannedStep) -> None:
        """This step was running when its executor was lost: any of its groups may have been the cause."""
        for sequence, context_len in zip(step.sequences, step.context_lens, strict=True):
            group = sequence.group
            group.furthest = max(group.furthest, context_len)
            group.num_strikes += 1
            if group.num_strikes >= MAX_STRIKES and not group.finished:
                self._end_group(group, Finish(FinishDetail.EXECUTOR_ERROR))

    # --- requests ----------------------------------------------------------------------------------------------------

    def add_request(self, spec: RequestSpec, now: float) -> None:
        """Queue a request; raises RequestRejectedError, RequestExistsError."""
        if spec.key in self.groups:
            raise RequestExistsError(f"request {spec.request_id!r} is being served already")
        self._check_fits(spec)
        group = SequenceGroup(spec, self._num_arrivals, now)
        self._num_arrivals += 1
        max_model_len = max(lane.spec.max_model_len for lane in self.lanes.values())
        for index in range(spec.num_samples):
            self._num_sequences += 1
            group.sequences.append(Sequence(self._num_sequences, group, index, max_model_len))
        self.groups[spec.key] = group
        self.waiting.add(group)

    def abort(self, key: RequestKey, detail: FinishDetail) -> list[SampleDelta]:
        """End a request at once; nothing happens if it is not known."""
        group = self.groups.get(key)
        if group is not None:
            self._end_group(group, Finish(detail))
        return self.take_deltas()

    def stop_sample(self, key: RequestKey, sample_index: int) -> None:
        """The engine has found a stop string: end a sample quietly, what it holds is freed."""
        group = self.groups.get(key)
        if group is not None and group.sequences[sample_index].state is not SequenceState.FINISHED:
            self._end(group.sequences[sample_index], Finish(FinishDetail.STOP_STRING))

    def take_deltas(self) -> list[SampleDelta]:
        """What happened to samples since the last call."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def take_ended(self) -> list[Sequence]:
        """The sequences that ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    # --- steps -------------------------------------------------------------------------------------------------------

    def plan_step(self, executor_id: int, now: float) -> StepPlan | None:
        """Plan the next step; None if there is nothing to do or to tell. Ends of requests come by `take_deltas`."""
        lane = self.lanes[executor_id]
        step = PlannedStep(StepPlan(self.last_step_id + 1, executor_id), now)
        budget = StepBudget(lane.spec.max_num_batched_tokens, lane.spec.max_num_seqs)
        self._retire(lane, step)
        self._plan_decodes(lane, step, budget)
        self._plan_chunks(lane, step, budget)
        if not step.preempted:
            self._admit(lane, step, budget)
        step.plan.released_slots = lane.slots.releases_for(step.plan.step_id)
        if not (step.sequences or step.plan.released_slots):
            return None
        self.last_step_id = step.plan.step_id
        lane.inflight.append(step)
        return step.plan

    def apply_result(self, executor_id: int, result: StepResult, now: float) -> tuple[PlannedStep, list[SampleDelta]]:
        """Take in the result of the oldest plan in flight, which must have gone well; returns that plan and the news.

        Raises InvariantError for a result of another step or status: the session is then to be given up.
        """
        lane = self.lanes[executor_id]
        if not lane.inflight or lane.inflight[0].plan.step_id != result.step_id:
            raise InvariantError(f"result of step {result.step_id} was not expected")
        _check_result(lane.inflight[0], result)
        step = lane.inflight.popleft()
        lane.slots.result_seen(result.step_id)
        self._confirm(step, result)
        return step, self.take_deltas()

    def check_integrity(self) -> None:
        """Prove that every block, slot and group is accounted for; raises InvariantError."""
        for lane in self.lanes.values():
            lane.check_integrity()
        homes = {id(group) for group in self.waiting}
        for lane in self.lanes.values():
            homes |= {id(sequence.group) for sequence in (*lane.running, *lane.finishing)}
        if homes != {id(group) for group in self.groups.values()}:
            raise InvariantError("a group is in no queue, or a queue holds a group that is not known")

    # --- planning ----------------------------------------------------------------------------------------------------

    def _retire(self, lane: Lane, step: PlannedStep) -> None:
        """Sequences whose last token is planned leave their slot and blocks to others; their results are awaited."""
        for sequence in [sequence for sequence in lane.running if sequence.fully_planned]:
            lane.leave(sequence)
            lane.finishing.append(sequence)
            step.retired.append(sequence)

    def _plan_decodes(self, lane: Lane, step: PlannedStep, budget: StepBudget) -> None:
        index = 0
        running = lane.running.sequences
        while index < len(running):
            sequence = running[index]
            if sequence.num_uncomputed_tokens != 1:
                index += 1
            elif self._grow(lane, step, sequence):
                self._decode(step, budget, sequence)
                index += 1

    def _decode(self, step: PlannedStep, budget: StepBudget, sequence: Sequence) -> None:
        """Let a ready sequence compute its newest token; the plan's short form covers all of them."""
        step.plan.decode_ready = True
        budget.spend(1)
        step.add(sequence, 1)

    def _grow(self, lane: Lane, step: PlannedStep, sequence: Sequence) -> bool:
        """Make room for one more token; False if the sequence had to go instead.

        Victims come from the end of the running queue, so none of them has been planned in this step yet.
        """
        if not lane.blocks.needs_block(sequence, sequence.num_computed_tokens + 1):
            return True
        while (block_id := lane.blocks.append(sequence)) is None:
            victim = lane.running.sequences[-1]
            if victim is sequence and len(lane.running) == 1:
                self._end_at_capacity(lane, step, sequence)
                return False
            self._preempt(lane, step, victim)
            if victim is sequence:
                return False
        step.plan.append_slots.append(held_slot(sequence))
        step.plan.append_block_ids.append(block_id)
        step.appended.append((sequence, block_id))
        return True

    def _end_at_capacity(self, lane: Lane, step: PlannedStep, sequence: Sequence) -> None:
        """Alone, a sequence has filled the pool: it ends with the tokens that it has or that are under way."""
        sequence.limit_to_planned(FinishDetail.KV_CAPACITY)
        if sequence.num_pending == 0:
            self._end(sequence, Finish(FinishDetail.KV_CAPACITY), tell=True)
        else:
            lane.leave(sequence)
            lane.finishing.append(sequence)
            step.retired.append(sequence)

    def _preempt(self, lane: Lane, step: PlannedStep, sequence: Sequence) -> None:
        """Preemption by recompute: blocks and slot go, tokens stay, those under way too."""
        lane.leave(sequence)
        step.preempted.append(sequence)
        sequence.group.num_preemptions += 1
        self.num_preemptions += 1
        self._wait_again(sequence)

    def _wait_again(self, sequence: Sequence) -> None:
        sequence.forget_computed()
        sequence.move(SequenceState.WAITING)
        self.waiting.add(sequence.group)

    def _plan_chunks(self, lane: Lane, step: PlannedStep, budget: StepBudget) -> None:
        for sequence in lane.running:
            if budget.exhausted:
                return
            if sequence.num_uncomputed_tokens > 1:
                self._chunk(step, budget, sequence)

    def _chunk(self, step: PlannedStep, budget: StepBudget, sequence: Sequence) -> None:
        """Compute as many of a sequence's tokens as the budget allows."""
        num_tokens = min(sequence.num_uncomputed_tokens, budget.num_tokens)
        budget.spend(num_tokens)
        step.add(sequence, num_tokens)
        step.plan.scheduled_slots.append(held_slot(sequence))
        step.plan.scheduled_num_tokens.append(num_tokens)
        step.plan.scheduled_samples.append(sequence.num_pending > 0)

    def _admit(self, lane: Lane, step: PlannedStep, budget: StepBudget) -> None:
        while (group := self.waiting.head) is not None:
            sequence = group.sequences[0]
            room = len(lane.running) < lane.spec.max_num_seqs and lane.slots.num_free > 0
            if not room or budget.exhausted or sequence.num_pending > 0:
                return
            if (too_long := lane.too_long(sequence)) is not None:
                self._end(sequence, Finish(too_long), tell=True)
                continue
            if not lane.blocks.can_admit(len(sequence.token_ids), alone=len(lane.running) == 0):
                return
            self.waiting.remove(group)
            self._start(lane, step, sequence)
            if sequence.num_uncomputed_tokens == 1:
                self._decode(step, budget, sequence)
            else:
                self._chunk(step, budget, sequence)

    def _start(self, lane: Lane, step: PlannedStep, sequence: Sequence) -> None:
        """Give a waiting sequence blocks for all of its tokens, and a slot."""
        sequence.move(SequenceState.RUNNING)
        lane.blocks.allocate(sequence, len(sequence.token_ids))
        sequence.slot = lane.slots.take()
        lane.running.add(sequence)
        step.joined.append(sequence)
        step.plan.admitted.append(
            AdmittedSequence(
                slot=sequence.slot,
                token_ids=tuple(sequence.token_ids),
                num_prompt_tokens=sequence.num_prompt_tokens,
                num_computed_tokens=sequence.num_computed_tokens,
                block_ids=tuple(sequence.block_ids),
                sampling=sequence.group.spec.sampling,
                sample_index=sequence.sample_index,
            )
        )

    # --- results -----------------------------------------------------------------------------------------------------

    def _confirm(self, step: PlannedStep, result: StepResult) -> None:
        for sequence, context_len, num_tokens in zip(step.sequences, step.context_lens, step.num_tokens, strict=True):
            if sequence.group.num_strikes and context_len + num_tokens > sequence.group.furthest:
                sequence.group.num_strikes = 0
        counts = result.num_tokens or [1] * len(result.slots)
        tokens = iter(result.token_ids)
        for slot, count in zip(result.slots, counts, strict=True):
            sequence = step.sampling_slots[slot]
            sequence.num_pending -= 1
            if count:
                self._confirm_token(sequence, slot, next(tokens), result)
        for slot in result.error_slots:
            sequence = step.sampling_slots[slot]
            if sequence.state is not SequenceState.FINISHED:
                self._end(sequence, Finish(FinishDetail.NON_FINITE_LOGITS), tell=True)

    def _confirm_token(self, sequence: Sequence, slot: int, token_id: int, result: StepResult) -> None:
        """A token that was learnt too late, after its sequence ended, is dropped here and never seen by a client."""
        if sequence.state is SequenceState.FINISHED:
            return
        finish = sequence.confirm(token_id)
        self.num_output_tokens += 1
        logprobs = result.logprobs.get(slot)
        self._deltas.append(
            SampleDelta(
                key=sequence.group.spec.key,
                sample_index=sequence.sample_index,
                token_ids=(token_id,),
                logprobs=(logprobs,) if logprobs is not None else (),
                finish=finish,
            )
        )
        if finish is not None:
            self._end(sequence, finish)

    def _end_group(self, group: SequenceGroup, finish: Finish) -> None:
        for sequence in group.sequences:
            if sequence.state is not SequenceState.FINISHED:
                self._end(sequence, finish, tell=True)

    def _end(self, sequence: Sequence, finish: Finish, *, tell: bool = False) -> None:
        """End a sequence wherever it is and free what it holds; with `tell`, as news of its own."""
        if sequence.state is SequenceState.WAITING:
            self.waiting.remove(sequence.group)
        for lane in self.lanes.values():
            lane.forget(sequence)
        sequence.move(SequenceState.FINISHED)
        sequence.finish = finish
        self._ended.append(sequence)
        group = sequence.group
        if tell:
            self._deltas.append(SampleDelta(group.spec.key, sequence.sample_index, finish=finish))
        if group.finished:
            del self.groups[group.spec.key]

    def _check_fits(self, spec: RequestSpec) -> None:
        """Refuse at the door what no executor could ever hold; the message has the numbers."""
        num_prompt = len(spec.prompt_token_ids)
        if num_prompt == 0:
            raise RequestRejectedError("prompt", "the prompt has no tokens")
        if spec.num_samples != 1:
            raise RequestRejectedError("sampling_params.n", f"n = {spec.num_samples} is not built yet; use 1")
        longest = max(lane.spec.max_model_len for lane in self.lanes.values())
        if num_prompt + 1 > longest:
            raise RequestRejectedError(
                "prompt", f"{num_prompt} prompt tokens and one of output exceed max_model_len = {longest}"
            )
        block_size = next(iter(self.lanes.values())).spec.block_size
        needed = num_prompt // block_size + spec.num_samples
        largest = max(lane.spec.num_blocks for lane in self.lanes.values())
        if needed > largest:
            raise RequestRejectedError(
                "prompt",
                f"{num_prompt} prompt tokens need {needed} KV blocks of {block_size} tokens; the pool has {largest}",
            )


def _check_result(step: PlannedStep, result: StepResult) -> None:
    """Hold a result against its own plan before anything is changed; raises InvariantError."""
    if result.status is not StepStatus.OK:
        raise InvariantError(f"step {result.step_id} ended {result.status.name}: {result.error_message}")
    counts = result.num_tokens or [1] * len(result.slots)
    sampling = step.sampling_slots
    answered = set(result.slots)
    if len(answered) != len(result.slots) or not answered <= sampling.keys():
        raise InvariantError(f"step {result.step_id}: tokens of slots {list(result.slots)}, not of {list(sampling)}")
    if len(counts) != len(result.slots) or sum(counts) != len(result.token_ids) or any(n > 1 for n in counts):
        raise InvariantError(f"step {result.step_id}: token counts do not add up")
    if not sampling.keys() >= set(result.error_slots):
        raise InvariantError(f"step {result.step_id}: errors of slots {list(result.error_slots)}")
    # Only a slot that had stopped by itself may have nothing to say, and its sequence has ended by now.
    silent = sampling.keys() - {slot for slot, count in zip(result.slots, counts, strict=True) if count}
    for slot in silent - set(result.error_slots):
        if sampling[slot].state is not SequenceState.FINISHED:
            raise InvariantError(f"step {result.step_id}: slot {slot} sampled nothing although it has not ended")
