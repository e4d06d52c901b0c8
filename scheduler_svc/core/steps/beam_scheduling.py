"""Beam scheduling: candidates from results, reordering of beams, and the end of a search.

A search waits for the candidates of all its beams; other sequences do not wait for it. Each beam that continues is a
parent's tokens and one more. The first child of a parent keeps the parent's slot; further children take the slots of
beams without children and share their parent's blocks. The blocks of beams without children are freed at once; the
next step copies shared blocks before children write to them. Each sequence of the group keeps the pages of its
recurrent state until the group stops: the next step copies a parent's state to those of its further children.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from cadenza_common.plan.result import Candidates, SlotError, StepResult
from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.lanes.planned_step import PlannedStep
from scheduler_svc.core.outputs import BeamOutput, count_by_tenant
from scheduler_svc.core.request_table import RequestTable
from scheduler_svc.core.sequences.beams import BeamSearch, Hypothesis
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup, held_slot
from scheduler_svc.core.steps.late_results import compute_again, may_be_late
from scheduler_svc.core.types import Finish, FinishDetail, SequenceState


def start_beam_search(group: SequenceGroup) -> None:
    """Start the beam search of a new group if its request is one."""
    spec, first = group.spec, group.sequences[0]
    if spec.beams is not None:
        group.beam_search = BeamSearch(
            spec.beams,
            stop_ids=frozenset(spec.sampling.stop_token_ids),
            eos_token_ids=spec.eos_token_ids,
            num_prompt_tokens=first.num_prompt_tokens,
            max_len=first.max_len,
            length_detail=first.length_detail,
        )


def take_candidates(requests: RequestTable, lane: Lane, step: PlannedStep, result: StepResult) -> None:
    """Pass candidates to their searches; a beam preempted since then computes its candidates again."""
    beams = [chunk.sequence for chunk in step.chunks if chunk.samples and chunk.sequence.is_beam]
    if not beams:
        return
    requests.policies.order.on_tokens(count_by_tenant(beams))
    errors = dict(zip(result.error_slots, result.errors, strict=True))
    for beam in beams:
        beam.group.num_pending_candidates -= 1
        slot = beam.last_slot
        if beam.state is not SequenceState.RUNNING or slot is None:
            continue
        if slot in result.candidates:
            beam.group.candidates[beam] = result.candidates[slot]
        elif errors.get(slot) is SlotError.NO_ALLOWED_TOKEN:
            beam.group.candidates[beam] = Candidates((), ())
        elif slot not in errors and may_be_late(beam):
            compute_again(lane, beam)
    for group in dict.fromkeys(beam.group for beam in beams):
        if not group.finished:
            _advance_search(requests, lane, group)


def finish_early(requests: RequestTable, group: SequenceGroup, detail: FinishDetail) -> None:
    """Finish a group early: running beams count as hypotheses as they are."""
    if group.beam_search is None or not group.forked:
        requests.finish_group(group, Finish(detail))
        return
    found = group.beam_search.best(group.spec.num_samples, _outputs(group.beams), detail)
    _finish(requests, group, found, Finish(detail))


def _advance_search(requests: RequestTable, lane: Lane, group: SequenceGroup) -> None:
    """Advance the search by one token if the candidates of all its beams are there."""
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
    """Replace the running beams by their continuations, given as (index of the parent, new token), best first."""
    parents = [beams[index] for index, _ in pairs]
    others = [sequence for sequence in group.sequences if sequence not in parents]
    children: list[Sequence] = []
    for sequence in others:
        lane.blocks.free(sequence, keeps_state=True)
        _end_description(lane, sequence)
    for parent in parents:
        child = parent
        if parent in children:
            child = others.pop()
            lane.blocks.share_blocks(parent, child, parent.num_computed_tokens)
            if lane.blocks.states is not None:
                lane.blocks.states.copy(parent, child)
            child.set_output(parent.output_ids)
        children.append(child)
    # Only now: the first child of a parent is the parent, and the others continue its former output.
    for child, (_, token_id) in zip(children, pairs, strict=True):
        child.append_output(token_id)
    for sequence in others:
        sequence.reset_computed_tokens()
    group.beams, group.forked = children, True
    lane.due_beam_groups[group] = None


def _end_description(lane: Lane, sequence: Sequence) -> None:
    """Let the next plan release the slot on the executor although the sequence keeps it: it will be described anew."""
    if sequence.described:
        lane.stale_slots.append(held_slot(sequence))
        sequence.described = False


def _outputs(beams: Iterable[Sequence]) -> list[list[int]]:
    return [beam.output_ids for beam in beams]


def _finish(requests: RequestTable, group: SequenceGroup, found: list[Hypothesis], otherwise: Finish) -> None:
    """Output the best hypotheses and finish the group; samples without a hypothesis finish with `otherwise`."""
    for index in range(group.spec.num_samples):
        if index < len(found):
            best = found[index]
            output = BeamOutput(group, index, best.token_ids, best.score, best.cumulative_logprob, best.finish)
        else:
            output = BeamOutput(group, index, (), -math.inf, None, otherwise)
        requests.outputs.hypotheses.append(output)
    for sequence in group.sequences:
        if sequence.state is not SequenceState.FINISHED:
            requests.finish(sequence, found[0].finish if found else otherwise, report=False)
