"""The end of a session whose executor may keep its KV: what is certain to be computed stays, the rest is given up.

The executor clears its slots and keeps both pools. A plan without a result may have run in full, in part or not at all.
So every position that such a plan was to write counts as not computed, and so does every block that it was to move KV
into; their entries leave the prefix cache. Running sequences go on from there and are described anew. A sequence goes
back to the waiting queue without KV if it

- was admitted, or swapped out, by a plan without a result,
- waits for KV that another sequence computes,
- still needs prompt logprobs, which are not computed from the middle of a prompt,
- would write to a block that another sequence holds, or lacks a block and none is free,
- has given back what its next row reads in a window: it was computed further than is certain,
- has a state that such a plan was to change, or to copy: it goes on behind a copy that a result has named,
- had its last token planned, which had freed its blocks.
"""

from __future__ import annotations

from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.lanes.planned_step import PlannedStep
from scheduler_svc.core.request_table import RequestTable
from scheduler_svc.core.sequences.sequence import Sequence
from scheduler_svc.core.steps.preemption import preempted_together
from scheduler_svc.core.steps.results import context_lens


def keep_kv(requests: RequestTable, lane: Lane) -> None:
    """End the lane's session; its executor still has the KV that is kept here."""
    steps = list(lane.inflight)
    contexts = _first_contexts(lane, steps)
    joined = {sequence for step in steps for sequence in step.joined}
    offsets = _uncertain_offsets(steps)
    changed = {*contexts, *_copied_to(lane, steps)} if lane.blocks.states is not None else set()
    for sequence in lane.running:
        num_computed = contexts.get(sequence, sequence.num_computed_tokens)
        num_certain = 0 if sequence in joined else _num_certain(lane, sequence, num_computed, offsets)
        if lane.blocks.states is not None and (num_certain < num_computed or sequence.kv_source is not None):
            changed.add(sequence)  # Where the KV that it waits for is there, the state behind it may not be.
        sequence.roll_back(num_certain)
    for group in {sequence.group for sequence in (*contexts, *lane.running)}:
        group.drop_candidates()
    if steps:
        host_block_ids = [host_block_id for step in steps for host_block_id in step.moves.swapped_out.destinations]
        lane.blocks.remove_uncertain(steps[0].first_node, offsets, host_block_ids)
    finishing = list(lane.finishing)
    lane.reset_session()
    for sequence in [*finishing, *_uncertain_swaps(lane, steps)]:
        requests.requeue(sequence)
    for sequence in {*contexts, *finishing}.difference(lane.running):
        sequence.drop_pending_tokens()
    for sequence in lane.running:
        if not (sequence.awaits_fork or sequence.is_spare_beam):
            lane.prefilling.add(sequence)
    _file_due_beams(lane, changed)
    _give_up_uncertain(requests, lane, joined, changed)


def forget_kv(requests: RequestTable, lane: Lane) -> None:
    """End the lane's session and empty its pools: the executor is another one, or is not known to be the same."""
    contexts = _first_contexts(lane, list(lane.inflight))
    interrupted = [*lane.running, *lane.finishing, *lane.swapped]
    lane.reset()
    for sequence in contexts.keys() - interrupted:
        sequence.drop_pending_tokens()
        sequence.group.drop_candidates()
    for sequence in interrupted:
        sequence.forget_executor_state()
        sequence.group.drop_candidates()
        requests.requeue(sequence)


def _first_contexts(lane: Lane, steps: list[PlannedStep]) -> dict[Sequence, int]:
    """The sequences of these steps, each with its context length before the first of them that computes it."""
    contexts: dict[Sequence, int] = {}
    for step in steps:
        contexts = context_lens(lane, step) | contexts
    return contexts


def _uncertain_offsets(steps: list[PlannedStep]) -> dict[int, int]:
    """Device blocks that others may come to hold, each with the first offset that these steps were to write.

    Blocks that decodes write to are left out: until they are full, only their sequence holds them.
    """
    offsets: dict[int, int] = {}
    for step in steps:
        for block_id in (*step.moves.copied.destinations, *step.moves.swapped_in.destinations):
            offsets[block_id] = 0
        for chunk in step.chunks:
            for index, block_id in enumerate(chunk.block_ids):
                offset = chunk.first_offset if index == 0 else 0
                offsets[block_id] = min(offset, offsets.get(block_id, offset))
    return offsets


def _copied_to(lane: Lane, steps: list[PlannedStep]) -> list[Sequence]:
    """The running sequences whose states these steps were to copy, or swap in."""
    moves = [pages for step in steps if (pages := step.moves.pages) is not None]
    copied = {page for each in moves for page in (*each.copied.destinations, *each.swapped_in.destinations)}
    return [sequence for sequence in lane.running if not copied.isdisjoint(sequence.state_pages)]


def _num_certain(lane: Lane, sequence: Sequence, num_computed: int, offsets: dict[int, int]) -> int:
    """Number of its leading tokens whose KV is certain to be there."""
    if sequence.is_beam:
        # Its candidates are lost: it computes its newest token again.
        num_computed = min(num_computed, sequence.num_tokens - 1)
    size = lane.spec.block_size
    for index, block_id in enumerate(sequence.block_ids[: lane.blocks.num_blocks_for(num_computed)]):
        if block_id in offsets:
            return min(num_computed, index * size + offsets[block_id])
    return num_computed


def _uncertain_swaps(lane: Lane, steps: list[PlannedStep]) -> list[Sequence]:
    """Free the host blocks of sequences that these steps were to swap out; returns the sequences."""
    swapped = [sequence for step in steps for sequence in step.swapped_out if sequence in lane.swapped]
    for sequence in swapped:
        lane.drop_swapped(sequence)
    return swapped


def _file_due_beams(lane: Lane, changed: set[Sequence]) -> None:
    """Mark groups whose beams each lack their newest token only: the next plan copies the blocks that they share.

    changed: those whose states are uncertain.
    """
    for group in dict.fromkeys(sequence.group for sequence in lane.running if sequence.is_beam):
        if group.forked and len(group.due_beams) == len(group.beams) and changed.isdisjoint(group.beams):
            lane.due_beam_groups[group] = None
            for beam in group.beams:
                lane.prefilling.discard(beam)


def _give_up_uncertain(requests: RequestTable, lane: Lane, joined: set[Sequence], changed: set[Sequence]) -> None:
    """Requeue the running sequences that cannot go on from here; the last holder of shared blocks keeps them.

    changed: those whose states are uncertain.
    """
    for sequence in lane.running.sequences[::-1]:
        if sequence.slot is None or sequence.group in lane.due_beam_groups:
            continue
        needs_more = sequence in joined or sequence.kv_source is not None or sequence.needs_prompt_logprobs
        needs_more = needs_more or sequence in changed
        if lane.blocks.windows is not None and not (sequence.awaits_fork or sequence.is_spare_beam):
            needs_more = needs_more or not lane.blocks.windows.covers(sequence)
        # Before a fork, all share the blocks that the first one writes to.
        if needs_more or (sequence.group.forked and not lane.blocks.writes_only_own(sequence)):
            _give_up(requests, lane, sequence)
    for sequence in list(lane.prefilling):
        if sequence.slot is None or not (num_missing := lane.blocks.num_missing(sequence)):
            continue
        if num_missing * lane.blocks.block_pages > lane.blocks.num_free:
            _give_up(requests, lane, sequence)
        else:
            lane.blocks.extend(sequence, num_missing)


def _give_up(requests: RequestTable, lane: Lane, sequence: Sequence) -> None:
    for member in preempted_together(sequence):
        lane.stop_running(member)
        requests.requeue(member)
