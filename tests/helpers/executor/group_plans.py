"""Plans of one KV group as plans of several: block b has the pages b * pages to b * pages + pages - 1, one a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cadenza_common.plan.plan import AdmittedSequence, BlockMoves, GroupAppends, GroupTable, StepPlan
from executor_svc.batch.slots import Slots
from executor_svc.device.kv_cache import KVCache
from executor_svc.plan.limits import Limits


def in_groups(plan: StepPlan, limits: Limits) -> StepPlan:
    """The same plan for all groups; tables of windows begin where the sequence's next row reads.

    Moves of models with recurrent states are in pages already.
    """
    if not limits.kv_groups:
        return plan
    blocks = list(plan.append_block_ids)
    columns = []
    for tables in _tables(limits):
        slots = [slot for slot in plan.append_slots for _ in tables]
        columns.append((slots, [page for block in blocks for page in _of(block, tables, limits)]))
    (slots, page_ids), *others = columns
    return replace(
        plan,
        admitted=[_admitted(each, limits) for each in plan.admitted],
        append_slots=slots,
        append_block_ids=page_ids,
        group_appends=[GroupAppends(group, *each) for group, each in enumerate(others, 1)] if blocks else (),
        swap_out=_moves(plan.swap_out, limits),
        copies=_moves(plan.copies, limits),
        swap_in=_moves(plan.swap_in, limits),
    )


def spoil_given_back(slots: Slots, pools: KVCache) -> None:
    """Fill the pages before the windows of all sequences with NaN."""
    limits = slots.limits
    for slot in slots.admitted.nonzero()[0].tolist():
        for tables, group in zip(_tables(limits), limits.groups, strict=True):
            if group.window:
                end = max(0, int(slots.num_computed_tokens[slot]) - group.window + 1) // limits.block_size
                pools.pool[slots.tables[slot, tables.start : tables.stop, :end].ravel().tolist()] = 0xFF


def _tables(limits: Limits) -> list[range]:
    """The tables of each group."""
    ranges, first = [], 0
    for group in limits.groups:
        ranges.append(range(first, first + group.pages_per_block))
        first += group.pages_per_block
    return ranges


def _of(block: int, tables: Sequence[int], limits: Limits) -> list[int]:
    return [int(block) * limits.num_tables + table for table in tables]


def _admitted(sequence: AdmittedSequence, limits: Limits) -> AdmittedSequence:
    tables = []
    for index, (group, strips) in enumerate(zip(limits.groups, _tables(limits), strict=True)):
        first = max(0, sequence.num_computed_tokens - group.window + 1) // limits.block_size if group.window else 0
        pages = [page for block in list(sequence.block_ids)[first:] for page in _of(block, strips, limits)]
        tables.append(GroupTable(index, first, pages))
    first, *others = tables
    return replace(sequence, block_ids=first.page_ids, first_block=first.first_block, group_tables=others)


def _moves(moves: BlockMoves, limits: Limits) -> BlockMoves:
    if limits.pages_per_state:
        return moves
    every = range(limits.num_tables)
    return BlockMoves(*([page for block in ids for page in _of(block, every, limits)]
                        for ids in (moves.sources, moves.destinations)))  # fmt: skip
