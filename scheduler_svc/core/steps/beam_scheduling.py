"""Beam searches: what results tell them, who goes on in whose place, and how they end.

A search waits for the candidates of all its beams, and nobody waits for it. Then each beam that runs on is a parent's
tokens and one more: the first child of a parent stays in its slot, the others take the slots of beams without children
and share their parent's blocks. What those held is free at once; copy-on-write sets the children apart when the next
step is planned.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.lanes.planned_step import PlannedStep
from scheduler_svc.core.outputs import BeamOutput
from scheduler_svc.core.request_table import RequestTable
from scheduler_svc.core.sequences.beams import BeamSearch, Hypothesis
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup, held_slot
from scheduler_svc.core.types import Candidates, Finish, FinishDetail, SequenceState, SlotError, StepResult


def start_beam_search(group: SequenceGroup) -> None:
    """Let a new group with sequences be a beam search, if its request asks for one."""
    spec, first = group.spec, group.sequences[0]
    if spec.beams is not None:
        group.beam_search = BeamSearch(
            spec.beams,
            stop_ids=group.stop_ids,
            eos_token_ids=spec.eos_token_ids,
            num_prompt_tokens=first.num_prompt_tokens,
            max_len=first.max_len,
            length_detail=first.length_detail,
        )


def take_candidates(requests: RequestTable, lane: Lane, step: PlannedStep, result: StepResult) -> None:
    """Give searches what their beams have been told; a beam that was preempted since will ask again."""
    told = [chunk.sequence for chunk in step.chunks if chunk.samples and chunk.sequence.is_beam]
    if not told:
        return
    requests.policies.order.computed(told)
    errors = dict(zip(result.error_slots, result.errors, strict=True))
    for beam in told:
        beam.group.num_awaited -= 1
        slot = beam.last_slot
        if beam.state is not SequenceState.RUNNING or slot is None:
            continue
        if slot in result.candidates:
            beam.group.candidates[beam] = result.candidates[slot]
        elif errors.get(slot) is SlotError.NO_ALLOWED_TOKEN:
            beam.group.candidates[beam] = Candidates((), ())
    for group in dict.fromkeys(beam.group for beam in told):
        if not group.finished:
            _advance_search(requests, lane, group)


def end_early(requests: RequestTable, group: SequenceGroup, detail: FinishDetail) -> None:
    """End a group before its time: beams that run count as they are."""
    if group.beam_search is None or not group.forked:
        requests.end_group(group, Finish(detail))
        return
    found = group.beam_search.best(group.spec.num_samples, _outputs(group.beams), detail)
    _finish(requests, group, found, Finish(detail))


def _advance_search(requests: RequestTable, lane: Lane, group: SequenceGroup) -> None:
    """One token further, if all beams have been told their candidates."""
    search, beams = group.beam_search, group.beams if group.forked else group.sequences[:1]
    if search is None or group.candidates.keys() != set(beams):
        return
    pairs = search.advance(_outputs(beams), [group.candidates[beam] for beam in beams])
    group.candidates.clear()
    if search.done:
        found = search.best(group.spec.num_samples)
        _finish(requests, group, found, Finish(FinishDetail.NO_ALLOWED_TOKEN))
    else:
        _reorder(lane, group, beams, pairs)


def _reorder(lane: Lane, group: SequenceGroup, beams: list[Sequence], pairs: list[tuple[int, int]]) -> None:
    """Make the beams that run on of those that ran: (index of the parent, new token) each, best first."""
    parents = [beams[index] for index, _ in pairs]
    outputs = [
        [*parent.token_ids[parent.num_prompt_tokens :], pair[1]] for parent, pair in zip(parents, pairs, strict=True)
    ]
    others = [sequence for sequence in group.sequences if sequence not in parents]
    children: list[Sequence] = []
    for sequence in others:
        lane.blocks.free(sequence)
        _end_description(lane, sequence)
    for parent in parents:
        child = parent
        if parent in children:
            child = others.pop()
            lane.blocks.share_table(parent, child, parent.num_computed_tokens)
        children.append(child)
    for child, output in zip(children, outputs, strict=True):
        child.set_output(output)
    for sequence in others:
        sequence.reset_computed_tokens()
    group.beams, group.forked = children, True
    lane.due_beam_groups[group] = None


def _end_description(lane: Lane, sequence: Sequence) -> None:
    """The executor is to forget a sequence that keeps its slot: it will be told of another."""
    if sequence.described:
        lane.stale_slots.append(held_slot(sequence))
        sequence.described = False


def _outputs(beams: Iterable[Sequence]) -> list[list[int]]:
    return [beam.token_ids[beam.num_prompt_tokens :] for beam in beams]


def _finish(requests: RequestTable, group: SequenceGroup, found: list[Hypothesis], otherwise: Finish) -> None:
    """Tell the best, and end the group; samples for which there is nothing end for another reason."""
    for index in range(group.spec.num_samples):
        if index < len(found):
            best = found[index]
            output = BeamOutput(group, index, best.token_ids, best.score, best.cumulative_logprob, best.finish)
        else:
            output = BeamOutput(group, index, (), -math.inf, None, otherwise)
        requests.outputs.hypotheses.append(output)
    for sequence in group.sequences:
        if sequence.state is not SequenceState.FINISHED:
            requests.end(sequence, found[0].finish if found else otherwise, report=False)
