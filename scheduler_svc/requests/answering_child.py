"""A child process that answers questions, one at a time, as a thread of this process talks to it.

Both are bytes behind their length in 4 bytes, on its stdin and its stdout.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

_MAX_ANSWER_BYTES = 64 * 1024 * 1024


class ChildDiedError(Exception):
    """The child has ended, for want of memory as a rule."""


class AnsweringChild:
    """One child; its methods block, for `timeout_s` at most, and raise TimeoutError then."""

    def __init__(self, module: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """Start `python -m module`, in this process's environment unless another one is given."""
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

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def answer(self, timeout_s: float) -> str:
        """Wait for an answer to no question, such as its first. Raises ChildDiedError."""
        return self._answer(time.monotonic() + timeout_s)

    def ask(self, content: bytes, timeout_s: float) -> str:
        """Send a question, and return the answer. Raises ChildDiedError."""
        deadline = time.monotonic() + timeout_s
        self._send(len(content).to_bytes(4, "little") + content, deadline)
        return self._answer(deadline)

    def end(self) -> None:
        """Kill it, and wait for its end."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _send(self, content: bytes, deadline: float) -> None:
        left = memoryview(content)
        while left:
            _wait(self._in, select.POLLOUT, deadline)
            try:
                left = left[os.write(self._in, left) :]
            except BrokenPipeError as error:
                raise ChildDiedError from error

    def _answer(self, deadline: float) -> str:
        length = int.from_bytes(self._read(4, deadline), "little")
        if length > _MAX_ANSWER_BYTES:
            raise ChildDiedError
        try:
            return self._read(length, deadline).decode()
        except UnicodeDecodeError as error:
            raise ChildDiedError from error

    def _read(self, count: int, deadline: float) -> bytes:
        parts: list[bytes] = []
        while count:
            _wait(self._out, select.POLLIN, deadline)
            part = os.read(self._out, count)
            if not part:
                raise ChildDiedError
            parts.append(part)
            count -= len(part)
        return b"".join(parts)


def _wait(descriptor: int, event: int, deadline: float) -> None:
    """Wait until a pipe can be read or written, or its other end is closed; raises TimeoutError.

    poll, as select takes no descriptors over 1,023, and each connection of the process has one.
    """
    poll = select.poll()
    poll.register(descriptor, event)
    if not poll.poll(1000 * max(0.0, deadline - time.monotonic())):
        raise TimeoutError
