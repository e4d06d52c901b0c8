"""A child process that compiles constraints, `cadenza.grammar.child`, as a thread of this process talks to it."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time

from cadenza.grammar.table import TableSource

START_S = 60.0
"""Longest time in which a child makes its table."""


class ChildDiedError(Exception):
    """The child has ended, for want of memory as a rule."""


class CompilingChild:
    """One child; its methods block, for `timeout_s` at most, and raise TimeoutError then."""

    def __init__(self, source: TableSource, max_bytes: int) -> None:
        """Start it; `table_error` waits until it is ready."""
        arguments = [str(max_bytes), str(source.path), str(source.vocab_size), *map(str, source.eos_token_ids)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "cadenza.grammar.child", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._in, False)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def table_error(self, timeout_s: float = START_S) -> str:
        """Wait for its table; return why it has none, empty if it has. Raises ChildDiedError."""
        return self._answer(time.monotonic() + timeout_s)

    def ask(self, content: bytes, timeout_s: float) -> str:
        """Send a message, and return the answer. Raises ChildDiedError."""
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
            _, writable, _ = select.select([], [self._in], [], max(0.0, deadline - time.monotonic()))
            if not writable:
                raise TimeoutError
            try:
                left = left[os.write(self._in, left) :]
            except BrokenPipeError as error:
                raise ChildDiedError from error

    def _answer(self, deadline: float) -> str:
        length = int.from_bytes(self._read(4, deadline), "little")
        return self._read(length, deadline).decode()

    def _read(self, count: int, deadline: float) -> bytes:
        content = b""
        while len(content) < count:
            readable, _, _ = select.select([self._out], [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                raise TimeoutError
            part = os.read(self._out, count - len(content))
            if not part:
                raise ChildDiedError
            content += part
        return content
