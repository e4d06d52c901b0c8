"""Drafts in the plan runner: who may have how many, as execution.proto says, and what they are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cadenza_common.plan.plan import StepPlan
from scheduler_svc.plan_loop.ports import ModelDescription

if TYPE_CHECKING:
    from tests.simulation.executor.slot import Slot

RESOLUTION = 1 << 24
"""Of the share of drafts that are right."""


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """How the executors of a history draft."""

    acceptance: float = 0.0
    """Probability that a draft is right, if those before it are."""
    row_ns: int = 0
    """What each token of a step costs, beside 100 µs for the step, by the timings that the core goes by."""


NO_DRAFTS = DraftPlan()


def num_allowed(model: ModelDescription, plan: StepPlan, slot: Slot) -> int:
    """The most drafts of a slot that decodes: they end at its greatest length, and within its block table.

    A table that may still have to grow keeps a place for one token of each plan that may follow in flight.
    """
    if slot.number in plan.scheduled_slots or slot.number in plan.fork_source_slots:
        return 0
    places, longest = slot.num_blocks * model.block_size, slot.max_len - 1
    places = longest if places >= longest else places - (model.max_inflight_plans - 1)
    return max(0, min(plan.max_drafts, slot.max_drafts, places - len(slot.tokens)))


def rows_left(model: ModelDescription, num_rows: int, num_tokens: int) -> int:
    """How many drafts a step with so many rows of logits and tokens has room for."""
    return min(model.max_num_seqs - num_rows, model.max_num_batched_tokens - num_tokens)


def make_drafts(slot: Slot, count: int, acceptance: float, draft: Callable[[Slot], tuple[int, int]], vocab: int) -> int:
    """Append drafts to a slot's tokens; returns how many."""
    for _ in range(count):
        token_id, hardness = draft(slot)
        slot.append(token_id if hardness < round(acceptance * RESOLUTION) else (token_id + 1) % vocab)
    return count


def take_drafts(slot: Slot, count: int) -> list[int]:
    """Take the last tokens away from a slot, which were drafts; returns them."""
    if not count:
        return []
    drafts = slot.tokens[-count:]
    del slot.tokens[-count:], slot.kv[-count:]
    return drafts


def in_order(counts: dict[int, int], slots: Collection[int]) -> Sequence[int]:
    """Counts by slot as a result has them: empty if all are 0."""
    return [counts.get(number, 0) for number in slots] if any(counts.values()) else ()
