"""examples/session_load.py: thousands of requests over one session."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from tests.helpers.examples import EXAMPLES
from tests.helpers.scheduler.scripted_executor import ScriptedExecutor, serve
from tests.helpers.services import Running, scheduler_service

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@dataclass
class Load:
    """The load caller's process, and what it runs against."""

    executor: ScriptedExecutor
    running: Running

    async def start(self, *options: object) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, str(EXAMPLES / "session_load.py"), "--target", self.running.target, *map(str, options)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )

    async def wait_for_requests(self, count: int) -> None:
        """Return once the server knows this many; each look costs a call, so this does not spin."""
        async with asyncio.timeout(60):
            while (load := await self.running.load()).num_waiting + load.num_running < count:
                pass

    async def report(self, process: asyncio.subprocess.Process) -> dict[str, int]:
        """The numbers of the report of a run that went well."""
        async with asyncio.timeout(120):
            out, err = await process.communicate()
        assert process.returncode == 0, (out, err)
        numbers = r"requests +(\d+) ok\nin flight +(\d+) at most; (\d+) refusals, .*\nreceived +(\d+) tokens in (\d+) "
        names = ("ok", "in_flight", "refusals", "tokens", "messages")
        found = re.match(numbers, out.decode())
        assert found is not None, out
        return dict(zip(names, map(int, found.groups()), strict=True))


@asynccontextmanager
async def load_on(max_queued_requests: int) -> AsyncIterator[Load]:
    """A real scheduler, whose executor waits for the test to let it go on."""
    executor = ScriptedExecutor(max_num_seqs=256, num_blocks=4096)
    server, address = await serve(executor)
    async with scheduler_service(address, skip_tokenizer_init=True, max_queued_requests=max_queued_requests) as running:
        yield Load(executor, running)
        await running.wait_until_free()
    await server.stop(0)


async def test_thousands_in_flight_end_once_each_with_all_their_tokens() -> None:
    async with load_on(max_queued_requests=5000) as load:
        load.executor.going.clear()
        process = await load.start("--requests", 2500, "--in-flight", 2000, "--max-tokens", 8)
        await load.wait_for_requests(2000)
        load.executor.going.set()
        report = await load.report(process)
        assert (report["ok"], report["in_flight"], report["refusals"]) == (2500, 2000, 0)
        assert 2500 <= report["tokens"] == (await load.running.load()).num_output_tokens
        assert report["messages"] * 4 < report["tokens"], "what a step made should travel together"


async def test_refused_requests_come_back_until_they_are_served() -> None:
    async with load_on(max_queued_requests=100) as load:
        load.executor.going.clear()
        process = await load.start("--requests", 1000, "--in-flight", 1000, "--max-tokens", 4)
        assert process.stderr is not None
        async with asyncio.timeout(60):
            first = await process.stderr.readline()
        assert first == b"refused, to be sent again: 100 requests wait already (max_queued_requests)\n"
        load.executor.going.set()
        report = await load.report(process)
        assert report["ok"] == 1000
        assert report["refusals"] > 0
        assert report["tokens"] == (await load.running.load()).num_output_tokens


async def test_an_open_loop_sends_at_its_rate_whatever_the_server_does() -> None:
    async with load_on(max_queued_requests=5000) as load:
        load.executor.going.clear()
        process = await load.start("--requests", 300, "--rate", 1000, "--in-flight", 1, "--max-tokens", 4)
        await load.wait_for_requests(300)
        load.executor.going.set()
        report = await load.report(process)
        assert (report["ok"], report["in_flight"]) == (300, 300)


async def test_wrong_requests_are_counted_and_the_exit_status_says_so() -> None:
    async with load_on(max_queued_requests=5000) as load:
        process = await load.start("--requests", 20, "--prompt-tokens", load.executor.max_model_len + 1)
        out, _ = await process.communicate()
    assert process.returncode == 1
    assert re.match(r"requests +20 prompt: has 257 tokens", out.decode()), out


async def test_a_stream_that_breaks_is_reported() -> None:
    executor = ScriptedExecutor()
    executor.going.clear()
    server, address = await serve(executor)
    async with scheduler_service(address, skip_tokenizer_init=True) as running:
        load = Load(executor, running)
        process = await load.start("--requests", 200)
        await load.wait_for_requests(200)
    out, err = await process.communicate()
    await server.stop(0)
    assert process.returncode == 1
    assert err.decode() == (
        "the stream broke: StatusCode.UNAVAILABLE: the service is stopping: 200 unfinished requests are lost, "
        "since there is no --journal\n"
    )
    assert re.match(r"requests +200 unfinished\nin flight +200 at most", out.decode()), out
