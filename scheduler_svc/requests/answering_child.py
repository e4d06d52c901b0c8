"""A child process that answers questions, one at a time, while the event loop of this process goes on.

Both are bytes behind their length in 4 bytes, on its stdin and its stdout.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

_MAX_ANSWER_BYTES = 64 * 1024 * 1024


class ChildDiedError(Exception):
    """The child has ended, for want of memory as a rule."""


class AnsweringChild:
    """One child. Questions wait for `timeout_s` at most, and raise TimeoutError then."""

    def __init__(self, module: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """Start `python -m module`, in this process's environment unless another one is given; for a thread."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._in, False)
        os.set_blocking(self._out, False)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    async def answer(self, timeout_s: float) -> str:
        """Wait for an answer to no question, such as its first. Raises ChildDiedError."""
        async with asyncio.timeout(timeout_s):
            return await self._answer()

    async def ask(self, content: bytes, timeout_s: float) -> str:
        """Send a question, and return the answer. Raises ChildDiedError."""
        async with asyncio.timeout(timeout_s):
            await self._send(len(content).to_bytes(4, "little") + content)
            return await self._answer()

    def end(self) -> None:
        """Kill it, and wait for its end, some ms."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def __del__(self) -> None:
        """End it if nobody has: its tokenizer was dropped before it was used."""
        if hasattr(self, "_process"):
            self.end()

    async def _send(self, content: bytes) -> None:
        loop, left = asyncio.get_running_loop(), memoryview(content)
        while left:
            try:
                left = left[os.write(self._in, left) :]
            except BlockingIOError:
                await _ready(loop.add_writer, loop.remove_writer, self._in)
            except BrokenPipeError as error:
                raise ChildDiedError from error

    async def _answer(self) -> str:
        length = int.from_bytes(await self._read(4), "little")
        if length > _MAX_ANSWER_BYTES:
            raise ChildDiedError
        try:
            return (await self._read(length)).decode()
        except UnicodeDecodeError as error:
            raise ChildDiedError from error

    async def _read(self, count: int) -> bytes:
        loop, parts = asyncio.get_running_loop(), list[bytes]()
        while count:
            try:
                part = os.read(self._out, count)
            except BlockingIOError:
                await _ready(loop.add_reader, loop.remove_reader, self._out)
                continue
            if not part:
                raise ChildDiedError
            parts.append(part)
            count -= len(part)
        return b"".join(parts)


async def _ready(add: Callable[..., object], remove: Callable[[int], object], descriptor: int) -> None:
    """Wait until a pipe can be read or written, or its other end is closed."""
    ready = asyncio.get_running_loop().create_future()
    add(descriptor, lambda: None if ready.done() else ready.set_result(None))
    try:
        await ready
    finally:
        remove(descriptor)
