"""The door to a child process that renders chats, with bounds on its memory and its time.

One that takes too long, or dies of a template, is ended and replaced for the next chat; the event loop only waits: a
thread talks to the child.
"""

from __future__ import annotations

import asyncio
import os
import pickle
from concurrent.futures import ThreadPoolExecutor

from scheduler_svc.requests.answering_child import AnsweringChild, ChildDiedError
from scheduler_svc.requests.chats.fields import ChatError, ChatJob, read_answer

START_S = 30.0
"""Longest time in which a child loads Jinja."""
MAX_CHILD_BYTES = 2**30
"""Of a child's memory."""
_MODULE = "scheduler_svc.requests.chats.child"
_KEPT_VARIABLES = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ")
"""A template that leaves its sandbox finds no tokens in the environment."""


class RenderDoor:
    """One child, started by the first chat, and the thread that talks to it."""

    def __init__(self, render_s: float, *, max_bytes: int = MAX_CHILD_BYTES) -> None:
        """render_s: the longest time for one chat."""
        self.child: AnsweringChild | None = None
        self._render_s = render_s
        self._max_bytes = max_bytes
        self._is_used = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="chat door")

    async def render(self, job: ChatJob) -> str:
        """Return a chat as text; raises ChatError."""
        self._is_used = True
        # If the call is cancelled meanwhile, the thread goes on, so that the child's answers stay in order.
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._render, job)

    def close(self) -> None:
        """End the child once the chats that wait are rendered, without waiting for that."""
        if self._is_used:
            self._is_used = False
            self._thread.submit(self._end)
        self._thread.shutdown(wait=False)

    # ------------------------------------------------------------ on the thread

    def _render(self, job: ChatJob) -> str:
        """Return a chat as text. A child that dies may have been killed by something else: a fresh one tries again."""
        content = pickle.dumps(job, pickle.HIGHEST_PROTOCOL)
        for _ in range(2):
            try:
                if self.child is None:
                    self._start()
                assert self.child is not None
                return read_answer(self.child.ask(content, self._render_s))
            except TimeoutError:
                self._end()
                raise ChatError(job.field, f"the chat takes over {self._render_s:g} s to render") from None
            except (ChildDiedError, ValueError, RecursionError):  # it has ended, or it answers nonsense
                self._end()
        mib = self._max_bytes // 2**20
        raise ChatError(job.field, f"the chat cannot be rendered in {mib} MiB of memory")

    def _start(self) -> None:
        """Start a child; raises TimeoutError, ChildDiedError."""
        environment = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        self.child = AnsweringChild(_MODULE, [str(self._max_bytes)], environment)
        self.child.answer(START_S)

    def _end(self) -> None:
        child, self.child = self.child, None
        if child is not None:
            child.end()
