"""Checks results against their plans, and applies them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from itertools import compress, filterfalse
from types import MappingProxyType

from cadenza_common.plan.result import SlotError, StepResult, StepStatus
from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.lanes.planned_step import PlannedStep
from scheduler_svc.core.outputs import count_by_tenant
from scheduler_svc.core.request_table import RequestTable
from scheduler_svc.core.sequences.sequence import Sequence
from scheduler_svc.core.steps.beam_scheduling import take_candidates
from scheduler_svc.core.steps.drafted_results import check_drafts, count_drafted
from scheduler_svc.core.steps.late_results import count_late, may_be_late
from scheduler_svc.core.steps.saves import check_saved, take_saved
from scheduler_svc.core.types import Finish, FinishDetail, SequenceState

_DETAILS = {
    SlotError.NON_FINITE_LOGITS: FinishDetail.NON_FINITE_LOGITS,
    SlotError.NO_ALLOWED_TOKEN: FinishDetail.NO_ALLOWED_TOKEN,
    SlotError.GRAMMAR: FinishDetail.GRAMMAR,
}


def check_result(lane: Lane, step: PlannedStep, result: StepResult) -> None:
    """Raise InvariantError if a result does not match its plan; changes nothing."""
    if result.status is not StepStatus.OK:
        raise InvariantError(f"step {result.step_id} ended {result.status.name}: {result.error_message}")
    _check_errors(step, result)
    expected, slots = step.sampling_slots, list(result.slots)
    if slots != expected or result.num_tokens:
        _check_samples(lane, step, slots, result)
    elif len(result.token_ids) != len(slots):
        raise InvariantError(f"step {result.step_id}: {len(result.token_ids)} tokens of {len(slots)} slots")
    if result.num_drafts or result.num_accepted:
        check_drafts(lane, step, result)
    if result.logprobs and not result.logprobs.keys() <= set(expected):
        raise InvariantError(f"step {result.step_id}: logprobs of slots {list(result.logprobs)}, not of {expected}")
    _check_prompt_logprobs(step, result)
    check_saved(lane, result)
    if result.candidates and not result.candidates.keys() <= set(step.candidate_slots):
        raise InvariantError(
            f"step {result.step_id}: candidates of slots {list(result.candidates)}, not of {step.candidate_slots}"
        )


def _check_errors(step: PlannedStep, result: StepResult) -> None:
    """Errors are allowed only for slots that computed something."""
    if not (result.error_slots or result.errors):
        return
    computed = set(step.slots)
    if len(result.errors) != len(result.error_slots) or not computed.issuperset(result.error_slots):
        raise InvariantError(
            f"step {result.step_id}: {len(result.errors)} errors of slots {list(result.error_slots)}, "
            f"where {sorted(computed)} were computed"
        )


def _check_samples(lane: Lane, step: PlannedStep, slots: list[int], result: StepResult) -> None:
    """Check a result in which slots sampled several tokens, or none: only finished sequences may lack one, and those
    with grammars."""
    counts, expected = result.num_tokens, step.sampling_slots
    if not counts and slots == list(filterfalse(lane.discarding_slots.__contains__, expected)):
        # Only the slots of finished sequences gave nothing.
        if len(result.token_ids) != len(slots):
            raise InvariantError(f"step {result.step_id}: token counts do not add up")
        return
    reported, sampling = set(slots), set(expected)
    if len(reported) != len(slots) or not reported <= sampling:
        raise InvariantError(f"step {result.step_id}: tokens of slots {slots}, not of {expected}")
    num_sampled = sum(counts) if counts else len(slots)
    if len(counts) not in (0, len(slots)) or num_sampled != len(result.token_ids):
        raise InvariantError(f"step {result.step_id}: token counts do not add up")
    check_drafts(lane, step, result)
    with_token = set(compress(slots, counts)) if counts else reported
    for slot in sampling - with_token - set(result.error_slots) - result.candidates.keys():
        sequence = _sequence_at(lane, slot)
        if sequence.state is not SequenceState.FINISHED and not may_be_late(sequence):
            raise InvariantError(f"step {result.step_id}: slot {slot} sampled nothing although it has not finished")


def _check_prompt_logprobs(step: PlannedStep, result: StepResult) -> None:
    """Check that all planned prompt logprobs are there; a slot that failed or finished may lack them."""
    if not result.prompt_logprobs.keys() <= step.prompt_logprobs.keys():
        raise InvariantError(
            f"step {result.step_id}: prompt logprobs of slots {list(result.prompt_logprobs)}, "
            f"not of {list(step.prompt_logprobs)}"
        )
    for slot, (sequence, tokens) in step.prompt_logprobs.items():
        logprobs = result.prompt_logprobs.get(slot)
        if logprobs is None:
            if sequence.state is not SequenceState.FINISHED and slot not in result.error_slots:
                raise InvariantError(f"step {result.step_id}: slot {slot} gave no prompt logprobs")
            continue
        width = sequence.group.spec.sampling.num_prompt_logprobs
        if (logprobs.start, logprobs.end, logprobs.num_top) != (tokens.start, tokens.stop, width):
            raise InvariantError(
                f"step {result.step_id}: slot {slot} gave prompt logprobs {logprobs.start} to {logprobs.end - 1} with "
                f"{logprobs.num_top} each, not {tokens.start} to {tokens.stop - 1} with {width}"
            )


def take_result(requests: RequestTable, lane: Lane, step: PlannedStep, result: StepResult) -> int:
    """Apply a checked result to its sequences and collect outputs; returns the number of new tokens.

    Work on all sequences of a step runs over columns in C-level loops (map, deque).
    """
    _take_prompt_logprobs(requests, step, result)
    take_saved(lane, step, result)
    slots, token_ids = _sampled(lane, result)
    # With drafts a slot has several tokens, and is listed with each.
    deque(map(list.append, map(lane.tokens_at.__getitem__, slots), token_ids), maxlen=0)
    sequences: list[Sequence] = list(map(lane.sequence_at.__getitem__, slots))  # type: ignore[arg-type]
    outputs = requests.outputs
    outputs.sequences += sequences
    outputs.token_ids += token_ids
    for slot, logprobs in result.logprobs.items():
        outputs.logprobs[_sequence_at(lane, slot)] = logprobs.tokens()
    if requests.policies.order.shares:
        num_by_tenant = count_by_tenant(sequences)
        requests.policies.order.on_tokens(num_by_tenant)
        outputs.num_by_tenant.update(num_by_tenant)
    if result.num_tokens:
        count_late(requests, lane, result)
    _finish_stopped(requests, lane, sequences, token_ids)
    if step.may_have_drafts:
        count_drafted(requests, lane, Counter(sequences))
    for sequence in [sequence for sequence in lane.finishing if sequence.num_tokens >= sequence.max_len]:
        requests.finish(sequence, Finish(sequence.length_detail))
    for slot, error in zip(result.error_slots, result.errors, strict=True):
        _finish_failed(requests, lane, _sequence_at(lane, slot), error)
    take_candidates(requests, lane, step, result)
    return len(sequences)


def _finish_failed(requests: RequestTable, lane: Lane, sequence: Sequence, error: SlotError) -> None:
    """Finish a sequence whose slot failed. A beam search continues without a beam that has no candidates."""
    finish = Finish(_DETAILS.get(error, FinishDetail.EXECUTOR_ERROR))
    if error is SlotError.NON_FINITE_LOGITS:
        if sequence.slot is not None:
            lane.stop_running(sequence, invalid_kv=True)
        lane.blocks.invalidate(sequence)
    if sequence.is_beam and error is SlotError.NO_ALLOWED_TOKEN:
        return
    if sequence.is_beam or not sequence.group.forked:
        requests.finish_group(sequence.group, finish)
    elif sequence.state is not SequenceState.FINISHED:
        requests.finish(sequence, finish)


def _sampled(lane: Lane, result: StepResult) -> tuple[list[int], list[int]]:
    """Slots with a token, and the tokens. Tokens of finished sequences are dropped."""
    slots, token_ids = list(result.slots), list(result.token_ids)
    if result.num_tokens:
        slots = [slot for slot, count in zip(slots, result.num_tokens, strict=True) for _ in range(count)]
    if lane.discarding_slots and not lane.discarding_slots.isdisjoint(slots):
        pairs = [pair for pair in zip(slots, token_ids, strict=True) if pair[0] not in lane.discarding_slots]
        slots, token_ids = [slot for slot, _ in pairs], [token_id for _, token_id in pairs]
    return slots, token_ids


def _take_prompt_logprobs(requests: RequestTable, step: PlannedStep, result: StepResult) -> None:
    """Collect new prompt logprobs before the step's tokens, so that a request that finishes now has all of them."""
    for slot, logprobs in result.prompt_logprobs.items():
        sequence, _ = step.prompt_logprobs[slot]
        if sequence.state is not SequenceState.FINISHED and (fresh := sequence.take_prompt_logprobs(logprobs)):
            requests.outputs.prompt_logprobs.append((sequence, fresh))


def _finish_stopped(requests: RequestTable, lane: Lane, sequences: list[Sequence], token_ids: list[int]) -> None:
    """Finish the sequences whose new token is one of their stop ids."""
    stop_ids = lane.stop_ids
    if stop_ids.isdisjoint(token_ids):
        return
    # Found before the first of them finishes: stop ids that no other sequence has leave `stop_ids` with it.
    stopped = [index for index, token_id in enumerate(token_ids) if token_id in stop_ids]
    # Of several tokens of a sequence only the last can stop it: an executor ends its tokens there.
    checked = [
        (sequences[index], sequences[index].check_stop(token_ids[index]))
        for index in stopped
        if index + 1 == len(sequences) or sequences[index + 1] is not sequences[index]
    ]
    requests.finish_all(lane, {sequence: finish for sequence, finish in checked if finish is not None})


def context_lens(
    lane: Lane, step: PlannedStep, *, applied: Mapping[Sequence, int] = MappingProxyType({})
) -> dict[Sequence, int]:
    """The context length of each sequence before the oldest step in flight, or before one just applied.

    A decoding sequence lacked the KV of its newest token then. `applied`: the number of tokens got since.
    """
    found = {chunk.sequence: chunk.context_len for chunk in step.chunks}
    sequence_at, num_applied = lane.sequence_at, applied.get
    for slot in step.decode_slots:
        sequence = sequence_at[slot] or _sequence_at(lane, slot)
        found[sequence] = sequence.num_tokens - 1 - num_applied(sequence, 0)
    return found


def _sequence_at(lane: Lane, slot: int) -> Sequence:
    sequence = lane.sequence_at[slot]
    if sequence is None:
        raise InvariantError(f"slot {slot} was never held by a sequence")
    return sequence
