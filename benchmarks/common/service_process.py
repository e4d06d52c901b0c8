"""A service of Cadenza as a process of its own, and the CPU time that it has taken."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator

import psutil

from benchmarks.common.rows import BenchmarkError


@contextlib.asynccontextmanager
async def service_process(module: str, *options: str, listen: str = "--listen") -> AsyncIterator[tuple[int, str]]:
    """Run `python -m module` on a free port, which it takes by the option `listen`.

    Yields its process id and address once it serves.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, listen, "127.0.0.1:0", *options),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        if not line.startswith("ready "):
            raise BenchmarkError(f"{module} did not start: {line!r}")
        yield process.pid, line.split()[1]
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def cpu_s(pid: int) -> float:
    """CPU seconds of all threads of a process since it began."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)
