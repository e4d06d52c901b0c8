"""What the engine logs of its work, on virtual time."""

from __future__ import annotations

import logging

import pytest

from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core.types import FinishDetail
from scheduler_svc.engine.activity_log import figures_line
from scheduler_svc.plan_loop.gauges import Load
from tests.helpers.scheduler.virtual_engine import STEP_S, started

LOGGER = "scheduler_svc.engine.activity_log"


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == LOGGER]


@pytest.fixture(autouse=True)
def _info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)


async def test_figures_come_every_ten_seconds_while_requests_run(caplog: pytest.LogCaptureFixture) -> None:
    async with started(step_s=0.5) as world:
        await world.clock.advance(25)
        assert lines(caplog) == [], "an idle engine logs nothing"
        world.submit(38, num_prompt_tokens=160)  # 38 steps: 19 seconds
        await world.clock.advance(9.9)
        assert lines(caplog) == []
        await world.clock.advance(0.2)
        # 160 prompt tokens and 20 of the output in 10 s. With the next two planned, they need 12 of 512 blocks.
        assert lines(caplog) == ["running 1 waiting 0 kv 2% prompt 16 tok/s output 2 tok/s"]
        await world.clock.advance(10)
        assert lines(caplog)[1:] == ["running 0 waiting 0 kv 0% prompt 0 tok/s output 2 tok/s"]
        await world.clock.advance(60)
        assert len(lines(caplog)) == 2, "nothing runs any more"


async def test_the_figures_of_a_full_server() -> None:
    before = Load(num_output_tokens=100, num_prefix_queries=1000, num_prefix_hits=500, num_preemptions=1)
    now = Load(
        num_running=12, num_waiting=3, num_swapped=2, num_device_blocks=100, num_used_device_blocks=41,
        num_output_tokens=2500, num_prefix_queries=2000, num_prefix_hits=1130, num_preemptions=5,
        num_drafts=400, num_accepted_drafts=100,
    )  # fmt: skip
    assert figures_line(before, now, 8120, 10.0) == (
        "running 12 waiting 3 swapped 2 kv 41% prompt 812 tok/s output 240 tok/s prefix hits 63% "
        "drafts accepted 25% preemptions 4"
    )


async def test_no_figures_where_the_interval_is_zero(caplog: pytest.LogCaptureFixture) -> None:
    async with started(SchedulerConfig(log_stats_interval_s=0), step_s=0.5) as world:
        world.submit(40)
        await world.clock.advance(30)
        assert lines(caplog) == []


async def test_each_request_is_a_line_when_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    async with started(SchedulerConfig(log_requests=True)) as world:
        world.submit(4, request_id="one", tenant="gold")
        await world.clock.advance(10 * STEP_S)
        world.submit(400, request_id="two")
        await world.clock.advance(10 * STEP_S)
        world.engine.abort("", "two", FinishDetail.ABORTED)
        world.submit(400, request_id="three", deadline=world.clock.monotonic())
        await world.clock.advance(STEP_S)
    one, two, three = lines(caplog)
    assert one == (
        "request 'one' tenant 'gold': max_tokens, prompt 3 tokens, output 4 tokens, "
        "queued 0.000 s, first token 0.010 s, total 0.040 s"
    )
    assert two.startswith("request 'two': aborted, prompt 3 tokens, output ")
    assert three.startswith("request 'three': deadline, prompt 3 tokens, output 0 tokens, queued ")


async def test_requests_are_not_logged_by_default(caplog: pytest.LogCaptureFixture) -> None:
    async with started() as world:
        world.submit(4)
        await world.clock.advance(10 * STEP_S)
    assert lines(caplog) == []
