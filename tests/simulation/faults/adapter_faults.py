"""What happens to adapters: files change, loads fail or take long, executors forget them, an operator reloads them."""

from __future__ import annotations

import asyncio

from scheduler_svc.core.errors import PreconditionError, RequestRejectedError, UnknownAdapterError
from tests.simulation.checks.lane_checks import Violation
from tests.simulation.executor.adapting import CONTENTS, FAILED, INVALID, NextLoad, path_of
from tests.simulation.executor.host import Host
from tests.simulation.world import World

_ANSWERED_S = 20.0
"""An operator's load is answered within this time, once requests leave a place for it."""


class AdapterFaults:
    """Disturbs the adapters of a world that has some."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.tasks: list[asyncio.Task[None]] = []
        """Loads by the operator under way."""

    def _pick(self, number: float) -> str:
        names = self._world.scenario.adapters.names
        return names[int(1000 * number) % len(names)]

    def _happened(self, kind: str, until_s: float, detail: str) -> None:
        world = self._world
        world.counts[f"fault: {kind}"] += 1
        world.quiet_at = max(world.quiet_at, world.loop.time() + until_s)
        world.note(f"FAULT {kind} {detail}")

    # --- files and executors -----------------------------------------------------------------------------------------

    def change(self, number: float) -> None:
        """The files of an adapter change under its name: who loads it later has another content."""
        name = self._pick(number)
        files, path = self._world.adapters, path_of(name)
        others = [content for content in CONTENTS if content != files.contents[path]]
        files.contents[path] = others[int(100 * number) % 2]
        self._happened("changed adapter", 0.0, f"{name} is {files.contents[path]}")

    def fail_load(self, host: Host, number: float) -> None:
        """An executor cannot read an adapter that others may read."""
        if host.alive:
            self._happened("failed load", 0.0, host.name)
            host.process.loads.next_load = NextLoad(fails=True)

    def delay_load(self, host: Host, number: float) -> None:
        """The next load of an executor takes long."""
        if host.alive:
            self._happened("slow load", 4.0 * number, f"{host.name} {4.0 * number:.3f} s")
            host.process.loads.next_load = NextLoad(seconds=4.0 * number)

    def forget(self, host: Host, number: float) -> None:
        """An executor's session breaks, and it has lost all of its adapters or some."""
        if host.alive and not host.process.stopped:
            host.happened("forgotten adapters", 0.5)
            host.process.forgets = lambda index: number < 0.5 or bool((index + int(100 * number)) % 2)
            host.address.cut("UNAVAILABLE: connection reset")

    # --- the operator ------------------------------------------------------------------------------------------------

    def unload(self, number: float) -> None:
        """An operator unloads an adapter, and loads it again after a while."""
        name = self._pick(number)
        if self._take_name(name):
            self._happened("unloaded adapter", number, name)
            self._world.later(number, lambda: self._load(name))

    def reload(self, number: float) -> None:
        """An operator unloads an adapter and loads it with other contents, while requests of the former one run."""
        name = self._pick(number)
        if self._take_name(name):
            self._happened("reloaded adapter", 0.0, name)
            self.change(number)
            self._load(name)

    def _take_name(self, name: str) -> bool:
        world = self._world
        if name not in world.adapters.names:
            return False
        world.adapters.names.remove(name)
        world.engine.adapters.unload(name)
        world.engine.executors.wake()
        return True

    def _load(self, name: str) -> None:
        """`cadenza lora load`."""
        world = self._world
        if name in world.adapters.names:
            return
        world.adapters.names.add(name)
        world.engine.adapters.load(name, path_of(name))
        index = world.engine.adapters.names.find(name) or 0
        world.engine.executors.wake()
        world.note(f"adapter {index} is {name}")
        self.tasks.append(asyncio.create_task(self._loaded(name, index)))

    async def _loaded(self, name: str, index: int) -> None:
        """Wait for the answer to a load: that an executor has it, or that none can."""
        world = self._world
        load = asyncio.create_task(world.engine.adapters.loaded(name))
        idle_since = world.loop.time()
        while not load.done():
            await asyncio.wait([load], timeout=0.5)
            # Requests may keep the places of others.
            if world.core.groups or world.loop.time() < world.quiet_at:
                idle_since = world.loop.time()
            if not load.done() and world.loop.time() > idle_since + _ANSWERED_S + world.paused_s:
                load.cancel()
                await asyncio.wait([load])
                if not world.partly_fenced:
                    world.fail(Violation(f"the load of {name} is never answered"))
                return
        try:
            load.result()
            world.counts["loads by the operator"] += 1
        except (PreconditionError, RequestRejectedError) as exc:
            self._check_refusal(name, index, exc)
        except UnknownAdapterError:
            if name in world.adapters.names:
                raise
            # Unloaded in the very turn in which it was loaded: this task had not begun to wait.

    def _check_refusal(self, name: str, index: int, error: Exception) -> None:
        """The name is free again, and what was wrong has happened."""
        world, text = self._world, str(error)
        world.note(f"adapter {index} cannot be loaded: {error}")
        world.counts["refused loads"] += 1
        if "was unloaded" in text:
            return  # By the operator, meanwhile.
        world.adapters.names.discard(name)
        has_failed = index in world.adapters.failed and (FAILED in text or INVALID in text)
        has_changed = len(world.adapters.answered.get(index, ())) > 1
        if not (has_failed or has_changed or any(not model.max_loras for model in world.models)):
            world.fail(Violation(f"the load of {name} is refused: {error}"))
