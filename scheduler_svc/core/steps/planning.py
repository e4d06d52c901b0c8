"""Plans a step: preemption, decodes, beams, chunks, admissions, releases.

Drafts of the decode batch come last: how many a step may have, and room for them in blocks.
Executors make drafts and check them in the same step (docs/decisions/0037). The core chooses the most for a step and
gives members blocks ahead of their tokens, but never takes them from others: an executor with too little room in a
block table drafts less.
"""

from __future__ import annotations

from cadenza_common.plan.plan import StepPlan
from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.lanes.planned_step import PlannedStep
from scheduler_svc.core.request_table import RequestTable
from scheduler_svc.core.sequences.sequence import Sequence, held_slot
from scheduler_svc.core.steps.admission import admit
from scheduler_svc.core.steps.budget import AdmissionBudget, StepBudget
from scheduler_svc.core.steps.chunks import plan_beams, plan_chunk
from scheduler_svc.core.steps.pages import append_pages, close_pages
from scheduler_svc.core.steps.preemption import append_missing, move_away, preempt_for_admission, preempt_for_decodes
from scheduler_svc.core.steps.saves import close_saves, save_in_decode
from scheduler_svc.core.steps.shares import plan_prompts_by_rank, preempt_for_share
from scheduler_svc.core.steps.suspects import clear_sequence, is_ready, next_trial

SPARE_TOKENS = 3
"""Places that drafts leave free in a block table that is not the longest: for one token of each plan that may be in
flight behind them, of which executors allow 4 in all."""


def plan_step(requests: RequestTable, lane: Lane, plan: StepPlan, now: float) -> PlannedStep | None:
    """Fill an empty plan; None if it stays empty, or if plans in flight and a trial must not accompany each other."""
    requests.placer.place(now)
    blocks = lane.blocks
    step = PlannedStep(plan, now, blocks.next_node, blocks.tiers.cache.num_noted)
    if not requests.suspects:
        return step if _fill(requests, lane, step) else None
    is_due = bool(next_trial(requests, lane)) and not lane.suspects_catch_up
    if lane.inflight:
        return None if is_due or lane.inflight[-1].is_trial or not _fill(requests, lane, step) else step
    # A trial stays empty if its suspects are preempted or cleared first; other steps, if only suspects are left.
    for is_trial in [True, False] if is_due else [False, True, False]:
        if _fill(requests, lane, step, is_trial=is_trial):
            return step
    return None


def _fill(requests: RequestTable, lane: Lane, step: PlannedStep, *, is_trial: bool = False) -> bool:
    """Plan a step; returns whether there is anything for the executor to do."""
    plan, spec = step.plan, lane.spec
    max_chunk = requests.policies.long_prefill_token_threshold
    if lane.blocks.windows is not None and lane.blocks.sizes is not None:
        max_chunk = min(max_chunk or spec.max_num_batched_tokens, lane.blocks.sizes.max_chunk)
    budget = StepBudget(spec.max_num_batched_tokens, spec.max_num_seqs, max_chunk)
    fully_planned = (_plan_trial if is_trial else _plan_all)(requests, lane, step, budget)
    plan.released_slots = lane.stale_slots + lane.take_released_slots(plan.step_id)
    lane.stale_slots = []
    step.retired, lane.retired = lane.retired, []
    _take_moves(lane, step)
    close_pages(step)
    close_saves(step)
    if lane.blocks.states is not None:
        for source, sample in step.forks:
            lane.blocks.states.copy(source, sample)
    # Only now: their blocks belong to this step, and are free, or can be shared, from the next one on.
    if lane.blocks.caching:
        for chunk in step.chunks:
            lane.blocks.cache_full_blocks(chunk.sequence, computed_again=True)
    for sequence in fully_planned:
        lane.retire(sequence)
    moves = plan.swap_out or plan.copies or plan.swap_in
    appends = plan.append_slots or plan.group_appends
    return bool(step.total_tokens or plan.released_slots or moves or appends or plan.resumed_slots)


def _plan_all(requests: RequestTable, lane: Lane, step: PlannedStep, budget: StepBudget) -> list[Sequence]:
    """Plan a step for all sequences, up to suspected positions; returns sequences whose last token is planned now."""
    if lane.draining:
        move_away(requests, lane, step)
    num_admissible = requests.policies.batching.num_admissible(
        lane, requests.waiting, step.planned_at, draining=requests.draining
    )
    order = requests.policies.order
    if num_admissible and order.preemptive:
        preempt_for_admission(requests, lane, step)
    elif num_admissible and order.shares:
        preempt_for_share(requests, lane, step)
    memory_is_short = preempt_for_decodes(requests, lane, step)
    _resume(lane, step)
    # Sequences with shared KV wait until an earlier plan has computed it.
    prefilling = [sequence for sequence in lane.prefilling if _shared_kv_is_computed(lane, sequence)]
    fully_planned = _plan_decodes(lane, step, budget)
    plan_beams(lane, step, budget, [group for group in lane.due_beam_groups if group not in requests.suspects])
    # A sequence preempted for lack of memory would be admitted again at once.
    admissions = AdmissionBudget(0 if memory_is_short else num_admissible)
    if prefilling and order.shares:
        fully_planned += plan_prompts_by_rank(requests, lane, step, budget, prefilling, admissions)
    else:
        for sequence in prefilling:
            if budget.exhausted:
                break
            fully_planned += plan_chunk(lane, step, budget, sequence)
    if num_admissible and not memory_is_short:
        fully_planned += admit(requests, lane, step, budget, admissions)
    plan_drafts(lane, step, budget)
    lane.suspects_catch_up = any(chunk.sequence.suspected is not None for chunk in step.chunks)
    return fully_planned


def _plan_trial(requests: RequestTable, lane: Lane, step: PlannedStep, budget: StepBudget) -> list[Sequence]:
    """Plan a trial: suspected positions alone; returns sequences whose last token is planned now."""
    preempt_for_decodes(requests, lane, step)
    _resume(lane, step)
    if (lane.blocks.windows or lane.blocks.states) is not None:
        for sequence in lane.prefilling:
            _shared_kv_is_computed(lane, sequence)
    groups = next_trial(requests, lane)
    step.is_trial, lane.suspects_catch_up = True, False
    fully_planned: list[Sequence] = []
    plan_beams(lane, step, budget, [group for group in lane.due_beam_groups if group in groups])
    for sequence in [sequence for sequence in lane.prefilling if sequence.group in groups and is_ready(sequence)]:
        if not append_missing(lane, step, sequence):
            # Preemption and capacity are for the decode batch to settle.
            clear_sequence(requests, sequence)
        elif not budget.exhausted:
            fully_planned += plan_chunk(lane, step, budget, sequence)
    step.is_trial = step.plan.announces_start = bool(step.chunks)
    return fully_planned


def _resume(lane: Lane, step: PlannedStep) -> None:
    """Resume sequences that were held for their fork."""
    step.plan.resumed_slots = [held_slot(sequence) for sequence in lane.resuming]
    lane.resuming.clear()


def _shared_kv_is_computed(lane: Lane, sequence: Sequence) -> bool:
    """Whether the KV that it shares is computed, so that it can continue from there, with a copy of the state there."""
    source, states = sequence.kv_source, lane.blocks.states
    if source is not None and sequence.num_present_tokens == sequence.num_computed_tokens:
        sequence.kv_source = None
        if lane.blocks.windows is not None:
            lane.blocks.windows.join(source, sequence)
        if states is not None:
            states.copy(source, sequence)
    return sequence.kv_source is None


def _plan_decodes(lane: Lane, step: PlannedStep, budget: StepBudget) -> list[Sequence]:
    """Schedule one token for the whole decode batch, by decode_ready; returns members whose last token this is."""
    if not len(lane.decode_batch):
        return []
    step.plan.decode_ready = True
    step.decode_slots, step.num_drafting = lane.decode_batch.slots.copy(), lane.decode_batch.num_drafting
    budget.spend(len(step.decode_slots), num_sequences=len(step.decode_slots))
    return lane.decode_batch.advance()


def _take_moves(lane: Lane, step: PlannedStep) -> None:
    moves = step.moves = lane.blocks.take_moves()
    if moves.pages is not None:
        moves = moves.pages
    step.plan.swap_out, step.plan.copies, step.plan.swap_in = moves.swapped_out, moves.copied, moves.swapped_in


def plan_drafts(lane: Lane, step: PlannedStep, budget: StepBudget) -> None:
    """Choose the most drafts of a step, once all else is planned: rows and tokens that are left over."""
    num_drafting = step.num_drafting
    if not num_drafting or not step.decode_slots:
        return
    chosen = lane.draft_control.choose(len(step.decode_slots), lane.decode_batch.draft_scopes)
    chosen = min(chosen, budget.num_tokens // num_drafting, budget.num_sequences // num_drafting)
    if chosen > 0:
        step.plan.max_drafts = chosen
        _make_room(lane, step, chosen)


def _make_room(lane: Lane, step: PlannedStep, num_drafts: int) -> None:
    """Append blocks for drafts, as far as blocks are free beyond the watermark.

    The step's own token is counted already. Each plan in flight may have given as many tokens more as it had drafts.
    Forks have no drafts before the next plan: it copies and appends the block that they write to.
    """
    num_ahead = num_drafts + SPARE_TOKENS + sum(each.plan.max_drafts for each in lane.inflight)
    while found := lane.decode_batch.without_room(num_ahead - 1):
        sequences = [sequence for sequence in found if sequence not in lane.pending_copy_on_write]
        if lane.blocks.windows is not None:
            # A chunk of this step reads more than the window of the row after it.
            chunked = {chunk.sequence for chunk in step.chunks}
            for sequence in sequences:
                if sequence not in chunked:
                    lane.blocks.give_back(sequence)
        if not sequences or not lane.blocks.can_take(len(sequences) * lane.blocks.block_pages, alone=False):
            return
        if lane.blocks.sizes is not None:
            save_in_decode(lane, step, sequences)
            for sequence in sequences:
                before = list(sequence.windows)
                block_ids = lane.blocks.take(1)
                lane.decode_batch.append_early(sequence, block_ids[0])
                append_pages(lane, step, sequence, block_ids, before)
            continue
        for sequence, block_id in zip(sequences, lane.blocks.take(len(sequences)), strict=True):
            lane.decode_batch.append_early(sequence, block_id)
            step.plan.append_slots.append(held_slot(sequence))
            step.plan.append_block_ids.append(block_id)
            step.appended.append((sequence, block_id))
