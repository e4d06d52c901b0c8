"""Admission of a group of one sequence without KV: most requests.

It does what `admission` does with any group, without the lists that groups of several sequences need: each request that
joins passes here, and its cost is a large part of a step's.
"""

from __future__ import annotations

from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.lanes.planned_step import PlannedStep
from scheduler_svc.core.request_table import RequestTable
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup, held_slot
from scheduler_svc.core.steps.budget import StepBudget
from scheduler_svc.core.steps.chunks import plan_chunk
from scheduler_svc.core.types import SequenceState


def admit_plain(
    requests: RequestTable, lane: Lane, step: PlannedStep, budget: StepBudget, group: SequenceGroup, *, alone: bool
) -> list[Sequence] | None:
    """Admit a waiting group; returns its sequence if its last token is planned now, else an empty list.

    None without any change if the group is not of this kind, is too long for this executor, or finds too few free
    blocks: `admission` settles what becomes of it.
    """
    sequence = group.sequences[0]
    if (
        len(group.sequences) > 1
        or group.beam_search is not None
        or sequence.state is not SequenceState.WAITING
        or lane.length_finish_detail(sequence) is not None
    ):
        return None
    blocks, spec = lane.blocks, lane.spec
    wanted = requests.policies.batching.num_reserved_tokens(sequence)
    num_tokens = max(sequence.num_tokens, min(wanted, spec.num_blocks * spec.block_size))
    found = blocks.find_cached_prefix(sequence)
    if not blocks.can_take(found.num_to_take(blocks.num_blocks_for(num_tokens)), alone=alone):
        return None
    requests.bind(group, lane)
    lane.start_running(sequence, prefills=False)
    step.joined.append(sequence)
    step.joined_slots.append(held_slot(sequence))
    blocks.allocate(sequence, num_tokens, found=found)
    sequence.mark_computed(found.num_tokens)
    sequence.num_hit_tokens = found.num_tokens
    requests.record_admission(group, lane)
    fully_planned = plan_chunk(lane, step, budget, sequence)
    if not sequence.is_decoding and not fully_planned:
        lane.prefilling.add(sequence)
    return fully_planned
