"""Looks at a world again and again while its history runs: health, the head of the queue, drains, counts."""

from __future__ import annotations

import asyncio

from scheduler_svc.engine.fleet.served_executors import CHANGE_AFTER_S
from scheduler_svc.plan_loop.progress import NUM_FIRST_STEPS
from tests.simulation.checks.lane_checks import MoveWatch, Violation, check_models
from tests.simulation.executor.host import Host
from tests.simulation.world import World

HEALTH_S = 2.3
"""Health is true after 2 s, and silence is checked every 0.25 s."""
HANG_S = 4.0
"""A step that hangs is noticed after 2 s or three times its predicted duration, which is under 1.2 s here."""
MODEL_S = CHANGE_AFTER_S + 1.0 + HEALTH_S
"""Another model is served after CHANGE_AFTER_S, and a refused executor is asked again every second."""
_CHECK_S = 0.3


async def watch(world: World) -> None:
    """Record a violation whenever the present state is not what it must be."""
    moves, num_steps = MoveWatch(world), 0
    while not world.violations:
        await asyncio.sleep(_CHECK_S)
        _check_health(world)
        check_models(world)
        world.heads.look()
        moves.look(_stable_s(world))
        counts = world.core.counts
        if counts.num_steps < num_steps:
            world.fail(Violation(f"{counts.num_steps} steps, after {num_steps}"))
        num_steps = counts.num_steps


def _stable_s(world: World) -> float:
    """For how long nothing has happened to the scheduler or to one of its executors."""
    return world.loop.time() - max(world.changed_at, *(host.changed_at for host in world.hosts))


def _check_health(world: World) -> None:
    """Health is whether an executor can take requests, as soon as that is known long enough to be noticed."""
    engine = world.engine
    usable = [_takes_requests(world, host) for host in world.present_hosts]
    if engine.draining or world.fenced:
        expected = False
        if world.loop.time() - world.changed_at < HEALTH_S or _stable_s(world) < HEALTH_S:
            return
    elif True in usable:
        expected = True
    elif None in usable:
        return
    else:
        expected = False
    world.counts["health checks"] += 1
    world.counts["health checks of hanging steps"] += any(host.alive and host.process.hanging for host in world.hosts)
    world.counts["health checks without an executor"] += not expected
    if engine.healthy != expected:
        states = [(host.name, each) for host, each in zip(world.present_hosts, usable, strict=True)]
        world.fail(Violation(f"healthy is {engine.healthy}, and which executors take requests is {states}"))


def _takes_requests(world: World, host: Host) -> bool | None:
    """Whether an executor takes requests; None: something changed too recently to know."""
    process, member = host.address.process, host.member
    if process is None or member is None:
        return False
    stable_s = world.loop.time() - max(world.changed_at, host.changed_at)
    if stable_s < (HANG_S if process.hanging else HEALTH_S):
        return None
    unpredicted = process.num_answered < NUM_FIRST_STEPS or process.num_slow_steps or process.num_running_tokens > 4
    if not process.loads.is_idle or world.loop.time() - process.loads.ended_at < HEALTH_S:
        return None  # A session opens once the adapter is loaded that is being read.
    if process.hanging and unpredicted:
        return None  # The first steps may take long; more work than before, or a slow step before, too.
    if member.draining or not host.is_usable:
        return False
    weights = {dict(each.process.model.numerics)["weights"] for each in world.present_hosts if each.address.process}
    if len(weights) > 1 and _stable_s(world) < MODEL_S:
        return None
    # With several models one of them is served, and nothing here says which.
    others = (each for each in world.present_hosts if each is not host and each.is_usable)
    return None if len(weights) > 1 and any(others) else True
