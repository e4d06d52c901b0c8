"""The pages of several KV groups in plans: of described sequences, of appended blocks, of windows that move on.

Lanes whose blocks are pages need none of this.
"""

from __future__ import annotations

from typing import cast

from cadenza_common.plan.plan import AdmittedSequence, GroupAppends, GroupTable, PrefixSource
from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.lanes.planned_step import PlannedStep
from scheduler_svc.core.memory.block_manager import BlockManager
from scheduler_svc.core.memory.paged_pool import PagedPool
from scheduler_svc.core.sequences.sequence import Sequence, held_slot


def describe_pages(blocks: BlockManager, sequence: Sequence, admitted: AdmittedSequence) -> None:
    """Put pages in place of the blocks of a description, which may lack the last ones of the sequence."""
    sizes = blocks.sizes
    if sizes is None:
        return
    admitted.state_pages = sequence.state_pages
    num_blocks, tables = len(admitted.block_ids), list[GroupTable]()
    admitted.block_ids = blocks.pages_of(admitted.block_ids)
    if (source := admitted.source) is not None:
        num_pages = source.num_blocks * sizes.full_pages
        admitted.source = PrefixSource(source.slot, source.num_tokens, num_pages)
    pool = cast("PagedPool", blocks.pool)
    for number, (group, held) in enumerate(zip(sizes.windows, sequence.windows, strict=True)):
        first, end = min(held.start, num_blocks), min(held.stop, num_blocks)
        page_ids = [page for block_id in sequence.block_ids[first:end] for page in pool.windows[number][block_id]]
        if group.index:
            tables.append(GroupTable(group.index, first, page_ids))
        else:
            admitted.block_ids, admitted.first_block = page_ids, first
    admitted.group_tables = tables


def note_appends(lane: Lane, step: PlannedStep, sequence: Sequence, block_ids: list[int]) -> None:
    """Append blocks to the executor's table of a described sequence in the group without a window."""
    slot, plan = held_slot(sequence), step.plan
    pages = lane.blocks.pages_of(block_ids)
    plan.append_slots += [slot] * len(pages)
    plan.append_block_ids += pages
    step.appended += [(sequence, page) for page in pages]


def note_windows(lane: Lane, step: PlannedStep, sequence: Sequence, before: list[range]) -> None:
    """Append what a described sequence holds in its windows behind what it held before to the executor's tables."""
    sizes, slot = lane.blocks.sizes, held_slot(sequence)
    if sizes is None:
        return
    pool = cast("PagedPool", lane.blocks.pool)
    for number, group in enumerate(sizes.windows):
        added = sequence.block_ids[before[number].stop : sequence.windows[number].stop]
        pages = [page for block_id in added for page in pool.windows[number][block_id]]
        if not pages:
            continue
        if group.index:
            step.window_appends.setdefault(group.index, []).extend((sequence, slot, page) for page in pages)
        else:
            step.plan.append_slots += [slot] * len(pages)
            step.plan.append_block_ids += pages
            step.appended += [(sequence, page) for page in pages]


def append_pages(lane: Lane, step: PlannedStep, sequence: Sequence, block_ids: list[int], before: list[range]) -> None:
    """Let a sequence whose table has grown by these blocks hold them in its windows, and append them to the executor's
    table. `before`: its windows before."""
    if lane.blocks.windows is not None:
        lane.blocks.windows.extend(sequence, len(sequence.block_ids) - len(block_ids))
    if sequence.described:
        note_appends(lane, step, sequence, block_ids)
        note_windows(lane, step, sequence, before)


def extend(lane: Lane, step: PlannedStep, sequence: Sequence, count: int) -> None:
    """Append blocks to the table of a sequence, all in its windows, and to the executor's table."""
    before, taken = list(sequence.windows), lane.blocks.take(count)
    sequence.block_ids += taken
    append_pages(lane, step, sequence, taken, before)


def cover(lane: Lane, step: PlannedStep, sequence: Sequence, num_tokens: int) -> int:
    """Move the windows of a sequence on to its next tokens; returns for how many there are pages."""
    windows = lane.blocks.windows
    if windows is None:
        return num_tokens
    before = list(sequence.windows)
    num_tokens = windows.cover(sequence, num_tokens)
    if sequence.described:
        note_windows(lane, step, sequence, before)
    return num_tokens


def close_pages(step: PlannedStep) -> None:
    """Put the appends to tables of window groups into the plan."""
    if step.window_appends:
        step.plan.group_appends = [
            GroupAppends(index, [slot for _, slot, _ in appended], [page for _, _, page in appended])
            for index, appended in sorted(step.window_appends.items())
        ]
