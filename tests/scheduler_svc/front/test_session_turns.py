"""The requests of a session take turns in its messages: a large backlog of one delays no other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cadenza.v1 import generation_pb2 as pb
from cadenza.v1 import types_pb2
from cadenza_common.plan.result import LogprobColumns
from cadenza_common.plan.sampling import SequenceSampling
from scheduler_svc.convert.generation import request_fields
from scheduler_svc.core.errors import RequestRejectedError
from scheduler_svc.core.types import Finish, FinishDetail, RequestSpec
from scheduler_svc.engine.live_request import LiveRequest
from scheduler_svc.engine.reader import MAX_CHUNK_BYTES, RequestReader
from scheduler_svc.front.session import SessionStream, _Entry
from scheduler_svc.plan_loop.ports import EngineRequest

NUM_PROMPT_TOKENS = 20_000
NUM_TOP = 20


class Quiet:
    """The parts of a Front that a session calls here."""

    def __init__(self) -> None:
        self.engine = self

    def detach(self, *_: object, handed_over: bool) -> None:
        """Nothing runs."""

    def caller_span(self, _: object) -> None:
        """Nothing is traced."""

    def log_refused(self, *_: object) -> None:
        """Nothing is logged."""


def session() -> SessionStream:
    return SessionStream(Quiet(), None, None)  # type: ignore[arg-type]


def add(opened: SessionStream, request_id: str, *, prompt_logprobs: int = 0) -> LiveRequest:
    """A request with one output token, and with the logprobs of so many prompt tokens, in the session."""
    num_top = NUM_TOP if prompt_logprobs else None
    spec = RequestSpec(request_id, (5,) * (prompt_logprobs + 1), SequenceSampling(num_prompt_logprobs=num_top))
    live = LiveRequest(EngineRequest(spec), 1)
    if live.prompt_logprobs is not None:
        count = prompt_logprobs
        rows = LogprobColumns(1, [-0.5] * count, [1] * count, NUM_TOP, [7] * NUM_TOP * count, [-1.0] * NUM_TOP * count)
        live.prompt_logprobs.extend(rows)
    live.samples[0].extend((9,))
    part = types_pb2.PromptPart(tokens=types_pb2.TokenIds(ids=[5]))
    entry = _Entry(opened, request_fields(pb.GenerateRequest(request_id=request_id, prompt=[part])))
    entry.reader = RequestReader(live)
    live.subscribe(entry)
    opened._entries[request_id] = entry
    opened.mark(entry)
    return live


async def next_message(opened: SessionStream) -> pb.SessionResponse | None:
    raw = await opened._collect()
    return None if raw is None else pb.SessionResponse.FromString(raw)


async def messages_of(opened: SessionStream) -> list[pb.SessionResponse]:
    messages: list[pb.SessionResponse] = []
    while (message := await next_message(opened)) is not None:
        messages.append(message)
    return messages


def ids_of(message: pb.SessionResponse) -> list[str]:
    return [event.request_id for event in message.events]


async def test_a_backlog_of_prompt_logprobs_delays_no_other_request() -> None:
    opened = session()
    add(opened, "large", prompt_logprobs=NUM_PROMPT_TOKENS)
    for index in range(50):
        add(opened, str(index))
    first = await next_message(opened)
    assert first is not None
    assert set(ids_of(first)) == {"large", *map(str, range(50))}
    # An output that comes while the backlog is being sent is in the next message.
    add(opened, "late")
    second = await next_message(opened)
    assert second is not None
    assert set(ids_of(second)) == {"late", "large"}


async def test_messages_are_as_large_as_for_the_backlog_alone() -> None:
    alone, shared = session(), session()
    for opened in (alone, shared):
        add(opened, "large", prompt_logprobs=NUM_PROMPT_TOKENS)
    for index in range(50):
        add(shared, str(index))
    expected, found = await messages_of(alone), await messages_of(shared)
    assert len(found) == len(expected) > 5
    assert max(message.ByteSize() for message in found) < 1.1 * MAX_CHUNK_BYTES


async def test_the_order_within_a_request_stays() -> None:
    opened = session()
    for name in ("a", "b"):
        live = add(opened, name, prompt_logprobs=NUM_PROMPT_TOKENS)
        live.samples[0].extend((10,), finish=Finish(FinishDetail.MAX_TOKENS))
    messages = await messages_of(opened)
    assert {name for message in messages[:2] for name in ids_of(message)} == {"a", "b"}
    for name in ("a", "b"):
        events = [event for message in messages for event in message.events if event.request_id == name]
        starts = [event.response.prompt_logprobs_start for event in events if event.response.prompt_logprobs.num_top]
        sizes = [len(event.response.prompt_logprobs.chosen_logprobs) for event in events]
        assert starts[0] == 1
        assert starts[1:] == [start + size for start, size in zip(starts, sizes, strict=False)][: len(starts) - 1]
        assert sum(sizes) == NUM_PROMPT_TOKENS
        assert [event.done for event in events] == [False] * (len(events) - 1) + [True]
        assert list(events[-1].response.outputs[0].token_ids) == [9, 10]


async def test_large_backlogs_share_a_message_alike() -> None:
    opened = session()
    for name in "abcd":
        add(opened, name, prompt_logprobs=NUM_PROMPT_TOKENS)
    sizes: dict[str, int] = {}
    for message in (await next_message(opened), await next_message(opened)):
        assert message is not None
        for event in message.events:
            sizes[event.request_id] = sizes.get(event.request_id, 0) + event.ByteSize()
    assert sizes.keys() == set("abcd")
    assert max(sizes.values()) < 1.5 * min(sizes.values())


async def test_errors_leave_room_for_outputs() -> None:
    opened: Any = session()
    for index in range(900):
        opened._report(f"{index}" + "x" * 4000, RequestRejectedError("prompt", "is empty"), done=True)
    add(opened, "served")
    assert "served" in ids_of(await next_message(opened))


async def test_the_event_loop_runs_other_tasks_while_a_large_message_is_made() -> None:
    opened = session()
    add(opened, "large", prompt_logprobs=NUM_PROMPT_TOKENS)
    num_pauses = 0

    async def count_pauses() -> None:
        nonlocal num_pauses
        while True:
            await asyncio.sleep(0)
            num_pauses += 1

    other = asyncio.create_task(count_pauses())
    message = await next_message(opened)
    other.cancel()
    assert message is not None
    assert len(message.events) >= 16
    assert num_pauses >= 14, "one after each full turn"


async def test_other_tasks_run_between_the_first_outputs_of_many_requests() -> None:
    """Each of them takes 40 us, though it has but some bytes."""
    opened = session()
    for index in range(256):
        add(opened, str(index))
    collecting = asyncio.ensure_future(next_message(opened))
    num_pauses = 0
    while not collecting.done():
        await asyncio.sleep(0)
        num_pauses += 1
    assert len(ids_of(collecting.result() or pb.SessionResponse())) == 256
    assert num_pauses >= 4


async def test_a_session_reads_no_further_while_a_thousand_outputs_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else requests would pile up for a client that sends and never reads."""
    opened, num_read = session(), 0

    async def requests() -> AsyncIterator[Any]:
        nonlocal num_read
        while num_read < 2500:
            num_read += 1
            yield str(num_read)

    async def no_long_fields(_: object) -> None:
        """No request is long."""

    monkeypatch.setattr(opened, "_long_fields", no_long_fields)
    monkeypatch.setattr(opened, "_handle", lambda name, _: add(opened, name))
    reading = asyncio.create_task(opened._read(requests()))
    for _ in range(5):
        await asyncio.sleep(0)
    assert 0 < num_read < 1000, "other tasks run meanwhile"
    for _ in range(50):
        await asyncio.sleep(0)
    assert num_read == len(opened._outputs) == 1001
    while not opened._input_over:
        assert await messages_of(opened)
        await asyncio.sleep(0)
    await reading
    assert num_read == 2500
