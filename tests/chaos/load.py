"""The clients of a run: each sends one request after another, of every kind and in every way, and checks what comes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from random import Random
from typing import Any

from cadenza import AsyncClient
from cadenza.calls import convert
from cadenza.calls.batch import BatchItem, SessionBatch
from cadenza.calls.output_collector import OutputCollector
from cadenza.calls.reconnect import grace_s
from cadenza.calls.request_stream import RequestStream
from cadenza.errors import CadenzaError
from cadenza.prompts import parse_prompt
from tests.chaos.checker import Outcome, Violation, check
from tests.chaos.history import History
from tests.chaos.requests import Body, content, poisonous

RECONNECT_TIMEOUT_S = 90.0
LONGEST_S = 240.0
"""A request that has not ended after so long never will."""
GAP_S = 0.15
WAYS = ("stream", "session", "generate")
_WAY_WEIGHTS = (6, 2, 2)
_BATCH = 3
_POISON = -1


@dataclass(slots=True)
class Gap:
    """A time in which a stream that had begun brought nothing; of the monotonic clock."""

    begin: float
    end: float


@dataclass(slots=True, eq=False)
class Running:
    """A request on its way."""

    outcome: Outcome
    collector: OutputCollector
    task: asyncio.Task[Any] | None = None


@dataclass
class Load:
    """All clients; `expected` are the contents of undisturbed runs, by the body's place, where they are known."""

    target: Callable[[], str]
    bodies: Sequence[Body]
    history: History
    report: Callable[[str], None]
    """Called with each violation."""
    expected: dict[int, dict[str, Any]] = field(default_factory=dict)
    running: dict[str, Running] = field(default_factory=dict)
    to_verify: list[Outcome] = field(default_factory=list)
    """Those whose seed the server drew: what they must be is known once that seed was run undisturbed."""
    gaps: list[Gap] = field(default_factory=list)
    longest_gaps_s: list[float] = field(default_factory=list)
    """Of each stream."""
    counts: Counter[str] = field(default_factory=Counter)
    stopping: bool = False
    prefix: str = ""
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _extra: set[asyncio.Task[None]] = field(default_factory=set)
    _number: Any = field(default_factory=itertools.count)

    def start(self, num_clients: int, seed: int) -> None:
        """Start the clients."""
        self._tasks = [asyncio.create_task(self._work(number, seed)) for number in range(num_clients)]

    async def end(self) -> None:
        """Let each client finish its request."""
        self.stopping = True
        await asyncio.gather(*self._tasks, *self._extra)

    async def _work(self, number: int, seed: int) -> None:
        rng = Random(f"client {seed} {number}")
        async with AsyncClient(self.target(), reconnect_timeout_s=RECONNECT_TIMEOUT_S) as client:
            await client.model_info()  # a client that has never reached its server does not wait for it
            while not self.stopping:
                way = rng.choices(WAYS, _WAY_WEIGHTS)[0]
                chosen = [rng.randrange(len(self.bodies)) for _ in range(1 if way == "stream" else _BATCH)]
                if way == "stream":
                    await self._stream(client, chosen[0])
                else:
                    await self._session(client, chosen, final_only=way == "generate")

    # --- ways -------------------------------------------------------------------------------------------------------

    async def _stream(
        self, client: AsyncClient, index: int, timeout_s: float | None = None, ended_by: str | None = None
    ) -> Outcome:
        body = poisonous() if index == _POISON else self.bodies[index]
        request, running = self._new(body, index, "stream", final_only=False)
        if timeout_s is not None:
            request.timeout_s = running.outcome.timeout_s = timeout_s
        if ended_by:
            running.outcome.ended_by.add(ended_by)
        running.task = asyncio.create_task(self._read(client, request, running))
        await self._finish([running], running.task)
        return running.outcome

    async def _read(self, client: AsyncClient, request: Any, running: Running) -> None:
        """As `AsyncClient.stream` does."""
        stream = RequestStream(client._stub(), client.target, request, running.collector, client._attempts())
        last: float | None = None
        longest = 0.0
        client._running.add(stream)
        try:
            async with client._explained():
                while (delta := await stream.next()) is not None:
                    now = time.monotonic()
                    if last is not None:
                        longest = max(longest, now - last)
                        if now - last > GAP_S:
                            self.gaps.append(Gap(last, now))
                    last = now if any(each.token_ids for each in delta.outputs) else last
            self.longest_gaps_s.append(longest)
        finally:
            client._running.discard(stream)
            await stream.leave()

    async def _session(self, client: AsyncClient, chosen: Sequence[int], *, final_only: bool) -> None:
        """As `AsyncClient.generate` does; without `final_only` the output comes step by step."""
        way = "generate" if final_only else "session"
        new = [self._new(self.bodies[index], index, way, final_only=final_only) for index in chosen]
        items = [BatchItem(request, running.collector) for request, running in new]
        batch = SessionBatch(client._stub(), client.target, items, client._attempts())

        async def run() -> None:
            async with client._explained():
                await batch.run()

        task = asyncio.create_task(run())
        for _, running in new:
            running.task = task
        await self._finish([running for _, running in new], task, items)

    # --- requests ---------------------------------------------------------------------------------------------------

    def _new(self, body: Body, index: int, way: str, *, final_only: bool) -> tuple[Any, Running]:
        prompt = parse_prompt(body.prompt if isinstance(body.prompt, str) else list(body.prompt))
        request = convert.request_to_proto(
            f"{self.prefix}{way} {next(self._number)}", prompt, body.params,
            final_only=final_only, resume_grace_s=grace_s(RECONNECT_TIMEOUT_S),
        )  # fmt: skip
        params = body.params
        outcome = Outcome(
            request.request_id, index, way,
            searches=params.beam_width is not None or params.best_of is not None,
            draws_seed=body.draws_seed, began_s=self.history.now(),
        )  # fmt: skip
        collector = OutputCollector(request.request_id, prompt)
        running = Running(outcome, collector)
        self.running[request.request_id] = running
        return request, running

    async def _finish(
        self, group: Sequence[Running], task: asyncio.Task[None], items: Sequence[BatchItem] = ()
    ) -> None:
        """Wait for the end, and check each request."""
        error: Exception | None = None
        done, _ = await asyncio.wait([task], timeout=LONGEST_S)
        if not done:
            where = [f"{each.f_code.co_filename}:{each.f_lineno}" for each in task.get_stack()]
            self.history.write("not ended", requests=[each.outcome.request_id for each in group], where=where)
            task.cancel()
            error = TimeoutError(f"not ended after {LONGEST_S:g} s")
        try:
            await task
        except asyncio.CancelledError:
            pass
        except Exception as exc:
            error = exc
        for place, running in enumerate(group):
            outcome = running.outcome
            outcome.error = error or (items[place].error if items else None)
            outcome.ended_s = self.history.now()
            result = running.collector.result()
            outcome.finished = result.finished
            outcome.content = None if result.seed is None else content(result)  # every first response has a seed
            del self.running[outcome.request_id]
            self._count(outcome)
            self._judge(outcome)

    def _count(self, outcome: Outcome) -> None:
        self.counts["requests"] += 1
        self.counts[f"way: {outcome.way}"] += 1
        kind = "poison" if outcome.body == _POISON else self.bodies[outcome.body].kind
        self.counts[f"kind: {kind}"] += 1
        for sample in outcome.content["samples"] if outcome.content else ():
            self.counts["tokens"] += len(sample["token_ids"])
            self.counts[f"end: {sample['finish']}"] += 1
        if outcome.error is not None:
            self.counts[f"end: {type(outcome.error).__name__}"] += 1

    def _judge(self, outcome: Outcome) -> None:
        expected = self.expected.get(outcome.body)
        if outcome.draws_seed and outcome.content is not None and outcome.content["seed"] is not None:
            self.to_verify.append(outcome)
            expected = None
        try:
            check(outcome, expected)
        except Violation as broken:
            self.fail(outcome, broken)

    def fail(self, outcome: Outcome, broken: Violation) -> None:
        """Record a broken promise."""
        self.counts["violations"] += 1
        kind = "poison" if outcome.body == _POISON else self.bodies[outcome.body].kind
        text = f"{outcome.request_id} ({kind}): {broken}"
        shown = {
            **asdict(replace(outcome, error=None)),
            "error": repr(outcome.error),
            "ended_by": sorted(outcome.ended_by),
        }
        self.history.write("broken", text=text[:2000], outcome=shown, expected=self.expected.get(outcome.body))
        self.report(text)

    # --- what faults do to clients ------------------------------------------------------------------------------------

    def choose(self, draw: float, *, streams_only: bool = False) -> Running | None:
        """One of the requests on their way."""
        found = [each for each in self.running.values() if not streams_only or each.outcome.way == "stream"]
        return found[int(draw * len(found))] if found else None

    def note_all(self, what: str) -> None:
        """Something happens to all requests on their way."""
        for running in self.running.values():
            running.outcome.ended_by.add(what)

    async def cancel(self, draw: float) -> None:
        """Abort a request by its id, over another connection."""
        running = self.choose(draw)
        if running is None:
            return
        running.outcome.ended_by.add("cancel")
        async with AsyncClient(self.target()) as client:
            with contextlib.suppress(CadenzaError, TimeoutError):
                async with asyncio.timeout(2):
                    await client.abort(running.outcome.request_id)

    def leave(self, draw: float) -> None:
        """A client leaves its stream."""
        running = self.choose(draw, streams_only=True)
        if running is not None and running.task is not None:
            running.outcome.ended_by.add("leave")
            running.task.cancel()

    def send_with_deadline(self, draw: float, timeout_s: float) -> None:
        """A request more, which may not end in time."""
        self._send(int(draw * len(self.bodies)), timeout_s, None)

    def send_poison(self) -> asyncio.Task[None]:
        """The request that kills each executor that computes it."""
        return self._send(_POISON, None, "poison")

    def _send(self, index: int, timeout_s: float | None, ended_by: str | None) -> asyncio.Task[None]:
        async def run() -> None:
            async with AsyncClient(self.target(), reconnect_timeout_s=RECONNECT_TIMEOUT_S) as client:
                client._expect_server(lambda: False)
                await self._stream(client, index, timeout_s, ended_by)

        task = asyncio.create_task(run())
        self._extra.add(task)
        task.add_done_callback(self._extra.discard)
        return task


async def undisturbed(target: str, bodies: Sequence[Body], num_clients: int) -> list[dict[str, Any]]:
    """The contents of these requests, run without a fault."""
    found: list[dict[str, Any]] = [{} for _ in bodies]
    places = iter(range(len(bodies)))

    async def work(client: AsyncClient) -> None:
        for place in places:
            (output,) = await client.generate([bodies[place].prompt], bodies[place].params)
            found[place] = content(output)

    async with AsyncClient(target) as client:
        await asyncio.gather(*(work(client) for _ in range(num_clients)))
    return found
