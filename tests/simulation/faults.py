"""The faults of a history: what each kind does to its world, and when it is over again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from scheduler_svc.core.types import StepStatus
from scheduler_svc.plan_loop.ports import ModelDescription
from tests.helpers.changing_executor import OTHER_NUMERICS
from tests.simulation.catalogue import catalogue
from tests.simulation.network import SILENCE_S
from tests.simulation.process import NextStep
from tests.simulation.scenario import Fault
from tests.simulation.world import World

_NOTICED_S = 0.25
"""Silence is checked at this interval."""


class Faults:
    """Injects the scenario's faults into a world at their moments."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._drains: list[asyncio.Task[None]] = []
        self._kinds: dict[str, Callable[[float], None]] = {
            "cut": self._cut,
            "stall": lambda number: self._stand_still("stall", 0.02 + 1.5 * number),
            "silence": lambda number: self._stand_still("silence", SILENCE_S + 0.5 + 2.0 * number),
            "kill": self._kill,
            "stop": self._stop,
            "hang": lambda number: self._next_step("hang", NextStep(seconds=2.5 + 5.0 * number)),
            "watchdog": self._watchdog,
            "slow step": lambda number: self._next_step("slow step", NextStep(seconds=0.1 + 0.8 * number)),
            "failed step": lambda _: self._next_step("failed step", NextStep(status=StepStatus.FAILED)),
            "out of memory": lambda _: self._next_step("out of memory", NextStep(status=StepStatus.OUT_OF_MEMORY)),
            "non-finite": lambda number: self._next_step("non-finite", NextStep(non_finite=int(3 * number))),
            "other limits": self._other_limits,
            "other numerics": self._other_numerics,
            "unusable limits": self._unusable_limits,
            "replaced while opening": self._replace_while_opening,
            "refused session": self._refuse,
            "held": self._hold,
            "fenced": self._fence,
            "poison": self._poison,
            "late scheduler": self._pause,
            "wall clock jump": self._jump,
            "drain": self._drain,
        }
        for fault in world.scenario.faults:
            world.loop.call_later(fault.at_s, self._inject, fault)

    def _inject(self, fault: Fault) -> None:
        if not self._world.fenced:
            self._kinds[fault.kind](fault.number)

    async def ended(self) -> None:
        """Wait for drains to end."""
        await asyncio.gather(*self._drains)

    def _happened(self, kind: str, until_s: float = 0.0, detail: str = "") -> None:
        self._world.counts[f"fault: {kind}"] += 1
        self._world.touch(until_s)
        self._world.note(f"FAULT {kind} {detail}".rstrip())

    # --- the network -------------------------------------------------------------------------------------------------

    def _cut(self, _: float) -> None:
        if self._world.address.connections:
            self._happened("cut")
            self._world.address.cut("UNAVAILABLE: connection reset")

    def _stand_still(self, kind: str, seconds: float) -> None:
        """The network delivers nothing for so long."""
        world, address = self._world, self._world.address
        if address.stalled:
            return
        self._happened(kind, seconds, f"for {seconds:.3f} s")
        address.stalled = True
        connections, ends_at = list(address.connections), world.loop.time() + seconds

        def notice() -> None:
            if world.loop.time() < ends_at:
                world.note("both ends notice the silence")
                for connection in connections:
                    connection.fall_silent()

        def end() -> None:
            address.stalled = False
            world.note(f"the {kind} is over")
            world.touch()
            address.flush()

        world.later(SILENCE_S + _NOTICED_S * world.rng.random(), notice)
        world.later(seconds, end)

    def _refuse(self, number: float) -> None:
        self._happened("refused session", 1.0)
        self._world.address.num_refusals = 1 + int(3 * number)
        self._world.address.cut("UNAVAILABLE: connection reset")

    def _hold(self, number: float) -> None:
        """Another scheduler took the executor and died: its lease must end first."""
        self._happened("held", SILENCE_S + 0.5)
        self._world.address.held_until = self._world.loop.time() + SILENCE_S
        self._world.address.cut("UNAVAILABLE: connection reset")

    def _fence(self, number: float) -> None:
        """Another scheduler holds the executor: ours learns of it when its session breaks."""
        self._happened("fenced", 1.0)
        self._world.fenced = self._world.address.fenced = True
        self._world.address.cut("UNAVAILABLE: connection reset")

    # --- the process -------------------------------------------------------------------------------------------------

    def _kill(self, number: float) -> None:
        world = self._world
        if world.process.alive:
            self._happened("kill", number)
            world.process.kill()
            world.later(0.02 + number, world.restart_if_dead)

    def _stop(self, number: float) -> None:
        """SIGSTOP, and SIGCONT later; or SIGKILL and another process."""
        world, process, address = self._world, self._world.process, self._world.address
        if not process.alive or process.stopped:
            return
        seconds = 0.05 + 3.5 * number
        self._happened("stop", seconds + 1.0, f"for {seconds:.3f} s")
        process.stopped = True
        connections = [each for each in address.connections if each.process is process]
        ends_at = world.loop.time() + seconds

        def notice() -> None:
            if process.alive and world.loop.time() < ends_at:
                world.note("the scheduler notices the silence")
                for connection in connections:
                    # Also the executor's side: it reads the end of the stream when it goes on.
                    connection.fall_silent()

        def end() -> None:
            if not process.alive:
                return
            world.touch(1.0)
            if number > 0.8:
                process.kill()
                world.later(0.1, world.restart_if_dead)
            else:
                world.note("the executor goes on")
                process.resume()
                address.flush()

        world.later(SILENCE_S + _NOTICED_S * world.rng.random(), notice)
        world.later(seconds, end)

    def _next_step(self, kind: str, step: NextStep) -> None:
        if self._world.process.alive and self._world.process.next_step is None:
            self._happened(kind, min(6.0, step.seconds))
            self._world.process.next_step = step

    def _watchdog(self, number: float) -> None:
        """A step never ends, and the executor's watchdog ends the process."""
        world, process = self._world, self._world.process
        if not process.alive or process.next_step is not None:
            return
        self._next_step("watchdog", NextStep(seconds=1e6))

        def end() -> None:
            if process.alive and process.hanging:
                process.kill()
                world.later(0.05 + 0.2 * number, world.restart_if_dead)
            elif process.alive:
                process.next_step = None

        self._world.later(3.0 + 4.0 * number, end)
        self._world.touch(8.0)

    def _replace(self, model: ModelDescription, numerics: int | None = None, after_s: float = 0.1) -> None:
        """Another process, with another description, takes the place of this one."""
        world = self._world
        world.process.kill()

        def start() -> None:
            if world.process.alive:
                world.process.kill()
            world.start_process(model, numerics)

        world.later(after_s, start)

    def _other_limits(self, number: float) -> None:
        self._happened("other limits", 0.5)
        self._replace(self._changed_model(), after_s=0.02 + 0.3 * number)

    def _changed_model(self) -> ModelDescription:
        model, rng = self._world.models[-1], self._world.rng
        size = rng.choice([model.block_size, model.block_size, 4])
        changes: list[dict[str, Any]] = [
            {"num_device_blocks": max(4, int(model.num_device_blocks * rng.choice([0.5, 0.7, 1.5])))},
            {"max_num_seqs": rng.choice([1, 2, 3, 5])},
            {"max_model_len": rng.choice([24, 40, 56])},
            {"num_host_blocks": rng.choice([0, 10])},
            {"block_size": size, "num_device_blocks": 120 // size, "num_host_blocks": 40 // size},
        ]
        changed = replace(model, **rng.choice(changes))
        return replace(
            changed,
            num_slots=max(changed.num_slots, changed.max_num_seqs),
            max_num_batched_tokens=max(changed.max_num_batched_tokens, changed.max_num_seqs),
        )

    def _other_numerics(self, _: float) -> None:
        if len(self._world.numerics) > 1:
            return
        self._happened("other numerics", 0.5)
        self._replace(replace(self._world.models[-1], **OTHER_NUMERICS), numerics=1)

    def _unusable_limits(self, number: float) -> None:
        """An executor whose limits cannot work, and later one that can be used."""
        world, model = self._world, self._world.models[-1]
        if not world.process.alive:
            return
        self._happened("unusable limits", 1.0 + number)
        self._replace(replace(model, max_num_batched_tokens=model.max_num_seqs - 1), after_s=0.01)
        world.later(0.5 + number, lambda: self._replace(model))

    def _replace_while_opening(self, number: float) -> None:
        world, changes = self._world, number > 0.3

        def exchange() -> None:
            world.process.kill()
            world.start_process(self._changed_model() if changes else None)

        self._happened("replaced while opening", 0.5)
        world.address.replace_before_open = exchange
        world.address.cut("UNAVAILABLE: connection reset")

    def _poison(self, number: float) -> None:
        """A request kills every executor that computes it from some token on."""
        world = self._world
        if world.poison is None:
            client = world.scenario.clients[int(number * len(world.scenario.clients))]
            seed = catalogue()[client.index].spec.sampling.seed
            self._happened("poison", 5.0, f"seed {seed}")
            world.poison = seed, int(number * 30) % 5

    # --- the scheduler -----------------------------------------------------------------------------------------------

    def _pause(self, number: float) -> None:
        world, seconds = self._world, 0.01 + 1.5 * number
        self._happened("late scheduler", seconds, f"for {seconds:.3f} s")
        world.loop.pause(seconds)
        world.paused_s += seconds
        world.touch()

    def _jump(self, number: float) -> None:
        self._happened("wall clock jump")
        self._world.clock.wall_offset_s += 3600.0 if number > 0.5 else -3600.0

    def _drain(self, number: float) -> None:
        world, engine = self._world, self._world.engine
        if engine.draining:
            return
        seconds = 0.02 + number
        self._happened("drain", seconds)

        async def drain_and_resume() -> None:
            left = await engine.drain(seconds)
            if left == 0 and engine.connected:
                world.counts["drained"] += 1
            if engine.failure is None:
                engine.resume()
            world.touch()

        self._drains.append(asyncio.create_task(drain_and_resume()))
