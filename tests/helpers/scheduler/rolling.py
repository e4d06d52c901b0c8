"""Services that tests restart at their address, as an operator does, under a load of clients that do not notice."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from cadenza import AsyncClient, SamplingParams
from tests.helpers.machine.loopback import new_address
from tests.helpers.service_process import ServiceProcess, service_process

_KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 8, "n": 3},
    {"beam_width": 3, "n": 2},
    {"temperature": 0.8, "seed": 9, "logprobs": 2},
]


class RollingService:
    """`python -m module`, which is started again at its address with the same options."""

    def __init__(self, module: str, *options: str) -> None:
        self._module = module
        self._options = options
        self._listen = f"{new_address()}:0"
        self._stack = contextlib.AsyncExitStack()
        self.running: ServiceProcess

    @property
    def address(self) -> str:
        return self.running.address

    async def start(self) -> None:
        process = service_process(self._module, *self._options, listen=self._listen)
        self.running = await self._stack.enter_async_context(process)
        self._listen = self.running.address

    def send(self, number: signal.Signals) -> None:
        self.running.process.send_signal(number)

    async def ended(self) -> None:
        """Wait until it has ended, by itself and without an error; its log is complete then."""
        async with asyncio.timeout(20):
            assert await self.running.process.wait() == 0, self.running.lines
        await self._stack.aclose()
        assert "Traceback" not in "".join(self.running.lines)

    async def roll(self) -> list[str]:
        """Stop it with SIGTERM and start the next one; returns the log of the one that was stopped."""
        self.send(signal.SIGTERM)
        await self.ended()
        lines = self.running.lines
        await self.start()
        return lines

    async def kill(self) -> None:
        await self._stack.aclose()


@contextlib.asynccontextmanager
async def rolling(module: str, *options: str) -> AsyncIterator[RollingService]:
    """A started one; killed at the end if it still runs."""
    service = RollingService(module, *options)
    try:
        await service.start()
        yield service
    finally:
        await service.kill()


@dataclass
class Seen:
    """What a client's loop has seen of one sample."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None


class ClientLoad:
    """32 mixed requests, each in a `for` loop over `AsyncClient.stream`."""

    def __init__(self, target: str, max_tokens: int, count: int = 32) -> None:
        self._target = target
        self._params = [
            SamplingParams(max_tokens=max_tokens - index, ignore_eos=True, **_KINDS[index % len(_KINDS)])
            for index in range(count)
        ]
        self.seen: list[dict[int, Seen]] = [{} for _ in range(count)]
        self._changed = asyncio.Condition()
        self._running = asyncio.create_task(self._run())

    @property
    def num_tokens(self) -> int:
        return sum(len(sample.token_ids) for samples in self.seen for sample in samples.values())

    async def more(self, count: int) -> None:
        """Return once so many more tokens have come; the load must still run."""
        goal = self.num_tokens + count
        async with asyncio.timeout(20), self._changed:
            await self._changed.wait_for(lambda: self.num_tokens >= goal or self._running.done())
        assert not self._running.done(), "the load has ended too early"

    async def finished(self) -> list[dict[int, Seen]]:
        """All that the loops have seen, once they have ended; raises the error of a request that failed."""
        await self._running
        return self.seen

    async def _run(self) -> None:
        async with AsyncClient(self._target) as client:
            await client.server_info()
            await asyncio.gather(*(self._read(client, index) for index in range(len(self.seen))))
        async with self._changed:
            self._changed.notify_all()

    def prompt(self, index: int) -> list[int]:
        """The token ids of a request's prompt."""
        return [3 + (7 * index + place) % 40 for place in range(3 + 5 * (index % 9))]

    async def _read(self, client: AsyncClient, index: int) -> None:
        async for delta in client.stream(self.prompt(index), self._params[index]):
            for output in delta.outputs:
                sample = self.seen[index].setdefault(output.index, Seen())
                sample.token_ids += output.token_ids
                sample.text += output.text
                sample.logprobs += output.logprobs or []
                sample.finish_reason = output.finish_reason
            async with self._changed:
                self._changed.notify_all()


async def serving(client: AsyncClient, address: str, within_s: float = 10) -> None:
    """Return once the scheduler gives this executor requests: what minReadySeconds waits for."""
    async with asyncio.timeout(within_s):
        while True:
            executors = (await client.server_info()).executors
            if any(each.target == address and each.connected and not each.refusal for each in executors):
                return
            await asyncio.sleep(0.02)


class Rounds:
    """The same load again and again while the body runs: each time its loops must see just what is expected."""

    def __init__(self, target: str, max_tokens: int, count: int, expected: list[dict[int, Seen]]) -> None:
        self._new_load = lambda: ClientLoad(target, max_tokens, count)
        self._expected = expected
        self._over = False
        self._next = asyncio.Event()
        self._load: ClientLoad

    async def amid(self) -> None:
        """Return in the middle of a round; raises the error of one that failed."""
        began = asyncio.create_task(self._next.wait())
        await asyncio.wait([began, self._running], return_when=asyncio.FIRST_COMPLETED)
        if self._running.done():
            began.cancel()
            await self._running
        await self._load.more(100)

    async def __aenter__(self) -> Rounds:
        self._running = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        self._over = True
        if kind is not None:
            self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=kind is not None)

    async def _run(self) -> None:
        while not self._over:
            self._load = self._new_load()
            began, self._next = self._next, asyncio.Event()
            began.set()
            assert await self._load.finished() == self._expected
