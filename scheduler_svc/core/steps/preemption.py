"""Preemption, for the next tokens of running sequences and for waiting groups of a smaller level."""

from __future__ import annotations

from collections import Counter

from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.lanes.planned_step import PlannedStep
from scheduler_svc.core.memory.prefix_lookups import may_hit
from scheduler_svc.core.request_table import RequestTable
from scheduler_svc.core.sequences.sequence import Sequence, held_slot
from scheduler_svc.core.sequences.shared_blocks import SharedBlocks
from scheduler_svc.core.steps.allocation import allocations_of, have_blocks
from scheduler_svc.core.steps.beam_scheduling import finish_early
from scheduler_svc.core.steps.pages import append_pages, extend, note_appends, note_windows
from scheduler_svc.core.steps.saves import save_in_decode
from scheduler_svc.core.types import Finish, FinishDetail


def preempt_for_decodes(requests: RequestTable, lane: Lane, step: PlannedStep) -> bool:
    """Give decodes and beams the blocks that this step writes to; preempt victims while too few are free.

    Returns whether any were preempted. All victims are preempted before any block is taken, so this step writes to no
    block that is freed here.
    """
    # With neither beams nor forks, decodes write to their own blocks alone.
    writes_own = not (lane.due_beam_groups or lane.pending_copy_on_write)
    if lane.blocks.windows is not None:
        writes_own = writes_own and not _give_back(lane)
    if writes_own and lane.decode_batch.num_needing_blocks * lane.blocks.block_pages <= lane.blocks.num_free:
        _append_blocks(lane, step)
        return False
    _free_reserves(lane)
    victims: list[Sequence] | None = None
    while _num_needed_blocks(lane) > lane.blocks.num_free:
        if victims is None:
            victims = lane.running.victims(requests.waiting, step.planned_at)[::-1]
        victim = victims.pop()
        if victim.slot is not None:
            _preempt_or_finish(requests, lane, step, victim)
    _copy_on_write(lane, step)
    _append_blocks(lane, step)
    return victims is not None


def preempt_for_admission(requests: RequestTable, lane: Lane, step: PlannedStep) -> None:
    """Preempt running groups of a larger level than the next group to admit, if that lets it fit."""
    head, order = requests.placer.own_head(lane, step.planned_at), requests.policies.order
    if head is None or not head.has_all_results or not len(lane.running):
        return
    if not lane.adapters.has_place(head, lane.running.num_by_adapter, step.planned_at):
        return
    level = order.level(head)
    if order.level(lane.running.last.group) <= level:
        return
    allocations = allocations_of(requests, lane, head)
    # Blocks that it will share with a victim are not free after the preemption.
    kept = {block_id for allocation in allocations for block_id in lane.blocks.device_blocks_of(allocation.found)}
    victims = VictimSet(lane, kept)
    for sequence in lane.running.victims(requests.waiting, step.planned_at):
        num_left = len(lane.running) - len(victims.sequences)
        fits = have_blocks(lane, head, allocations, alone=num_left == 0, num_more=victims.num_freed)
        if fits and num_left + len(allocations) <= lane.spec.max_num_seqs:
            break
        if order.level(sequence.group) <= level or requests.waiting.is_overdue(sequence.group, step.planned_at):
            return
        victims.add(sequence)
    for victim in victims.sequences:
        if victim.slot is not None:
            preempt_victim(requests, lane, step, victim)


class VictimSet:
    """Candidate victims, and the number of pages that their preemption would free."""

    def __init__(self, lane: Lane, kept: set[int]) -> None:
        self.sequences: dict[Sequence, None] = {}
        self.num_freed = 0
        self._pool = lane.blocks.pool
        self._ref_counts = self._pool.ref_counts
        self._kept = kept
        self._holders: Counter[int] = Counter()
        self._sharers: Counter[SharedBlocks] = Counter()

    def add(self, sequence: Sequence) -> list[Sequence]:
        """Add a sequence and all that are preempted together with it; returns the sequences that were not in yet."""
        added = [member for member in preempted_together(sequence) if member not in self.sequences]
        for member in added:
            self.sequences[member] = None
            self.num_freed += len(member.state_pages)
            shared, first = member.shared_blocks, 0
            if shared is not None:
                self._sharers[shared] += 1
                if self._sharers[shared] < shared.num_holders:
                    first = len(shared.block_ids)  # The pool counts them once for all that share them.
            for block_id in member.block_ids[first:]:
                self._holders[block_id] += 1
                last = self._holders[block_id] == self._ref_counts[block_id]
                if last and block_id not in self._kept:
                    self.num_freed += self._pool.num_pages_of((block_id,))
        return added


def _give_back(lane: Lane) -> int:
    """Let the sequences that are about to get a block give back what their windows have passed.

    Returns the number of pages that the first other sequence lacks for its next token: the first always goes on.
    """
    windows = lane.blocks.windows
    if windows is None:
        return 0
    for sequence in (*lane.decode_batch.needing_blocks, *_due_beams(lane)):
        lane.blocks.give_back(sequence)
    first = next((sequence for sequence in lane.prefilling if sequence.may_compute), None)
    return 0 if first is None else windows.num_lacking(first)


def _free_reserves(lane: Lane) -> None:
    """Free as many of the reserved blocks of beam groups as their beams are about to take."""
    for group in lane.due_beam_groups:
        if group.reserved_blocks:
            kept = max(0, len(group.reserved_blocks) - _num_needed_for(lane, group.due_beams, group.due_beams))
            lane.blocks.free_taken(group.reserved_blocks[kept:])
            del group.reserved_blocks[kept:]


def _num_needed_blocks(lane: Lane) -> int:
    """Number of pages of new blocks for growing decodes and beams, and for copy-on-write after forks."""
    beams = _due_beams(lane)
    num_blocks = lane.decode_batch.num_needing_blocks
    num_blocks += _num_needed_for(lane, beams, [*lane.pending_copy_on_write, *beams])
    return num_blocks * lane.blocks.block_pages + _give_back(lane)


def _num_needed_for(lane: Lane, beams: list[Sequence], sharers: list[Sequence]) -> int:
    """New blocks for growing beams, and a copy for all holders but one of each shared block that is written."""
    shared: dict[int, int] = {}
    for sequence in sharers:
        if lane.blocks.writes_shared(sequence):
            block_id = sequence.block_ids[sequence.num_computed_tokens // lane.spec.block_size]
            shared[block_id] = lane.blocks.num_other_holders(sequence)
    return len(_beams_needing_blocks(lane, beams)) + sum(shared.values())


def _due_beams(lane: Lane) -> list[Sequence]:
    return [beam for group in lane.due_beam_groups for beam in group.due_beams]


def _beams_needing_blocks(lane: Lane, beams: list[Sequence]) -> list[Sequence]:
    return [beam for beam in beams if beam.num_computed_tokens == len(beam.block_ids) * lane.spec.block_size]


def _copy_on_write(lane: Lane, step: PlannedStep) -> None:
    """Copy shared blocks before they are written: forked sequences, then beams; the last holder keeps a block."""
    size = lane.spec.block_size
    # The source of a fork is last: the executor's table of it has that block.
    for sequence, lacks_block in sorted(lane.pending_copy_on_write.items(), key=lambda item: not item[1]):
        lane.blocks.make_writable(sequence)
        if lacks_block:
            index = sequence.num_computed_tokens // size
            if lane.blocks.sizes is not None:
                note_appends(lane, step, sequence, sequence.block_ids[index:])
                note_windows(lane, step, sequence, [range(min(held.stop, index)) for held in sequence.windows])
                continue
            for block_id in sequence.block_ids[index:]:
                _note_append(step, sequence, block_id)
    lane.pending_copy_on_write.clear()
    # Beams that keep their slot are last: by then no other sequence shares their blocks.
    for beam in sorted(_due_beams(lane), key=lambda beam: beam.described):
        if lane.blocks.writes_shared(beam):
            lane.blocks.make_writable(beam)


def _append_blocks(lane: Lane, step: PlannedStep) -> None:
    """Append a block to each sequence whose blocks are full."""
    beams, needing_blocks = _beams_needing_blocks(lane, _due_beams(lane)), lane.decode_batch.needing_blocks
    if not (beams or needing_blocks):
        return
    if lane.blocks.sizes is not None:
        _append_pages(lane, step, beams, needing_blocks)
        return
    block_ids = lane.blocks.take(len(needing_blocks) + len(beams))
    for beam, block_id in zip(beams, block_ids[len(needing_blocks) :], strict=True):
        lane.blocks.cache_full_blocks(beam)
        beam.block_ids.append(block_id)
        if beam.described:
            _note_append(step, beam, block_id)
    if needing_blocks:
        if lane.blocks.caching:
            for sequence in needing_blocks:
                lane.blocks.cache_full_blocks(sequence)
        block_ids = block_ids[: len(needing_blocks)]
        lane.decode_batch.append_blocks(needing_blocks, block_ids)
        step.plan.append_slots += [held_slot(sequence) for sequence in needing_blocks]
        step.plan.append_block_ids += block_ids
        step.appended += zip(needing_blocks, block_ids, strict=True)


def _append_pages(lane: Lane, step: PlannedStep, beams: list[Sequence], needing_blocks: list[Sequence]) -> None:
    """The same where blocks are not pages."""
    for beam in beams:
        lane.blocks.cache_full_blocks(beam)
        extend(lane, step, beam, 1)
    if not needing_blocks:
        return
    if lane.blocks.caching:
        for sequence in needing_blocks:
            lane.blocks.cache_full_blocks(sequence)
    save_in_decode(lane, step, needing_blocks)
    before = [list(sequence.windows) for sequence in needing_blocks]
    block_ids = lane.blocks.take(len(needing_blocks))
    lane.decode_batch.append_blocks(needing_blocks, block_ids)
    for sequence, block_id, windows in zip(needing_blocks, block_ids, before, strict=True):
        append_pages(lane, step, sequence, [block_id], windows)


def append_missing(lane: Lane, step: PlannedStep, sequence: Sequence) -> bool:
    """Append the blocks that a sequence outside the decode batch lacks for its tokens; False if too few are free."""
    num_missing = lane.blocks.num_missing(sequence)
    lane.blocks.give_back(sequence)
    if num_missing * lane.blocks.block_pages > lane.blocks.num_free:
        return False
    if lane.blocks.sizes is not None:
        extend(lane, step, sequence, num_missing)
        return True
    for block_id in lane.blocks.take(num_missing):
        sequence.block_ids.append(block_id)
        if sequence.described:
            _note_append(step, sequence, block_id)
    return True


def _note_append(step: PlannedStep, sequence: Sequence, block_id: int) -> None:
    step.plan.append_slots.append(held_slot(sequence))
    step.plan.append_block_ids.append(block_id)
    step.appended.append((sequence, block_id))


def _preempt_or_finish(requests: RequestTable, lane: Lane, step: PlannedStep, victim: Sequence) -> None:
    """Preempt a victim; with nothing else running, finish it instead, since preemption would free nothing.

    Unless another executor has a larger pool.
    """
    others = any(sequence.group is not victim.group for sequence in lane.running)
    if others:
        preempt_victim(requests, lane, step, victim)
    elif requests.outgrows(victim.group, lane):
        _preempt(requests, lane, step, victim.group.running, swapped=False)
    elif victim.group.beam_search is not None:
        finish_early(requests, victim.group, FinishDetail.KV_CAPACITY)
    elif len(lane.running) > 1:
        _preempt(requests, lane, step, [victim], swapped=False)
    elif victim.num_pending == 0:
        requests.finish(victim, Finish(FinishDetail.KV_CAPACITY))
    else:
        lane.retire(victim)
        victim.finish_after_planned(FinishDetail.KV_CAPACITY)


def preempt_victim(requests: RequestTable, lane: Lane, step: PlannedStep, victim: Sequence) -> None:
    """Preempt a sequence, together with those that must lose their KV with it; a swap takes the whole group."""
    group = victim.group.running
    swapped = _prefers_swap(requests, lane, group)
    _preempt(requests, lane, step, group if swapped else preempted_together(victim), swapped=swapped)


def move_away(requests: RequestTable, lane: Lane, step: PlannedStep) -> None:
    """Preempt the groups of a draining lane that another lane can go on with; the others finish here."""
    for group in dict.fromkeys(sequence.group for sequence in (*lane.running, *lane.swapped)):
        if not requests.fits_elsewhere(group, lane):
            continue
        requests.drop_swapped(group)
        if group.running:
            _preempt(requests, lane, step, group.running, swapped=False)


def preempted_together(sequence: Sequence) -> list[Sequence]:
    """The sequences that lose their KV together: all beams, and all sequences before their fork."""
    group = sequence.group
    return group.running if group.beam_search is not None or not group.forked else [sequence]


def _prefers_swap(requests: RequestTable, lane: Lane, group: list[Sequence]) -> bool:
    """Whether the group's KV is to be swapped out, and fits into the host pool."""
    policy = requests.policies.preemption
    if policy == "recompute" or any(sequence.kv_source is not None for sequence in group):
        return False
    num_blocks = lane.blocks.num_to_swap(group)
    if num_blocks > lane.blocks.host_pool.num_free or not any(sequence.num_computed_tokens for sequence in group):
        return False
    return policy == "swap" or lane.rates.swap_is_cheaper(_num_to_recompute(lane, group), num_blocks)


def _num_to_recompute(lane: Lane, group: list[Sequence]) -> int:
    """Number of tokens that a group's running sequences compute again if they lose their KV.

    With states they go on behind the last snapshot of what they have: samples each behind its own, sequences that begin
    together behind that of the first.
    """
    first, snapshots, size = group[0], lane.blocks.snapshots, lane.spec.block_size
    if snapshots is None or not may_hit(first):
        return lane.num_distinct_tokens(group)
    if first.group.forked and not first.is_beam:
        return sum(each.num_computed_tokens - size * snapshots.last_of(each) for each in group)
    return lane.num_distinct_tokens(group) - size * snapshots.last_of(first)


def _preempt(
    requests: RequestTable, lane: Lane, step: PlannedStep, sequences: list[Sequence], *, swapped: bool
) -> None:
    """Release slots and blocks; tokens stay, including pending ones."""
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
    group.held_until = step.plan.step_id
    lane.counts.num_preemptions += 1
    lane.counts.num_swap_preemptions += swapped
