"""The first of the waiting groups, beside a plain search over all of them."""

from __future__ import annotations

import itertools
import random

import pytest

from cadenza_common.plan.sampling import SequenceSampling
from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.outputs import count_by_tenant
from scheduler_svc.core.queues.orders import FairOrder, FcfsOrder, OrderPolicy, PriorityOrder, ShortestFirstOrder
from scheduler_svc.core.queues.queues import WaitingQueue
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup
from scheduler_svc.core.types import RequestSpec

ORDERS = {
    "fcfs": FcfsOrder,
    "priority": PriorityOrder,
    "shortest": ShortestFirstOrder,
    "fair": lambda: FairOrder({"t0": 3.0, "t1": 0.5}),
}


def make(number: int, tenant: str, *, priority: int = 0, num_prompt: int = 4) -> SequenceGroup:
    spec = RequestSpec(
        str(number),
        (1,) * num_prompt,
        SequenceSampling(),
        max_tokens=10,
        tenant=tenant,
        priority=priority,
        expected_output_tokens=number * 7 % 11 + 1,
    )
    group = SequenceGroup(spec, number, float(number), 100)
    group.sequences.append(Sequence(number, group, 0))
    return group


def plain_head(order: OrderPolicy, waiting: list[SequenceGroup]) -> SequenceGroup | None:
    """The group that the definition of the order names, by a look at each."""
    return min(waiting, key=lambda group: (order.rank(order.subqueue(group)), order.key(group)), default=None)


@pytest.mark.sampled(12)
@pytest.mark.slow
@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("seed", range(6))
def test_the_head_is_that_of_a_plain_search(name: str, seed: int) -> None:
    rng, order = random.Random(seed), ORDERS[name]()
    queue = WaitingQueue(order)
    waiting: list[SequenceGroup] = []
    running: list[SequenceGroup] = []
    numbers = itertools.count()
    for step in range(600):
        for _ in range(rng.choice((0, 1, 1, 2)) if step < 500 else 0):
            tenant = f"t{rng.randrange(12)}"
            group = make(next(numbers), tenant, priority=rng.randrange(4), num_prompt=rng.randrange(1, 9))
            lifted = max(order.rank(tenant), min((order.rank(each.spec.tenant) for each in waiting), default=0.0))
            queue.add(group)
            if name == "fair" and waiting and all(each.spec.tenant != tenant for each in waiting):
                assert order.rank(tenant) == pytest.approx(lifted, rel=1e-9)
            waiting.append(group)
        head = queue.head(0.0)
        assert head is plain_head(order, waiting)
        what = rng.random()
        if head is not None and what < 0.5:
            queue.remove(head)
            order.on_admission(head)
            order.on_prompt_tokens(head, rng.randrange(1, 9))
            waiting.remove(head)
            running.append(head)
        elif waiting and what < 0.6:
            aborted = waiting.pop(rng.randrange(len(waiting)))
            queue.remove(aborted)
            assert not aborted.queued
        elif running and what < 0.7:
            preempted = running.pop(rng.randrange(len(running)))
            queue.add(preempted, again=True)
            waiting.append(preempted)
        order.on_tokens(count_by_tenant([group.sequences[0] for group in running[-5:]]))
        assert list(queue) == sorted(waiting, key=lambda group: group.arrival_number)
    with pytest.raises(InvariantError, match="not in the waiting queue"):
        queue.remove(running[0])


class CountingFairOrder(FairOrder):
    """Counts how often the rank of a tenant is read."""

    num_ranks = 0

    def rank(self, subqueue: str) -> float:
        self.num_ranks += 1
        return super().rank(subqueue)


def test_thousands_of_waiting_tenants_cost_no_more_than_a_few() -> None:
    order = CountingFairOrder()
    queue = WaitingQueue(order)
    for number in range(5000):
        queue.add(make(number, f"t{number}"))
    order.num_ranks = 0
    for number in range(5000, 6000):
        head = queue.head(0.0)
        assert head is not None
        queue.remove(head)
        order.on_admission(head)
        order.on_prompt_tokens(head, 8)
        order.on_tokens(count_by_tenant(head.sequences))
        queue.add(make(number, f"t{number}"))
    assert order.num_ranks < 1000 * 20


def test_tenants_that_left_are_forgotten_now_and_then() -> None:
    """Not at each arrival: with more waiting tenants than counters are kept, none can be dropped."""
    order = FairOrder()
    queue = WaitingQueue(order)
    for number in range(30_000):
        group = make(number, f"t{number}")
        queue.add(group)
        queue.remove(group)
        if number % 100 == 0:
            order.on_admission(group)
    assert len(order._served) <= 20_000
