"""`python -m executor_svc --simulate …` as a process that cannot import torch, and says at its end whether it tried."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator

from tests.helpers.machine.loopback import new_address

_WITHOUT_TORCH = """
import atexit, runpy, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "safetensors", "triton"):
            tried.append(name)
            raise ImportError(f"{name} is not for simulation")

tried = []
sys.meta_path.insert(0, Refuse())
atexit.register(lambda: print("imported:", *tried, *({"torch", "safetensors", "triton"} & set(sys.modules))))
runpy.run_module("executor_svc", run_name="__main__", alter_sys=True)
"""


class SimulatedProcess:
    """A running one."""

    def __init__(self, process: asyncio.subprocess.Process, address: str) -> None:
        self.process = process
        self.address = address
        self.exit_reason = ""

    async def kill(self) -> None:
        """As if by the kernel."""
        self.process.kill()
        await self.process.wait()

    async def stop(self) -> None:
        """As an operator does; what it says at its end is then in last_words."""
        if self.process.returncode is None:
            self.process.terminate()
        assert self.process.stdout is not None
        async with asyncio.timeout(20):
            self.exit_reason = (await self.process.stdout.read()).decode()
            await self.process.wait()


@contextlib.asynccontextmanager
async def simulated_process(*options: str, listen: str | None = None) -> AsyncIterator[SimulatedProcess]:
    """Yields it once it serves; at a free port of an address that no other test has, if no other is given."""
    listen = listen or f"{new_address()}:0"
    command = [sys.executable, "-c", _WITHOUT_TORCH, "--listen", listen, *options]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL, env={**os.environ}
    )
    assert process.stdout is not None
    running = SimulatedProcess(process, "")
    try:
        line = (await process.stdout.readline()).decode()
        assert line.startswith("ready "), f"{options}: {line!r}"
        running.address = line.split()[1]
        yield running
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        process._transport.close()  # type: ignore[attr-defined]
