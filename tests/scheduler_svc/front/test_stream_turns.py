"""Generate streams with new output are woken a few at a time, in order; other work of the event loop goes between."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import Any

import pytest

from cadenza.v1 import generation_pb2 as pb
from cadenza_common.plan.sampling import SequenceSampling
from scheduler_svc.convert.errors import NotServingError
from scheduler_svc.convert.generation import request_fields
from scheduler_svc.core.types import Finish, FinishDetail, RequestSpec
from scheduler_svc.engine.live_request import LiveRequest
from scheduler_svc.engine.reader import RequestReader
from scheduler_svc.front.front import AT_ONCE, StreamTurns
from scheduler_svc.front.generation import GenerationServicer
from scheduler_svc.plan_loop.ports import EngineRequest


async def test_streams_are_woken_a_few_at_a_time_and_in_order() -> None:
    turns, wakes = StreamTurns(), [asyncio.Event() for _ in range(3 * AT_ONCE + 1)]
    for wake in wakes:
        turns.request(wake)
    num_set = []
    for _ in range(5):
        num_set.append(sum(wake.is_set() for wake in wakes))
        assert all(wake.is_set() for wake in wakes[: num_set[-1]])
        await asyncio.sleep(0)
    assert num_set == [AT_ONCE, 2 * AT_ONCE, 3 * AT_ONCE, len(wakes), len(wakes)]


async def test_a_few_streams_are_woken_at_once() -> None:
    turns, wakes = StreamTurns(), [asyncio.Event() for _ in range(2 * AT_ONCE + 1)]
    for wake in wakes[:AT_ONCE]:
        turns.request(wake)
        assert wake.is_set(), "it need not wait for the next turn of the event loop"
    await asyncio.sleep(0)
    turns.request(wakes[AT_ONCE])
    assert wakes[AT_ONCE].is_set(), "another turn has begun"
    for wake in wakes:
        turns.request(wake)
    assert [wake.is_set() for wake in wakes] == [True] * (2 * AT_ONCE) + [False], "an event that is set takes no turn"


async def test_a_stream_that_waits_keeps_its_place_and_is_woken_once() -> None:
    turns, wakes = StreamTurns(), [asyncio.Event() for _ in range(2 * AT_ONCE + 1)]
    for wake in (*wakes, *wakes[AT_ONCE:]):
        turns.request(wake)
    await asyncio.sleep(0)
    assert [wake.is_set() for wake in wakes] == [True] * (2 * AT_ONCE) + [False]
    for wake in wakes:
        wake.clear()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [wake.is_set() for wake in wakes] == [False] * (2 * AT_ONCE) + [True]


async def test_a_stream_that_has_ended_is_not_woken() -> None:
    turns, ended, other = StreamTurns(), asyncio.Event(), asyncio.Event()
    for wake in (*(asyncio.Event() for _ in range(AT_ONCE)), ended, other):
        turns.request(wake)
    turns.withdraw(ended)
    turns.withdraw(ended)
    await asyncio.sleep(0)
    assert (ended.is_set(), other.is_set()) == (False, True)
    turns.request(ended)
    await asyncio.sleep(0)
    assert ended.is_set(), "it begins anew"


class QuietFront:
    """The parts of a Front that a stream calls."""

    def __init__(self) -> None:
        self.engine: Any = self
        self.turns = StreamTurns()
        self.is_stopped = False
        self.wakes: list[asyncio.Event] = []

    def stop(self) -> None:
        self.is_stopped = True
        for wake in self.wakes:
            wake.set()

    def listen(self, live: LiveRequest, listener: Any) -> None:
        live.subscribe(listener)

    def detach(self, *_: object, handed_over: bool) -> None:
        assert handed_over != self.is_stopped

    def check_serving(self) -> None:
        if self.is_stopped:
            raise NotServingError("the service is stopping")

    @contextmanager
    def stream(self, wake: asyncio.Event) -> Any:
        self.wakes.append(wake)
        yield


class Context:
    """Collects what is written; `num_written` counts over all streams."""

    num_written = 0

    def __init__(self) -> None:
        self.messages: list[pb.GenerateResponse] = []

    async def write(self, message: pb.GenerateResponse | bytes) -> None:
        raw = message if isinstance(message, bytes) else message.SerializeToString()
        self.messages.append(pb.GenerateResponse.FromString(raw))
        Context.num_written += 1


async def test_a_stream_that_is_woken_as_the_service_stops_sends_its_output_and_ends() -> None:
    front, context = QuietFront(), Context()
    live = LiveRequest(EngineRequest(RequestSpec("r", (5,), SequenceSampling())), 1)
    stream = GenerationServicer(front)._stream(  # type: ignore[arg-type]
        RequestReader(live), request_fields(pb.GenerateRequest(request_id="r")), context
    )
    task = asyncio.create_task(stream)
    await asyncio.sleep(0)
    live.samples[0].extend((7,))
    live.notify()
    assert front.wakes[0].is_set(), "its turn has come; it runs next"
    front.stop()
    with pytest.raises(NotServingError):
        await asyncio.wait_for(task, 1.0)
    assert [list(message.outputs[0].token_ids) for message in context.messages] == [[7]]


async def test_the_next_step_does_not_wait_for_all_streams() -> None:
    front, contexts, tasks = QuietFront(), [], []
    lives = [LiveRequest(EngineRequest(RequestSpec(f"{index}", (5,), SequenceSampling())), 1) for index in range(40)]
    for live in lives:
        contexts.append(Context())
        stream = GenerationServicer(front)._stream(  # type: ignore[arg-type]
            RequestReader(live), request_fields(pb.GenerateRequest(request_id=live.request_id)), contexts[-1]
        )
        tasks.append(asyncio.create_task(stream))
    await asyncio.sleep(0)
    most, num_steps, before = 0, 0, 0

    def step(finish: Finish | None = None) -> None:
        nonlocal num_steps
        num_steps += 1
        for live in lives:
            live.samples[0].extend((num_steps,), finish=finish)
            live.notify()

    Context.num_written = 0
    while num_steps < 6:
        # The results of steps come sooner than 40 streams can have had a turn.
        step()
        for _ in range(5):
            before = Context.num_written
            await asyncio.sleep(0)
            most = max(most, Context.num_written - before)
    step(Finish(FinishDetail.MAX_TOKENS))
    await asyncio.gather(*tasks)
    assert most == AT_ONCE
    for context in contexts:
        tokens = [token for message in context.messages for output in message.outputs for token in output.token_ids]
        assert tokens == list(range(1, 8))
        assert len(context.messages) < 7, "tokens of several steps share a message"
        assert context.messages[-1].HasField("stats")
