"""Watches a server's steps by AdminService.WatchSteps, for the demo's picture and `cadenza top`, and counts tokens."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from cadenza.async_client import AsyncClient
from cadenza.errors import InternalError, from_rpc_error
from cadenza.v1 import admin_pb2
from cadenza.v1.admin_pb2_grpc import AdminServiceStub


@dataclass(slots=True)
class StepWatch:
    """The step records since the watch began."""

    records: list[admin_pb2.StepRecord] = field(default_factory=list)
    num_dropped: int = 0  # records that the server lost to this watch
    num_left: int = 0  # sequences that have ended
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _ended: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, response: admin_pb2.WatchStepsResponse) -> None:
        """Add the records of a message."""
        self.records.extend(response.records)
        self.num_left += sum(len(record.left) for record in response.records)
        self.num_dropped = response.num_dropped
        self._changed.set()

    def take(self) -> list[admin_pb2.StepRecord]:
        """Remove and return the records since the last call."""
        records, self.records = self.records, []
        return records

    def end(self) -> None:
        """Mark the watch as ended."""
        self._ended.set()

    async def wait_end(self, timeout_s: float) -> bool:
        """Wait until the watch has ended, at most `timeout_s` seconds; returns whether it has."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()
        return self._ended.is_set()

    async def wait_left(self, count: int, timeout_s: float) -> None:
        """Wait until `count` sequences have left, at most `timeout_s` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.num_left < count:
                    self._changed.clear()
                    await self._changed.wait()


@contextlib.asynccontextmanager
async def watch_steps(client: AsyncClient) -> AsyncIterator[StepWatch]:
    """A watch that is established before the body begins: the server confirms it by its first message.

    Raises CadenzaError if it cannot be established, or if it broke while the body ran.
    """
    watch = StepWatch()
    stub: Any = client.stub_of(AdminServiceStub)
    call = stub.WatchSteps(admin_pb2.WatchStepsRequest())
    reader: asyncio.Task[None] | None = None
    try:
        first = await call.read()
        if first is grpc.aio.EOF:
            raise InternalError(f"{client.target} ended the watch of steps at once")
        watch.add(first)
        reader = asyncio.create_task(_read(call, watch))
        yield watch
        if reader.done():
            reader.result()
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error, client.target) from None
    finally:
        # An abandoned aio call is never collected and its handler runs on (grpc#43462).
        call.cancel()
        if reader is not None:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)


async def _read(call: Any, watch: StepWatch) -> None:
    try:
        while (response := await call.read()) is not grpc.aio.EOF:
            watch.add(response)
    finally:
        watch.end()


class PromptCounter:
    """Separates the prompt tokens that steps compute from output tokens."""

    def __init__(self) -> None:
        self._lengths: dict[int, int] = {}  # by sequence id

    def count(self, record: admin_pb2.StepRecord) -> tuple[int, list[int]]:
        """Prompt tokens of this step, including recomputed tokens, and the tokens of each sequence that got some
        without computing any.

        For a sequence that joined before the watch, a chunk of one token counts as output.
        """
        lengths = self._lengths
        lengths.update((join.sequence_id, join.num_prompt_tokens) for join in record.joined)
        columns = zip(record.sequence_ids, record.num_tokens, record.context_lens, record.num_sampled, strict=True)
        num_prompt_tokens, decoded = 0, []
        for sequence, num_tokens, context_len, num_sampled in columns:
            if num_tokens > 1 or context_len < lengths.get(sequence, 0):
                num_prompt_tokens += num_tokens
            elif num_tokens and num_sampled:
                decoded.append(num_sampled)
        for leave in record.left:
            lengths.pop(leave.sequence_id, None)
        return num_prompt_tokens, decoded
