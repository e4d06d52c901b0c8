"""Admission of new requests at the head of the queue, all at once: groups of one sequence, as most are.

It does what `admission` and `chunks` do with any group, without the lists that groups of several sequences need: each
request that joins passes here, and its cost is a large part of a step's.
"""

from __future__ import annotations

from itertools import islice

from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.lanes.planned_step import Chunk, PlannedStep
from scheduler_svc.core.request_table import RequestTable
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup
from scheduler_svc.core.steps.budget import AdmissionBudget, StepBudget
from scheduler_svc.core.steps.chunks import described
from scheduler_svc.core.steps.pages import describe_pages
from scheduler_svc.core.steps.saves import save_in_chunk


def admit_new(
    requests: RequestTable, lane: Lane, step: PlannedStep, budget: StepBudget, admissions: AdmissionBudget
) -> None:
    """Admit the first groups that wait for a lane.

    Up to the first that is not new or has several sequences, whose prompt is not computed whole by this step, or for
    which too few slots or blocks are free: `admission` goes on with it.
    """
    if not requests.waiting.is_by_arrival:
        return
    num_running, most = len(lane.running), min(admissions.num_groups, budget.num_sequences, lane.slots.num_free)
    joining: list[SequenceGroup] = []
    groups = requests.placer.by_arrival(lane, step.planned_at)
    for group in islice(groups, max(0, min(most, lane.spec.max_num_seqs - num_running))):
        alone = not (num_running or joining)
        if not (
            admissions.allows(group)
            and _is_new(group, lane)
            and (not group.spec.adapter_index or _runs_already(group, lane))
            and _take_blocks(requests, lane, budget, group.sequences[0], alone=alone)
        ):
            break
        admissions.spend(group)
        joining.append(group)
    if joining:
        _start(lane, step, [group.sequences[0] for group in joining])
        requests.record_new_admissions(joining, lane)


def _runs_already(group: SequenceGroup, lane: Lane) -> bool:
    """Whether a group's adapter has a place on a lane, and no other group waits for one."""
    return group.spec.adapter_index in lane.running.num_by_adapter and lane.adapters.turns.is_idle


def _is_new(group: SequenceGroup, lane: Lane) -> bool:
    """Whether a group has never run and has one sequence, with more to compute than its prompt's last token."""
    spec, sequence = group.spec, group.sequences[0]
    return not (
        group.was_admitted
        or len(group.sequences) > 1
        or group.beam_search is not None
        or spec.known_outputs
        or spec.sampling.num_prompt_logprobs is not None
        # The limit of its length is another one here.
        or group.max_model_len > lane.spec.max_model_len
        or sequence.max_len != spec.length_limit(group.max_model_len)[0]
        or sequence.num_prompt_tokens + 1 >= sequence.max_len
    )


def _take_blocks(requests: RequestTable, lane: Lane, budget: StepBudget, sequence: Sequence, *, alone: bool) -> bool:
    """Give a new sequence its blocks, and subtract it from the budget; False without any change if this step cannot
    compute it whole."""
    blocks, num_prompt = lane.blocks, sequence.num_prompt_tokens
    num_reserved = 0 if blocks.windows is not None else requests.policies.batching.num_reserved_tokens(sequence)
    # More than its prompt only where the length is reserved, and never more than the pool has.
    num_tokens = num_prompt if num_reserved <= num_prompt else max(num_prompt, min(num_reserved, lane.num_kv_tokens))
    num_blocks = -(-num_tokens // lane.spec.block_size)
    found = blocks.find_cached_prefix(sequence)
    num_new = num_prompt - found.num_tokens
    # A single token is scheduled as the next token of a decoding sequence is.
    num_to_take = found.num_to_take(num_blocks) if blocks.sizes is None else blocks.num_to_take(found, num_blocks)
    if num_new == 1 or not blocks.can_take(num_to_take, alone=alone):
        return False
    if not budget.take_whole(num_new, num_prompt + num_blocks + sequence.group.spec.sampling.num_values):
        return False
    blocks.allocate(sequence, num_tokens, found=found)
    sequence.num_hit_tokens = found.num_tokens
    return True


def _start(lane: Lane, step: PlannedStep, sequences: list[Sequence]) -> None:
    """Start sequences with blocks: the plan describes each and computes all that its prompt lacks."""
    slots, plan, size, sizes = lane.start_all(sequences), step.plan, lane.spec.block_size, lane.blocks.sizes
    step.joined += sequences
    step.joined_slots += slots
    step.described += sequences
    num_tokens = []
    for sequence, slot in zip(sequences, slots, strict=True):
        spec, num_prompt, num_hit = sequence.group.spec, sequence.num_prompt_tokens, sequence.num_hit_tokens
        block_ids = tuple(sequence.block_ids)
        num_tokens.append(num_prompt - num_hit)
        plan.admitted.append(described(sequence, slot, spec.prompt_token_ids, num_hit, block_ids, spec.sampling))
        if sizes is not None:
            describe_pages(lane.blocks, sequence, plan.admitted[-1])
        written = block_ids[num_hit // size : -(-num_prompt // size)]
        step.chunks.append(Chunk(sequence, slot, num_prompt - num_hit, num_hit, True, written, num_hit % size))
        if lane.blocks.snapshots is not None:
            save_in_chunk(lane, step, sequence, num_hit, num_prompt - num_hit)
    plan.scheduled_slots += slots
    plan.scheduled_num_tokens += num_tokens
    plan.scheduled_samples += [True] * len(slots)
