"""Long bodies: how many bytes of them are held at once, and the process that reads them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from gateway_svc.http.bodies.result import MAX_CPU_S, Result
from gateway_svc.http.bodies.shares import Shares
from gateway_svc.http.errors import ApiError

T = TypeVar("T")

SHORT_BYTES = 64 * 1024
"""Of a body that is read on the loop, if it has few values too."""
_SHORT_VALUES = 4096
"""1 to 3 us each: the marks of JSON's lists and objects are counted, those in texts too."""
_MARKS = (b",", b":", b"{", b"[")
_ROOM_OF_BODIES = 16
"""Bodies of the largest size that are held at once: one caller has as many as are free."""
_BYTES_PER_BYTE = 32
"""Of memory: `[],` is a list of 72 bytes."""
_BYTES_OF_ALL = 512 * 2**20
_PART_BYTES = 2**18
_TRIES = 2
_LOG = logging.getLogger(__name__)


def is_cheap(raw: bytes | bytearray) -> bool:
    """Whether a body's reading holds the loop for 5 ms at most."""
    return len(raw) <= SHORT_BYTES and sum(map(raw.count, _MARKS)) <= _SHORT_VALUES


class LongBodies:
    """Reads long bodies in processes of their own; for use on one event loop."""

    def __init__(self, max_body_bytes: int) -> None:
        """Start nothing yet: the first body does, or `start`."""
        self._max_bytes = _BYTES_OF_ALL + _BYTES_PER_BYTE * max_body_bytes
        self.room = Shares(max(_ROOM_OF_BODIES * max_body_bytes, 2 * SHORT_BYTES), "long bodies")
        """In bytes of bodies, from before they are received until they are read."""
        self.readings = Shares(max(2, min(8, (os.cpu_count() or 1) // 2)), "long bodies")
        """In processes at once."""
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._starting: asyncio.Task[None] | None = None
        self._running: set[asyncio.Task[Any]] = set()

    async def read(self, who: str, read: Callable[[bytes], T], raw: bytes | bytearray) -> T:
        """What `read` makes of a body; a function that pickle knows by its name. Raises ApiError, and what it raises.

        If the caller goes meanwhile, its share stays taken until the process has ended.
        """
        task = asyncio.create_task(self._read(who, read, raw), name="long-body")
        self._running.add(task)
        task.add_done_callback(self._ended)
        try:
            return await asyncio.shield(task)
        finally:
            del task, raw  # an error's traceback has this frame, and would keep them until a garbage collection

    async def start(self) -> None:
        """Start the process that forks."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start(), name="body-forker")
        await asyncio.shield(self._starting)

    async def _start(self) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.to_thread(_process, theirs, self._max_bytes)

    async def close(self) -> None:
        """End it, and what it reads."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await self._end()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # the caller may have gone

    async def _read(self, who: str, read: Callable[[bytes], T], raw: bytes | bytearray) -> T:
        async with self.readings.taken(who, 1):
            for _ in range(_TRIES):
                answer = await self._exchange(pickle.dumps(read), raw)
                if answer is not None:
                    break
                await self._end()  # the next try has a new one
            result = pickle.loads(answer) if answer else None
        if not isinstance(result, Result):
            limits = f"{self._max_bytes // 2**20} MiB of memory and {MAX_CPU_S} s"
            raise ApiError(413, f"the body cannot be read within {limits}")
        if result.error is not None:
            status, message, param, code = result.error
            raise ApiError(status, message, param=param, code=code)
        if result.bug:
            raise RuntimeError(result.bug)
        value: T = result.value
        return value

    async def _exchange(self, function: bytes, raw: bytes | bytearray) -> bytes | None:
        """The answer to a body, empty if its process has died; None: there is nobody to fork one."""
        await self.start()
        assert self._control is not None
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with ours:
            ours.setblocking(False)
            with theirs:
                try:
                    socket.send_fds(self._control, [b"."], [theirs.fileno()])
                except OSError:
                    return None
            answer = bytearray()
            with contextlib.suppress(OSError):
                await loop.sock_sendall(ours, len(function).to_bytes(4, "little") + function)
                await loop.sock_sendall(ours, raw)
                ours.shutdown(socket.SHUT_WR)
                while part := await loop.sock_recv(ours, _PART_BYTES):
                    answer += part
            return bytes(answer)

    async def _end(self) -> None:
        starting, self._starting = self._starting, None
        if starting is not None:
            await asyncio.gather(starting, return_exceptions=True)
        control, process = self._control, self._process
        self._control = self._process = None
        if control is not None:
            control.close()
        if process is not None:
            process.kill()
            await asyncio.to_thread(process.wait)


def _process(control: socket.socket, max_bytes: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "gateway_svc.body_forker", str(max_bytes)],
        stdin=control.fileno(),
        stdout=subprocess.DEVNULL,
    )
