"""An executor as the scheduler's list has it: an address, and the processes that run there one after another."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from cadenza_common.plan.plan import StepPlan
from scheduler_svc.core.adapters.events import AdapterCommands, AdapterLoaded
from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.engine.fleet.executor_member import ExecutorMember
from scheduler_svc.plan_loop.ports import ModelDescription
from tests.simulation.catalogue import KnownTokens, catalogue
from tests.simulation.checks.adapter_checks import check_named_adapters, check_unloads
from tests.simulation.checks.lane_checks import check_admissions
from tests.simulation.executor.network import Address
from tests.simulation.executor.plan_runner import PlanRunner
from tests.simulation.executor.pools import PlanError
from tests.simulation.executor.process import ExecutorProcess, Runner, Session
from tests.simulation.executor.real_runner import RealRunner
from tests.simulation.executor.slot import Slot
from tests.simulation.scenario import NUMERICS

if TYPE_CHECKING:
    from tests.simulation.world import World

_MOST_POISON_DEATHS = 25
"""A request that kills executors is found after fewer deaths: those that halve the suspects, and three alone."""


class Host:
    """One address, and what runs there."""

    def __init__(self, world: World, number: int, model: ModelDescription) -> None:
        """Nothing runs there yet."""
        self.name = f"e{number}"
        self.model = model
        """Of the last process that could be used."""
        self.changed_at = world.loop.time()
        """When something last happened here that health depends on."""
        self._world = world
        self.address = Address(
            f"{self.name}.simulated:9090", world.loop, world.rng, world.scenario.delays,
            on_plan=self._on_plan, on_adapters=self._on_adapters, on_answer=self._on_answer,
        )  # fmt: skip

    @property
    def numerics(self) -> int:
        """Of the last process that could be used."""
        return NUMERICS[self.model.fingerprint]

    @property
    def member(self) -> ExecutorMember | None:
        """The scheduler's side of it; None: it is not in the scheduler's set, or is about to leave it."""
        members = self._world.engine.executors._members.values()
        return next((each for each in members if each.target == self.address.target and not each.loop.leaving), None)

    @property
    def lane(self) -> Lane | None:
        """The core's lane of it; None: it has none."""
        return None if (member := self.member) is None else self._world.core.lanes.get(member.index)

    @property
    def process(self) -> ExecutorProcess:
        """The process at the address, dead or alive."""
        assert self.address.process is not None
        return self.address.process

    @property
    def alive(self) -> bool:
        """Whether a process runs here."""
        return self.address.process is not None and self.address.process.alive

    @property
    def is_usable(self) -> bool:
        """Whether an executor runs here that can serve."""
        process = self.address.process
        return (
            process is not None
            and self.address.answers
            and not self.address.fenced
            and not process.hanging
            and process.model.max_num_batched_tokens >= process.model.max_num_seqs
        )

    def touch(self, until_s: float = 0.0) -> None:
        """Something changed here that health depends on; `until_s`: seconds from now until it is over."""
        self.changed_at = self._world.loop.time()
        self._world.quiet_at = max(self._world.quiet_at, self.changed_at + until_s)

    def later(self, delay_s: float, call: Callable[[], object]) -> None:
        """Call this after a while, unless everything ends before."""
        self._world.later(delay_s, call)

    # --- processes ---------------------------------------------------------------------------------------------------

    def start(self, model: ModelDescription | None = None, *, for_a_while: bool = False) -> None:
        """Start another process; by default one like the last. With `for_a_while` the next one is as before again."""
        world = self._world
        model = replace(model or self.model, incarnation=world.next_incarnation())
        usable = model.max_num_batched_tokens >= model.max_num_seqs
        numerics = NUMERICS[model.fingerprint]
        if usable:
            world.models.append(model)
        if usable and not for_a_while:
            self.model = model
        self.touch()
        world.numerics.add(numerics)
        drafts = world.scenario.drafts
        runner: Runner = (
            RealRunner(model, drafts.acceptance)
            if world.scenario.is_real
            else PlanRunner(model, KnownTokens(numerics), drafts)
        )
        self.address.process = process = ExecutorProcess(
            world.loop, world.rng, model, runner, world.adapters, world.scenario.adapters.load_s,
            on_error=world.fail, on_death=self._on_death, on_step=self._on_step,
            on_computed=lambda session, began_at: world.overlaps.add(process, session, began_at),
            on_change=self.touch, is_poisoned=self._is_poisoned, unused=world.take_unused,
        )  # fmt: skip
        self.note(f"executor {model.incarnation} starts: {model.num_device_blocks} blocks of {model.block_size}, "
                  f"{model.max_num_seqs} sequences, {model.max_num_batched_tokens} tokens a step, "
                  f"{model.max_model_len} tokens a sequence")  # fmt: skip

    def start_if_dead(self) -> None:
        """Start a process unless one runs."""
        if not self.alive:
            self.start()

    def kill(self) -> None:
        """Kill the process, if one runs."""
        if self.address.process is not None:
            self.address.process.kill()

    def replace(self, model: ModelDescription, after_s: float = 0.1) -> None:
        """Kill the process, and start one with this description in its place."""
        self.kill()

        def start() -> None:
            self.kill()
            self.start(model)

        self.later(after_s, start)

    def happened(self, kind: str, until_s: float = 0.0, detail: str = "") -> None:
        """A fault begins here, which is over after so many seconds."""
        self._world.counts[f"fault: {kind}"] += 1
        self.touch(until_s)
        self.note(f"FAULT {kind} {detail}".rstrip())

    def note(self, text: str) -> None:
        """Add a line to the trace."""
        world = self._world
        world.note(text if len(world.hosts) == 1 else f"{self.name}: {text}")

    def _on_death(self, informed: Session | None) -> None:
        self.note("the executor dies")
        self.touch()
        self.address.cut("UNAVAILABLE: the process died", but=informed)

    def _on_step(self, plan: StepPlan, ended: bool) -> None:
        world = self._world
        if ended:
            world.on_step_ended()
        elif plan.decode_ready and self.process.model.max_drafts:
            world.counts["steps with drafts" if plan.max_drafts else "steps of drafting executors without any"] += 1
        if world.trace is not None:
            self.note(f"step {plan.step_id} {'ends' if ended else described(plan)}")

    def _on_adapters(self, commands: AdapterCommands) -> None:
        """The scheduler sends loads and unloads."""
        world = self._world
        self.note(f"loads {[each.index for each in commands.loads]}, unloads {list(commands.unloads)}")
        world.counts["unloads"] += len(commands.unloads)
        if self.lane is not None:
            check_unloads(world, self.lane, commands.unloads)

    def _on_answer(self, answer: AdapterLoaded) -> None:
        """The scheduler reads the answer to a load."""
        world = self._world
        world.adapters.on_answer(answer)
        world.counts["loads" if answer.error is None else "failed loads"] += 1
        self.note(f"adapter {answer.index} " + (answer.error.message if answer.error else "is loaded"))

    def _on_plan(self, plan: StepPlan, adapters: Collection[int]) -> None:
        """The scheduler sends a plan, which may name these adapters."""
        world = self._world
        # One that is being removed may get a last plan.
        member = world.engine.executors._members.get(plan.executor_id)
        if member is None or member.target != self.address.target:
            world.fail(PlanError(f"{self.name} gets a plan of executor {plan.executor_id}"))
            return
        lane = world.core.lanes[plan.executor_id]
        world.heads.on_plan(lane)
        world.turns.on_plan(lane)
        if plan.admitted:
            check_named_adapters(world, lane, plan, adapters)
            check_admissions(world, member)

    def _is_poisoned(self, plan: StepPlan) -> bool:
        world, runner = self._world, self.process.runner
        if world.poison is None:
            return False
        seed, num_output = world.poison
        slots = runner.slots.values() if isinstance(runner, PlanRunner) else ()
        held = any(
            slot.sampling.seed == seed and len(slot.tokens) - slot.num_prompt >= num_output and _computes(plan, slot)
            for slot in slots
        )
        admitted = any(
            each.sampling.seed == seed
            and len(each.token_ids) - each.num_prompt_tokens >= num_output
            and each.slot in plan.scheduled_slots
            for each in plan.admitted
        )
        if held or admitted:
            world.counts["poison deaths"] += 1
            num_poisonous = sum(catalogue()[each.index].spec.sampling.seed == seed for each in world.scenario.clients)
            if world.counts["poison deaths"] > _MOST_POISON_DEATHS * num_poisonous:
                world.fail(PlanError(f"a request has killed {world.counts['poison deaths']} executors and goes on"))
            self.later(world.poison_stays_s + 0.2 * world.rng.random(), self.start_if_dead)
            self.touch(world.poison_stays_s + 1.0)
        return held or admitted


def _computes(plan: StepPlan, slot: Slot) -> bool:
    """Whether a slot that the plan does not admit computes in its step."""
    number = slot.number
    if number in plan.released_slots or slot.stopped:
        return False
    held = (slot.held or number in plan.held_slots) and number not in plan.resumed_slots
    return number in plan.scheduled_slots or (plan.decode_ready and slot.num_left == 1 and not held)


def described(plan: StepPlan) -> str:
    """What a step does, for the trace."""
    admitted = [
        (each.slot, each.sampling.seed, len(each.token_ids), each.num_computed_tokens)
        + ((f"adapter {each.adapter_index}",) if each.adapter_index else ())
        for each in plan.admitted
    ]
    appended = list(zip(plan.append_slots, plan.append_block_ids, strict=True))
    computed = list(zip(plan.scheduled_slots, plan.scheduled_num_tokens, strict=True))
    parts = {
        "admits": admitted, "releases": plan.released_slots, "swaps out": plan.swap_out, "copies": plan.copies,
        "swaps in": plan.swap_in, "appends": appended, "computes": computed,
    }  # fmt: skip
    done = [f"{name} {what}" for name, what in parts.items() if what]
    done += ["decodes"] if plan.decode_ready else []
    done += [f"drafts {plan.max_drafts}"] if plan.max_drafts else []
    return "begins: " + ", ".join(done)
