"""One watch of the scheduler's steps for all open pages: opened with the first page, closed with the last."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

from cadenza.errors import CadenzaError, PermissionDeniedError, UnauthenticatedError, UnsupportedError
from gateway_svc.http.sending import data_event
from gateway_svc.page.board import Board
from gateway_svc.scheduler.watching import Watching

_LOG = logging.getLogger(__name__)
FRAME_S = 0.2
"""Least time between two frames."""
LOOK_S = 1.0
"""Time between two looks at the server's state, each of which is an event: an open page hears from us so often."""
MAX_EVENTS = 32
"""Events that wait for a page; one that takes nothing for so many is closed, and opens again with a snapshot."""
MAX_PAGES = 64
_AGAIN_S = 1.0
_RECORDS_AT_ONCE = 8
"""Records that are taken before other tasks run: under 2 ms at 1,024 sequences."""


class OpenPage:
    """One open page: its events, encoded once for all pages."""

    def __init__(self, *, has_right: bool) -> None:
        self.has_right = has_right
        """Whether it has shown a token: one without is closed when the scheduler may have become another."""
        self._events: deque[bytes] = deque()
        self._wake = asyncio.Event()
        self.is_closed = False

    def put(self, event: bytes) -> None:
        """Add an event, or close a page that does not read."""
        if len(self._events) >= MAX_EVENTS:
            self._events.clear()
            self.close()
        if self.is_closed:
            return
        self._events.append(event)
        self._wake.set()

    def close(self) -> None:
        """Let its stream end, after what has come."""
        self.is_closed = True
        self._wake.set()

    async def take(self) -> bytes:
        """What has come, as soon as there is something; empty: the stream is to end."""
        await self._wake.wait()
        events = b"".join(self._events)
        self._events.clear()
        if not self.is_closed:
            self._wake.clear()
        return events


class Feed:
    """Follows the scheduler while there are views."""

    def __init__(self, watching: Watching) -> None:
        """watching: with the right of an admin where the scheduler has tenants."""
        self.watching = watching
        self._views: set[OpenPage] = set()
        self._task: asyncio.Task[None] | None = None
        self.board = Board()
        self.is_watching = False
        """Whether records come."""

    @property
    def num_views(self) -> int:
        """Open pages."""
        return len(self._views)

    @asynccontextmanager
    async def view(self, *, has_right: bool) -> AsyncIterator[OpenPage]:
        """An open page; the first event is a snapshot."""
        view = OpenPage(has_right=has_right)
        view.put(data_event(self.board.snapshot()))
        self._views.add(view)
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="page-feed")
        try:
            yield view
        finally:
            self._views.discard(view)
            if not self._views:
                await self.close()

    def end_views(self) -> None:
        """Let all pages' streams end, as when the gateway stops."""
        for view in self._views:
            view.close()

    async def close(self) -> None:
        """End the watch, and forget what it has brought."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if self._task is None:
                self.board = self.board.emptied()

    # -----------------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            try:
                await self._follow()
                reason = "the scheduler has ended the watch of its steps"
            except (UnauthenticatedError, PermissionDeniedError, UnsupportedError) as error:
                self._send({"type": "denied", "message": error.message})
                await asyncio.sleep(_AGAIN_S)
                continue
            except CadenzaError as error:
                reason = error.message
            except Exception as error:
                _LOG.exception("the live page's watch failed")
                reason = type(error).__name__
            self.board = self.board.emptied()
            self._send({"type": "away", "message": reason})
            for view in [each for each in self._views if not each.has_right]:
                view.close()  # the next scheduler may have tenants
            await asyncio.sleep(_AGAIN_S)

    async def _follow(self) -> None:
        """Follow one scheduler until its watch ends; raises CadenzaError."""
        self.board.look(await self.watching.server_info())  # how pools are divided, before the first record
        begun = asyncio.Event()
        tasks = [
            asyncio.create_task(self._take_records(begun), name="page-records"),
            asyncio.create_task(self._look_often(begun), name="page-state"),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self.is_watching = False
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _take_records(self, begun: asyncio.Event) -> None:
        async with aclosing(self.watching.steps()) as responses:
            async for response in responses:
                begun.set()  # by the first message, which has no records
                self.is_watching = True
                self.board.lose(response.num_dropped)
                for number, record in enumerate(response.records, start=1):
                    self.board.add(record)
                    if number % _RECORDS_AT_ONCE == 0:
                        await asyncio.sleep(0)

    async def _look_often(self, begun: asyncio.Event) -> None:
        """Send a frame if there is something new, and the server's state now and then."""
        await begun.wait()
        self._send(self.board.snapshot())
        looked_at = 0.0
        while True:
            if time.monotonic() - looked_at >= LOOK_S:
                looked_at = time.monotonic()
                self._send(self.board.look(await self.watching.server_info()))
            if (frame := self.board.take()) is not None:
                self._send(frame)
            await asyncio.sleep(FRAME_S)

    def _send(self, event: dict[str, Any]) -> None:
        encoded = data_event(event)
        for view in self._views:
            view.put(encoded)
