"""An engine on virtual time whose executor is replaced, at its address, by one with another description.

The executor simulates KV: tokens read from a wrong block differ from the known ones, and a plan that contradicts
earlier plans is an error.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from cadenza.v1.types_pb2 import NumericsFingerprint
from cadenza_common.plan.plan import StepPlan
from cadenza_common.plan.result import StepResult, StepStatus
from executor_svc.batch.scheduled import Scheduled
from executor_svc.batch.slots import Slots
from executor_svc.simulated.injection import Poison
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core.types import BeamSpec, ExecutorSpec, RequestSpec
from scheduler_svc.engine.engine import Engine
from scheduler_svc.engine.live_request import LiveRequest
from scheduler_svc.plan_loop.ports import (
    EngineRequest,
    ExecutorLostError,
    ModelDescription,
    PlanStream,
    SessionOpened,
)
from scheduler_svc.recording.recording import recorded_core
from tests.helpers.core.core_executor import CoreExecutor
from tests.helpers.core.core_sampling import core_sampling
from tests.helpers.core.known import VOCAB_SIZE, known_beams, known_sample
from tests.helpers.scheduler.fake_clock import FakeClock

STEP_S = 0.010
MODEL = ModelDescription(
    name="/models/one", architecture="Simulated", vocab_size=VOCAB_SIZE, max_model_len=128, dtype="uint64",
    num_parameters=0, tokenizer="/models/one", eos_token_ids=(), bos_token_id=None, block_size=4, num_device_blocks=64,
    num_host_blocks=16, num_slots=8, max_num_seqs=4, max_num_batched_tokens=16, max_logprobs=VOCAB_SIZE,
    max_inflight_plans=2, device="cpu", incarnation=1,
    fingerprint=NumericsFingerprint(digest=b"one").SerializeToString(), numerics=(("weights", "1111"),),
)  # fmt: skip
OTHER_NUMERICS: dict[str, Any] = {
    "fingerprint": NumericsFingerprint(digest=b"two").SerializeToString(),
    "numerics": (("weights", "2222"),),
}


class ChangingExecutor:
    """An ExecutorPort in this process; each step takes STEP_S on the clock."""

    target = "virtual:1"

    def __init__(self, clock: FakeClock) -> None:
        self.model = MODEL
        self.num_described = 0
        self.opens_as: int | None = None
        """The incarnation that answers the next OpenSession in place of the described one, once."""
        self._clock = clock
        self.poison: Poison | None = None
        """Steps that are fatal by it fail, and later ones of the session are skipped; the process lives on."""
        self.num_failed = 0
        self.sole_since_epoch = 1
        self._running: CoreExecutor | None = None
        self._running_incarnation = 0
        self._stream: _Stream | None = None

    def become(self, **changes: Any) -> None:
        """Replace the process: another incarnation with these changes in its description, and empty pools."""
        self.model = replace(self.model, incarnation=self.model.incarnation + 1, **changes)
        self.break_off()

    def break_off(self) -> None:
        """End the session."""
        if self._stream is not None:
            self._stream.results_queue.put_nowait(None)

    async def describe(self) -> ModelDescription:
        self.num_described += 1
        return self.model

    async def open(self, epoch: int) -> PlanStream:
        model = self.model
        if self._running is None or self._running_incarnation != model.incarnation:
            self._running, self._running_incarnation = CoreExecutor(_spec(model), model.vocab_size), model.incarnation
        self._running.clear()
        incarnation, self.opens_as = self.opens_as or model.incarnation, None
        self._running.inner._poison = (
            None if self.poison is None else _Failing(self.poison.token_id, self.poison.position)
        )
        self._stream = _Stream(self, self._clock, self._running, incarnation)
        return self._stream


class _Failing(Poison):
    """Fails a step in place of killing the process."""

    def before_compute(self, slots: Slots, scheduled: Scheduled) -> None:
        if self.is_fatal(slots, scheduled):
            raise RuntimeError("injected")


class _Stream:
    """One session."""

    resident_bytes = 0
    begun_step_id = 0

    def __init__(self, owner: ChangingExecutor, clock: FakeClock, executor: CoreExecutor, incarnation: int) -> None:
        self._owner = owner
        self._failed = False
        self.opened = SessionOpened(incarnation, 0, owner.sole_since_epoch)
        self.results_queue: asyncio.Queue[StepResult | None] = asyncio.Queue()
        self._clock, self._executor = clock, executor
        self._free_at = clock.monotonic()

    async def send(self, plan: StepPlan) -> None:
        result, now = self._run(plan), self._clock.monotonic()
        self._free_at = max(now, self._free_at) + STEP_S
        self._clock.call_later(self._free_at - now, lambda: self.results_queue.put_nowait(result))

    def _run(self, plan: StepPlan) -> StepResult:
        if self._failed:
            return StepResult(plan.step_id, StepStatus.SKIPPED)
        try:
            return self._executor.run(plan)
        except RuntimeError as exc:
            self._failed = True
            self._owner.num_failed += 1
            return StepResult(plan.step_id, StepStatus.FAILED, str(exc))

    async def results(self) -> AsyncIterator[StepResult]:
        while (result := await self.results_queue.get()) is not None:
            yield result
        raise ExecutorLostError("the process was replaced")

    async def close(self) -> None:
        """Nothing is held."""


def _spec(model: ModelDescription) -> ExecutorSpec:
    return ExecutorSpec(
        block_size=model.block_size,
        num_blocks=model.num_device_blocks,
        num_slots=model.num_slots,
        max_num_seqs=model.max_num_seqs,
        max_num_batched_tokens=model.max_num_batched_tokens,
        max_model_len=model.max_model_len,
        num_host_blocks=model.num_host_blocks,
    )


class ChangingWorld:
    """An engine and its executor."""

    def __init__(self, config: SchedulerConfig, stack: contextlib.ExitStack) -> None:
        self.clock = FakeClock()
        self.executor = ChangingExecutor(self.clock)
        self.core, record = stack.enter_context(recorded_core(config))
        self.engine = Engine(config, self.core, self.clock)
        self.engine.executors.add_port(record(0, self.executor))
        self.live: dict[str, LiveRequest] = {}

    def submit(self, request_id: str, prompt: int = 6, max_tokens: int | None = 8, **more: Any) -> None:
        """Submit a request with a prompt of so many tokens. `more`: fields of RequestSpec, or of its sampling."""
        tokens = tuple(index % VOCAB_SIZE for index in range(1, prompt + 1))
        fields = {name: more.pop(name) for name in list(more) if name in RequestSpec.__dataclass_fields__}
        sampling = core_sampling(**{"temperature": 1.0, "seed": len(self.live), **more})
        self.add(RequestSpec(request_id, tokens, sampling, max_tokens, **fields))

    def add(self, spec: RequestSpec) -> None:
        """Submit this request."""
        self.live[spec.request_id] = self.engine.submit(EngineRequest(spec))

    def tokens(self, request_id: str) -> list[list[int]]:
        """The tokens of each sample so far."""
        return [sample.token_ids for sample in self.live[request_id].samples]

    def details(self, request_id: str) -> list[str]:
        """How each sample ended; empty: it has not."""
        finishes = [sample.finish for sample in self.live[request_id].samples]
        return ["" if finish is None else finish.detail.name for finish in finishes]

    def state(self) -> str:
        """What is held, for the message of a failed test."""
        lane = self.core.lanes[0]
        groups = [
            (group.spec.request_id, group.has_all_results, [sequence.state.name for sequence in group.sequences])
            for group in self.core.groups.values()
        ]
        return (
            f"at {self.clock.monotonic()} connected {self.engine.connected}, described {self.executor.num_described} "
            f"times, {len(lane.inflight)} plans in flight, {len(lane.running)} running, {len(self.core.waiting)} "
            f"waiting, failure {self.engine.failure!r}, {lane.spec}, {groups}"
        )

    async def run(self, seconds: float = 20.0) -> None:
        """Let time pass until all requests have ended, or for so long; then everything must be free."""
        end = self.clock.monotonic() + seconds
        while self.clock.monotonic() < end and not all(live.ended for live in self.live.values()):
            await self.clock.advance(10 * STEP_S)
            self.core.check_integrity()
        assert [name for name, live in self.live.items() if not live.ended] == [], self.state()
        assert not self.core.groups


@contextlib.asynccontextmanager
async def changing_world(**options: Any) -> AsyncIterator[ChangingWorld]:
    """A world whose engine is connected; it is stopped at the end, and must not have failed."""
    with contextlib.ExitStack() as stack:
        world = ChangingWorld(SchedulerConfig(**options), stack)
        starting = asyncio.create_task(world.engine.start())
        await world.clock.advance(0)
        await starting
        try:
            yield world
            assert world.engine.failure is None
        finally:
            await world.engine.stop()


def expected(world: ChangingWorld, request_id: str) -> list[list[int]]:
    """The tokens of an undisturbed run."""
    spec = world.live[request_id].request.spec
    if spec.beams is not None:
        return [list(each.token_ids) for each in known_beams(spec, MODEL.max_model_len)]
    return [known_sample(spec, MODEL.max_model_len, index)[0] for index in range(spec.num_samples)]


def submit_all_kinds(world: ChangingWorld) -> None:
    """More than run at once: some run, some wait."""
    world.submit("greedy", 20, 30, temperature=0.0)
    world.submit("samples", 9, 12, num_samples=2)
    world.submit("prompt logprobs", 14, 6, num_prompt_logprobs=2, num_logprobs=1)
    world.submit("beams", 6, 10, beams=BeamSpec(2), num_samples=2, temperature=0.0)
    for index in range(4):
        world.submit(f"waiting {index}", 5 + index, 9)


def other_vocabulary(world: ChangingWorld) -> None:
    """Another model takes the executor's place."""
    world.executor.become(name="/models/two", tokenizer="/models/two", vocab_size=VOCAB_SIZE + 10, **OTHER_NUMERICS)
