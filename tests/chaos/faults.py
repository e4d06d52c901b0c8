"""Makes the faults of a schedule happen."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace

import psutil

from tests.chaos.health import HealthWatch
from tests.chaos.history import History
from tests.chaos.load import Load
from tests.chaos.membership import Membership
from tests.chaos.schedule import Fault
from tests.chaos.services import CHANGED_LIMITS, LIMITS, SCHEDULER, Services
from tests.helpers.machine.relay import Relay

RECOVERY_LIMIT_S = 90.0
_LOOK_S = 0.02
_HOUR_S = 3600.0
_SLOW_DELAY_S = 0.12
_SLOW_BYTES_PER_S = 60_000.0
_DAMAGE_LIMIT_S = 5.0
_TOGETHER_S = 0.4
"""Two executors that die together die within this."""


class FaultRunner:
    """Runs a schedule against the services and their load."""

    def __init__(
        self, services: Services, load: Load, watch: HealthWatch, history: History, report: Callable[[str], None]
    ) -> None:
        self.happened: Counter[str] = Counter()
        self.moments: list[tuple[float, Fault]] = []
        """When each fault happened, on the event loop's clock."""
        self._services = services
        self._load = load
        self._watch = watch
        self._history = history
        self._report = report
        self._membership = Membership(services, report)
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, schedule: list[Fault], stop_at: float) -> None:
        """Make all of them happen, or as many as there is time for; return once the service has recovered."""
        loop = asyncio.get_running_loop()
        for fault in schedule:
            if loop.time() > stop_at:
                break
            if fault.waits:
                await self.recovered()
            await asyncio.sleep(fault.after_s)
            self._history.write(
                "fault", number=fault.number, kind=fault.kind, duration_s=fault.duration_s, executor=fault.executor
            )
            self.moments.append((loop.time(), fault))
            self.happened[fault.kind] += 1
            task = asyncio.create_task(self._happen(fault))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            await asyncio.sleep(_LOOK_S)  # it begins before anything looks whether the service has recovered from it
        await asyncio.gather(*self._tasks)
        await self.recovered()

    async def recovered(self) -> None:
        """Wait until nothing is wrong and health is SERVING."""
        try:
            async with asyncio.timeout(RECOVERY_LIMIT_S):
                while self._services.truth.reasons or not self._watch.is_serving:  # noqa: ASYNC110
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            self._report(f"no recovery after {RECOVERY_LIMIT_S:g} s; wrong: {self._services.truth.reasons}")

    async def _happen(self, fault: Fault) -> None:
        place, _, what = fault.kind.partition(" link: ")
        if what:
            services = self._services
            link = services.executor_links[fault.executor] if place == "executor" else services.client_link
            await self._on_link(link, place, what, fault)
            return
        actions: dict[str, Callable[[Fault], Awaitable[None]]] = {
            "kill executor": lambda fault: self._restart_executor(fault, LIMITS),
            "changed executor": lambda fault: self._restart_executor(
                fault, CHANGED_LIMITS[int(fault.draw * len(CHANGED_LIMITS))]
            ),
            "executor out of memory": lambda fault: self._restart_executor(
                fault, LIMITS, f"oom@{2 + int(20 * fault.draw)}", f"oom@{30 + int(60 * fault.draw)}"
            ),
            "executor hangs": lambda fault: self._restart_executor(
                fault, LIMITS, f"hang@{20 + int(60 * fault.draw)}:{fault.duration_s}"
            ),
            "executor loses its device": lambda fault: self._restart_executor(
                fault, LIMITS, f"device-error@{2 + int(80 * fault.draw)}"
            ),
            "stop executor": lambda fault: self._stop(fault.executor, fault),
            "all executors die": self._kill_all,
            "two executors die": self._kill_two,
            "one executor stops, one drains": self._stop_and_drain,
            "executor drains": self._membership.drain,
            "executor is removed and added": self._membership.remove_and_add,
            "executor joins and leaves": self._membership.join_and_leave,
            "list of executors changes": self._membership.change_list,
            "kill scheduler": self._kill_scheduler,
            "stop scheduler": lambda fault: self._stop(None, fault),
            "client disconnects": self._disconnect,
            "client half-open": self._disconnect,
            "cancel": lambda fault: self._load.cancel(fault.draw),
            "client leaves": self._leave,
            "deadline": self._deadline,
            "clock jump": self._jump,
            "full disk": self._fill_disk,
            "poison": self._poison,
        }
        await actions[fault.kind](fault)

    # --- processes --------------------------------------------------------------------------------------------------

    async def _restart_executor(self, fault: Fault, limits: dict[str, int], *inject: str) -> None:
        self._services.set_limits(fault.executor, limits, *inject)
        self._services.kill(self._services.executors[fault.executor])

    async def _kill_all(self, fault: Fault) -> None:
        for name in self._services.executors:
            self._services.kill(name)

    async def _kill_two(self, fault: Fault) -> None:
        names = self._services.executors
        self._services.kill(names[fault.executor])
        await asyncio.sleep(_TOGETHER_S * fault.draw)
        self._services.kill(names[self._other(fault)])

    async def _stop_and_drain(self, fault: Fault) -> None:
        other = replace(fault, executor=self._other(fault))
        await asyncio.gather(self._stop(fault.executor, fault), self._membership.drain(other))

    def _other(self, fault: Fault) -> int:
        """An executor beside the one that the fault concerns."""
        return (fault.executor + 1) % self._services.num_executors

    async def _kill_scheduler(self, fault: Fault) -> None:
        self._services.kill(SCHEDULER)

    async def _stop(self, executor: int | None, fault: Fault) -> None:
        """SIGSTOP, and SIGCONT later, unless the supervisor has killed the process meanwhile; None: the scheduler."""
        process = self._services.process(SCHEDULER if executor is None else self._services.executors[executor])
        if process is None:
            return
        reason = f"stopped by fault {fault.number}"
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()
            self._services.truth.begin(reason, executor)
            await asyncio.sleep(fault.duration_s)
            process.resume()
        self._services.truth.end(reason, executor)

    # --- networks ---------------------------------------------------------------------------------------------------

    async def _on_link(self, link: Relay, place: str, what: str, fault: Fault) -> None:
        if what == "cut":
            link.cut()
        elif what in ("halve", "repeat"):
            await self._damage(link, place, what, fault)
        else:
            await self._for_a_while(link, place, what, fault)

    async def _damage(self, link: Relay, place: str, what: str, fault: Fault) -> None:
        """Return once all chunks were damaged: connections that are made meanwhile may break too."""
        reason = f"{place} link: {what}"
        if place == "executor":
            self._services.truth.begin(reason, fault.executor, must=False)
        if what == "halve":
            link.num_to_halve = 1 + int(3 * fault.draw)
        else:
            link.num_to_repeat = 1 + int(5 * fault.draw)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DAMAGE_LIMIT_S):
                while link.num_to_halve or link.num_to_repeat:  # noqa: ASYNC110
                    await asyncio.sleep(_LOOK_S)
        link.num_to_halve = link.num_to_repeat = 0
        self._services.truth.end(reason, fault.executor)

    async def _for_a_while(self, link: Relay, place: str, what: str, fault: Fault) -> None:
        reason, truth = f"{place} link: {what}", self._services.truth
        if place == "executor":
            # Slow messages may keep the session or not.
            truth.begin(reason, fault.executor, must=what in ("stall", "drop", "refuse"))
        if what == "stall":
            link.flows.clear()
        elif what == "drop":
            link.silent = True
        elif what == "refuse":
            link.refuses = True
            link.cut()
        elif what == "delay":
            link.delay_s = _SLOW_DELAY_S * (0.2 + fault.draw)
        elif what == "throttle":
            link.bytes_per_s = _SLOW_BYTES_PER_S * (0.2 + fault.draw)
        else:
            link.slow_close_s = fault.duration_s
            link.cut_servers()
        await asyncio.sleep(fault.duration_s)
        if what == "drop":
            link.cut()  # bytes are missing: TCP would not go on after them
        link.flows.set()
        link.silent = link.refuses = False
        link.delay_s, link.bytes_per_s, link.slow_close_s = 0.0, None, 0.0
        truth.end(reason, fault.executor)

    async def _disconnect(self, fault: Fault) -> None:
        connections = sorted(self._services.client_link.connections, key=id)
        if connections:
            chosen = connections[int(fault.draw * len(connections))]
            self._services.client_link.connections.discard(chosen)
            if fault.kind == "client half-open":
                chosen.cut_client()
            else:
                chosen.cut()

    # --- clients, clocks, disks ---------------------------------------------------------------------------------------

    async def _leave(self, fault: Fault) -> None:
        self._load.leave(fault.draw)

    async def _deadline(self, fault: Fault) -> None:
        self._load.send_with_deadline(fault.draw, fault.duration_s / 2)

    async def _jump(self, fault: Fault) -> None:
        """An hour ahead or behind, and back after a while."""
        self._load.note_all("clock jump")
        self._services.clock.shift(_HOUR_S if fault.draw < 0.5 else -_HOUR_S)
        await asyncio.sleep(fault.duration_s)
        self._load.note_all("clock jump")
        self._services.clock.shift(0)

    async def _fill_disk(self, fault: Fault) -> None:
        await asyncio.to_thread(self._services.fill_disk)
        await asyncio.sleep(fault.duration_s)
        self._services.empty_disk()

    async def _poison(self, fault: Fault) -> None:
        """Return once it has ended: health is what it is while executors die one after another."""
        self._services.truth.begin("poison", must=False)
        await self._load.send_poison()
        self._services.truth.end("poison")
