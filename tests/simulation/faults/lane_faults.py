"""What happens to the set of executors: they join, are drained and removed, stay away, or have another model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from scheduler_svc.engine.fleet.executor_member import ExecutorExistsError, LastExecutorError, UnknownExecutorError
from tests.simulation.checks.lane_checks import Violation
from tests.simulation.executor.host import Host
from tests.simulation.scenario import OTHER_MODEL, Fault, draw_peer
from tests.simulation.world import World

_MAX_HOSTS = 6


class LaneFaults:
    """Changes the executors of a world that has several."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.tasks: list[asyncio.Task[None]] = []
        """Drains and removals under way."""
        self._kinds: dict[str, Callable[[Host, float], None]] = {
            "join": self._join,
            "drained executor": self._drain_and_resume,
            "drained and removed": self._drain_and_remove,
            "removed": self._remove,
            "gone": self._go,
            "other list": self._rewrite_list,
            "other model": self._other_model,
        }

    def inject(self, fault: Fault, host: Host) -> None:
        """Let a fault happen to this executor."""
        self._kinds[fault.kind](host, fault.number)

    def remove_later(self, host: Host, delay_s: float) -> None:
        """Let an operator remove an executor after a while."""
        self._world.touch(delay_s)
        self._world.later(delay_s, lambda: self._start(self._removal(host)))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(asyncio.create_task(work))

    # --- join --------------------------------------------------------------------------------------------------------

    def _join(self, host: Host, number: float) -> None:
        """An executor that left comes back, or a new one comes; it may not run yet."""
        joining = self._absent_host()
        if joining is None:
            return
        joining.happened("join", 0.5 + number)
        self._world.engine.executors.add(joining.address.target)
        if not joining.alive:
            joining.later(number * number, joining.start_if_dead)
        try:
            self._world.engine.executors.add(joining.address.target)
        except ExecutorExistsError:
            return
        self._world.fail(Violation(f"{joining.name} was added twice"))

    def _absent_host(self) -> Host | None:
        """An executor that is not in the scheduler's set; None: there are enough."""
        world = self._world
        absent = [host for host in world.hosts if host.member is None and not host.address.fenced]
        if absent and world.rng.random() < 0.6:
            return world.rng.choice(absent)
        if len(world.hosts) >= _MAX_HOSTS:
            return None
        return world.add_host(draw_peer(world.rng, world.scenario.models[0]))

    # --- drain and remove --------------------------------------------------------------------------------------------

    def _drain_and_resume(self, host: Host, number: float) -> None:
        host.happened("drained executor", 0.5 + 4.0 * number)
        self._start(self._drain(host, 0.5 + 4.0 * number, removes=False))

    def _drain_and_remove(self, host: Host, number: float) -> None:
        host.happened("drained and removed", 0.5 + 4.0 * number)
        self._start(self._drain(host, 0.5 + 4.0 * number, removes=True))

    async def _drain(self, host: Host, seconds: float, *, removes: bool) -> None:
        """`cadenza executors drain`, and then resume or remove."""
        world, target = self._world, host.address.target
        ends_at = world.loop.time() + seconds
        try:
            num_left = await world.engine.executors.drain(target, seconds)
            lane = host.lane
            if num_left == 0 and world.loop.time() < ends_at and host.member is not None and lane is not None:
                world.counts["drained executors"] += 1
                if not lane.is_empty:
                    world.fail(Violation(f"{host.name} counts as drained and is not empty"))
            if removes:
                await self._removal(host)
                return
            # It stays drained for a while.
            await asyncio.sleep(max(0.0, ends_at - world.loop.time()))
            world.engine.executors.resume(target)
            host.note("resumed")
            if host.lane is not None:
                world.turns.forget(host.lane)
        except UnknownExecutorError:
            if host.member is not None:
                raise
        host.touch()

    def _remove(self, host: Host, number: float) -> None:
        host.happened("removed", 0.5)
        self._start(self._removal(host))

    async def _removal(self, host: Host) -> None:
        """`cadenza executors remove`. The last one is kept, and takes requests again if it was draining."""
        world, target = self._world, host.address.target
        present = [each for each in world.present_hosts if each is not host]
        host.touch()
        try:
            await world.engine.executors.remove(target)
            host.note("removed")
            world.counts["removed executors"] += 1
        except LastExecutorError as exc:
            if any(not each.address.fenced and (each.lane is not None or host.lane is None) for each in present):
                world.fail(exc)
            if host.member is not None:
                world.engine.executors.resume(target)
        except UnknownExecutorError:
            if host.member is not None:
                raise
        world.touch()

    def _rewrite_list(self, host: Host, number: float) -> None:
        """The list has one executor less, one more, or both; a name is resolved again within 5 s."""
        world, rng = self._world, self._world.rng
        listed = [each.address.target for each in world.present_hosts]
        until_s = 6.5 if world.scenario.resolves else 1.0
        if len(listed) > 1 and number < 0.7:
            listed.remove(host.address.target)
        if number > 0.4 and (joining := self._absent_host()) is not None:
            listed.append(joining.address.target)
            if not joining.alive:
                joining.later(number, joining.start_if_dead)
        rng.shuffle(listed)
        host.happened("other list", until_s, " ".join(listed))
        world.rewrite_list(listed)

    # --- processes ---------------------------------------------------------------------------------------------------

    def _go(self, host: Host, number: float) -> None:
        """It dies and stays away for so long that its requests move; then it comes back, or is removed."""
        if not host.alive:
            return
        seconds = 1.0 + 4.0 * number
        host.happened("gone", seconds, f"for {seconds:.1f} s")
        host.kill()
        if number < 0.3:
            self.remove_later(host, seconds)
        host.later(seconds, host.start_if_dead)

    def _other_model(self, host: Host, number: float) -> None:
        """A process with another model takes its place, until somebody notices."""
        world, seconds = self._world, 0.5 + 5.0 * number
        if not host.alive:
            return
        host.happened("other model", seconds + 3.5, f"for {seconds:.1f} s")
        host.kill()
        host.start(replace(host.model, **OTHER_MODEL), for_a_while=True)

        def correct() -> None:
            host.kill()
            host.start()
            # If it had become the served model, this executor must come back first.
            world.touch(3.5)

        world.later(seconds, correct)
