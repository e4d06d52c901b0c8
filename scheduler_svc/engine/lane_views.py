"""Figures and block tables of a lane, for the admin calls and the log."""

from __future__ import annotations

from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequences.sequence import Sequence
from scheduler_svc.core.types import RequestKey, SequenceState
from scheduler_svc.plan_loop.ports import Load, ModelDescription, SequenceBlockTable


def current_load(core: Scheduler, lane: Lane, model: ModelDescription) -> Load:
    """The current state of queues and memory."""
    blocks, prefixes = lane.blocks, core.prefix_counts
    used = lane.spec.num_blocks - blocks.num_free
    stored = lane.num_stored_tokens
    reserved = lane.num_reserved_tokens
    return Load(
        num_waiting=len(core.waiting) - core.num_swapped,
        num_running=len({sequence.group for sequence in (*lane.running, *lane.finishing)}),
        num_swapped=core.num_swapped,
        num_device_blocks=lane.spec.num_blocks,
        num_used_device_blocks=used,
        num_cached_device_blocks=blocks.num_cached,
        num_host_blocks=model.num_host_blocks,
        num_used_host_blocks=blocks.num_used_host,
        num_stored_tokens=stored,
        num_unused_slots=used * lane.spec.block_size - stored - reserved,
        num_reserved_slots=reserved,
        num_used_slots=lane.slots.num_used,
        num_steps=core.num_steps,
        num_output_tokens=core.num_output_tokens,
        num_preemptions=core.num_preemptions,
        num_prefix_queries=prefixes.num_queried,
        num_prefix_hits=prefixes.num_hits,
        num_shared_block_refs=blocks.num_shared_refs,
        num_cached_host_blocks=blocks.host_pool.num_idle,
        num_prefix_host_hits=prefixes.num_host_hits,
    )


def block_tables(core: Scheduler, lane: Lane, key: RequestKey) -> list[SequenceBlockTable] | None:
    """The block tables of a request's unfinished sequences; None if the request is unknown."""
    group = core.groups.get(key)
    if group is None:
        return None
    return [_block_table(lane, each) for each in group.sequences if each.state is not SequenceState.FINISHED]


def _block_table(lane: Lane, sequence: Sequence) -> SequenceBlockTable:
    blocks, swapped = lane.blocks, sequence.state is SequenceState.SWAPPED
    block_ids = sequence.host_block_ids if swapped else sequence.block_ids
    ref_counts = (blocks.host_pool if swapped else blocks.pool).ref_counts
    return SequenceBlockTable(
        sample_index=sequence.sample_index,
        block_ids=tuple(block_ids),
        ref_counts=tuple(ref_counts[block_id] for block_id in block_ids),
        num_computed_tokens=sequence.num_computed_tokens,
        swapped=swapped,
    )


def retry_after_s(core: Scheduler, lane: Lane) -> float:
    """Estimated seconds until the queue has moved: one per full batch of waiting requests, between 0.1 and 30."""
    return min(30.0, max(0.1, len(core.waiting) / lane.spec.max_num_seqs))
