"""A request outlives its stream for its grace, in virtual time: it runs on, its results are kept, then it is gone."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import replace

import pytest

from cadenza_common.plan.result import TokenLogprobs
from cadenza_common.plan.sampling import SequenceSampling
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core.errors import ModelChangedError, RequestExistsError, UnknownRequestError
from scheduler_svc.core.types import FinishDetail, RequestSpec
from scheduler_svc.engine.kept_requests import result_bytes
from scheduler_svc.engine.live_request import Listener, LiveRequest
from scheduler_svc.plan_loop.ports import EngineRequest
from scheduler_svc.requests.detokenizer import StoppedText
from tests.helpers.models.toy_tokenizers import byte_level
from tests.helpers.scheduler.virtual_engine import STEP_S, World, started

GRACE_S = 5.0


def listen(world: World, live: LiveRequest) -> Listener:
    """Attach a stream."""

    def listener(_: LiveRequest) -> None:
        """A reader would take the output."""

    world.engine.listen(live, listener)
    return listener


def lost(world: World, request_id: str = "r", tenant: str = "") -> bool:
    """Whether a stream can no longer be attached."""
    try:
        world.engine.attach(tenant, request_id)
    except UnknownRequestError:
        return True
    return False


async def test_without_a_grace_a_lost_stream_aborts_the_request() -> None:
    async with started() as world:
        live = world.submit(100)
        listener = listen(world, live)
        await world.clock.advance(5 * STEP_S)
        world.engine.detach(live, listener, handed_over=False)
        assert live.samples[0].finish is not None
        assert live.samples[0].finish.detail is FinishDetail.ABORTED
        assert lost(world)
        await world.clock.advance(3 * STEP_S)
        assert world.engine.load().num_used_slots == 0


async def test_with_a_grace_it_runs_on_and_is_aborted_at_its_end() -> None:
    async with started() as world:
        live = world.submit(2000, grace_s=GRACE_S)
        world.engine.detach(live, listen(world, live), handed_over=False)
        await world.clock.advance(GRACE_S - STEP_S)
        assert len(live.samples[0].token_ids) > 400
        assert world.engine.attach("", "r") is live
        await world.clock.advance(2 * STEP_S)
        assert live.samples[0].finish is not None
        assert live.samples[0].finish.detail is FinishDetail.ABORTED
        assert lost(world)
        assert world.engine.load().num_used_slots == 0


async def test_results_are_kept_until_the_grace_is_over() -> None:
    """It finishes without a stream; the grace counts from the loss of the stream."""
    async with started() as world:
        live = world.submit(20, grace_s=GRACE_S)
        world.engine.detach(live, listen(world, live), handed_over=False)
        await world.clock.advance(GRACE_S - STEP_S)
        assert live.ended
        assert world.engine.attach("", "r") is live
        assert len(live.samples[0].token_ids) == 20
        await world.clock.advance(2 * STEP_S)
        assert lost(world)
        assert world.engine.kept.num_bytes == 0


async def test_the_grace_stands_still_while_a_stream_is_attached() -> None:
    async with started() as world:
        live = world.submit(20, grace_s=GRACE_S)
        first = listen(world, live)
        await world.clock.advance(3 * GRACE_S)
        world.engine.detach(live, first, handed_over=False)
        await world.clock.advance(GRACE_S - STEP_S)
        second = listen(world, world.engine.attach("", "r"))
        await world.clock.advance(3 * GRACE_S)
        assert not lost(world)
        world.engine.detach(live, second, handed_over=True)
        await world.clock.advance(GRACE_S - STEP_S)
        assert not lost(world), "nobody can know whether the client received what was sent"
        await world.clock.advance(2 * STEP_S)
        assert lost(world)


async def test_the_server_shortens_a_grace() -> None:
    async with started(SchedulerConfig(max_resume_grace_s=1.0)) as world:
        live = world.submit(2000, grace_s=GRACE_S)
        world.engine.detach(live, listen(world, live), handed_over=False)
        await world.clock.advance(1.0 + STEP_S)
        assert lost(world)
    async with started(SchedulerConfig(max_resume_grace_s=0.0)) as world:
        live = world.submit(2000, grace_s=GRACE_S)
        world.engine.detach(live, listen(world, live), handed_over=False)
        assert lost(world)


async def test_an_abort_ends_it_at_once_and_keeps_nothing() -> None:
    async with started() as world:
        live = world.submit(2000, grace_s=GRACE_S)
        world.engine.detach(live, listen(world, live), handed_over=False)
        assert world.engine.abort("", "r")
        assert lost(world)
        assert not world.engine.abort("", "r")
        kept = world.submit(3, grace_s=GRACE_S)
        listen(world, kept)
        await world.clock.advance(5 * STEP_S)
        assert not lost(world)
        assert not world.engine.abort("", "r"), "it has finished"
        assert lost(world)
        assert world.engine.kept.num_bytes == 0


async def test_a_deadline_ends_it_at_once_and_its_results_are_kept() -> None:
    async with started() as world:
        deadline = world.clock.monotonic() + 1.0
        live = world.submit(2000, grace_s=GRACE_S, deadline=deadline)
        world.engine.detach(live, listen(world, live), handed_over=False)
        await world.clock.advance(1.0 + STEP_S)
        assert world.engine.attach("", "r").samples[0].finish is not None
        assert live.samples[0].finish is not None
        assert live.samples[0].finish.detail is FinishDetail.DEADLINE
        assert world.engine.load().num_used_slots == 0


async def test_a_request_that_a_changed_model_ended_is_kept_with_its_error() -> None:
    """Whoever comes back gets the output and the reason."""
    async with started() as world:
        live = world.submit(2000, grace_s=GRACE_S)
        world.engine.detach(live, listen(world, live), handed_over=False)
        await world.clock.advance(10 * STEP_S)
        world.executor.model = replace(world.executor.model, name="other", fingerprint=b"other", incarnation=2)
        world.executor.incarnation = 2
        assert world.executor.stream is not None
        world.executor.stream.break_off()
        await world.clock.advance(2.0)
        again = world.engine.attach("", "r")
        assert isinstance(again.error, ModelChangedError)
        assert len(again.samples[0].token_ids) >= 8
        await world.clock.advance(GRACE_S)
        assert lost(world)


async def test_another_stream_takes_over() -> None:
    async with started() as world:
        live = world.submit(2000)
        calls: list[str] = []
        listeners: list[Callable[[LiveRequest], None]] = [
            lambda _: calls.append("first"),
            lambda _: calls.append("second"),
        ]
        world.engine.listen(live, listeners[0])
        world.engine.listen(live, listeners[1])
        assert calls == ["first"], "it learns that it was replaced"
        assert live.listener is not listeners[0]
        world.engine.detach(live, listeners[0], handed_over=False)
        await world.clock.advance(10 * STEP_S)
        assert not live.ended, "its end does not concern the request any more"
        assert set(calls[1:]) == {"second"}


async def test_same_id_and_body_is_the_same_request_until_its_grace_is_over() -> None:
    async with started() as world:
        live = world.submit(3, grace_s=GRACE_S, body_digest=b"one")
        assert world.submit(3, grace_s=GRACE_S, body_digest=b"one") is live
        listener = listen(world, live)
        await world.clock.advance(10 * STEP_S)
        assert live.ended
        assert world.submit(3, grace_s=GRACE_S, body_digest=b"one") is live
        with pytest.raises(RequestExistsError):
            world.submit(3, grace_s=GRACE_S, body_digest=b"other")
        other = world.submit(3, grace_s=GRACE_S, body_digest=b"other", tenant="t")
        assert other is not live
        assert world.engine.attach("t", "r") is other
        world.engine.detach(live, listener, handed_over=True)
        await world.clock.advance(GRACE_S + STEP_S)
        anew = world.submit(3, body_digest=b"other")
        assert anew is not live


async def test_an_old_stream_does_not_touch_a_new_request_of_its_id() -> None:
    """Its results were dropped, the id was used again, and only then the old stream ends."""
    async with started(SchedulerConfig(max_kept_results_mb=0.006)) as world:
        old = world.submit(3, grace_s=GRACE_S, body_digest=b"old")
        old_stream = listen(world, old)
        await world.clock.advance(10 * STEP_S)
        finish_others(world, 1)
        await world.clock.advance(10 * STEP_S)
        assert lost(world)
        new = world.submit(3, grace_s=GRACE_S, body_digest=b"new")
        new_stream = listen(world, new)
        await world.clock.advance(10 * STEP_S)
        world.engine.detach(old, old_stream, handed_over=True)
        await world.clock.advance(2 * GRACE_S)
        assert world.engine.attach("", "r") is new
        world.engine.detach(new, new_stream, handed_over=True)


def finish_others(world: World, count: int) -> None:
    for index in range(count):
        live = world.submit(3, request_id=f"other {index}", grace_s=GRACE_S)
        world.engine.detach(live, listen(world, live), handed_over=False)


async def test_kept_results_have_a_limit_and_those_handed_over_go_first() -> None:
    async with started(SchedulerConfig(max_kept_results_mb=0.1)) as world:
        unsent = world.submit(3, request_id="unsent", grace_s=GRACE_S)
        world.engine.detach(unsent, listen(world, unsent), handed_over=False)
        await world.clock.advance(10 * STEP_S)
        sent = world.submit(3, request_id="sent", grace_s=GRACE_S)
        listener = listen(world, sent)
        await world.clock.advance(10 * STEP_S)
        world.engine.detach(sent, listener, handed_over=True)
        room = int(100_000 // result_bytes(unsent)) - 2
        finish_others(world, room)
        await world.clock.advance(1.0)
        assert not lost(world, "sent")
        finish_others(world, 1)
        world.submit(3, request_id="one more", grace_s=GRACE_S)
        await world.clock.advance(1.0)
        assert lost(world, "sent")
        assert not lost(world, "unsent"), "though it is older"
        assert world.engine.kept.num_bytes <= 100_000
        finish_others(world, 3 * room)
        await world.clock.advance(1.0)
        assert lost(world, "unsent")
        assert len(world.engine.kept._finished) == room + 2
        assert world.engine.kept.num_bytes <= 100_000


def test_the_size_of_a_result_is_about_what_it_takes() -> None:
    tokenizer = byte_level()

    def make() -> LiveRequest:
        spec = RequestSpec("r", tuple(int(str(1000 + i)) for i in range(3000)), SequenceSampling(num_logprobs=5))
        live = LiveRequest(EngineRequest(spec, lambda: StoppedText(tokenizer)), 1)
        for index in range(2000):
            top = [int(str(300 + index + each)) for each in range(5)]
            live.samples[0].extend(
                (int(str(index % 390)),), (TokenLogprobs(-0.5 * index, index, top, [-1.5 * each for each in top]),)
            )
        return live

    make()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    live = make()
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert 0.6 < result_bytes(live) / taken < 1.6, (result_bytes(live), taken)
