"""Clients of a history: each submits one request and reads it, patiently or not, as the front does."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from hashlib import sha256

from cadenza_common.plan.result import TokenLogprobs
from scheduler_svc.core.errors import (
    DrainingError,
    PreconditionError,
    RequestExistsError,
    RequestRejectedError,
    UnknownAdapterError,
    WaitingQueueFullError,
)
from scheduler_svc.core.types import ExecutorSpec, Finish, FinishDetail, RequestSpec
from scheduler_svc.engine.live_request import LiveRequest
from scheduler_svc.engine.reader import OutputChunk, RequestReader
from scheduler_svc.plan_loop.ports import EngineRequest
from tests.simulation.catalogue import Entry, catalogue
from tests.simulation.scenario import ClientPlan
from tests.simulation.world import Violation, World

_RETRY_S = 0.05


@dataclass(slots=True)
class SampleSeen:
    """What a client has received of one sample."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: Finish | None = None


class Client:
    """One client, and all that it has received."""

    def __init__(self, world: World, plan: ClientPlan) -> None:
        self.plan = plan
        self.entry: Entry = catalogue()[plan.index]
        self.spec: RequestSpec = replace(
            self.entry.spec,
            request_id=plan.name,
            max_tokens=plan.max_tokens,
            tenant=plan.tenant,
            priority=plan.priority,
            max_drafts=plan.max_drafts,
        )
        self.live: LiveRequest | None = None
        self.samples = [SampleSeen() for _ in range(self.spec.num_samples)]
        self.num_prompt_logprobs = 0
        self.error: Exception | None = None
        """The error that the request ended with."""
        self.refusal: Exception | None = None
        """The error that it was refused with."""
        self.refused_by: list[ExecutorSpec] = []
        """The limits of all executors at that moment."""
        self.deadline: float | None = None
        self.aborted_at: float | None = None
        """When it has ended its request, by a call or by going away."""
        self.has_left = False
        """Whether it went away before it had received everything."""
        self._world = world

    async def run(self) -> None:
        """Submit the request and read it to its end, or until this client goes away."""
        await asyncio.sleep(self.plan.arrives_s)
        self.live = await self._submit()
        if self.live is None:
            return
        adapter = f", adapter {self.spec.adapter_index}" if self.plan.adapter else ""
        self._world.note(f"{self.plan.name} arrives: seed {self.spec.sampling.seed}, {self.entry.kind}, "
                         f"{len(self.spec.prompt_token_ids)} + {self.spec.max_tokens} tokens{adapter}")  # fmt: skip
        if self.plan.kind == "cancels":
            self._world.later(self.plan.number, self._cancel)
        if self.plan.kind == "twice":
            self._submit_again()
        await self._read(self.live)
        ends = {sample.finish.detail.name if sample.finish else "open" for sample in self.samples}
        self._world.note(f"{self.plan.name} ends: {self.error or ' '.join(sorted(ends))}")

    async def _submit(self) -> LiveRequest | None:
        """Submit until the service is ready to take it."""
        world, engine = self._world, self._world.engine
        if self.plan.kind == "deadline":
            self.deadline = world.clock.monotonic() + self.plan.number
        while True:
            try:
                if self.plan.adapter:
                    # As the engine will find it.
                    self.spec = replace(self.spec, adapter_index=engine.adapters.names.find(self.plan.adapter) or 0)
                return engine.submit(self._request())
            except (RequestRejectedError, PreconditionError) as exc:
                self.refusal = exc
                self.refused_by = [lane.spec for lane in world.core.lanes.values()]
                return None
            except UnknownAdapterError as exc:
                self.refusal = exc
                if self.plan.adapter in world.adapters.names:
                    world.fail(Violation(f"{self.plan.name} is refused: {exc}"))
                return None
            except (WaitingQueueFullError, DrainingError) as exc:
                world.counts[f"turned away: {type(exc).__name__}"] += 1
                if engine.failure is not None or (self.deadline or 1e9) < world.clock.monotonic():
                    self.refusal = exc
                    return None
            await asyncio.sleep(_RETRY_S)

    def _request(self) -> EngineRequest:
        return EngineRequest(
            self.spec,
            make_text=self.entry.text_stream if self.entry.stop else None,
            deadline=self.deadline,
            body_digest=sha256(self.plan.name.encode()).digest(),
            adapter=self.plan.adapter,
        )

    def _submit_again(self) -> None:
        """The same id and the same body is the same request; another body is refused."""
        engine, request = self._world.engine, self._request()
        if engine.submit(request) is not self.live:
            self._world.fail(Violation(f"{self.plan.name}: the same request was taken twice"))
        try:
            engine.submit(replace(request, body_digest=b"another"))
        except RequestExistsError:
            return
        self._world.fail(Violation(f"{self.plan.name}: an id in use was taken for another request"))

    def _cancel(self) -> None:
        if self._world.engine.abort(self.plan.tenant, self.plan.name):
            self.aborted_at = self._world.clock.monotonic()
            if self.live is None or not self.live.ended:
                self._world.fail(Violation(f"{self.plan.name} goes on after an abort"))

    async def _read(self, live: LiveRequest) -> None:
        """Read as the front does; a client that goes away stops in the middle."""
        world, plan = self._world, self.plan
        wake = asyncio.Event()
        reader = RequestReader(live, final_only=plan.final_only)

        def listener(_: LiveRequest) -> None:
            wake.set()

        world.engine.listen(live, listener)
        leaves = world.clock.timeout(plan.number if plan.kind == "disconnects" else None)
        try:
            async with leaves:
                while not reader.done:
                    chunk = reader.take(plan.max_bytes)
                    if chunk is not None:
                        self._take(chunk)
                        if plan.kind == "slow":
                            await asyncio.sleep(min(0.05, 0.1 * plan.number))
                        continue
                    if live.error is not None:
                        self.error = live.error
                        break
                    await wake.wait()
                    wake.clear()
        except TimeoutError:
            self.has_left = True
            if not live.ended:
                self.aborted_at = world.clock.monotonic()
        finally:
            world.engine.detach(live, listener, handed_over=reader.done)
        if self.aborted_at is not None and not live.ended:
            world.fail(Violation(f"{plan.name} goes on without a reader"))

    def _take(self, chunk: OutputChunk) -> None:
        """Add a message; nothing may be missing before it, or come twice."""
        if chunk.prompt_logprobs is not None:
            start = chunk.prompt_logprobs.start
            if len(chunk.prompt_logprobs.logprobs) and start != self.num_prompt_logprobs + 1:
                self._world.fail(Violation(f"{self.plan.name}: prompt logprobs from {start}"))
            self.num_prompt_logprobs += len(chunk.prompt_logprobs.logprobs)
        for part in chunk.samples:
            seen = self.samples[part.sample_index]
            if part.first_token_index != len(seen.token_ids) or part.text_offset != len(seen.text) or seen.finish:
                self._world.fail(Violation(f"{self.plan.name}: lost or repeated output: {part} after {seen}"))
            seen.token_ids += part.token_ids
            seen.text += part.text
            seen.logprobs += part.logprobs
            seen.finish = part.finish

    def details(self) -> list[FinishDetail]:
        """How its samples ended, as this client knows."""
        return [sample.finish.detail for sample in self.samples if sample.finish is not None]
