"""Room for those that run and for those that must not wait: who gives way, and what becomes of its KV."""

from __future__ import annotations

from collections import Counter

from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.lanes.planned_step import PlannedStep
from scheduler_svc.core.request_table import RequestTable
from scheduler_svc.core.sequences.sequence import Sequence, held_slot
from scheduler_svc.core.steps.beam_scheduling import end_early
from scheduler_svc.core.steps.placement import have_blocks, placements_of
from scheduler_svc.core.types import Finish, FinishDetail


def preempt_for_decodes(requests: RequestTable, lane: Lane, step: PlannedStep) -> bool:
    """Blocks that this step's tokens are written to, for decodes and beams; victims go while there are too few.

    Returns whether any had to go. All of them go before any block is taken, so what is freed here was not written to by
    this step.
    """
    _free_reserves(lane)
    victims: list[Sequence] | None = None
    while _num_needed_blocks(lane) > lane.blocks.num_free:
        if victims is None:
            victims = lane.running.victims(requests.waiting, step.planned_at)[::-1]
        victim = victims.pop()
        if victim.slot is not None:
            _preempt_or_end(requests, lane, step, victim)
    _copy_on_write(lane, step)
    _append_blocks(lane, step)
    return victims is not None


def preempt_for_admission(requests: RequestTable, lane: Lane, step: PlannedStep) -> None:
    """Push out running groups of a higher level than the next to join, if that makes room for it."""
    head, order = requests.waiting.head(step.planned_at), requests.policies.order
    if head is None or not head.has_all_results or not len(lane.running):
        return
    level = order.level(head)
    if order.level(lane.running.sequences[-1].group) <= level:
        return
    placements = placements_of(requests, lane, head)
    # What it will share with a victim is not free when that has gone.
    kept = {block_id for placement in placements for block_id in lane.blocks.blocks_of(placement.found)}
    leaving = _VictimSet(lane, kept)
    for sequence in lane.running.victims(requests.waiting, step.planned_at):
        num_left = len(lane.running) - len(leaving.sequences)
        fits = have_blocks(lane, head, placements, alone=num_left == 0, num_more=leaving.num_freed)
        if fits and num_left + len(placements) <= lane.spec.max_num_seqs:
            break
        if order.level(sequence.group) <= level or requests.waiting.is_overdue(sequence.group, step.planned_at):
            return
        leaving.add(sequence)
    for victim in leaving.sequences:
        if victim.slot is not None:
            _preempt_victim(requests, lane, step, victim)


class _VictimSet:
    """Sequences that would be pushed out, and the blocks that this would free."""

    def __init__(self, lane: Lane, kept: set[int]) -> None:
        self.sequences: dict[Sequence, None] = {}
        self.num_freed = 0
        self._ref_counts = lane.blocks.pool.ref_counts
        self._kept = kept
        self._holders: Counter[int] = Counter()

    def add(self, sequence: Sequence) -> None:
        """This one, with those that cannot stay without it."""
        for member in _preempted_together(sequence):
            if member in self.sequences:
                continue
            self.sequences[member] = None
            for block_id in member.block_ids:
                self._holders[block_id] += 1
                last = self._holders[block_id] == self._ref_counts[block_id]
                self.num_freed += last and block_id not in self._kept


def _free_reserves(lane: Lane) -> None:
    """Free so many of the blocks reserved for beams as these are about to take."""
    for group in lane.due_beam_groups:
        if group.reserve:
            kept = max(0, len(group.reserve) - _num_needed_for(lane, group.due_beams, group.due_beams))
            lane.blocks.put_back(group.reserve[kept:])
            del group.reserve[kept:]


def _num_needed_blocks(lane: Lane) -> int:
    """Blocks that decodes and beams outgrow to, and that forks write to apart from each other."""
    beams = _due_beams(lane)
    return len(lane.decode_batch.outgrowing) + _num_needed_for(lane, beams, [*lane.pending_copy_on_write, *beams])


def _num_needed_for(lane: Lane, beams: list[Sequence], sharers: list[Sequence]) -> int:
    """Blocks that beams outgrow to, and one for each holder but the last of a block that sharers write to."""
    shared: dict[int, int] = {}
    for sequence in sharers:
        if lane.blocks.writes_shared(sequence):
            block_id = sequence.block_ids[sequence.num_computed_tokens // lane.spec.block_size]
            shared[block_id] = lane.blocks.pool.ref_counts[block_id] - 1
    return len(_outgrowing(lane, beams)) + sum(shared.values())


def _due_beams(lane: Lane) -> list[Sequence]:
    return [beam for group in lane.due_beam_groups for beam in group.due_beams]


def _outgrowing(lane: Lane, beams: list[Sequence]) -> list[Sequence]:
    return [beam for beam in beams if beam.num_computed_tokens == len(beam.block_ids) * lane.spec.block_size]


def _copy_on_write(lane: Lane, step: PlannedStep) -> None:
    """Copy-on-write: those that have forked, then beams; the last holder of a block keeps it."""
    size = lane.spec.block_size
    # Their source is last: the executor's table of it has that block.
    for sequence, lacks_block in sorted(lane.pending_copy_on_write.items(), key=lambda item: not item[1]):
        lane.blocks.make_writable(sequence)
        if lacks_block:
            for block_id in sequence.block_ids[sequence.num_computed_tokens // size :]:
                _note_append(step, sequence, block_id)
    lane.pending_copy_on_write.clear()
    # Those that stay in their slot are last: by then their blocks are their own.
    for beam in sorted(_due_beams(lane), key=lambda beam: beam.described):
        if lane.blocks.writes_shared(beam):
            lane.blocks.make_writable(beam)


def _append_blocks(lane: Lane, step: PlannedStep) -> None:
    """A block more for each that outgrows its own."""
    beams, outgrowing = _outgrowing(lane, _due_beams(lane)), lane.decode_batch.outgrowing
    if not (beams or outgrowing):
        return
    block_ids = lane.blocks.take(len(outgrowing) + len(beams))
    for beam, block_id in zip(beams, block_ids[len(outgrowing) :], strict=True):
        lane.blocks.register(beam)
        beam.block_ids.append(block_id)
        if beam.described:
            _note_append(step, beam, block_id)
    if outgrowing:
        if lane.blocks.caching:
            for sequence in outgrowing:
                lane.blocks.register(sequence)
        block_ids = block_ids[: len(outgrowing)]
        lane.decode_batch.append_blocks(outgrowing, block_ids)
        step.plan.append_slots += [held_slot(sequence) for sequence in outgrowing]
        step.plan.append_block_ids += block_ids
        step.appended += zip(outgrowing, block_ids, strict=True)


def _note_append(step: PlannedStep, sequence: Sequence, block_id: int) -> None:
    step.plan.append_slots.append(held_slot(sequence))
    step.plan.append_block_ids.append(block_id)
    step.appended.append((sequence, block_id))


def _preempt_or_end(requests: RequestTable, lane: Lane, step: PlannedStep, victim: Sequence) -> None:
    """Memory is short: a sequence gives way; if there is nobody else who could go on, it ends."""
    others = any(sequence.group is not victim.group for sequence in lane.running)
    if others:
        _preempt_victim(requests, lane, step, victim)
    elif victim.group.beam_search is not None:
        end_early(requests, victim.group, FinishDetail.KV_CAPACITY)
    elif len(lane.running) > 1:
        _preempt(requests, lane, step, [victim], swapped=False)
    elif victim.num_pending == 0:
        requests.end(victim, Finish(FinishDetail.KV_CAPACITY))
    else:
        lane.retire(victim)
        victim.end_after_planned(FinishDetail.KV_CAPACITY)


def _preempt_victim(requests: RequestTable, lane: Lane, step: PlannedStep, victim: Sequence) -> None:
    """Preempt a sequence, with those that it cannot go without: its whole group if that is swapped."""
    group = victim.group.running
    swapped = _prefers_swap(requests, lane, group)
    _preempt(requests, lane, step, group if swapped else _preempted_together(victim), swapped=swapped)


def _preempted_together(sequence: Sequence) -> list[Sequence]:
    """Those that lose their KV together: beams, and sequences before their fork."""
    group = sequence.group
    return group.running if group.beam_search is not None or not group.forked else [sequence]


def _prefers_swap(requests: RequestTable, lane: Lane, group: list[Sequence]) -> bool:
    """Is the group's KV to be kept in the host pool, and is there room for it."""
    rule = requests.policies.preemption
    if rule == "recompute" or any(sequence.kv_source is not None for sequence in group):
        return False
    num_blocks, num_tokens = lane.blocks.num_to_swap(group), lane.num_distinct_tokens(group)
    if num_tokens == 0 or num_blocks > lane.blocks.host_pool.num_free:
        return False
    return rule == "swap" or lane.rates.swap_is_cheaper(num_tokens, num_blocks)


def _preempt(
    requests: RequestTable, lane: Lane, step: PlannedStep, sequences: list[Sequence], *, swapped: bool
) -> None:
    """Blocks and slots go, tokens stay, those under way too."""
    if swapped:
        lane.swap_out(sequences)
        step.swapped_out += sequences
    for sequence in sequences:
        if swapped:
            sequence.recompute_last_token()
        else:
            lane.stop_running(sequence)
        requests.requeue(sequence, swapped=swapped)
    step.preempted += sequences
    group = sequences[0].group
    group.candidates.clear()
    group.num_preemptions += 1
    requests.num_preemptions += 1
