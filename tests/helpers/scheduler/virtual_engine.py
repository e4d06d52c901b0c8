"""An engine, its plan loop and the core on virtual time, with an executor whose steps all take the same time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from cadenza_common.plan.sampling import SequenceSampling
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core.policies.policies import Policies
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.types import RequestSpec
from scheduler_svc.engine.engine import Engine
from scheduler_svc.engine.live_request import LiveRequest
from scheduler_svc.plan_loop.ports import EngineRequest, ModelDescription
from scheduler_svc.tenants.quotas import Quotas
from scheduler_svc.tenants.registry import Registry
from tests.helpers.scheduler.fake_clock import FakeClock, TimedExecutor

START_S = 1.0
STEP_S = 0.010
MODEL = ModelDescription(
    name="virtual", architecture="none", vocab_size=64, max_model_len=4096, dtype="float32", num_parameters=0,
    tokenizer="", eos_token_ids=(), bos_token_id=None, block_size=16, num_device_blocks=512, num_host_blocks=0,
    num_slots=8, max_num_seqs=4, max_num_batched_tokens=256, max_logprobs=0, max_inflight_plans=2, device="none",
    incarnation=1, fingerprint=b"",
)  # fmt: skip


class World:
    """An engine with one executor, both on a fake clock."""

    def __init__(
        self,
        config: SchedulerConfig,
        step_s: float,
        model: ModelDescription,
        policies: Policies,
        registry: Registry | None = None,
        make_executor: Callable[[FakeClock, ModelDescription, float], TimedExecutor] = TimedExecutor,
    ) -> None:
        self.clock = FakeClock()
        self.executor = make_executor(self.clock, model, step_s)
        self.core = Scheduler(policies)
        quotas = None if registry is None else Quotas(registry, self.clock, config.max_queued_requests)
        self.engine = Engine(config, self.core, self.clock, quotas=quotas)
        self.engine.executors.add_port(self.executor)

    def submit(
        self,
        max_tokens: int,
        *,
        num_prompt_tokens: int = 3,
        deadline: float | None = None,
        request_id: str = "r",
        tenant: str = "",
        grace_s: float = 0.0,
        body_digest: bytes = b"",
        priority: int = 0,
    ) -> LiveRequest:
        """Submit a greedy request."""
        prompt = tuple(range(5, 5 + num_prompt_tokens))
        spec = RequestSpec(request_id, prompt, SequenceSampling(), max_tokens, tenant=tenant, priority=priority)
        return self.engine.submit(
            EngineRequest(spec, deadline=deadline, body_digest=body_digest, resume_grace_s=grace_s)
        )


@contextlib.asynccontextmanager
async def started(
    config: SchedulerConfig | None = None,
    *,
    step_s: float = STEP_S,
    model: ModelDescription = MODEL,
    policies: Policies | None = None,
    registry: Registry | None = None,
    make_executor: Callable[[FakeClock, ModelDescription, float], TimedExecutor] = TimedExecutor,
) -> AsyncIterator[World]:
    """A World whose engine is connected; stopped at the end."""
    world = World(config or SchedulerConfig(), step_s, model, policies or Policies(), registry, make_executor)
    starting = asyncio.create_task(world.engine.start())
    await world.clock.advance(0)
    await starting
    world.executor.lane = world.core.lanes[0]
    try:
        yield world
    finally:
        await world.engine.stop()
