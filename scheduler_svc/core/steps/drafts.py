"""Drafts of the decode batch: how many a step may have, and room for them in blocks.

Executors make drafts and check them in the same step (docs/decisions/0037). The core chooses the most for a step and
gives members blocks ahead of their tokens, but never takes them from others: an executor with too little room in a
block table drafts less.
"""

from __future__ import annotations

from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.lanes.planned_step import PlannedStep
from scheduler_svc.core.sequences.sequence import held_slot
from scheduler_svc.core.steps.budget import StepBudget

SPARE_TOKENS = 3
"""Places that drafts leave free in a block table that is not the longest: for one token of each plan that may be in
flight behind them, of which executors allow 4 in all."""


def plan_drafts(lane: Lane, step: PlannedStep, budget: StepBudget) -> None:
    """Choose the most drafts of a step, once all else is planned: rows and tokens that are left over."""
    num_drafting = step.num_drafting
    if not num_drafting or not step.decode_slots:
        return
    chosen = lane.draft_control.choose(len(step.decode_slots))
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
        if not sequences or not lane.blocks.can_take(len(sequences), alone=False):
            return
        for sequence, block_id in zip(sequences, lane.blocks.take(len(sequences)), strict=True):
            lane.decode_batch.append_early(sequence, block_id)
            step.plan.append_slots.append(held_slot(sequence))
            step.plan.append_block_ids.append(block_id)
            step.appended.append((sequence, block_id))
