"""One service as a process of its own, whose log a test can wait for."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping

from tests.helpers.machine.loopback import new_address


class ServiceProcess:
    """A running one; `lines` is its log so far."""

    def __init__(self, process: Process, address: str) -> None:
        self.process = process
        self.address = address
        self.lines: list[str] = []
        self._changed = asyncio.Condition()
        self._reading = asyncio.create_task(self._read())

    async def logged(self, text: str) -> str:
        """The first line of the log with this text, as soon as it is there; 20 s at most."""
        async with asyncio.timeout(20), self._changed:
            await self._changed.wait_for(lambda: any(text in line for line in self.lines))
        return next(line for line in self.lines if text in line)

    async def end(self) -> None:
        """Kill it if it still runs, and read its log to the end."""
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
        await self._reading

    async def _read(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            async with self._changed:
                self.lines.append(line.decode(errors="replace").rstrip())
                self._changed.notify_all()


@contextlib.asynccontextmanager
async def service_process(
    module: str,
    *options: str,
    listen: str | None = None,
    environment: Mapping[str, str] | None = None,
    by: str = "--listen",
) -> AsyncIterator[ServiceProcess]:
    """`python -m module`, with these variables too; yields it once it serves, and kills it at the end.

    listen: by default a free port of an address that no other test has. by: the option that says where it listens.
    """
    listen = listen or f"{new_address()}:0"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, by, listen, *options),
        stdout=PIPE,
        stderr=PIPE,
        env={**os.environ, **(environment or {})},
    )
    running = ServiceProcess(process, "")
    try:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        assert line.startswith("ready "), f"{module} {options}: {line!r} {running.lines}"
        running.address = line.split()[1]
        yield running
    finally:
        await running.end()
