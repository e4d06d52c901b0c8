"""The faults of a history: what each kind does to one executor or to the scheduler, and when it is over again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cadenza_common.plan.result import StepStatus
from scheduler_svc.plan_loop.ports import ModelDescription
from tests.helpers.scheduler.changing_executor import OTHER_NUMERICS
from tests.simulation.catalogue import catalogue
from tests.simulation.executor.host import Host
from tests.simulation.executor.network import SILENCE_S
from tests.simulation.executor.process import NextStep
from tests.simulation.faults.adapter_faults import AdapterFaults
from tests.simulation.faults.lane_faults import LaneFaults
from tests.simulation.scenario import KERNELS, Fault
from tests.simulation.world import World

_NOTICED_S = 0.25
"""Silence is checked at this interval."""


class Faults:
    """Injects the scenario's faults into a world at their moments."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._drains: list[asyncio.Task[None]] = []
        self._lanes, self._adapters = LaneFaults(world), AdapterFaults(world)
        self._of_executors: dict[str, Callable[[Host, float], None]] = {
            "cut": self._cut,
            "stall": lambda host, number: self._stand_still(host, "stall", 0.02 + 1.5 * number),
            "silence": lambda host, number: self._stand_still(host, "silence", SILENCE_S + 0.5 + 2.0 * number),
            "kill": self._kill,
            "terminated": self._terminate,
            "stop": self._stop,
            "hang": lambda host, number: _next_step(host, "hang", NextStep(seconds=2.5 + 5.0 * number)),
            "watchdog": self._watchdog,
            "slow step": lambda host, number: _next_step(host, "slow step", NextStep(seconds=0.1 + 0.8 * number)),
            "failed step": lambda host, _: _next_step(host, "failed step", NextStep(status=StepStatus.FAILED)),
            "out of memory": lambda host, _: _next_step(
                host, "out of memory", NextStep(status=StepStatus.OUT_OF_MEMORY)
            ),
            "non-finite": lambda host, number: _next_step(host, "non-finite", NextStep(non_finite=int(3 * number))),
            "other limits": self._other_limits,
            "other numerics": self._other_numerics,
            "unusable limits": self._unusable_limits,
            "replaced while opening": self._replace_while_opening,
            "refused session": self._refuse,
            "held": self._hold,
            "fenced": self._fence,
            "failed load": self._adapters.fail_load,
            "slow load": self._adapters.delay_load,
            "forgotten adapters": self._adapters.forget,
        }
        self._of_the_scheduler: dict[str, Callable[[float], None]] = {
            "poison": self._poison,
            "late scheduler": self._pause,
            "wall clock jump": self._jump,
            "drain": self._drain,
            "network": self._network,
            "changed adapter": self._adapters.change,
            "unloaded adapter": self._adapters.unload,
            "reloaded adapter": self._adapters.reload,
        }
        for fault in world.scenario.faults:
            world.loop.call_later(fault.at_s, self._inject, fault)

    def _inject(self, fault: Fault) -> None:
        hosts = self._world.present_hosts
        if self._world.fenced or not hosts:
            return
        host = hosts[int(fault.place * len(hosts))]
        if fault.kind in self._of_the_scheduler:
            self._of_the_scheduler[fault.kind](fault.number)
        elif fault.kind in self._of_executors:
            if host.address.process is not None:
                self._of_executors[fault.kind](host, fault.number)
        else:
            self._lanes.inject(fault, host)

    async def ended(self) -> None:
        """Wait for drains and removals to end."""
        await asyncio.gather(*self._drains, *self._lanes.tasks, *self._adapters.tasks)

    def _happened(self, kind: str, until_s: float = 0.0, detail: str = "") -> None:
        self._world.counts[f"fault: {kind}"] += 1
        self._world.touch(until_s)
        self._world.note(f"FAULT {kind} {detail}".rstrip())

    # --- the network -------------------------------------------------------------------------------------------------

    def _cut(self, host: Host, _: float) -> None:
        if host.address.connections:
            host.happened("cut")
            host.address.cut("UNAVAILABLE: connection reset")

    def _network(self, number: float) -> None:
        """The scheduler's own connection is lost: it reaches no executor for a while."""
        for host in self._world.present_hosts:
            self._stand_still(host, "network", 0.02 + 3.0 * number)

    def _stand_still(self, host: Host, kind: str, seconds: float) -> None:
        """The network delivers nothing for so long."""
        world, address = self._world, host.address
        if address.stalled:
            return
        host.happened(kind, seconds, f"for {seconds:.3f} s")
        address.stalled = True
        connections, ends_at = list(address.connections), world.loop.time() + seconds

        def notice() -> None:
            if world.loop.time() < ends_at:
                host.note("both ends notice the silence")
                for connection in connections:
                    connection.fall_silent()

        def end() -> None:
            address.stalled = False
            host.note(f"the {kind} is over")
            host.touch()
            address.flush()

        world.later(SILENCE_S + _NOTICED_S * world.rng.random(), notice)
        world.later(seconds, end)

    def _refuse(self, host: Host, number: float) -> None:
        host.happened("refused session", 1.0)
        host.address.num_refusals = 1 + int(3 * number)
        host.address.cut("UNAVAILABLE: connection reset")

    def _hold(self, host: Host, number: float) -> None:
        """Another scheduler took the executor and died: its lease must end first."""
        host.happened("held", SILENCE_S + 0.5)
        host.address.held_until = self._world.loop.time() + SILENCE_S
        if host.alive:
            # Its indexes meant other adapters.
            host.process.forgets = lambda index: True
        host.address.cut("UNAVAILABLE: connection reset")

    def _fence(self, host: Host, number: float) -> None:
        """Another scheduler holds the executor: ours learns of it when its session breaks."""
        host.happened("fenced", 3.0)
        host.address.fenced = True
        host.address.cut("UNAVAILABLE: connection reset")
        if not self._world.fenced:
            # Nobody else can know that it never comes back.
            self._lanes.remove_later(host, 1.5 + number)

    # --- the process -------------------------------------------------------------------------------------------------

    def _kill(self, host: Host, number: float) -> None:
        if host.alive:
            host.happened("kill", number)
            host.kill()
            host.later(0.02 + number, host.start_if_dead)

    def _terminate(self, host: Host, number: float) -> None:
        """A signal stops it: its sessions end with a message, and another process follows."""
        if host.alive:
            host.happened("terminated", 0.1 + number)
            host.process.terminate()
            host.later(0.1 + number, host.start_if_dead)

    def _stop(self, host: Host, number: float) -> None:
        """SIGSTOP, and SIGCONT later; or SIGKILL and another process."""
        world, process, address = self._world, host.process, host.address
        if not process.alive or process.stopped:
            return
        seconds = 0.05 + 3.5 * number
        host.happened("stop", seconds + 1.0, f"for {seconds:.3f} s")
        process.loads.stopped = True
        connections = [each for each in address.connections if each.process is process]
        ends_at = world.loop.time() + seconds

        def notice() -> None:
            if process.alive and world.loop.time() < ends_at:
                host.note("the scheduler notices the silence")
                for connection in connections:
                    # Also the executor's side: it reads the end of the stream when it goes on.
                    connection.fall_silent()

        def end() -> None:
            if not process.alive:
                return
            host.touch(1.0)
            if number > 0.8:
                process.kill()
                host.later(0.1, host.start_if_dead)
            else:
                host.note("the executor goes on")
                process.resume()
                address.flush()

        world.later(SILENCE_S + _NOTICED_S * world.rng.random(), notice)
        world.later(seconds, end)

    def _watchdog(self, host: Host, number: float) -> None:
        """A step never ends, and the executor's watchdog ends the process."""
        process = host.process
        if not process.alive or process.next_step is not None:
            return
        _next_step(host, "watchdog", NextStep(seconds=1e6))

        def end() -> None:
            if process.alive and process.hanging:
                process.kill()
                host.later(0.05 + 0.2 * number, host.start_if_dead)
            elif process.alive:
                process.next_step = None

        host.later(3.0 + 4.0 * number, end)
        host.touch(8.0)

    def _other_limits(self, host: Host, number: float) -> None:
        host.happened("other limits", 0.5)
        host.replace(self._changed_model(host), after_s=0.02 + 0.3 * number)

    def _changed_model(self, host: Host) -> ModelDescription:
        model, rng = host.model, self._world.rng
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

    def _other_numerics(self, host: Host, _: float) -> None:
        """With several executors it is the same model still, on other kernels."""
        world = self._world
        if len(world.hosts) > 1:
            host.happened("other numerics", 0.5)
            host.replace(replace(host.model, **KERNELS[1 - host.numerics]))
        elif len(world.numerics) == 1:
            host.happened("other numerics", 0.5)
            host.replace(replace(host.model, **OTHER_NUMERICS))

    def _unusable_limits(self, host: Host, number: float) -> None:
        """An executor whose limits cannot work, and later one that can be used."""
        model = host.model
        if not host.alive:
            return
        host.happened("unusable limits", 1.0 + number)
        host.replace(replace(model, max_num_batched_tokens=model.max_num_seqs - 1), after_s=0.01)
        host.later(0.5 + number, lambda: host.replace(model))

    def _replace_while_opening(self, host: Host, number: float) -> None:
        changes = number > 0.3

        def exchange() -> None:
            host.kill()
            host.start(self._changed_model(host) if changes else None)

        host.happened("replaced while opening", 0.5)
        host.address.replace_before_open = exchange
        host.address.cut("UNAVAILABLE: connection reset")

    # --- requests and the scheduler ----------------------------------------------------------------------------------

    def _poison(self, number: float) -> None:
        """A request kills every executor that computes it from some token on."""
        world = self._world
        if world.poison is None:
            client = world.scenario.clients[int(number * len(world.scenario.clients))]
            seed = catalogue()[client.index].spec.sampling.seed
            self._happened("poison", 5.0, f"seed {seed}")
            world.poison = seed, int(number * 30) % 5
            if len(world.hosts) > 1 and int(number * 1000) % 2:
                # So late that its requests have moved.
                world.poison_stays_s = 1.2

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


def _next_step(host: Host, kind: str, step: NextStep) -> None:
    if host.alive and host.process.next_step is None:
        host.happened(kind, min(6.0, step.seconds))
        host.process.next_step = step
