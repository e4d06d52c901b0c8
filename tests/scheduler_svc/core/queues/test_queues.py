"""The waiting queue's clock."""

from __future__ import annotations

from scheduler_svc.core.policies.policies import Policies
from scheduler_svc.core.queues.orders import PriorityOrder
from tests.helpers.core.core_bench import Bench


def test_the_oldest_group_is_overdue_first() -> None:
    bench = Bench(Policies(order=PriorityOrder(), max_wait_s=10.0))
    assert bench.core.waiting.overdue_at is None
    for name, now in (("old", 3.0), ("young", 8.0)):
        bench.now = now
        bench.add(name, 4, priority=1)
    assert bench.core.waiting.overdue_at == 13.0
    assert bench.core.waiting.oldest is bench.core.groups["", "old"]
