"""Processes of a scheduler on one journal, one after the other, on virtual time.

Token 9 comes in each step of 10 ms. The monotonic clock of a later process begins elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

from cadenza.v1 import generation_pb2 as pb
from cadenza.v1 import types_pb2
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.convert.generation import request_fields
from scheduler_svc.core.policies.policies import Policies
from scheduler_svc.core.types import FinishDetail
from scheduler_svc.engine.live_request import LiveRequest
from scheduler_svc.engine.reader import RequestReader
from scheduler_svc.journal.journal import connect
from scheduler_svc.journal.restore import Restored, Restorer
from scheduler_svc.journal.writer import JournalWriter
from scheduler_svc.plan_loop.ports import ModelDescription
from scheduler_svc.requests.builder import RequestBuilder
from scheduler_svc.requests.grammar_door import GrammarDoor
from scheduler_svc.tenants.registry import Registry
from scheduler_svc.tenants.tenant import Tenant
from tests.helpers.scheduler.journals import HeldThread, opened_store
from tests.helpers.scheduler.virtual_engine import MODEL, STEP_S, World

EXACT = replace(MODEL, is_exact=True, fingerprint=b"print", eos_token_ids=(2,), max_logprobs=5)
FAST = replace(EXACT, is_exact=False)
GRACE_S = 30.0


@dataclass
class Process:
    """A scheduler's process: its engine, and what it restored."""

    world: World
    builder: RequestBuilder
    restored: Restored

    def submit(self, request_id: str = "r", max_tokens: int = 20, **fields) -> LiveRequest:
        params = types_pb2.SamplingParams(max_tokens=max_tokens, seed=3, ignore_eos=True, **fields.pop("params", {}))
        prompt = [types_pb2.PromptPart(tokens=types_pb2.TokenIds(ids=[5, 6, 7]))]
        tenant = Tenant(fields.pop("tenant", ""))
        message = pb.GenerateRequest(request_id=request_id, prompt=prompt, sampling_params=params, **fields)
        now = self.world.clock.monotonic()
        return self.world.engine.submit(self.builder.build(request_fields(message, tenant), now=now, time_left_s=None))

    async def steps(self, count: int) -> None:
        await self.world.clock.advance(count * STEP_S)


@contextlib.asynccontextmanager
async def process(
    folder: Path,
    model: ModelDescription = EXACT,
    *,
    at_s: float = 0.0,
    allow_fingerprint_change: bool = False,
    registry: Registry | None = None,
    grammars: GrammarDoor | None = None,
) -> AsyncIterator[Process]:
    """`at_s`: seconds on the wall's clock since the first process began."""
    world = World(SchedulerConfig(), STEP_S, model, Policies(), registry)
    if at_s:
        world.clock.now_ns, start_ns = 7_000_000_000, world.clock.wall_time_ns()
        world.clock.wall_time_ns = lambda: start_ns + round(at_s * 1e9) + world.clock.now_ns - 7_000_000_000
    store = opened_store(folder, HeldThread())
    writer = JournalWriter(store, world.clock, restart_grace_s=GRACE_S)
    engine = world.engine
    engine.journal = writer
    connect(writer, engine)
    starting = asyncio.create_task(engine.start())
    await world.clock.advance(0)
    await starting
    world.executor.lane = world.core.lanes[0]
    builder = RequestBuilder(model, None, max_model_len=model.max_model_len, grammars=grammars)
    restorer = Restorer(
        engine, writer, builder, restart_grace_s=GRACE_S, allow_fingerprint_change=allow_fingerprint_change
    )
    requests, last_number = store.load().result()
    writer.continue_after(last_number)
    restored = await restorer.run(requests)
    try:
        yield Process(world, builder, restored)
    finally:
        await writer.close()
        await engine.stop()


def read(live: LiveRequest) -> tuple[list[int], FinishDetail | None]:
    """The tokens of all samples as a new stream gets them, and the last finish."""
    reader, tokens, finish = RequestReader(live), [], None
    while (chunk := reader.take()) is not None:
        for sample in chunk.samples:
            tokens += sample.token_ids
            finish = sample.finish.detail if sample.finish is not None else finish
    return tokens, finish
