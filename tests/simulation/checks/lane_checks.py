"""What must hold of several lanes at once: which requests they compute, admit and pass over."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.placement.placer import MAX_PASS_OVER_S
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup
from scheduler_svc.core.types import SequenceState
from scheduler_svc.engine.fleet.executor_member import ExecutorMember
from tests.simulation.catalogue import catalogue
from tests.simulation.executor.process import ExecutorProcess, Session

if TYPE_CHECKING:
    from tests.simulation.world import World

_LEAST_PLANS = 4
"""A lane that had room for the head in so many plans one after another had the occasion to admit it."""
_LEAST_BUDGET = 8
"""Tokens of a step beyond one for each running sequence, with which prompts do not fill every step."""
MOVED_S = 3.0
"""After this time a draining or lost executor has none of the requests that others can hold."""


class Violation(Exception):
    """Something happened that must not."""


@dataclass(frozen=True, slots=True)
class _Computed:
    session: Session
    began_at: float
    ended_at: float
    seeds: frozenset[int]

    def overlaps(self, other: _Computed) -> bool:
        """Whether both steps ran at one time in which the scheduler had both sessions."""
        ends = (self.ended_at, other.ended_at, self.session.lost_at, other.session.lost_at)
        return max(self.began_at, other.began_at) < min(ends)


class Overlaps:
    """Notices a request that two executors compute at the same time."""

    def __init__(self, world: World) -> None:
        self._world = world
        seeds = Counter(catalogue()[plan.index].spec.sampling.seed for plan in world.scenario.clients)
        self._ambiguous = {seed for seed, count in seeds.items() if count > 1}
        """Of several clients: nothing distinguishes their requests here."""
        self._recent: dict[ExecutorProcess, deque[_Computed]] = {}

    def add(self, process: ExecutorProcess, session: Session, began_at: float) -> None:
        """A step has ended."""
        world = self._world
        seeds = process.runner.computed_seeds - self._ambiguous
        computed = _Computed(session, began_at, world.loop.time(), seeds)
        for other, steps in self._recent.items():
            for step in steps if other is not process else ():
                if step.seeds & seeds and step.overlaps(computed):
                    world.fail(Violation(f"two executors compute the requests with seeds {step.seeds & seeds} at once"))
        self._recent.setdefault(process, deque(maxlen=3)).append(computed)


def check_admissions(world: World, member: ExecutorMember) -> None:
    """A draining executor gets no request that another one could take; called when its newest plan is sent."""
    lanes = world.core.lanes
    lane = lanes[member.index]
    if not member.draining or not lane.inflight:
        return
    joined = lane.inflight[-1].joined
    for group in {sequence.group for sequence in joined}:
        if any(each.state is SequenceState.RUNNING and each not in joined for each in group.sequences):
            continue  # The rest of a group goes where the others of it run.
        if others_can_hold(world, lane, group):
            world.fail(Violation(f"{member.target} is draining and gets {group.spec.request_id}"))


def check_placed(world: World) -> None:
    """No request waits for an executor that takes none while another one could take it."""
    lanes = world.core.lanes
    for group in world.core.waiting:
        lane = lanes.get(group.placed_on) if group.placed_on is not None else None
        if lane is None or (lane.is_open and not lane.draining) or lane.holds(group):
            continue
        if others_can_hold(world, lane, group):
            how = "is draining" if lane.draining else "has no session"
            world.fail(Violation(f"{group.spec.request_id} waits for executor {lane.executor_id}, which {how}"))


def others_can_hold(world: World, lane: Lane, group: SequenceGroup) -> bool:
    """Whether another lane that is open and not draining can hold a group to its end."""
    others = (other for other in world.core.lanes.values() if other is not lane)
    return any(other.is_open and not other.draining and can_hold(world, other, group) for other in others)


def can_hold(world: World, lane: Lane, group: SequenceGroup) -> bool:
    """Whether an empty executor certainly can hold a group to its end; the core's own answer is not used."""
    spec, limits = group.spec, lane.spec
    longest = max(each.spec.max_model_len for each in world.core.lanes.values())
    length = min(longest, len(spec.prompt_token_ids) + (longest if spec.max_tokens is None else spec.max_tokens))
    unfinished = _unfinished(group)
    return (
        (not group.has_output or group.numerics in (b"", limits.numerics))
        and length <= limits.max_model_len
        and len(unfinished) <= limits.max_num_seqs
        and _most_blocks(lane, len(unfinished), length) <= limits.num_blocks
        and lane.num_kv_tokens > group.outgrown_kv_tokens
        and lane.adapters.has(spec.adapter_index)
    )


def _most_blocks(lane: Lane, num_sequences: int, length: int) -> int:
    """An upper bound of the pages of so many sequences of this length, with a state each."""
    num_blocks = -(-(length + 1) // lane.spec.block_size) + 1
    return num_sequences * (num_blocks * lane.blocks.block_pages + lane.spec.pages_per_state)


def _unfinished(group: SequenceGroup) -> list[Sequence]:
    return [sequence for sequence in group.sequences if sequence.state is not SequenceState.FINISHED]


class HeadWatch:
    """Notices a head of the queue that a lane with room for it passes over for too long."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._passed: dict[Lane, tuple[SequenceGroup, int]] = {}
        """By lane: the head that its last plans had room for, and their number."""
        self._idle: dict[Lane, SequenceGroup] = {}
        """Lanes that had nothing to do when they were last looked at, and the head that they had room for."""

    def on_plan(self, lane: Lane) -> None:
        """A lane has planned a step."""
        head = self._passed_over(lane)
        if head is None:
            self._passed.pop(lane, None)
            return
        former, count = self._passed.get(lane, (head, 0))
        count = count + 1 if former is head else 1
        self._passed[lane] = head, count
        self._world.counts["plans with room for the head"] += 1
        if count >= _LEAST_PLANS:
            self._fail(lane, head, f"in {count} plans")

    def look(self) -> None:
        """Look for a lane that has nothing to do and does not admit the head; called again and again."""
        idle = {lane for lane in self._world.core.lanes.values() if not lane.inflight}
        for lane in idle:
            head = self._passed_over(lane)
            if head is not None and self._idle.get(lane) is head:
                self._fail(lane, head, "with nothing to do")
        self._idle = {lane: head for lane in idle if (head := self._passed_over(lane))}

    def _passed_over(self, lane: Lane) -> SequenceGroup | None:
        """The head of the queue, if this lane has room for it and may not pass it over any more."""
        core, config, now = self._world.core, self._world.scenario.config, self._world.clock.monotonic()
        head = core.waiting.head(now)
        # A batch that is not continuous waits for others, suspects are tried alone, and prompts may be held back.
        if head is None or config.batching != "continuous" or core._requests.suspects or config.waiting_served_ratio:
            return None
        allowed_s = MAX_PASS_OVER_S if len(core.lanes) > 1 else 0.0
        if now - head.arrival < allowed_s + self._world.loop.latest_s or not head.has_all_results:
            return None
        holder = core.lanes.get(head.lane_id) if head.lane_id is not None else None
        if holder is not None and holder is not lane and holder.holds(head, swapped=False):
            return None
        return head if lane.is_open and not lane.draining and self._has_room(lane, head) else None

    def _has_room(self, lane: Lane, group: SequenceGroup) -> bool:
        spec, unfinished = lane.spec, _unfinished(group)
        longest = max(len(sequence.token_ids) for sequence in unfinished)
        num_needed = _most_blocks(lane, len(unfinished), longest) + int(spec.watermark * spec.num_blocks) + 1
        num_slots = min(spec.max_num_seqs - len(lane.running), lane.slots.num_free)
        return (
            can_hold(self._world, lane, group)
            and len(unfinished) <= num_slots
            and num_needed <= lane.blocks.num_free
            and spec.max_num_batched_tokens >= spec.max_num_seqs + _LEAST_BUDGET
            and self._has_place(lane, group)
        )

    def _has_place(self, lane: Lane, group: SequenceGroup) -> bool:
        """Whether its adapter has a place, no other group has the turn, and no due adapter keeps it from beginning."""
        index, running = group.spec.adapter_index, lane.running.num_by_adapter
        if not index:
            return True
        if not group.was_admitted and self._world.core.adapters.bars(lane.adapters):
            return False
        return lane.adapters.turns.waits in (None, group) and (
            index in running or len(running) < lane.adapters.max_loras
        )

    def _fail(self, lane: Lane, head: SequenceGroup, how: str) -> None:
        age_s = self._world.clock.monotonic() - head.arrival
        text = f"executor {lane.executor_id} has room for {head.spec.request_id}, {age_s:.2f} s old, and passes it over"
        self._world.fail(Violation(f"{text} {how}"))


class MoveWatch:
    """Notices a draining or lost executor that keeps requests which others could take."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._leaving_since: dict[Lane, float] = {}

    def look(self, stable_s: float) -> None:
        """Look at the present state; stable_s: for so long nothing has happened to the scheduler or an executor."""
        world, now = self._world, self._world.loop.time()
        leaving = [lane for lane in world.core.lanes.values() if lane.draining or not lane.is_open]
        if any(host.alive and host.process.hanging for host in world.hosts):
            leaving = []  # What hangs has a session, and takes nothing.
        self._leaving_since = {lane: self._leaving_since.get(lane, now) for lane in leaving}
        for lane in leaving:
            if min(stable_s, now - self._leaving_since[lane]) < MOVED_S:
                continue
            world.counts["lanes left"] += 1
            held = {sequence.group for sequence in (*lane.running, *lane.swapped)}
            held |= {group for group in world.core.waiting if group.placed_on == lane.executor_id}
            kept = sorted(group.spec.request_id for group in held if others_can_hold(world, lane, group))
            if kept:
                how = "is draining" if lane.draining else "is lost"
                world.fail(Violation(f"executor {lane.executor_id} {how} and still has {kept}"))


def check_models(world: World) -> None:
    """All executors that have a session have one model."""
    models = [host.member.loop.model for host in world.hosts if host.member is not None and host.member.is_live]
    weights = {dict(model.numerics)["weights"] for model in models if model is not None}
    if len(weights) > 1:
        world.fail(Violation(f"two models are served at once: {sorted(weights)}"))
