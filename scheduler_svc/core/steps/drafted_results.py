"""Results of steps with drafts: several tokens of a slot, and what they say about the number of drafts."""

from __future__ import annotations

from collections.abc import Mapping

from cadenza_common.plan.result import StepResult
from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.lanes.drafted_step import DraftedStep, ScopeDrafts
from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.lanes.planned_step import PlannedStep
from scheduler_svc.core.request_table import RequestTable
from scheduler_svc.core.sequences.sequence import Sequence
from scheduler_svc.core.types import Finish, SequenceState


def check_drafts(lane: Lane, step: PlannedStep, result: StepResult) -> None:
    """Raise InvariantError for tokens or drafts beyond what the plan allows; changes nothing."""
    if max(result.num_tokens, default=0) <= 1 and not (result.num_drafts or result.num_accepted):
        return
    slots, most = list(result.slots), step.plan.max_drafts
    drafts = list(result.num_drafts) or [0] * len(slots)
    accepted = list(result.num_accepted) or [0] * len(slots)
    counts = list(result.num_tokens) or [1] * len(slots)
    if not len(drafts) == len(accepted) == len(slots):
        raise InvariantError(
            f"step {result.step_id}: {len(drafts)} counts of drafts and {len(accepted)} of accepted ones for "
            f"{len(slots)} slots"
        )
    for slot, count, num_drafts, num_accepted in zip(slots, counts, drafts, accepted, strict=True):
        if not (num_accepted <= num_drafts <= most and count <= 1 + num_accepted and num_accepted <= count):
            raise InvariantError(
                f"step {result.step_id}: slot {slot} gave {count} tokens, with {num_accepted} of {num_drafts} drafts "
                f"accepted, where {most} were allowed"
            )
        sequence = lane.sequence_at[slot]
        is_late = slot in lane.discarding_slots or sequence is None
        if count > 1 and not is_late and sequence is not None and sequence.num_tokens + count > sequence.max_len:
            raise InvariantError(f"step {result.step_id}: slot {slot} exceeded its maximum length {sequence.max_len}")


def count_drafted(requests: RequestTable, lane: Lane, num_tokens: Mapping[Sequence, int]) -> None:
    """Correct the counts of sequences that got more than one token; finish those at their maximum length.

    num_tokens: of each sequence in this result, which it has already.
    """
    for sequence, count in num_tokens.items():
        if count == 1 or sequence.state is SequenceState.FINISHED:
            continue
        if sequence.is_decoding and sequence.num_planned_tokens + count - 1 < sequence.max_len:
            lane.decode_batch.correct(sequence, count - 1)
            continue
        if sequence.is_decoding:
            lane.retire(sequence)
        sequence.count_more(count - 1)
        if sequence.num_tokens >= sequence.max_len and sequence not in lane.finishing:
            requests.finish(sequence, Finish(sequence.length_detail))


def observe_drafts(lane: Lane, step: PlannedStep, result: StepResult) -> None:
    """Report a result to the lane's control of the number of drafts, and count its drafts."""
    if not (lane.spec.max_drafts and step.decode_slots):
        return
    most, num_decodes = step.plan.max_drafts, max(len(step.decode_slots), step.num_drafting)
    lane.counts.drafts.most = most
    if not len(result.num_drafts) and lane.draft_control.counts_only(num_decodes, step.num_drafting if most else 0):
        return
    drafts, by_scope = list(result.num_drafts), dict[int, ScopeDrafts]()
    if drafts:
        accepted = list(result.num_accepted)
        drafted_at = [sum(count > index for count in drafts) for index in range(most)]
        accepted_at = [sum(count > index for count in accepted) for index in range(most)]
        lane.counts.drafts.add(drafted_at, accepted_at)
        by_scope = _by_scope(lane, step, result, ScopeDrafts(step.num_drafting, accepted_at, drafted_at))
    lane.draft_control.observe(
        DraftedStep(
            num_decodes=num_decodes,
            num_drafting=step.num_drafting,
            max_drafts=most,
            num_drafts=sum(drafts),
            num_accepted=sum(result.num_accepted),
            num_other_tokens=step.total_tokens - num_decodes,
            step_ns=result.timings.total_ns - result.timings.moves_ns,
            by_scope=by_scope,
        )
    )


def _by_scope(lane: Lane, step: PlannedStep, result: StepResult, whole: ScopeDrafts) -> dict[int, ScopeDrafts]:
    """Return what a result with these drafts says of each scope."""
    most, scopes = step.plan.max_drafts, lane.decode_batch.draft_scopes
    if len(scopes) == 1:
        return dict.fromkeys(scopes, whole)
    drafted = zip(result.num_drafts, result.num_accepted, strict=True) if len(result.num_drafts) else ()
    counts = dict(zip(result.slots, drafted, strict=False))
    found: dict[int, ScopeDrafts] = {}
    for slot in step.decode_slots:
        sequence = lane.sequence_at[slot]
        if sequence is None or not sequence.max_drafts:
            continue
        part = found.setdefault(sequence.draft_scope, ScopeDrafts(0, [0] * most, [0] * most))
        part.num_drafting += 1
        num_drafts, num_accepted = counts.get(slot, (0, 0))
        for index in range(num_drafts):
            part.drafted_at[index] += 1
            part.accepted_at[index] += index < num_accepted
    return found
