"""Results of slots that gave no token because the mask of their grammar was late: they sample in the next step."""

from __future__ import annotations

from cadenza_common.plan.result import StepResult
from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.request_table import RequestTable
from scheduler_svc.core.sequences.sequence import Sequence
from scheduler_svc.core.types import SequenceState


def may_be_late(sequence: Sequence) -> bool:
    """Whether a sequence may give no token (a beam: no candidates) in a step that samples it, and go on."""
    return sequence.group.spec.sampling.grammar is not None


def count_late(requests: RequestTable, lane: Lane, result: StepResult) -> None:
    """Take back the token that each late slot was counted to give, before any sequence of the result finishes.

    Beams are counted to give none: `compute_again` is for them.
    """
    given = set(result.error_slots)
    for slot, count in zip(result.slots, result.num_tokens, strict=True):
        sequence = None if count or slot in given or slot in lane.discarding_slots else lane.sequence_at[slot]
        if sequence is None or sequence.is_beam or sequence.state is SequenceState.FINISHED:
            continue
        if may_be_late(sequence):
            _take_back(requests, lane, sequence)


def compute_again(lane: Lane, beam: Sequence) -> None:
    """Let a running beam without candidates compute its last token again, beside the other prompts and chunks.

    The others of its search keep the candidates that they have.
    """
    beam.recompute_last_token()
    lane.prefilling.add(beam)


def _take_back(requests: RequestTable, lane: Lane, sequence: Sequence) -> None:
    if sequence.is_decoding:
        lane.decode_batch.correct(sequence, -1)
        return
    sequence.count_more(-1)
    if sequence not in lane.finishing:
        return
    # Its last token was planned, so that it has lost its slot and blocks: it goes on as after a preemption.
    del lane.finishing[sequence]
    requests.requeue(sequence)
    if lane.inflight:
        sequence.group.held_until = lane.inflight[-1].plan.step_id
