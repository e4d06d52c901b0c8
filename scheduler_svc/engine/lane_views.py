"""Figures and block tables of lanes, for the admin calls and the log."""

from __future__ import annotations

from itertools import chain
from typing import cast

from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.memory.paged_pool import PagedPool
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequences.sequence import Sequence
from scheduler_svc.core.sequences.shared_blocks import SharedBlocks
from scheduler_svc.core.types import RequestKey, SequenceState
from scheduler_svc.plan_loop.gauges import Load, num_queued
from scheduler_svc.plan_loop.ports import GroupPages, SequenceBlockTable


def step_load(core: Scheduler) -> Load:
    """What a step's record says of `current_load`, and nothing else: it is made for each step that is watched."""
    num_swapped = core.num_swapped
    num_running = num_blocks = num_used_blocks = num_stored_tokens = 0
    for lane in core.lanes.values():
        num_running += lane.num_running_groups
        num_blocks += lane.spec.num_blocks
        num_used_blocks += lane.spec.num_blocks - lane.blocks.num_free
        num_stored_tokens += lane.num_stored_tokens
    return Load(
        num_waiting=num_queued(core) - num_swapped,
        num_running=num_running,
        num_swapped=num_swapped,
        num_device_blocks=num_blocks,
        num_used_device_blocks=num_used_blocks,
        num_stored_tokens=num_stored_tokens,
    )


def num_held(lane: Lane) -> int:
    """Number of requests that hold something on this executor."""
    return len({sequence.group for sequence in (*lane.running, *lane.finishing, *lane.swapped)})


def block_tables(core: Scheduler, key: RequestKey) -> list[SequenceBlockTable] | None:
    """The block tables of a request's unfinished sequences; None if the request is unknown."""
    group = core.groups.get(key)
    if group is None:
        return None
    lane = None if group.lane_id is None else core.lanes[group.lane_id]
    counts = ([], []) if lane is None else (lane.blocks.pool.num_holders, lane.blocks.host_pool.num_holders)
    shared_counts: dict[SharedBlocks, list[int]] = {}
    return [
        _block_table(counts, shared_counts, sequence, () if lane is None else _group_pages(lane, sequence))
        for sequence in group.sequences
        if sequence.state is not SequenceState.FINISHED
    ]


def _block_table(
    counts: tuple[list[int], list[int]],
    shared_counts: dict[SharedBlocks, list[int]],
    sequence: Sequence,
    groups: tuple[GroupPages, ...],
) -> SequenceBlockTable:
    """A sequence's block table.

    `counts`: by device block and by host block, the number of holders; `shared_counts`: those of blocks that the group
    shares, as far as they were needed. `groups`: its pages by KV group.
    """
    swapped = sequence.state is SequenceState.SWAPPED
    block_ids, shared = sequence.host_block_ids if swapped else sequence.block_ids, sequence.shared_blocks
    count_of = counts[swapped].__getitem__
    first: list[int] = []
    if shared is not None:
        if shared not in shared_counts:
            shared_counts[shared] = list(map(count_of, shared.block_ids))
        first = shared_counts[shared]
    return SequenceBlockTable(
        sample_index=sequence.sample_index,
        block_ids=tuple(block_ids),
        ref_counts=(*first, *map(count_of, block_ids[len(first) :])),
        num_computed_tokens=sequence.num_computed_tokens,
        swapped=swapped,
        groups=groups,
    )


def _group_pages(lane: Lane, sequence: Sequence) -> tuple[GroupPages, ...]:
    """What a sequence holds in each KV group; empty where a block is a page."""
    sizes = lane.blocks.sizes
    if sizes is None:
        return ()
    pool = cast("PagedPool", lane.blocks.host_pool if sequence.host_block_ids else lane.blocks.pool)
    table = sequence.host_block_ids or sequence.block_ids
    held = [GroupPages(0, tuple(chain.from_iterable(map(pool.full_pages_of, table))))] if sizes.full_pages else []
    windows = sequence.windows or [range(0)] * len(sizes.windows)
    # Behind the windows a pool has the snapshots of states.
    for of_blocks, window in zip(pool.windows[: len(windows)], windows, strict=True):
        pages = chain.from_iterable(of_blocks[block_id] for block_id in table[window.start : window.stop])
        held.append(GroupPages(window.start, tuple(pages)))
    return tuple(held)


def retry_after_s(core: Scheduler, max_num_seqs: int) -> float:
    """Estimated seconds until the queue has moved: one per full batch of waiting requests, between 0.1 and 30."""
    return min(30.0, max(0.1, len(core.waiting) / max(1, max_num_seqs)))
