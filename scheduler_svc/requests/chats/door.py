"""The door to a child process that renders chats, with bounds on its memory and its time.

One that takes too long, or dies of a template, is ended and replaced for the next chat; the event loop only waits.
"""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from scheduler_svc.requests.answering_child import AnsweringChild, ChildDiedError
from scheduler_svc.requests.chats.fields import ChatBoundsError, ChatJob, read_answer

_T = TypeVar("_T")
START_S = 30.0
"""Longest time in which a child loads Jinja."""
MAX_CHILD_BYTES = 2**30
"""Of a child's memory."""
_MODULE = "scheduler_svc.requests.chats.child"
_KEPT_VARIABLES = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ")
"""A template that leaves its sandbox finds no tokens in the environment."""
_TRIES = 2
"""A child that dies may have been killed by something else: a fresh one tries again."""


class RenderDoor:
    """One child, started by the first chat, and the chats that wait for it in their order."""

    def __init__(self, render_s: float, *, max_bytes: int = MAX_CHILD_BYTES) -> None:
        """render_s: the longest time for one chat."""
        self.child: AnsweringChild | None = None
        self._render_s = render_s
        self._max_bytes = max_bytes
        self._is_closed = False
        self._turn = asyncio.Lock()

    async def render(self, job: ChatJob) -> str:
        """Return a chat as text; raises ChatError."""
        # If the call is cancelled meanwhile, this goes on, so that the child's answers stay in order.
        return await asyncio.shield(asyncio.ensure_future(self._render(job)))

    def close(self) -> None:
        """End the child once the chats that wait are rendered, without waiting for that."""
        self._is_closed = True
        if not self._turn.locked():
            self._end()

    async def _render(self, job: ChatJob) -> str:
        content = pickle.dumps(job, pickle.HIGHEST_PROTOCOL)
        async with self._turn:
            try:
                return await self._asked(job, content)
            except asyncio.CancelledError:  # the loop ends, and the answer is left in the pipe
                self._end()
                raise
            finally:
                if self._is_closed:
                    self._end()

    async def _asked(self, job: ChatJob, content: bytes) -> str:
        loop = asyncio.get_running_loop()
        for _ in range(_TRIES):
            try:
                if self.child is None:
                    await loop.run_in_executor(None, self._start)
                    await self._child().answer(START_S)
                return read_answer(await self._child().ask(content, self._render_s))
            except TimeoutError:
                await loop.run_in_executor(None, self._end)
                raise ChatBoundsError(job.field, f"the chat takes over {self._render_s:g} s to render") from None
            except (ChildDiedError, ValueError, RecursionError):  # it has ended, or it answers nonsense
                await loop.run_in_executor(None, self._end)
        mib = self._max_bytes // 2**20
        raise ChatBoundsError(job.field, f"the chat cannot be rendered in {mib} MiB of memory")

    def _start(self) -> None:
        environment = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        self.child = AnsweringChild(_MODULE, [str(self._max_bytes)], environment)

    def _child(self) -> AnsweringChild:
        if self.child is None:
            raise ChildDiedError  # ended meanwhile, as the service is
        return self.child

    def _end(self) -> None:
        child, self.child = self.child, None
        if child is not None:
            child.end()


def finished(work: Coroutine[Any, Any, _T]) -> _T:
    """Return what a coroutine does, on an event loop of its own: its caller blocks."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()
