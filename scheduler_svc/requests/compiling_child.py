"""A child process that compiles constraints, `cadenza_common.grammar.child`, as this event loop talks to it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cadenza_common.grammar.spec import GrammarSpec
from cadenza_common.grammar.table import TableSource

START_S = 60.0
"""Longest time in which a child makes its table."""


class ChildStartError(Exception):
    """The child cannot start; the message says why."""


class CompilingChild:
    """One child; its methods do not wait."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        pipes: tuple[asyncio.ReadTransport, asyncio.WriteTransport],
    ) -> None:
        """Of `start`."""
        self._process, self._reader, (self._answers, self._commands) = process, reader, pipes
        self._task: asyncio.Task[None] | None = None
        self._pids: dict[int, int] = {}
        """Of the process that compiles each constraint."""

    @classmethod
    async def start(cls, source: TableSource, max_bytes: int) -> CompilingChild:
        """Start a child, and wait for its table; raises ChildStartError."""
        loop = asyncio.get_running_loop()
        arguments = [str(max_bytes), str(source.path), str(source.vocab_size), *map(str, source.eos_token_ids)]
        process = await loop.run_in_executor(None, _process, arguments)
        reader = asyncio.StreamReader()
        answers, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), process.stdout)
        commands, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, process.stdin)
        child = cls(process, reader, (answers, commands))
        try:
            async with asyncio.timeout(START_S):
                error = (await child._read())["error"]
        except (TimeoutError, asyncio.IncompleteReadError) as exc:
            error = f"its table of tokens is not made ({type(exc).__name__})"
        except BaseException:
            child.end()
            raise
        if error:
            child.end()
            raise ChildStartError(error)
        return child

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def listen(self, answered: Callable[[int, str | None], None], ended: Callable[[CompilingChild], None]) -> None:
        """Report its answers from now on, as (id, what is wrong; None: its process has died), and its end."""

        async def listen() -> None:
            try:
                while True:
                    answer = await self._read()
                    if "pid" in answer:
                        self._pids[answer["id"]] = answer["pid"]
                    else:
                        self._pids.pop(answer["id"], None)
                        answered(answer["id"], answer.get("error"))
            except asyncio.IncompleteReadError:
                ended(self)

        self._task = asyncio.create_task(listen(), name="grammar-child")

    def compile(self, number: int, spec: GrammarSpec) -> None:
        """Let it compile a constraint, which has this id from now on."""
        self._send({"id": number, "compile": asdict(spec)})

    def cpu_s(self, number: int) -> float:
        """Return the seconds of a processor that a constraint has had: waits are none of its own."""
        try:
            fields = Path(f"/proc/{self._pids[number]}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        except (KeyError, OSError):
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def slow_down(self, number: int) -> None:
        """Let everything else on the machine go before a constraint."""
        self._send({"id": number, "yield": True})

    def drop(self, number: int) -> None:
        """Let it stop compiling a constraint; it answers that the process has died."""
        self._send({"id": number, "drop": True})

    def end(self) -> None:
        """Kill it; what it compiles ends with it, and no end is reported."""
        if self._task is not None:
            self._task.cancel()
        self._process.kill()
        self._answers.close()
        if not self._commands.is_closing():
            self._commands.abort()
        threading.Thread(target=self._process.wait, name="grammar child's end", daemon=True).start()

    def _send(self, command: dict[str, Any]) -> None:
        content = json.dumps(command).encode()
        self._commands.write(len(content).to_bytes(4, "little") + content)

    async def _read(self) -> dict[str, Any]:
        """Return its next answer; raises IncompleteReadError at its end."""
        length = int.from_bytes(await self._reader.readexactly(4), "little")
        answer: dict[str, Any] = json.loads(await self._reader.readexactly(length))
        return answer


def _process(arguments: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "cadenza_common.grammar.child", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
