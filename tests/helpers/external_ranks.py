"""The ranks of a replica as processes that a test starts, as torchrun or a group of pods does."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tests.helpers.service_process import ServiceProcess

PORT = 50053
_READY_S = 60


@dataclass
class ExternalRanks:
    """What each rank is started with; the first serves at `listen`."""

    model: str
    master: str
    listen: str
    options: Sequence[str] = ()
    size: int = 2
    prefixes: Sequence[Sequence[str]] = ()
    """Of each rank's command: where it runs."""
    running: list[ServiceProcess] = field(default_factory=list)

    async def start_rank(self, rank: int, *options: str, **changes: str) -> ServiceProcess:
        """Start one rank, with other options and variables where given."""
        own = {name: value for name, value in os.environ.items() if not name.startswith("CADENZA_")}
        place = {"RANK": rank, "WORLD_SIZE": self.size, "MASTER_ADDR": self.master, "MASTER_PORT": PORT - 1}
        variables: Mapping[str, str] = {**own, **{name: str(value) for name, value in place.items()}, **changes}
        prefix = self.prefixes[rank] if self.prefixes else ()
        command = [*prefix, sys.executable, "-m", "executor_svc", "--distributed-executor-backend", "external"]
        sizes = ("--tensor-parallel-size", str(self.size), "--device", "cpu", "--num-threads", "1")
        process = await asyncio.create_subprocess_exec(
            *command, "--model", self.model, "--listen", self.listen, *sizes, *self.options, *options,
            stdout=PIPE, stderr=PIPE, env=variables,
        )  # fmt: skip
        return ServiceProcess(process, self.listen)

    async def start(self) -> None:
        """Start all; returns once the first serves."""
        self.running = [await self.start_rank(rank) for rank in range(self.size)]
        output = self.running[0].process.stdout
        assert output is not None
        async with asyncio.timeout(_READY_S):
            line = (await output.readline()).decode()
        if not line.startswith("ready "):
            await self.end()
            raise AssertionError([each.lines for each in self.running])
        for each in self.running:
            each.address = line.split()[1]

    async def ended(self, within_s: float) -> tuple[float, list[int | None]]:
        """Wait until all have ended by themselves; returns how long that took, and the exit codes."""
        began = time.monotonic()
        async with asyncio.timeout(within_s):
            await asyncio.gather(*(each.process.wait() for each in self.running))
        took = time.monotonic() - began
        await self.end()
        return took, [each.process.returncode for each in self.running]

    def send(self, rank: int, number: signal.Signals) -> None:
        """Signal one rank."""
        self.running[rank].process.send_signal(number)

    async def end(self) -> None:
        """Kill what still runs."""
        await asyncio.gather(*(each.end() for each in self.running))


@asynccontextmanager
async def external_ranks(ranks: ExternalRanks) -> AsyncIterator[ExternalRanks]:
    """Start them; what runs at the end is killed."""
    try:
        await ranks.start()
        yield ranks
    finally:
        await ranks.end()
