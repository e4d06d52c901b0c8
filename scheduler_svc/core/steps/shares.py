"""Shares of subqueues, as tenants, under an order that has them: of each step's budget, and of slots and blocks.

A step's budget goes to the subqueue of the smallest rank first. So a prompt that has begun does not hold up a waiting
prompt of a subqueue that was served less. A subqueue's share of an executor's slots and blocks goes by its weight among
the subqueues that run there or want to. It gives up what exceeds its share when another subqueue, within its own, needs
it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from operator import itemgetter

from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.lanes.planned_step import PlannedStep
from scheduler_svc.core.queues.orders import OrderPolicy
from scheduler_svc.core.request_table import RequestTable
from scheduler_svc.core.sequences.sequence import Sequence
from scheduler_svc.core.steps.admission import admit
from scheduler_svc.core.steps.allocation import allocations_of, have_blocks
from scheduler_svc.core.steps.budget import AdmissionBudget, StepBudget
from scheduler_svc.core.steps.chunks import plan_chunk
from scheduler_svc.core.steps.preemption import VictimSet, preempt_victim


def plan_prompts_by_rank(
    requests: RequestTable,
    lane: Lane,
    step: PlannedStep,
    budget: StepBudget,
    prefilling: Iterable[Sequence],
    admissions: AdmissionBudget,
) -> list[Sequence]:
    """Plan the chunks of prompts that have begun, each after the waiting groups of subqueues with a smaller rank.

    Overdue ones come first. Returns sequences whose last token is planned now.
    """
    order, fully_planned = requests.policies.order, list[Sequence]()
    places = []
    for sequence in prefilling:
        is_overdue = requests.waiting.is_overdue(sequence.group, step.planned_at)
        places.append((not is_overdue, order.rank(order.subqueue(sequence.group)), sequence))
    for may_wait, _, sequence in sorted(places, key=itemgetter(0, 1)):
        if budget.exhausted:
            break
        if may_wait:
            rank = order.rank(order.subqueue(sequence.group))
            fully_planned += admit(requests, lane, step, budget, admissions, max_rank=rank)
        if not budget.exhausted:
            fully_planned += plan_chunk(lane, step, budget, sequence)
    return fully_planned


def preempt_for_share(requests: RequestTable, lane: Lane, step: PlannedStep) -> None:
    """Preempt sequences of subqueues above their share, if that lets the next group in, whose subqueue stays within its
    own. A subqueue within its share loses nothing, so that two never preempt each other in turn.
    """
    order, head = requests.policies.order, requests.placer.own_head(lane, step.planned_at)
    if head is None or not head.has_all_results:
        return
    if not lane.adapters.has_place(head, lane.running.num_by_adapter, step.planned_at):
        return
    own = order.subqueue(head)
    holdings = _Holdings(lane, order, own)
    if holdings.names == {own}:
        return
    allocations = allocations_of(requests, lane, head)
    num_blocks = sum(allocation.num_to_take for allocation in allocations)
    if not holdings.is_within(own, len(allocations), num_blocks):
        return
    kept = {block_id for allocation in allocations for block_id in lane.blocks.device_blocks_of(allocation.found)}
    victims = VictimSet(lane, kept)
    head_is_overdue = requests.waiting.is_overdue(head, step.planned_at)
    for sequence in [None, *lane.running.victims(requests.waiting, step.planned_at)]:
        if sequence is not None:
            name = order.subqueue(sequence.group)
            if holdings.is_within(name) or requests.waiting.is_overdue(sequence.group, step.planned_at):
                continue
            # Queued again, it would go before the head.
            if not head_is_overdue and order.rank(name) <= order.rank(own):
                continue
            for victim in victims.add(sequence):
                holdings.remove(name, victim)
        num_left = len(lane.running) - len(victims.sequences)
        fits = have_blocks(lane, head, allocations, alone=num_left == 0, num_more=victims.num_freed)
        if fits and num_left + len(allocations) <= lane.spec.max_num_seqs:
            break
    else:
        return
    for victim in victims.sequences:
        if victim.slot is not None:
            preempt_victim(requests, lane, step, victim)


class _Holdings:
    """Slots and pages that each subqueue holds on an executor. Shared blocks count for each holder."""

    def __init__(self, lane: Lane, order: OrderPolicy, other: str) -> None:
        """other: a subqueue that has a share too, although it may hold nothing."""
        self._lane = lane
        self._num_slots = Counter(order.subqueue(sequence.group) for sequence in lane.running)
        self._num_blocks: Counter[str] = Counter()
        self.names = {*self._num_slots, other}
        if len(self.names) > 1:
            for sequence in lane.running:
                self._num_blocks[order.subqueue(sequence.group)] += lane.blocks.num_pages_of(sequence)
        weights = {name: order.weight(name) for name in self.names}
        total = sum(weights.values())
        self._max_slots = {name: lane.spec.max_num_seqs * weight / total for name, weight in weights.items()}
        self._max_blocks = {name: lane.spec.num_blocks * weight / total for name, weight in weights.items()}

    def is_within(self, name: str, more_slots: int = 0, more_blocks: int = 0) -> bool:
        """Whether a subqueue stays within its share with so many more."""
        return (
            self._num_slots[name] + more_slots <= self._max_slots[name]
            and self._num_blocks[name] + more_blocks <= self._max_blocks[name]
        )

    def remove(self, name: str, sequence: Sequence) -> None:
        """A sequence is to be preempted."""
        self._num_slots[name] -= 1
        self._num_blocks[name] -= self._lane.blocks.num_pages_of(sequence)
