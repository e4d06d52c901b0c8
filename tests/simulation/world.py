"""One history's services: the core, the engine and its plan loop, and executors at one address, on a virtual loop."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

from scheduler_svc.core.types import ExecutorSpec, StepPlan
from scheduler_svc.engine.engine import Engine
from scheduler_svc.plan_loop.ports import ModelDescription
from scheduler_svc.recording.recording import recorded_core
from tests.simulation.catalogue import KnownTokens
from tests.simulation.loop import LoopClock, VirtualLoop
from tests.simulation.network import Address
from tests.simulation.plan_runner import PlanRunner
from tests.simulation.process import ExecutorProcess, Runner
from tests.simulation.real_runner import RealRunner
from tests.simulation.scenario import Scenario


class Violation(Exception):
    """Something happened that must not."""


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
        self.models = [scenario.model]
        """All descriptions of executors that have run."""
        self.numerics = {0}
        self.poison: tuple[int, int] | None = None
        """The seed of the request that kills its executor, and after how many output tokens."""
        self.fenced = False
        self.paused_s = 0.0
        """How long the scheduler was late, over all of its pauses."""
        self.changed_at = loop.time()
        """When something last happened that health depends on."""
        self.quiet_at = loop.time()
        """When the last fault so far is over."""
        self.address = Address(loop, self.rng, scenario.delays)
        config = scenario.config
        if record is not None:
            config = config.model_copy(update={"record": str(record)})
        self.core, record = stack.enter_context(recorded_core(config))
        self.engine = Engine(config, self.core, self.clock)
        self.engine.executors.add_port(record(0, self.address))
        self.engine.add_health_listener(self._on_health)
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

    def _on_health(self, healthy: bool) -> None:
        if healthy != self._was_healthy:
            self._was_healthy = healthy
            self.counts["healthy" if healthy else "unhealthy"] += 1
            self.note("healthy" if healthy else "unhealthy")

    # --- executors ---------------------------------------------------------------------------------------------------

    @property
    def process(self) -> ExecutorProcess:
        """The process at the address, dead or alive."""
        assert self.address.process is not None
        return self.address.process

    def start_process(self, model: ModelDescription | None = None, numerics: int | None = None) -> None:
        """Start another process at the address; by default one like the last."""
        self._incarnation += 1
        model = replace(model or self.models[-1], incarnation=self._incarnation)
        if model.max_num_batched_tokens >= model.max_num_seqs:
            self.models.append(model)
        self.touch()
        source = KnownTokens(max(self.numerics) if numerics is None else numerics)
        self.numerics.add(source.numerics)
        runner: Runner = RealRunner(model) if self.scenario.is_real else PlanRunner(model, source)
        self.address.process = ExecutorProcess(
            self.loop, self.rng, model, runner,
            on_error=self.fail, on_death=self._on_death, on_step=self._on_step, on_change=self.touch,
            is_poisoned=self._is_poisoned,
        )  # fmt: skip
        self.note(f"executor {self._incarnation} starts: {model.num_device_blocks} blocks of {model.block_size}, "
                  f"{model.max_num_seqs} sequences, {model.max_num_batched_tokens} tokens a step")  # fmt: skip

    def _on_death(self) -> None:
        self.note("the executor dies")
        self.touch()
        self.address.cut("UNAVAILABLE: the process died")

    def _on_step(self, plan: StepPlan, ended: bool) -> None:
        if ended:
            self._num_checks += 1
            if self._num_checks % 4 == 0:
                self.core.check_integrity()
        self.counts["steps"] += ended
        if self.trace is not None:
            self.note(f"step {plan.step_id} {'ends' if ended else _described(plan)}")

    def _is_poisoned(self, plan: StepPlan) -> bool:
        if self.poison is None:
            return False
        seed, num_output = self.poison
        slots = self.process.runner.slots.values() if isinstance(self.process.runner, PlanRunner) else ()
        held = any(
            slot.sampling.seed == seed and len(slot.tokens) - slot.num_prompt >= num_output
            for slot in slots
            if slot.number not in plan.released_slots
        )
        admitted = any(
            each.sampling.seed == seed and len(each.token_ids) - each.num_prompt_tokens >= num_output
            for each in plan.admitted
        )
        if held or admitted:
            self.counts["poison deaths"] += 1
            self.loop.call_later(0.1 + 0.2 * self.rng.random(), self.restart_if_dead)
            self.touch(1.0)
        return held or admitted

    @property
    def num_lost(self) -> int:
        """Sessions that were lost."""
        return self.address.num_opened - self.engine.connected

    def restart_if_dead(self) -> None:
        """Start a process unless one runs."""
        if not self.process.alive:
            self.start_process()

    # --- limits ------------------------------------------------------------------------------------------------------

    def specs(self) -> list[ExecutorSpec]:
        """The limits of all executors that have run."""
        return [
            ExecutorSpec(
                model.block_size, model.num_device_blocks, model.num_slots, model.max_num_seqs,
                model.max_num_batched_tokens, model.max_model_len,
            )
            for model in self.models
        ]  # fmt: skip

    def later(self, delay_s: float, call: Callable[[], object]) -> None:
        """Call this after a while."""
        self.loop.call_later(delay_s, call)


def _described(plan: StepPlan) -> str:
    admitted = [
        (each.slot, each.sampling.seed, len(each.token_ids), each.num_computed_tokens) for each in plan.admitted
    ]
    appended = list(zip(plan.append_slots, plan.append_block_ids, strict=True))
    computed = list(zip(plan.scheduled_slots, plan.scheduled_num_tokens, strict=True))
    parts = {
        "admits": admitted, "releases": plan.released_slots, "swaps out": plan.swapped_out, "copies": plan.copied,
        "swaps in": plan.swapped_in, "appends": appended, "computes": computed,
    }  # fmt: skip
    done = [f"{name} {what}" for name, what in parts.items() if what] + (["decodes"] if plan.decode_ready else [])
    return "begins: " + ", ".join(done)
