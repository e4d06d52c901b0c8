"""How long requests wait for their adapters, on virtual time, and what is not run with another content."""

from __future__ import annotations

import dataclasses

import pytest

from cadenza_common.plan.sampling import SequenceSampling
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core.adapters.events import AdapterLoaded, AdapterUnloaded
from scheduler_svc.core.errors import PreconditionError
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.types import ExecutorSpec, FinishDetail, RequestKey, RequestSpec
from scheduler_svc.engine.adapters.adapters import LOOKS, Adapters
from scheduler_svc.engine.journal import NoJournal
from scheduler_svc.engine.live_request import LiveRequest
from scheduler_svc.plan_loop.ports import EngineRequest
from scheduler_svc.tenants.registry import Registry
from tests.helpers.scheduler.fake_clock import FakeClock

SPEC = ExecutorSpec(16, 1000, 64, 32, 512, 4096, max_loras=2, max_cpu_loras=4, shares_prefixes=True)
LIMIT_S = 60.0


class Rig:
    """A core with one executor and the adapter a, and the engine's part about adapters."""

    def __init__(self, spec: ExecutorSpec = SPEC) -> None:
        self.clock = FakeClock()
        self.core = Scheduler()
        self.core.add_executor(0, spec)
        self.num_wakes = 0
        self.unfinished: dict[RequestKey, LiveRequest] = {}
        self.failed: list[tuple[float, Exception]] = []
        config = SchedulerConfig(lora_load_timeout_s=LIMIT_S)
        self.adapters = Adapters(
            self.core, self.clock, config, Registry(), NoJournal(), self.unfinished, self._fail, self._wake
        )
        self.adapters.names.register("a", "/a")

    def _fail(self, live: LiveRequest, error: Exception) -> None:
        self.failed.append((self.clock.monotonic(), error))
        self.core.abort(live.request.spec.key, FinishDetail.EXECUTOR_ERROR)
        del self.unfinished[live.request.spec.key]

    def _wake(self) -> None:
        self.num_wakes += 1

    def submit(self, adapter: str = "a") -> None:
        spec = RequestSpec("r", (1, 2, 3), SequenceSampling(), 4000)
        with self.adapters.admitting(EngineRequest(spec, adapter=adapter)) as request:
            self.core.add_request(request.spec, self.clock.monotonic())
        live = LiveRequest(request, self.clock.monotonic_ns())
        self.unfinished[spec.key] = live
        self.adapters.on_added(live)

    def load(self, content: bytes = b"a") -> None:
        for each in self.core.adapter_commands(0).loads:
            self.core.adapter_event(AdapterLoaded(each.index, content), 0)
        self.adapters.on_outputs()

    def another_executor(self) -> None:
        """The executor dies, and its successor has no adapters."""
        self.core.executor_lost(0, self.clock.monotonic())
        self.core.session_opened(0, executor_id=0)


async def test_a_request_waits_for_its_adapter_as_long_as_the_limit_says() -> None:
    rig = Rig()
    rig.submit()
    begin = rig.clock.monotonic()
    await rig.clock.advance(2 * LIMIT_S)
    ((at, error),) = rig.failed
    assert at == pytest.approx(begin + LIMIT_S)
    assert isinstance(error, PreconditionError)
    assert str(error) == "adapter 'a' was not loaded within 60 s"
    assert dict(rig.adapters.refusals) == {"timeout": 1}


async def test_the_adapter_of_a_request_that_waits_is_due_long_before_the_limit() -> None:
    """All places are in use: it takes the one of an adapter that no request runs with."""
    rig = Rig(dataclasses.replace(SPEC, max_loras=1, max_cpu_loras=1))
    rig.load()
    rig.core.add_request(
        RequestSpec("other", (1, 2, 3), SequenceSampling(), 4000, adapter_index=1), rig.clock.monotonic()
    )
    rig.adapters.names.register("b", "/b")
    rig.submit("b")
    await rig.clock.advance(LIMIT_S / LOOKS - 1)
    assert not rig.core.adapter_commands(0)
    assert not rig.num_wakes
    await rig.clock.advance(2)
    assert rig.num_wakes == 1
    assert rig.core.adapter_commands(0).unloads == (1,)


async def test_a_request_that_waits_for_the_place_of_another_adapter_goes_on_waiting() -> None:
    """The limit is that of a load: it counts from when there is a place for it."""
    rig = Rig(dataclasses.replace(SPEC, max_loras=1, max_cpu_loras=1))
    rig.load()
    rig.core.add_request(
        RequestSpec("other", (1, 2, 3), SequenceSampling(), 4000, adapter_index=1), rig.clock.monotonic()
    )
    rig.core.plan_step(0, rig.clock.monotonic())
    rig.adapters.names.register("b", "/b")
    rig.submit("b")
    await rig.clock.advance(5 * LIMIT_S)
    assert not rig.failed
    assert not rig.core.adapter_commands(0)
    rig.core.abort(("", "other"), FinishDetail.ABORTED)
    assert rig.core.adapter_commands(0).unloads == (1,)
    rig.core.adapter_event(AdapterUnloaded(1))
    assert [each.name for each in rig.core.adapter_commands(0).loads] == ["b"]
    begin = rig.clock.monotonic()
    await rig.clock.advance(2 * LIMIT_S)
    ((at, _),) = rig.failed
    assert begin + LIMIT_S <= at <= begin + LIMIT_S * (1 + 1 / LOOKS) + 1e-6


async def test_loads_that_never_end_let_others_wait_no_longer_than_the_limit() -> None:
    rig = Rig(dataclasses.replace(SPEC, max_loras=1, max_cpu_loras=1))
    assert rig.core.adapter_commands(0).loads
    rig.adapters.names.register("b", "/b")
    begin = rig.clock.monotonic()
    rig.submit("b")
    await rig.clock.advance(2 * LIMIT_S)
    ((at, _),) = rig.failed
    assert at == pytest.approx(begin + LIMIT_S)


@pytest.mark.parametrize("after_s", [0.0, 1.0, 50.0, 61.0, 1000.0])
async def test_a_request_that_loses_its_adapter_later_waits_hardly_longer(after_s: float) -> None:
    rig = Rig()
    rig.load()
    rig.submit()
    await rig.clock.advance(after_s)
    rig.another_executor()
    begin = rig.clock.monotonic()
    await rig.clock.advance(2 * LIMIT_S)
    ((at, _),) = rig.failed
    assert begin + LIMIT_S <= at <= begin + LIMIT_S * (1 + 1 / LOOKS) + 1e-6


async def test_a_request_whose_adapter_comes_in_time_goes_on() -> None:
    rig = Rig()
    rig.submit()
    await rig.clock.advance(LIMIT_S - 1)
    rig.load()
    await rig.clock.advance(5 * LIMIT_S)
    assert not rig.failed


def test_a_restored_request_runs_with_the_content_that_it_began_with_alone() -> None:
    rig = Rig()
    rig.load(b"new")
    for content, goes_on in ((b"new", True), (b"", True), (b"old", False)):
        request = EngineRequest(RequestSpec("r", (1,), SequenceSampling(), 5, adapter_hash=content), adapter="a")
        if goes_on:
            assert rig.adapters.restored(request).spec.adapter_index == 1
        else:
            with pytest.raises(PreconditionError, match="its files have changed since the request began"):
                rig.adapters.restored(request)
