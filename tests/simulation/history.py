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

from cadenza_common.serving.plan_log import PlanLogReader
from scheduler_svc.replay.core_replay import CoreReplay
from tests.simulation.checks.adapter_checks import check_adapters_left
from tests.simulation.checks.checks import check_client
from tests.simulation.clients import Client
from tests.simulation.executor.adapting import turn_bounds
from tests.simulation.faults.faults import Faults
from tests.simulation.loop import VirtualLoop
from tests.simulation.scenario import Scenario, draw_scenario
from tests.simulation.watching import watch
from tests.simulation.world import Violation, World

BOUND_S = 20.0
"""Once the last fault is over, every request ends within this time."""
_SETTLE_S = 1.0
"""After the last request the executor releases its slots within this time."""
_OPENED_S = 0.05
"""A session that has just opened is used within this time."""
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
        if cause.__cause__ is not None:
            found += ": " + "".join(traceback.format_exception_only(cause.__cause__)).strip()
        message = f"seed {seed}: {found}\nrepeat: python -m tests.simulation --seed {seed} --trace"
        return cls(message, seed, trace)


def run_history(seed: int, *, trace: bool = False, scenario: Scenario | None = None) -> Report:
    """Run one history; raises HistoryError."""
    scenario = scenario or draw_scenario(seed)
    loop = VirtualLoop(Random(f"loop {seed}"), latest_s=scenario.latest_s)
    lines: list[str] | None = [] if trace else None
    try:
        with _quiet(), turn_bounds(scenario.adapters), contextlib.ExitStack() as stack:
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
    _start_executors(world)
    world.discovery.start()
    await world.engine.start()
    faults = Faults(world)
    reading = [asyncio.create_task(client.run(), name=client.plan.name) for client in clients]
    watching = asyncio.create_task(watch(world), name="watching")
    await _until_ended(world, clients, reading)
    await faults.ended()
    await _settle(world)
    watching.cancel()
    outcome = (await asyncio.gather(watching, return_exceptions=True))[0]
    if isinstance(outcome, Exception):
        raise outcome
    if world.engine.failure is not None and not world.fenced:
        raise Violation("the engine has stopped") from world.engine.failure
    _raise_violations(world)
    for client in clients:
        check_client(world, client)
    _check_nothing_held(world)
    check_adapters_left(world)
    _count_drafts(world)
    await _stop(world)


def _start_executors(world: World) -> None:
    """Some of several executors come a little later."""
    first, *others = world.hosts
    first.start()
    for host in others:
        if world.rng.random() < 0.15:
            host.later(0.5 * world.rng.random(), host.start_if_dead)
        else:
            host.start()


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
        if now > world.quiet_at + BOUND_S + world.paused_s + _load_timeout_s(world):
            waiting = [task.get_name() for task in reading if not task.done()]
            raise Violation(f"{waiting} wait for ever: {_state(world)}")


def _load_timeout_s(world: World) -> float:
    """How long requests may wait for adapters that nobody loads while another scheduler holds an executor."""
    waits = world.partly_fenced and world.core.adapters.parked
    return world.scenario.config.lora_load_timeout_s if waits else 0.0


def _state(world: World) -> str:
    groups = [
        (
            key[1], group.lane_id, group.placed_on, group.spec.max_tokens,
            [(each.state.name, len(each.token_ids), each.num_pending) for each in group.sequences],
        )
        for key, group in world.core.groups.items()
    ]  # fmt: skip
    executors = [
        (state.target, state.connected, state.draining, state.refusal, state.num_inflight_plans)
        for state in world.engine.executor_infos()
    ]
    usable = [(host.name, host.is_usable) for host in world.hosts]
    return (
        f"healthy {world.engine.healthy}, failure {world.engine.failure!r}, executors {executors}, usable {usable}, "
        f"groups {groups}"
    )


def _raise_violations(world: World) -> None:
    if world.violations:
        raise world.violations[0]


async def _settle(world: World) -> None:
    """Let the last plans run, which release slots, and the last loads end, whose answers are on their way."""
    num_left = 3
    while num_left:
        await asyncio.sleep(_SETTLE_S)
        if _is_settled(world):
            await asyncio.sleep(_OPENED_S)
            if _is_settled(world):
                return
        # The last step may be one that hangs, and adapters are loaded one after another.
        num_left -= not any(
            host.alive and (host.process.hanging or not host.process.loads.is_idle) for host in world.hosts
        )


def _is_settled(world: World) -> bool:
    """Whether nothing is under way between the engine and its executors."""
    lanes = world.core.lanes.values()
    is_busy = any(lane.inflight or lane.adapters.num_loading or lane.adapters.num_unloading for lane in lanes)
    return world.engine.connected and not is_busy


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
        "plans in flight": sum(len(lane.inflight) for lane in core.lanes.values()),
    }
    states = {state.target: state for state in engine.executor_infos()}
    for host in world.present_hosts:
        if states[host.address.target].connected:
            held[f"slots of {host.name}"] = host.process.runner.num_slots_used
    left = {name: count for name, count in held.items() if count}
    if left:
        raise Violation(f"still held at the end: {left}")
    for host in world.present_hosts:
        if states[host.address.target].connected:
            if host.member is not None and host.member.loop.model != host.process.model:
                raise Violation(f"the service goes by another description than that of {host.name}")
        elif engine.failure is None and host.is_usable:
            raise Violation(f"{host.name} is back, and no session is open: {states[host.address.target].refusal!r}")
    if len(states) == 1 and engine.connected and engine.model != world.present_hosts[0].process.model:
        raise Violation("the service goes by the description of another executor")


def _count_drafts(world: World) -> None:
    for lane in world.core.lanes.values():
        drafted, accepted = sum(lane.counts.drafts.drafted), sum(lane.counts.drafts.accepted)
        world.counts["accepted drafts"] += accepted
        world.counts["refused drafts"] += drafted - accepted


async def _stop(world: World) -> None:
    """Stop the engine: it leaves no task, and no timer of its own."""
    engine = world.engine
    await world.discovery.stop()
    await engine.stop()
    # What is left then are messages under way, and what this simulation does later.
    for host in world.hosts:
        host.kill()
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
