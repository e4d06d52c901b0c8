"""A request's first token goes to its client before the next tokens of streams that go on."""

from __future__ import annotations

import asyncio
from typing import Any

from cadenza.calls.output_collector import OutputCollector
from cadenza.prompts import Prompt
from cadenza.v1 import generation_pb2 as pb
from gateway_svc.scheduler.inbox import Inbox
from gateway_svc.scheduler.session import GatewaySession, PromptRun


class _Call:
    """A stream that brings these messages, and then nothing more."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[pb.SessionResponse] = asyncio.Queue()

    async def read(self) -> pb.SessionResponse:
        return await self.messages.get()

    async def write(self, message: pb.SessionRequest) -> None:
        pass

    def cancel(self) -> None:
        pass


def _token(request_id: str, index: int) -> pb.SessionEvent:
    output = pb.SampleOutput(first_token_index=index, token_ids=[7])
    return pb.SessionEvent(request_id=request_id, response=pb.GenerateResponse(request_id=request_id, outputs=[output]))


def _live(request_id: str) -> PromptRun:
    request = pb.GenerateRequest(request_id=request_id)
    return PromptRun(request, OutputCollector(request_id, Prompt(token_ids=[1])), Inbox(1), 0, is_streamed=True)


async def test_a_first_token_is_taken_before_those_of_streams_that_go_on() -> None:
    call, taken = _Call(), list[str]()
    stub: Any = type("Stub", (), {"Session": lambda _: call})()
    session = GatewaySession(
        stub, "target", 1.0, was_reached=lambda: True, on_response=lambda: None, on_loss=lambda: None
    )
    old, new = _live("old"), _live("new")
    session.start(old)
    session.start(new)

    async def take(live: PromptRun) -> None:
        assert await live.inbox.take() is not None
        taken.append(live.request.request_id)

    call.messages.put_nowait(pb.SessionResponse(events=[_token("old", 0)]))
    await take(old)
    taken.clear()
    waiting = [asyncio.create_task(take(old)), asyncio.create_task(take(new))]
    call.messages.put_nowait(pb.SessionResponse(events=[_token("old", 1), _token("new", 0)]))
    await asyncio.gather(*waiting)
    await session.close()
    assert taken == ["new", "old"]
