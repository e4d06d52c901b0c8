"""Admission of waiting groups.

A group is admitted as a whole where possible. Before its fork the first sequence computes the prompt, and the others
hold a slot and share its blocks. After the fork, preempted sequences are admitted again, each with its own tokens: one
of them computes the full blocks that they have in common.
"""

from __future__ import annotations

from scheduler_svc.core.errors import RequestRejectedError
from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.lanes.planned_step import PlannedStep
from scheduler_svc.core.placement.candidates import check_fits_one, count_field, may_continue
from scheduler_svc.core.queues.passed import PassedOver
from scheduler_svc.core.request_table import RequestTable
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup, held_slot
from scheduler_svc.core.steps.allocation import Allocation, allocations_of, have_blocks
from scheduler_svc.core.steps.beam_scheduling import finish_early
from scheduler_svc.core.steps.budget import (
    MAX_ADMITTED_VALUES,
    MAX_GROUP_TOKENS,
    SINGLE_WEIGHT,
    AdmissionBudget,
    StepBudget,
)
from scheduler_svc.core.steps.chunks import plan_chunk
from scheduler_svc.core.steps.plain_admission import admit_new
from scheduler_svc.core.types import ExecutorSpec, Finish, FinishDetail, RequestSpec, SequenceState


def admit(
    requests: RequestTable,
    lane: Lane,
    step: PlannedStep,
    budget: StepBudget,
    admissions: AdmissionBudget,
    max_rank: float | None = None,
) -> list[Sequence]:
    """Admit waiting groups while slots, blocks and budgets last; returns sequences whose last token is planned now.

    A batch that is larger than a plan may admit goes on in the next plan, as one that exceeds the token budget.
    max_rank: only groups of subqueues whose rank is smaller, in their order; None: all.
    """
    fully_planned: list[Sequence] = []
    memory_is_full, order, num_before = False, requests.policies.order, admissions.num_admitted
    may_begin, is_barred = tuple(requests.adapters.has_turn), requests.adapters.bars(lane.adapters)
    lane.adapters.turns.refresh(lane.executor_id, is_barred=is_barred, may_begin=may_begin)
    admit_new(requests, lane, step, budget, admissions)
    passed = PassedOver()
    while admissions.num_groups > 0 and (num_free_slots := _num_free_slots(lane)) and not budget.exhausted:
        alone = not len(lane.running)
        memory_is_full = not lane.blocks.can_take(1, alone=alone)
        if memory_is_full or (group := next(requests.placer.heads(lane, step.planned_at, passed), None)) is None:
            break
        if not admissions.allows(group, SINGLE_WEIGHT):
            break
        if max_rank is not None and order.rank(order.subqueue(group)) >= max_rank:
            break
        if _is_passed_over(requests, lane, group, passed, step.planned_at):
            continue
        is_free = _is_free(requests, lane, step, group)
        if not requests.placer.is_own(group, lane):
            if not is_free or not _take_over(requests, lane, group, num_free_slots):
                passed.add(group)
                continue
        elif not is_free:
            break
        if _finish_oversized(requests, lane, group):
            continue
        allocations = allocations_of(requests, lane, group)
        allocations, memory_is_full = _fitting(lane, group, allocations, num_free_slots, alone=alone)
        if memory_is_full and alone and (lane.blocks.windows or lane.blocks.states) is not None:
            # Shorter chunks need fewer pages, and so does an empty state.
            allocations = allocations_of(requests, lane, group, chunk=1)
            allocations, memory_is_full = _fitting(lane, group, allocations, num_free_slots, alone=alone)
        if memory_is_full and alone:
            _shrink_or_finish(requests, lane, group)
            continue
        if memory_is_full or not allocations:
            break
        _start(requests, lane, step, group, allocations)
        admissions.spend(group, SINGLE_WEIGHT)
        for sequence in [allocation.sequence for allocation in allocations if allocation.sequence.may_compute]:
            if not budget.exhausted:
                fully_planned += plan_chunk(lane, step, budget, sequence)
    num_joined = admissions.num_admitted - num_before
    requests.policies.batching.record_admissions(lane, num_joined, memory_is_full=memory_is_full)
    return fully_planned


def _is_free(requests: RequestTable, lane: Lane, step: PlannedStep, group: SequenceGroup) -> bool:
    """Whether a lane may admit a group now: nothing of it is in flight, elsewhere, or swapped out by this step."""
    if not requests.is_free_for(group, lane):
        return False
    return not (step.swapped_out and any(each.group is group for each in step.swapped_out))


def _start(
    requests: RequestTable, lane: Lane, step: PlannedStep, group: SequenceGroup, allocations: list[Allocation]
) -> None:
    """Admit a group, or the part of it that these allocations name."""
    requests.bind(group, lane)
    _allocate(lane, step, allocations)
    requests.record_admission(group, lane)


def _is_passed_over(requests: RequestTable, lane: Lane, group: SequenceGroup, passed: PassedOver, now: float) -> bool:
    """Pass over a group whose adapter has no place, or that this lane cannot go on with; returns whether it is so.

    The latter is placed again: its first token came after it was placed here, from an executor of other numerics.
    """
    if group.was_admitted and not may_continue(lane, group):
        requests.placer.replace(group)
        passed.add(group)
        return True
    if lane.adapters.has_place(group, lane.running.num_by_adapter, now):
        return False
    _pass_over(requests, lane, group, passed, now)
    return True


def _pass_over(requests: RequestTable, lane: Lane, group: SequenceGroup, passed: PassedOver, now: float) -> None:
    """Pass over a group whose adapter has no place, and others of this adapter that wait for this lane."""
    if requests.placer.is_own(group, lane):  # others have a turn where they are placed
        lane.adapters.turns.pass_over(group, now)
        passed.add_adapter_of(group)
    else:
        passed.add(group)


def _fitting(
    lane: Lane, group: SequenceGroup, allocations: list[Allocation], num_free_slots: int, *, alone: bool
) -> tuple[list[Allocation], bool]:
    """The allocations that fit into so many slots and the free blocks, and whether they lack blocks all the same.

    A group that can be admitted in part has fewer of them; any other one none, if slots are lacking.
    """
    if num_free_slots < len(allocations):
        allocations = allocations[:num_free_slots] if group.can_admit_partially else []
    memory_is_full = not have_blocks(lane, group, allocations, alone=alone)
    while memory_is_full and len(allocations) > 1 and group.can_admit_partially:
        allocations.pop()
        memory_is_full = not have_blocks(lane, group, allocations, alone=alone)
    return allocations, memory_is_full


def _num_free_slots(lane: Lane) -> int:
    return min(lane.spec.max_num_seqs - len(lane.running), lane.slots.num_free)


def _finish_oversized(requests: RequestTable, lane: Lane, group: SequenceGroup) -> bool:
    """Finish sequences that this executor can never hold; returns whether there were any.

    They may have started on an executor with larger limits.
    """
    unfinished = [sequence for sequence in group.sequences if sequence.state is not SequenceState.FINISHED]
    if len(unfinished) > lane.spec.max_num_seqs and not (group.can_admit_partially or group.swapped):
        finish_early(requests, group, FinishDetail.EXECUTOR_ERROR)
        return True
    ended = False
    if group.beam_search is not None:
        group.beam_search.apply_max_len(*group.length_limit(lane.spec.max_model_len))
    for sequence in group.waiting_sequences if group.forked else unfinished:
        if (detail := lane.length_finish_detail(sequence)) is None:
            continue
        ended = True
        if detail is FinishDetail.KV_CAPACITY and _send_on(requests, lane, group):
            break
        if group.beam_search is not None:
            finish_early(requests, group, detail)
            break
        requests.finish(sequence, Finish(detail))
    return ended


def _shrink_or_finish(requests: RequestTable, lane: Lane, group: SequenceGroup) -> None:
    """Handle a group that does not fit into an empty pool.

    Swapped samples lose their KV and are admitted one by one; anything else finishes with KV_CAPACITY.
    """
    if _send_on(requests, lane, group):
        requests.drop_swapped(group)
    elif group.beam_search is not None:
        finish_early(requests, group, FinishDetail.KV_CAPACITY)
    elif group.swapped:
        requests.drop_swapped(group)
    else:
        requests.finish_group(group, Finish(FinishDetail.KV_CAPACITY))


def _send_on(requests: RequestTable, lane: Lane, group: SequenceGroup) -> bool:
    """Place a group that this lane's pool cannot hold on a lane with a larger one; False if there is none."""
    if not requests.outgrows(group, lane):
        return False
    requests.placer.replace(group)
    return True


def _take_over(requests: RequestTable, lane: Lane, group: SequenceGroup, num_free_slots: int) -> bool:
    """Take a group over from another lane, unless this lane has no room for it now; its swapped KV is given up."""
    blocks = lane.blocks
    num_pages = sum(blocks.num_pages_for(blocks.num_blocks_for(each.num_tokens)) for each in group.waiting_sequences)
    if group.swapped and not blocks.can_take(num_pages, alone=not len(lane.running)):
        return False
    requests.drop_swapped(group)
    allocations = allocations_of(requests, lane, group)
    return len(allocations) <= num_free_slots and have_blocks(lane, group, allocations, alone=not len(lane.running))


def _allocate(lane: Lane, step: PlannedStep, allocations: list[Allocation]) -> None:
    """Give the admitted sequences their slots and blocks."""
    swapped = [allocation.sequence for allocation in allocations if allocation.sequence.state is SequenceState.SWAPPED]
    if swapped:
        lane.blocks.swap_in(swapped)
        step.swapped_in += swapped
    for allocation in allocations:
        sequence, source = allocation.sequence, allocation.source
        came_back = sequence.state is SequenceState.SWAPPED
        lane.start_running(sequence)
        step.joined.append(sequence)
        step.joined_slots.append(held_slot(sequence))
        if not allocation.num_tokens:
            lane.blocks.open_state(sequence)
            continue  # A slot and a state for a later beam.
        if came_back:
            num_more = lane.blocks.num_blocks_for(allocation.num_tokens) - len(sequence.block_ids)
            if num_more > 0:
                lane.blocks.extend(sequence, num_more)
            if sequence.group.forked and lane.blocks.writes_shared(sequence):
                lane.blocks.make_writable(sequence)
        elif source is None:
            lane.blocks.allocate(sequence, allocation.num_tokens, found=allocation.found, chunk=allocation.chunk)
            sequence.mark_computed(allocation.found.num_tokens)
            sequence.num_hit_tokens = allocation.found.num_tokens
            sequence.group.reserved_blocks += lane.blocks.take(allocation.num_reserved_blocks)
        elif sequence.awaits_fork:
            lane.blocks.share_blocks(source, sequence, sequence.num_prompt_tokens, in_windows=False)
            num_more = lane.blocks.num_blocks_for(allocation.num_tokens) - len(sequence.block_ids)
            sequence.block_ids += lane.blocks.take(num_more)
        else:
            num_shared, chunk = allocation.num_shared, allocation.chunk
            lane.blocks.allocate(sequence, allocation.num_tokens, source=source, num_shared=num_shared, chunk=chunk)
            sequence.mark_computed(allocation.num_shared * lane.spec.block_size)
            sequence.kv_source = source


def check_fits(spec: RequestSpec, executors: list[ExecutorSpec], count: int) -> None:
    """Reject a request of `count` sequences that no executor can hold; the message has the numbers."""
    num_prompt = len(spec.prompt_token_ids)
    if not num_prompt:
        raise RequestRejectedError("prompt", "the prompt has no tokens")
    check_fits_one(spec, executors, count)
    if count == 1:
        return
    if count * num_prompt > MAX_GROUP_TOKENS:
        raise RequestRejectedError(
            count_field(spec),
            f"{count} sequences of {num_prompt} prompt tokens have over {MAX_GROUP_TOKENS} tokens in all",
        )
    # Sequences after the first take the prompt from its slot.
    if num_prompt + count * spec.sampling.num_listed > MAX_ADMITTED_VALUES:
        raise RequestRejectedError(
            count_field(spec),
            f"{num_prompt} prompt tokens and {count} sequences with {spec.sampling.num_listed} numbers each in "
            f"their sampling parameters exceed {MAX_ADMITTED_VALUES} numbers in a plan",
        )
