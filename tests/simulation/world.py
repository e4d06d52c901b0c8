"""One history's services: the core, the engine, a plan loop for each executor, and the executors, on a virtual loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

from cadenza_common.plan.plan import StepPlan
from scheduler_svc.core.memory.paged_pool import PagedPool
from scheduler_svc.core.types import ExecutorSpec
from scheduler_svc.engine.engine import Engine
from scheduler_svc.executors.addresses import ExecutorEntries
from scheduler_svc.executors.discovery import Discovery
from scheduler_svc.plan_loop.ports import ExecutorPort, ModelDescription
from scheduler_svc.recording.recording import recorded_core
from tests.simulation.checks.adapter_checks import TurnWatch
from tests.simulation.checks.lane_checks import HeadWatch, Overlaps, Violation, check_placed
from tests.simulation.executor.adapting import AdapterFiles
from tests.simulation.executor.host import Host
from tests.simulation.loop import LoopClock, VirtualLoop
from tests.simulation.scenario import KERNELS, Scenario

__all__ = ["Violation", "World"]

_NAME = ("executors", 9090)
"""The DNS name of all executors, in histories in which the scheduler resolves one."""


class World:
    """Everything of a history but its clients and its faults."""

    def __init__(self, scenario: Scenario, loop: VirtualLoop, stack: contextlib.ExitStack, record: Path | None) -> None:
        self.scenario, self.loop = scenario, loop
        self.rng = Random(f"world {scenario.seed}")
        self.clock = LoopClock(loop)
        self.counts: Counter[str] = Counter()
        """What happened, by name."""
        self.trace: list[str] | None = None
        self.violations: list[Exception] = []
        self.models: list[ModelDescription] = []
        """All descriptions of executors that have run."""
        self.numerics: set[int] = set()
        self.poison: tuple[int, int] | None = None
        """The seed of the request that kills its executor, and after how many output tokens."""
        self.poison_stays_s = 0.1
        """For how long an executor that it has killed stays away, at least."""
        self.paused_s = 0.0
        """How long the scheduler was late, over all of its pauses."""
        self.changed_at = loop.time()
        """When something last happened to the scheduler that health depends on."""
        self.quiet_at = loop.time()
        """When the last fault so far is over."""
        self.adapters = AdapterFiles.of(scenario.adapters)
        config = scenario.config
        if record is not None:
            config = config.model_copy(update={"record": str(record)})
        self.core, self._record = stack.enter_context(recorded_core(config))
        self._unused = dict[int, tuple[StepPlan, list[int]]]()
        """By plan, the pages that nobody had when it was made."""
        self.core.plan_step, self._plan_step = self._plan, self.core.plan_step  # type: ignore[method-assign]
        self.engine = Engine(config, self.core, self.clock, connect=self._connect)
        self.engine.add_health_listener(self._on_health)
        self.overlaps, self.heads, self.turns = Overlaps(self), HeadWatch(self), TurnWatch(self)
        self.hosts: list[Host] = []
        """All executors that there have been."""
        for model, numerics in zip(scenario.models, scenario.numerics, strict=True):
            self.add_host(replace(model, **KERNELS[numerics]))
        self.listed = [host.address.target for host in self.hosts]
        """The scheduler's list of executors, as last written."""
        self.discovery = Discovery(self.engine.executors, self._entries(), resolve=self._resolve)
        self._was_healthy = False
        self._incarnation = 0
        self._num_checks = 0

    # --- notes -------------------------------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        """Add a line to the trace."""
        if self.trace is not None:
            self.trace.append(f"{self.loop.time():9.4f} {text}")

    def fail(self, error: Exception) -> None:
        """Record that something happened that must not."""
        self.note(f"VIOLATION {error}")
        self.violations.append(error)

    def touch(self, until_s: float = 0.0) -> None:
        """Something changed that health depends on; `until_s`: seconds from now until it is over."""
        self.changed_at = self.loop.time()
        self.quiet_at = max(self.quiet_at, self.changed_at + until_s)

    def later(self, delay_s: float, call: Callable[[], object]) -> None:
        """Call this after a while."""
        self.loop.call_later(delay_s, call)

    def _on_health(self, healthy: bool) -> None:
        if healthy != self._was_healthy:
            self._was_healthy = healthy
            self.counts["healthy" if healthy else "unhealthy"] += 1
            self.note("healthy" if healthy else "unhealthy")

    def _plan(self, executor_id: int, now: float) -> StepPlan | None:
        plan, pool = self._plan_step(executor_id, now), self.core.lanes[executor_id].blocks.pool
        if plan is not None and isinstance(pool, PagedPool):
            self._unused[id(plan)] = plan, list(pool.unused_pages)
        return plan

    def take_unused(self, plan: StepPlan) -> list[int]:
        """The pages that get garbage when a plan has run: nobody may read what was given back or evicted."""
        return self._unused.pop(id(plan), (plan, []))[1]

    def on_step_ended(self) -> None:
        """An executor has ended a step."""
        self.counts["steps"] += 1
        self._num_checks += 1
        if self._num_checks % (4 * max(1, len(self.core.lanes))) == 0:
            self.core.check_integrity()
            check_placed(self)

    # --- executors ---------------------------------------------------------------------------------------------------

    def add_host(self, model: ModelDescription) -> Host:
        """A further address, where nothing runs yet."""
        host = Host(self, len(self.hosts) + 1, model)
        self.hosts.append(host)
        return host

    @property
    def present_hosts(self) -> list[Host]:
        """Those that the scheduler has in its set."""
        return [host for host in self.hosts if host.member is not None]

    @property
    def partly_fenced(self) -> bool:
        """Whether another scheduler holds one of them, perhaps the only one that can load an adapter."""
        return any(host.address.fenced for host in self.present_hosts)

    @property
    def fenced(self) -> bool:
        """Whether another scheduler holds all executors of this one."""
        present = self.present_hosts
        return bool(present) and all(host.address.fenced for host in present)

    @property
    def num_lost(self) -> int:
        """Sessions that were lost."""
        return sum(host.address.num_opened for host in self.hosts) - self.engine.connected

    def next_incarnation(self) -> int:
        """The number of the next process."""
        self._incarnation += 1
        return self._incarnation

    def rewrite_list(self, targets: list[str]) -> None:
        """Change the scheduler's list of executors: it is read again, or its name is resolved again after a while."""
        self.listed = targets
        if not self.scenario.resolves:
            self.discovery.reload(self._entries())

    def _entries(self) -> ExecutorEntries:
        if self.scenario.resolves:
            return ExecutorEntries((), (_NAME,), ())
        return ExecutorEntries(tuple(self.listed), (), ())

    async def _resolve(self, name: str, port: int) -> list[str]:
        await asyncio.sleep(0.02 * self.rng.random())
        if self.engine.executors.started.is_set() and self.rng.random() < 0.2:
            raise OSError("no answer")
        return sorted(self.listed)

    def _connect(self, executor_id: int, target: str) -> ExecutorPort:
        host = next(host for host in self.hosts if host.address.target == target)
        return self._record(executor_id, host.address)

    # --- limits ------------------------------------------------------------------------------------------------------

    def specs(self) -> list[ExecutorSpec]:
        """The limits of all executors that have run."""
        return [
            ExecutorSpec(
                model.block_size, model.num_device_blocks, model.num_slots, model.max_num_seqs,
                model.max_num_batched_tokens, model.max_model_len, kv_groups=model.kv_groups,
                pages_per_state=model.pages_per_state,
            )
            for model in self.models
        ]  # fmt: skip
