"""Limits of tenants, on virtual time."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core.errors import RequestExistsError, RequestRejectedError, WaitingQueueFullError
from scheduler_svc.core.policies.policies import Policies
from scheduler_svc.core.queues.orders import FairOrder
from scheduler_svc.tenants.errors import TenantLimitError
from scheduler_svc.tenants.quotas import TokenBucket
from scheduler_svc.tenants.registry import Registry
from tests.helpers.scheduler.virtual_engine import STEP_S, World, started
from tests.helpers.tenants import write_tenants

_ids = (f"r{number}" for number in itertools.count())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tenants.toml"


def registry(file: Path, **limits: Any) -> Registry:
    return Registry(write_tenants(file, {"gold": limits, "other": {}}))


def submit(world: World, max_tokens: int = 4, tenant: str = "gold", **fields: Any) -> str:
    name = fields.pop("request_id", None) or next(_ids)
    world.submit(max_tokens, request_id=name, tenant=tenant, **fields)
    return name


def refused(world: World, kind: type[Exception] = TenantLimitError, **fields: Any) -> Any:
    with pytest.raises(kind) as found:
        submit(world, **fields)
    return found.value


async def test_requests(file: Path) -> None:
    async with started(registry=registry(file, max_requests=2)) as world:
        submit(world)
        running = submit(world)
        error = refused(world)
        assert str(error) == "unfinished requests of this tenant: 2 (max_requests)"
        assert 0.1 <= error.retry_after_s <= 30
        submit(world, tenant="other")
        world.engine.abort("gold", running)
        submit(world)
        refused(world)
        await world.clock.advance(20 * STEP_S)
        assert world.engine.num_unfinished == 0
        submit(world)
        usage = world.engine.quotas.usage("gold")
        assert (usage.num_requests, usage.num_rejected) == (1, 2)


async def test_queued_tokens(file: Path) -> None:
    """Of requests that have not begun: the executor has four slots."""
    async with started(registry=registry(file, max_queued_tokens=20)) as world:
        first = submit(world, num_prompt_tokens=12)
        error = refused(world, num_prompt_tokens=9)
        assert str(error) == "waiting prompt tokens of this tenant: 12; 9 more exceed 20 (max_queued_tokens)"
        await world.clock.advance(2 * STEP_S)
        assert world.engine.find("gold", first) is not None
        submit(world, num_prompt_tokens=20)
        world.engine.abort("gold", first)
        await world.clock.advance(0)
        error = refused(world, RequestRejectedError, num_prompt_tokens=21)
        assert (error.field, str(error)) == ("prompt", "has 21 tokens; this tenant's max_queued_tokens is 20")


async def test_tokens_a_minute_and_when_to_come_back(file: Path) -> None:
    async with started(registry=registry(file, tokens_per_minute=60)) as world:
        submit(world, max_tokens=10, num_prompt_tokens=30)
        error = refused(world, num_prompt_tokens=31)
        assert str(error) == "this tenant has used its 60 tokens a minute (tokens_per_minute)"
        assert error.retry_after_s == pytest.approx(1.0)
        await world.clock.advance(20 * STEP_S)
        assert world.engine.num_unfinished == 0, "0.2 s have passed"
        error = refused(world, num_prompt_tokens=30)
        assert error.retry_after_s == pytest.approx(10 - 0.2), "its ten output tokens count too"
        await world.clock.advance(error.retry_after_s)
        submit(world, num_prompt_tokens=30)
        submit(world, tenant="other", num_prompt_tokens=3000)
        await world.clock.advance(600)
        assert refused(world, num_prompt_tokens=61, kind=RequestRejectedError).field == "prompt"
        submit(world, num_prompt_tokens=60, max_tokens=1)
        error = refused(world, num_prompt_tokens=1)
        assert error.retry_after_s == pytest.approx(1.0), "no more than a minute's tokens are saved up"


async def test_what_is_sent_twice_or_resumed_is_charged_once(file: Path) -> None:
    limits = {"tokens_per_minute": 60, "max_requests": 1, "max_queued_tokens": 40}
    async with started(registry=registry(file, **limits)) as world:
        name = submit(world, num_prompt_tokens=40, grace_s=100.0, body_digest=b"a")
        for _ in range(3):
            submit(world, request_id=name, num_prompt_tokens=40, body_digest=b"a")
            world.engine.attach("gold", name)
        with pytest.raises(RequestExistsError):
            submit(world, request_id=name, num_prompt_tokens=40, body_digest=b"b")
        await world.clock.advance(10 * STEP_S)
        submit(world, request_id=name, num_prompt_tokens=40, body_digest=b"a")
        usage = world.engine.quotas.usage("gold")
        assert (usage.num_requests, usage.num_prompt_tokens, usage.num_output_tokens) == (0, 40, 4)
        submit(world, num_prompt_tokens=16)


async def test_refused_requests_are_not_charged(file: Path) -> None:
    async with started(registry=registry(file, tokens_per_minute=60, max_requests=1)) as world:
        submit(world, num_prompt_tokens=10)
        for _ in range(10):
            refused(world, num_prompt_tokens=10)
        world.engine.abort("gold", next(iter(world.engine._live))[1])
        submit(world, num_prompt_tokens=50)


async def test_the_priority_ceiling(file: Path) -> None:
    """Smaller goes first, so the highest priority is the smallest number."""
    async with started(registry=registry(file, max_priority=-2)) as world:
        submit(world, priority=-2)
        submit(world, priority=5)
        error = refused(world, RequestRejectedError, priority=-3)
        assert error.field == "sampling_params.priority"
        assert str(error) == "must be -2 or more for this tenant (max_priority; smaller goes first), not -3"
        submit(world, priority=-3, tenant="other")


async def test_a_tenant_that_floods_leaves_places_in_the_queue(file: Path) -> None:
    async with started(SchedulerConfig(max_queued_requests=12), registry=registry(file)) as world:
        world.executor.hangs = True
        for _ in range(6):
            submit(world, tenant="other", max_tokens=100)
        error = refused(world, WaitingQueueFullError, tenant="other")
        assert "waiting requests of this tenant: 6, its share of the queue" in str(error), "as many as are free: half"
        for _ in range(3):
            submit(world)
        assert "waiting requests of this tenant: 3" in str(refused(world, WaitingQueueFullError))
        error = refused(world, WaitingQueueFullError, tenant="other")
        assert error.retry_after_s > 0
        loads = {load.name: load for load in world.engine.tenant_loads()}
        assert (loads["other"].num_waiting, loads["other"].num_rejected) == (6, 2)
        assert (loads["gold"].num_waiting, loads["gold"].num_queued_tokens) == (3, 9)
        world.executor.go_on()


async def test_limits_change_with_the_file(file: Path) -> None:
    tenants = registry(file, max_requests=1, tokens_per_minute=60)
    async with started(registry=tenants) as world:
        submit(world, num_prompt_tokens=30)
        refused(world)
        write_tenants(file, {"gold": {"max_requests": 2, "tokens_per_minute": 600}, "other": {}})
        tenants.reload()
        assert refused(world, num_prompt_tokens=40).retry_after_s == pytest.approx(1.0), "the level stays: 30 of 600"
        submit(world, num_prompt_tokens=30)
        write_tenants(file, {"gold": {}, "other": {}})
        tenants.reload()
        submit(world, num_prompt_tokens=500)


async def test_loads_of_tenants(file: Path) -> None:
    async with started(registry=registry(file, weight=3)) as world:
        for _ in range(6):
            submit(world, max_tokens=50)
        await world.clock.advance(4.5 * STEP_S)
        gold, other = world.engine.tenant_loads()
        assert (gold.name, gold.num_waiting, gold.num_running, gold.num_queued_tokens) == ("gold", 2, 4, 6)
        assert (gold.weight, other.weight) == (3.0, 1.0)
        assert gold.num_output_tokens == world.core.num_output_tokens > 0
        assert (other.num_waiting, other.num_running, other.num_output_tokens) == (0, 0, 0)


def test_a_bucket_that_is_overdrawn_fills_up_again() -> None:
    bucket = TokenBucket(600, now=5.0)
    bucket.take(1000)
    assert bucket.wait_s(100, 5.0) == pytest.approx(50.0)
    assert bucket.wait_s(100, 30.0) == pytest.approx(25.0)
    assert bucket.wait_s(100, 55.0) == 0.0
    bucket.set_rate(60, 55.0)
    assert bucket.wait_s(60, 55.0) == 0.0, "what it holds is cut to a minute's worth"
    bucket.take(60)
    assert bucket.wait_s(1, 55.0) == pytest.approx(1.0)


async def test_a_fair_order_and_the_quotas_count_tokens_by_tenant_once(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with started(registry=registry(file), policies=Policies(order=FairOrder())) as world:
        monkeypatch.setattr("scheduler_svc.tenants.quotas.count_by_tenant", None)
        submit(world, max_tokens=3)
        submit(world, tenant="other", max_tokens=5)
        await world.clock.advance(20 * STEP_S)
        usages = [world.engine.quotas.usage(name).num_output_tokens for name in ("gold", "other")]
        assert usages == [3, 5]
