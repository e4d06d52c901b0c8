"""What the engine measures, on virtual time: each number is what the requests' own times and counts say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cadenza_common.metrics.histogram import sum_of
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core.errors import WaitingQueueFullError
from scheduler_svc.core.policies.policies import Policies
from scheduler_svc.engine.fleet.executor_member import MOVE_AFTER_S
from scheduler_svc.engine.live_request import LiveRequest
from scheduler_svc.metrics import buckets
from scheduler_svc.metrics.lane_numbers import LaneNumbers
from scheduler_svc.metrics.request_numbers import OTHER_TENANT
from tests.helpers.scheduler.changing_executor import STEP_S as FLEET_STEP_S
from tests.helpers.scheduler.fleet_world import fleet
from tests.helpers.scheduler.virtual_engine import MODEL, STEP_S, World, started

SMALL = replace(MODEL, num_device_blocks=12, num_host_blocks=64)


def lane_of(world: World) -> LaneNumbers:
    (lane,) = world.engine.numbers.lanes.values()
    return lane


def seconds(lives: list[LiveRequest], begin: str, end: str) -> float:
    """Sum of the time between two moments of the requests."""
    return sum(getattr(live.times, end) - getattr(live.times, begin) for live in lives) / 1e9


def num_tokens(lives: list[LiveRequest]) -> int:
    return sum(live.num_completion_tokens for live in lives)


async def test_times_of_requests_are_their_own() -> None:
    async with started() as world:
        lives = [world.submit(20 + index, request_id=f"r{index}") for index in range(6)]
        await world.clock.advance(1.0)
        requests, tenant = world.engine.numbers.requests, world.engine.numbers.requests.of("")
        assert (tenant.num_admitted, tenant.ends) == (6, {"max_tokens": 6})
        assert tenant.first_token_s.total == pytest.approx(seconds(lives, "arrival_ns", "first_token_ns"))
        assert tenant.queue_s.total == pytest.approx(seconds(lives, "arrival_ns", "first_plan_ns"))
        assert tenant.total_s.total == pytest.approx(seconds(lives, "arrival_ns", "end_ns"))
        assert requests.prefill_s.total == pytest.approx(seconds(lives, "first_plan_ns", "first_token_ns"))
        assert requests.decode_s.total == pytest.approx(seconds(lives, "first_token_ns", "end_ns"))
        assert requests.inference_s.total == pytest.approx(seconds(lives, "first_plan_ns", "end_ns"))
        assert tenant.per_token_s.total == pytest.approx(6 * STEP_S)
        lane = lane_of(world)
        assert lane.token_s.num_values == num_tokens(lives) - 6
        assert lane.token_s.total == pytest.approx((num_tokens(lives) - 6) * STEP_S)
        assert lane.step_s.num_values == lane.counts.num_steps
        assert lane.step_tokens.total == 6 * 3 + num_tokens(lives) - 6
        assert lane.gap_s.total == pytest.approx(0)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
async def test_preempted_sequences_have_long_intervals_and_are_counted_by_kind(preemption: str) -> None:
    async with started(model=SMALL, policies=Policies(preemption=preemption)) as world:
        lives = [world.submit(60, num_prompt_tokens=20, request_id=f"r{index}") for index in range(4)]
        await world.clock.advance(5.0)
        lane, counts = lane_of(world), lane_of(world).counts
        assert counts.num_preemptions == sum(live.counts.num_preemptions for live in lives) > 0
        assert counts.num_swap_preemptions == (counts.num_preemptions if preemption == "swap" else 0)
        assert lane.token_s.num_values == num_tokens(lives) - 4
        assert lane.token_s.total == pytest.approx(seconds(lives, "first_token_ns", "end_ns"))
        if preemption == "recompute":
            assert lane.num_prompt_tokens > 4 * 20, "computed again"


async def test_a_lost_executor_leaves_a_long_interval_and_no_host_gap() -> None:
    async with fleet(1) as world:
        live = world.submit("a", max_tokens=40)
        await world.clock.advance(10.5 * FLEET_STEP_S)
        world.executors[0].die()
        await world.clock.advance(3.0)
        world.executors[0].come_back()
        await world.run()
        (lane,) = world.engine.numbers.lanes.values()
        assert lane.num_sessions_ended == 1
        assert lane.token_s.num_values == 40 - 1
        assert lane.token_s.total == pytest.approx(seconds([live], "first_token_ns", "end_ns"))
        assert lane.gap_s.cumulative((0.1,))[0] == lane.gap_s.num_values > 0


async def test_an_idle_executor_has_no_host_gap_and_a_late_plan_has_one() -> None:
    async with started() as world:
        for index in range(2):
            world.submit(5, request_id=f"r{index}")
            await world.clock.advance(2.0)
        lane = lane_of(world)
        assert 0 < lane.gap_s.num_values < lane.step_s.num_values
        assert lane.gap_s.total == pytest.approx(0)
        lane.had_work, lane.last_result_at = True, world.clock.monotonic()
        await world.clock.advance(0.5)
        world.submit(1, request_id="late")
        await world.clock.advance(1.0)
        assert lane.gap_s.total == pytest.approx(0.5)


@pytest.mark.slow
async def test_numbers_survive_their_executor_and_go_on_when_it_comes_back() -> None:
    async with fleet() as world:
        world.submit_mix()
        await world.run()
        numbers = world.engine.numbers
        before = {index: (lane.target, lane.counts.num_steps) for index, lane in numbers.lanes.items()}
        assert set(before) == {0, 1}
        await world.engine.executors.drain("e:0", 1.0)
        await world.engine.executors.remove("e:0")
        world.submit_mix(4)
        await world.run()
        assert numbers.lanes[0].counts.num_steps == before[0][1] > 0
        assert sum(lane.counts.num_steps for lane in numbers.lanes.values()) == world.engine.load().num_steps
        steps = sum_of([lane.step_s for lane in numbers.lanes.values()], buckets.STEP_S)
        assert steps.num_values == world.engine.load().num_steps


@pytest.mark.slow
async def test_requests_that_move_keep_their_intervals() -> None:
    async with fleet() as world:
        world.submit_mix(max_tokens=60)
        await world.clock.advance(12.5 * FLEET_STEP_S)
        world.executors[0].die()
        await world.clock.advance(MOVE_AFTER_S + FLEET_STEP_S)
        await world.run()
        lives = [live for live in world.live.values() if live.request.spec.beams is None and len(live.samples) == 1]
        token_s = sum_of([lane.token_s for lane in world.engine.numbers.lanes.values()], buckets.TOKEN_S)
        assert token_s.total >= seconds(lives, "first_token_ns", "end_ns") * 0.99
        assert token_s.cumulative((0.5,)) < [token_s.num_values, token_s.num_values], "those that waited"


async def test_a_client_cannot_make_labels() -> None:
    async with started() as world:
        for index in range(20):
            world.submit(2, tenant=f"made up {index}", request_id=f"r{index}")
        await world.clock.advance(1.0)
        tenants = world.engine.numbers.requests.tenants
        assert set(tenants) == {OTHER_TENANT}
        assert tenants[OTHER_TENANT].num_admitted == 20


async def test_aborts_deadlines_and_rejections_are_counted() -> None:
    async with started(SchedulerConfig(max_queued_requests=1)) as world:
        lives = [world.submit(500, request_id="a")]
        await world.clock.advance(0.1)
        lives.append(world.submit(500, request_id="b", deadline=world.clock.monotonic() + 0.2))
        with pytest.raises(WaitingQueueFullError):
            [world.submit(500, request_id=f"c{index}") for index in range(2)]
        await world.clock.advance(0.5)
        for live in lives:
            world.engine.abort("", live.request_id)
        tenant = world.engine.numbers.requests.of("")
        assert tenant.ends == {"aborted": 1, "deadline": 1}
        (load,) = world.engine.tenant_loads()
        assert load.rejections == {"max_queued_requests": 1}
        assert tenant.total_s.total == pytest.approx(seconds(lives, "arrival_ns", "end_ns"))
