"""What must hold of adapters: which plans may name them, how long a group waits for a place, what is left of them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cadenza_common.plan.plan import StepPlan
from scheduler_svc.core.adapters.lane_adapters import AdapterState
from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.sequences.sequence import SequenceGroup
from tests.simulation.checks.lane_checks import Violation

if TYPE_CHECKING:
    from tests.simulation.world import World


def check_named_adapters(world: World, lane: Lane, plan: StepPlan, usable: Collection[int]) -> None:
    """A plan names adapters between the answer to their load and their unload alone, each with one content."""
    for index in {each.adapter_index for each in plan.admitted} - {0}:
        if index not in usable:
            world.fail(Violation(f"step {plan.step_id} names adapter {index}, which is not loaded, or not any more"))
        wrong = world.adapters.on_admitted(index, world.core.adapters.adapters[index].content_hash)
        if wrong:
            world.fail(Violation(wrong))
    world.counts["plans with several adapters"] += len(lane.running.num_by_adapter) > 1


def check_unloads(world: World, lane: Lane, indexes: Collection[int]) -> None:
    """No adapter is unloaded that a running group has."""
    running = {each.group.spec.adapter_index for each in lane.running}
    if found := running & set(indexes):
        world.fail(Violation(f"executor {lane.executor_id} is to unload {found}, which running requests have"))


@dataclass(slots=True)
class _Turn:
    group: SequenceGroup
    since: float
    num_passed: int = 0


class TurnWatch:
    """Notices a group that waits for a place for its adapter and is passed over for longer than decision 0038 says.

    Which group has the turn is the core's own word, unless it says that there is none; how often and for how long it is
    passed over is counted here.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._turns: dict[Lane, _Turn] = {}
        self._begun: set[SequenceGroup] = set()
        """Groups that have run: preempted ones pass."""

    def on_plan(self, lane: Lane) -> None:
        """A lane has planned a step."""
        step, plan = lane.inflight[-1], self._world.scenario.adapters
        if not lane.adapters.max_loras:
            return
        joined = list(dict.fromkeys(each.group for each in step.joined if each.group.spec.adapter_index))
        begun, joined = joined, [group for group in joined if group not in self._begun]
        self._begun.update(begun)
        turn, waits = self._turns.get(lane), lane.adapters.turns.waits
        late = _passing(joined, turn.group) if turn is not None else []
        if turn is not None and late and turn.group not in begun and _waits_for(turn.group, lane):
            is_due = step.planned_at - turn.since >= plan.max_passed_s
            if is_due or turn.num_passed + len(late) > plan.max_passed:
                how = f"{step.planned_at - turn.since:.3f} s after its turn began, with {turn.num_passed} before it"
                self._fail(lane, turn.group, late[0], how)
        if waits is None:
            # The group that had the turn has begun, and others with its adapter: the next one gets it in the next plan.
            if turn is None or turn.group not in begun:
                self._check_nobody_waits(lane, joined)
            self._turns.pop(lane, None)
        elif turn is None or turn.group is not waits:
            self._turns[lane] = _Turn(waits, step.planned_at)
            self._world.counts["turns"] += 1
        else:
            self._world.counts["groups that passed a turn"] += len(late)
            turn.num_passed += len(late)

    def forget(self, lane: Lane) -> None:
        """A drain has ended: its groups went to others or were placed again, so that nobody had a turn meanwhile."""
        self._turns.pop(lane, None)

    def _check_nobody_waits(self, lane: Lane, joined: list[SequenceGroup]) -> None:
        """First come, first served: what a later group with another adapter has passed has a turn."""
        core = self._world.core
        # With several lanes a group may not be placed yet.
        if self._world.scenario.config.order != "fcfs" or core._requests.suspects or len(core.lanes) > 1:
            return
        running = lane.running.num_by_adapter
        if len(running) < lane.adapters.max_loras:
            return
        for group in core.waiting:
            index = group.spec.adapter_index
            late = [each for each in _passing(joined, group) if each.arrival_number > group.arrival_number]
            if index and late and index not in running and lane.adapters.has(index) and _waits_for(group, lane):
                self._fail(lane, group, late[0], "which has no turn")

    def _fail(self, lane: Lane, group: SequenceGroup, late: SequenceGroup, how: str) -> None:
        names = late.spec.request_id, group.spec.request_id
        self._world.fail(Violation(f"executor {lane.executor_id} admits {names[0]} before {names[1]} {how}"))


def _passing(joined: list[SequenceGroup], waiting: SequenceGroup) -> list[SequenceGroup]:
    """The groups that begin before one that waits, and have another adapter."""
    return [group for group in joined if group.spec.adapter_index != waiting.spec.adapter_index]


def _waits_for(group: SequenceGroup, lane: Lane) -> bool:
    """Whether a group is in the queue, and may be admitted on this lane."""
    return bool(group.queued) and group.placed_on in (None, lane.executor_id)


def check_adapters_left(world: World) -> None:
    """At the end no request uses one, and executors have those that the scheduler goes by: all of them have names."""
    table, members = world.core.adapters, [host for host in world.present_hosts if host.lane is not None]
    if table.parked or table.users:
        raise Violation(f"requests of adapters are left: {table.parked}, {table.users}")
    if {adapter.registered.name for adapter in table.adapters.values()} != world.adapters.names:
        raise Violation(f"the names of adapters are {table.adapters}, not {world.adapters.names}")
    for host in members:
        lane = host.lane
        assert lane is not None
        if not lane.is_open or not host.is_usable or not host.process.loads.is_idle:
            continue
        known = {index for index in host.process.loads.loaded if lane.adapters.has(index)}
        ours = {index for index in table.adapters if lane.adapters.has(index)} if lane.adapters.max_loras else set()
        if not known == ours == set(host.process.loads.loaded):
            raise Violation(f"{host.name} has adapters {host.process.loads.loaded}, and the scheduler knows of {ours}")
        states = [lane.adapters.state(index) for index in table.adapters]
        if any(
            state is not None and state.state is not AdapterState.LOADED and state.error is None for state in states
        ):
            raise Violation(f"{host.name} has not answered a load or an unload: {states}")
        if len(known) < min(lane.adapters.max_cpu_loras, len(table.adapters)) and None in states:
            raise Violation(f"{host.name} has loaded {known}, though there are places for more: {states}")
