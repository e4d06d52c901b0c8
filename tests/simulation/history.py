"""Runs one history: its services, clients and faults on a virtual loop, and the checks of all that came of it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from cadenza.plan_log import PlanLogReader
from scheduler_svc.plan_loop.progress import NUM_FIRST_STEPS
from scheduler_svc.replay.core_replay import CoreReplay
from tests.simulation.checks import check_client
from tests.simulation.clients import Client
from tests.simulation.faults import Faults
from tests.simulation.loop import VirtualLoop
from tests.simulation.scenario import Scenario, draw_scenario
from tests.simulation.world import Violation, World

BOUND_S = 20.0
"""Once the last fault is over, every request ends within this time."""
HEALTH_S = 2.3
"""Health is true after 2 s, and silence is checked every 0.25 s."""
HANG_S = 4.0
"""A step that hangs is noticed after 2 s or three times its predicted duration, which is under 1.2 s here."""
_CHECK_S = 0.3
_SETTLE_S = 1.0
"""After the last request the executor releases its slots within this time."""

_LAST_S = 3.0
"""Whatever the simulation itself has planned happens within this time."""


@dataclass(frozen=True, slots=True)
class Report:
    """What came of a history."""

    seed: int
    counts: Counter[str]
    num_callbacks: int
    seconds: float
    """Of virtual time."""
    trace: tuple[str, ...] = ()


class HistoryError(Exception):
    """A history broke a promise; the message says which, and how to repeat it."""

    def __init__(self, message: str, seed: int = 0, trace: list[str] | None = None) -> None:
        super().__init__(message)
        self.seed = seed
        self.trace = trace or []

    @classmethod
    def of(cls, seed: int, cause: BaseException, trace: list[str] | None) -> HistoryError:
        """The error of a history that raised `cause`."""
        found = "".join(traceback.format_exception_only(cause)).strip()
        message = f"seed {seed}: {found}\nrepeat: python -m tests.simulation --seed {seed} --trace"
        return cls(message, seed, trace)


def run_history(seed: int, *, trace: bool = False, scenario: Scenario | None = None) -> Report:
    """Run one history; raises HistoryError."""
    scenario = scenario or draw_scenario(seed)
    loop = VirtualLoop(Random(f"loop {seed}"), latest_s=scenario.latest_s)
    lines: list[str] | None = [] if trace else None
    try:
        with _quiet(), contextlib.ExitStack() as stack:
            log = _log_path(stack) if scenario.is_recorded else None
            with contextlib.ExitStack() as recording:
                world = World(scenario, loop, recording, log)
                world.trace = lines
                loop.set_exception_handler(lambda _, context: world.fail(_unhandled(context)))
                loop.run_until_complete(_run(world))
            if log is not None:
                _check_replay(log)
                world.counts["replayed"] += 1
    except Exception as exc:
        _abandon(loop)
        raise HistoryError.of(seed, exc, lines) from exc
    finally:
        loop.close()
    return Report(seed, world.counts, loop.num_callbacks, loop.time(), tuple(lines or ()))


def _abandon(loop: VirtualLoop) -> None:
    """End the tasks of a history that has failed, as far as they still obey."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    with _quiet(), contextlib.suppress(Exception):
        loop.run_until_complete(_gather(tasks))


async def _gather(tasks: set[asyncio.Task[Any]]) -> None:
    await asyncio.wait(tasks, timeout=10.0)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No log lines, and no garbage collection in the middle of a history, which would run finalizers at any moment."""
    disabled, collects = logging.root.manager.disable, gc.isenabled()
    logging.disable(logging.CRITICAL)
    gc.disable()
    try:
        yield
    finally:
        logging.disable(disabled)
        if collects:
            gc.enable()


def _unhandled(context: dict[str, Any]) -> Exception:
    """What a callback or a forgotten task has raised."""
    error = context.get("exception")
    return error if isinstance(error, Exception) else Violation(context["message"])


def _log_path(stack: contextlib.ExitStack) -> Path:
    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="simulation-"))) / "plan.log"


async def _run(world: World) -> None:
    clients = [Client(world, plan) for plan in world.scenario.clients]
    world.start_process()
    await world.engine.start()
    faults = Faults(world)
    reading = [asyncio.create_task(client.run(), name=client.plan.name) for client in clients]
    watching = asyncio.create_task(_watch_health(world), name="health")
    await _until_ended(world, clients, reading)
    await faults.ended()
    await _settle(world)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    _raise_violations(world)
    for client in clients:
        check_client(world, client)
    _check_nothing_held(world)
    await _stop(world)


async def _until_ended(world: World, clients: list[Client], reading: list[asyncio.Task[None]]) -> None:
    """Wait for all clients, and for all faults; raises Violation if a request waits for ever."""
    asked_to_start = False
    last_fault_s = max((fault.at_s for fault in world.scenario.faults), default=0.0)
    world.touch(last_fault_s + 0.01)
    while True:
        left = [task for task in reading if not task.done()]
        await (asyncio.wait(left, timeout=0.5) if left else asyncio.sleep(0.2))
        for task in reading:
            if task.done():
                task.result()
        _raise_violations(world)
        now = world.loop.time()
        if now >= world.quiet_at and all(task.done() for task in reading):
            return
        arrived = all(client.live or client.refusal for client in clients)
        if arrived and not asked_to_start and now > world.quiet_at + 1.0:
            # A static batch would wait for further requests, and no more will come.
            asked_to_start = True
            world.core.drain(True)
            world.engine.executors.wake()
        if now > world.quiet_at + BOUND_S + world.paused_s:
            waiting = [task.get_name() for task in reading if not task.done()]
            raise Violation(f"{waiting} wait for ever: {_state(world)}")


def _state(world: World) -> str:
    lane = world.core.lanes[0]
    groups = [
        (key[1], [(each.state.name, len(each.token_ids), each.num_pending) for each in group.sequences])
        for key, group in world.core.groups.items()
    ]
    return (
        f"connected {world.engine.connected}, healthy {world.engine.healthy}, failure {world.engine.failure!r}, "
        f"{len(lane.inflight)} plans in flight, process alive {world.process.alive}, groups {groups}"
    )


def _raise_violations(world: World) -> None:
    if world.violations:
        raise world.violations[0]


async def _watch_health(world: World) -> None:
    """Hold health against what is true, whenever nothing has changed for long enough to notice."""
    engine = world.engine
    while True:
        await asyncio.sleep(_CHECK_S)
        process = world.process
        if world.loop.time() - world.changed_at < (HANG_S if process.hanging else HEALTH_S):
            continue
        unpredicted = process.num_answered < NUM_FIRST_STEPS or process.num_slow_steps or process.num_running_tokens > 4
        if process.hanging and unpredicted:
            continue  # The first steps may take long; more work than before, or a slow step before, too.
        usable = (
            world.address.answers
            and not process.hanging
            and process.model.max_num_batched_tokens >= process.model.max_num_seqs
            and not (world.fenced or engine.draining)
        )
        world.counts["health checks"] += 1
        world.counts["health checks of hanging steps"] += process.hanging
        if engine.healthy != usable:
            is_usable = "is" if usable else "is not"
            world.fail(Violation(f"healthy is {engine.healthy}, and the executor {is_usable} usable"))
            return


async def _settle(world: World) -> None:
    """Let the last plans run, which release slots."""
    for _ in range(3):
        await asyncio.sleep(_SETTLE_S)
        if world.engine.connected and not world.core.lanes[0].inflight:
            return


def _check_nothing_held(world: World) -> None:
    """All that requests held is free: groups, slots, blocks, timers, on both sides."""
    engine, core = world.engine, world.core
    core.check_integrity()
    load = engine.load()
    held = {
        "groups": len(core.groups),
        "live requests": len(engine._live),
        "deadline timers": len(engine._deadlines._timers),
        "waiting": load.num_waiting,
        "running": load.num_running,
        "swapped": load.num_swapped,
        "slots": load.num_used_slots,
        "device blocks": load.num_used_device_blocks,
        "host blocks": load.num_used_host_blocks,
        "plans in flight": len(core.lanes[0].inflight),
    }
    if engine.connected:
        held["slots of the executor"] = world.process.runner.num_slots_used
    left = {name: count for name, count in held.items() if count}
    if left:
        raise Violation(f"still held at the end: {left}")
    if engine.connected and engine.model != world.process.model:
        raise Violation("the service goes by the description of another executor")
    if engine.failure is None and not engine.connected:
        raise Violation("the executor is back, and no session is open")


async def _stop(world: World) -> None:
    """Stop the engine: it leaves no task, and no timer of its own."""
    engine = world.engine
    await engine.stop()
    # What is left then are messages under way, and what this simulation does later.
    world.process.kill()
    await asyncio.sleep(_LAST_S)
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    if tasks:
        raise Violation(f"tasks left: {sorted(task.get_name() for task in tasks)}")
    if world.loop.scheduled:
        raise Violation(f"timers left: {world.loop.scheduled}")


def _check_replay(log: Path) -> None:
    """The recorded calls give the recorded plans."""
    with PlanLogReader(str(log)) as reader:
        core = CoreReplay(reader.header)
        for number, record in enumerate(reader, start=1):
            differences = core.make(record)
            if differences:
                raise Violation(f"record {number} of the plan log gives another plan: {differences}")
        if reader.num_cut_bytes:
            raise Violation("the plan log is cut off")
