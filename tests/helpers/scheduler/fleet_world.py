"""An engine on virtual time with several simulated executors: they die, hang, come back, join and leave."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from cadenza_common.plan.plan import StepPlan
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core.types import BeamSpec, FinishDetail, RequestSpec
from scheduler_svc.engine.engine import Engine
from scheduler_svc.engine.live_request import LiveRequest
from scheduler_svc.plan_loop.ports import (
    EngineRequest,
    ExecutorFencedError,
    ExecutorLostError,
    ExecutorPort,
    ExecutorState,
    ExecutorStoppedError,
    ModelDescription,
    PlanStream,
)
from scheduler_svc.recording.recording import recorded_core
from tests.helpers.core.core_sampling import core_sampling
from tests.helpers.core.known import VOCAB_SIZE, known_beams, known_sample
from tests.helpers.scheduler.changing_executor import MODEL, STEP_S, ChangingExecutor
from tests.helpers.scheduler.fake_clock import FakeClock


class FleetExecutor(ChangingExecutor):
    """One executor of several. It answers while it is alive."""

    def __init__(self, clock: FakeClock, target: str, model: ModelDescription) -> None:
        super().__init__(clock)
        self.target = target
        self.model = model
        self.alive = asyncio.Event()
        self.alive.set()
        self.goes_on = asyncio.Event()
        """While not set, a step runs that does not end: no result comes, and a new session waits for it."""
        self.goes_on.set()
        self.fences = False
        """While set, it refuses every session, as if another scheduler that is alive held it."""
        self.num_sent = 0
        self.num_opened = 0
        self.is_closed = False

    def die(self, *, stopped: bool = False) -> None:
        """End the process; with `stopped` it says that a signal stopped it."""
        self.alive.clear()
        if self._stream is not None:
            self._stream.results_queue.put_nowait(ExecutorStoppedError("a signal stopped it") if stopped else None)

    def come_back(self, **changes: Any) -> None:
        """Start another process at the address."""
        self.model = replace(self.model, incarnation=self.model.incarnation + 1, **changes)
        self.alive.set()

    async def describe(self) -> ModelDescription:
        await self.alive.wait()
        return await super().describe()

    async def open(self, epoch: int) -> PlanStream:
        if not self.alive.is_set():
            raise ExecutorLostError("it is dead")
        await self.goes_on.wait()
        if self.fences:
            raise ExecutorFencedError("another scheduler holds it")
        self.num_opened += 1
        stream: Any = await super().open(epoch)
        send, results = stream.send, stream.results

        async def send_unless_hung(plan: StepPlan) -> None:
            self.num_sent += 1
            if self.goes_on.is_set():
                await send(plan)

        async def results_or_error() -> AsyncIterator[Any]:
            async for result in results():
                if isinstance(result, Exception):
                    raise result
                yield result

        stream.send, stream.results = send_unless_hung, results_or_error
        return stream

    async def aclose(self) -> None:
        self.is_closed = True


class FleetWorld:
    """An engine and its executors "e:0", "e:1" and so on."""

    def __init__(self, config: SchedulerConfig, stack: contextlib.ExitStack, models: Sequence[dict[str, Any]]) -> None:
        self.clock = FakeClock()
        self.core, self._record = stack.enter_context(recorded_core(config))
        self.engine = Engine(config, self.core, self.clock, connect=self._connect)
        self.executors = [
            FleetExecutor(self.clock, f"e:{index}", replace(MODEL, **{"incarnation": 100 * index + 1, **changes}))
            for index, changes in enumerate(models)
        ]
        self.live: dict[str, LiveRequest] = {}

    def _connect(self, executor_id: int, target: str) -> ExecutorPort:
        port = next(executor for executor in self.executors if executor.target == target)
        return self._record(executor_id, port)

    def submit(self, request_id: str, prompt: int = 6, max_tokens: int | None = 20, **more: Any) -> LiveRequest:
        """Submit a request with a prompt of so many tokens. `more`: fields of RequestSpec, or of its sampling."""
        first = 1 + len(self.live)
        tokens = tuple((first + 7 * index) % VOCAB_SIZE for index in range(prompt))
        fields = {name: more.pop(name) for name in list(more) if name in RequestSpec.__dataclass_fields__}
        sampling = core_sampling(**{"temperature": 1.0, "seed": len(self.live), **more})
        spec = RequestSpec(request_id, tokens, sampling, max_tokens, **fields)
        self.live[request_id] = self.engine.submit(EngineRequest(spec))
        return self.live[request_id]

    def submit_mix(self, count: int = 12, max_tokens: int = 40) -> None:
        """Submit requests of all kinds: single samples, several samples, beams."""
        kinds: list[dict[str, Any]] = [{}, {"num_samples": 3}, {}, {"beams": BeamSpec(2), "num_samples": 2}]
        for _ in range(count):
            number = len(self.live)
            kind = kinds[number % len(kinds)]
            self.submit(f"r{number}", prompt=5 + 3 * (number % 7), max_tokens=max_tokens - number % 5, **kind)

    def state(self, index: int) -> ExecutorState:
        """The state of the executor at `e:index`."""
        return next(state for state in self.engine.executor_infos() if state.target == f"e:{index}")

    def holder(self, request_id: str) -> int | None:
        """The index of the executor that runs a request; None: none does."""
        group = self.core.groups[("", request_id)]
        return next((index for index, lane in self.core.lanes.items() if lane.holds(group)), None)

    async def run(self, seconds: float = 30.0) -> None:
        """Let time pass until all requests have ended, or for so long; then everything must be free."""
        end = self.clock.monotonic() + seconds
        while self.clock.monotonic() < end and not all(live.ended for live in self.live.values()):
            await self.clock.advance(10 * STEP_S)
            self.core.check_integrity()
        assert [name for name, live in self.live.items() if not live.ended] == [], self.engine.executor_infos()
        assert not self.core.groups

    def check_tokens(self, *, but: Sequence[str] = ()) -> None:
        """Each request has all tokens that one executor alone would have given it, once and in order."""
        for name, live in self.live.items():
            if name in but:
                continue
            spec, limit = live.request.spec, self.engine.model.max_model_len
            assert live.error is None, name
            if spec.beams is not None:
                expected = [list(beam.token_ids) for beam in known_beams(spec, limit)]
            else:
                expected = [known_sample(spec, limit, index)[0] for index in range(spec.num_samples)]
            assert [sample.token_ids for sample in live.samples] == expected, name
            ends = {sample.finish.detail for sample in live.samples if sample.finish is not None}
            assert not ends & {FinishDetail.ABORTED, FinishDetail.EXECUTOR_ERROR}, name


@contextlib.asynccontextmanager
async def fleet(
    count: int = 2, *, models: Sequence[dict[str, Any]] | None = None, dead: Sequence[int] = (), **options: Any
) -> AsyncIterator[FleetWorld]:
    """A world of so many executors, `models` with changes of their descriptions; `dead`: those that do not answer yet.

    The engine has a session with each of the others. It is stopped at the end.
    """
    with contextlib.ExitStack() as stack:
        world = FleetWorld(SchedulerConfig(**options), stack, models or [{}] * count)
        for index in dead:
            world.executors[index].alive.clear()
        for executor in world.executors:
            world.engine.executors.add(executor.target)
        starting = asyncio.create_task(world.engine.start())
        await world.clock.advance(0)
        try:
            await starting
            yield world
        finally:
            await world.engine.stop()
