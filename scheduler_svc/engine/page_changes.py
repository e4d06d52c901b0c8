"""What a step changes of the pages of an executor's device pool, for watches of steps that ask for it."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Ids
from dataclasses import dataclass
from typing import cast

from cadenza_common.plan.plan import AdmittedSequence
from scheduler_svc.core.kv_groups import GroupSizes
from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.lanes.planned_step import PlannedStep
from scheduler_svc.core.memory.paged_pool import PagedPool
from scheduler_svc.core.sequences.sequence import Sequence
from scheduler_svc.plan_loop.ports import BlockTableChange


@dataclass(frozen=True, slots=True)
class PageChanges:
    """What only lanes with several KV groups, several pages a block or states have; names as in StepRecord."""

    appended: Ids[BlockTableChange] = ()
    state_copies: Ids[tuple[int, Ids[int], bool]] = ()
    freed: Ids[int] = ()


NO_CHANGES = PageChanges()


def freed_pages(lane: Lane) -> list[int]:
    """The unused pages that have been in use since the last call."""
    return [] if lane.blocks.sizes is None else cast("PagedPool", lane.blocks.pool).take_freed()


def page_changes(lane: Lane, step: PlannedStep, freed: list[int]) -> PageChanges:
    """The changes of pages, where the step's result has just been applied. freed: with it, or before."""
    sizes = lane.blocks.sizes
    if sizes is None:
        return NO_CHANGES
    pool = cast("PagedPool", lane.blocks.pool)
    made = [(position, pages, True) for position, pages in step.saved if pages]
    known = {pages for _, pages, _ in made}
    armed = [(at, pages, False) for _, at, pages in step.saves if pages in pool.states and pages not in known]
    if not lane.inflight:  # else a later record has what is freed from now on
        freed = [*freed, *freed_pages(lane)]
    return PageChanges(_appended(sizes, step), [*armed, *made], freed)


def block_changes(step: PlannedStep, pages: PageChanges) -> list[BlockTableChange]:
    """Block table changes of a step: tables cleared, tables set, blocks appended."""
    changes = [BlockTableChange(sequence.sequence_id, cleared=True) for sequence in (*step.preempted, *step.retired)]
    for sequence, admitted in zip(step.described, step.plan.admitted, strict=True):
        changes += _described(sequence, admitted)
    if pages is NO_CHANGES:
        changes += [BlockTableChange(sequence.sequence_id, (block_id,)) for sequence, block_id in step.appended]
    return [*changes, *pages.appended]


def _described(sequence: Sequence, admitted: AdmittedSequence) -> Iterator[BlockTableChange]:
    """The tables of a described sequence, that of KV group 0 first."""
    number, first = sequence.sequence_id, admitted.first_block
    yield BlockTableChange(number, admitted.block_ids, True, 0, first, admitted.state_pages)
    for table in admitted.group_tables:
        yield BlockTableChange(number, table.page_ids, False, table.kv_group, table.first_block)


def _appended(sizes: GroupSizes, step: PlannedStep) -> list[BlockTableChange]:
    """What was appended to tables, and what their sequences hold by now in windows: a change for each table."""
    appended: dict[tuple[Sequence, int], list[int]] = {}
    for sequence, page in step.appended:
        appended.setdefault((sequence, 0), []).append(page)
    for group, each in step.window_appends.items():
        for sequence, _, page in each:
            appended.setdefault((sequence, group), []).append(page)
    numbers = {group.index: number for number, group in enumerate(sizes.windows)}
    changes = []
    for (sequence, group), pages in appended.items():
        number = numbers.get(group)
        first = sequence.windows[number].start if number is not None and sequence.windows else 0
        changes.append(BlockTableChange(sequence.sequence_id, pages, False, group, first))
    return changes
