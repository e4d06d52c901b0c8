"""The request table: all unfinished requests, their queues and lanes, and the outputs not yet taken."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from scheduler_svc.core.adapters.table import AdapterTable
from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.lanes.lane_counts import LaneCounts
from scheduler_svc.core.outputs import StepOutputs
from scheduler_svc.core.placement.candidates import able_lanes, holding_lanes
from scheduler_svc.core.placement.placer import Placer
from scheduler_svc.core.policies.policies import Policies
from scheduler_svc.core.queues.queues import WaitingQueue
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup
from scheduler_svc.core.types import Finish, RequestKey, SequenceState


@dataclass(slots=True)
class Suspicion:
    """A request that may have killed an executor."""

    death: int
    """The number of the death that it is suspected of. Each has its own suspects."""
    positions: dict[Sequence, range]
    """The positions at which it may have, of each of its sequences that it may have been; removed when passed."""
    num_deaths_alone: int
    """Number of deaths at these positions for which no other request is suspected."""
    num_other_deaths: int = 0
    """Number of later deaths in plans that computed what comes before these positions."""


@dataclass(frozen=True, slots=True)
class BegunSteps:
    """The steps that an executor may have begun when its session ended."""

    computed: dict[Sequence, range]
    """The positions that they were to compute of each sequence."""
    is_trial: bool
    is_known: bool
    """Whether the executor is known to have begun the first of them."""


class RequestTable:
    """Groups by key, the waiting queue, the lanes, and the outputs for the engine."""

    def __init__(self, policies: Policies) -> None:
        self.policies = policies
        self.waiting = WaitingQueue(policies.order, policies.max_wait_s)
        self.lanes: dict[int, Lane] = {}
        placement = policies.placement if policies.batching.is_placed else None
        self.placer = Placer(self.waiting, self.lanes, policies.order, placement)
        self.draining = False
        """No new requests are expected, so batches start without waiting for more."""
        self.adapters = AdapterTable()
        self.groups: dict[RequestKey, SequenceGroup] = {}
        self.suspects: dict[SequenceGroup, Suspicion] = {}
        """Requests that may have killed an executor."""
        self.begun: dict[int, BegunSteps] = {}
        """By executor, while it has no session: the steps that it may have begun in the last one."""
        self.num_deaths = 0
        """Number of deaths of executors for which requests were suspected, without deaths in trials."""
        self.num_suspected = 0
        """Number of times that a request became a suspect."""
        self._removed = LaneCounts()
        """Counts of executors that were removed."""
        self._outputs = StepOutputs()
        self._finished: list[Sequence] = []

    @property
    def counts(self) -> LaneCounts:
        """Counts over all executors, also those that were removed; without a last step."""
        total = LaneCounts()
        for counts in (self._removed, *(lane.counts for lane in self.lanes.values())):
            total.add(counts)
        return total

    def add_counts(self, lane: Lane) -> None:
        """Keep the counts of a lane that is about to be removed."""
        self._removed.add(lane.counts)

    @property
    def outputs(self) -> StepOutputs:
        """The outputs since `take_outputs` was last called."""
        return self._outputs

    def take_outputs(self) -> StepOutputs:
        """Return the outputs and start new ones."""
        outputs, self._outputs = self._outputs, StepOutputs()
        return outputs

    def take_finished(self) -> list[Sequence]:
        """The sequences that finished since the last call."""
        ended, self._finished = self._finished, []
        return ended

    def add(self, group: SequenceGroup) -> None:
        """Queue a new group."""
        self.groups[group.key] = group
        self.adapters.on_added(group)
        self.enqueue(group)

    def enqueue(self, group: SequenceGroup, *, again: bool = False) -> None:
        """Queue a group, or put it aside while no executor has its adapter; `again`: it was queued before."""
        index = group.spec.adapter_index
        if index:
            if not any(lane.adapters.has(index) for lane in self.lanes.values()):
                self.adapters.park(group, again=again)
                return
            group.adapter_hash = self.adapters.adapters[index].content_hash
        self.waiting.add(group, again=again)
        self.placer.on_queued(group)

    def park(self, group: SequenceGroup) -> None:
        """Take a group out of the waiting queue until an executor has its adapter."""
        self._leave_queue(group)
        self.adapters.park(group, again=True)

    def unpark(self, group: SequenceGroup) -> None:
        """Put a group that waited for its adapter into the waiting queue, or back into it."""
        self.enqueue(group, again=self.adapters.parked.pop(group).again)

    def lane_of(self, group: SequenceGroup) -> Lane | None:
        """The lane that runs a group, or ran it last; None: it has never run, or its executor was removed."""
        return None if group.lane_id is None else self.lanes.get(group.lane_id)

    def is_free_for(self, group: SequenceGroup, lane: Lane) -> bool:
        """Whether a lane may admit a group now: no plan in flight returns anything for it, no other lane runs it."""
        if not group.has_all_results:
            return False
        former = self.lane_of(group)
        return former is None or former is lane or not former.holds(group, swapped=False)

    def bind(self, group: SequenceGroup, lane: Lane) -> None:
        """Record that a group is about to run on a lane. From now on this lane holds its blocks and slots."""
        former = self.lane_of(group)
        if former is not None and former is not lane:
            for sequence in group.sequences:
                former.forget(sequence)
                sequence.last_slot = None
        group.lane_id, group.numerics = lane.executor_id, lane.spec.numerics

    def drop_swapped(self, group: SequenceGroup) -> None:
        """Give up the KV of a group's swapped sequences: they compute it again, here or on another lane."""
        for sequence in group.sequences:
            if sequence.state is SequenceState.SWAPPED and group.lane_id is not None:
                self.lanes[group.lane_id].drop_swapped(sequence)
                self.requeue(sequence)

    def fits_elsewhere(self, group: SequenceGroup, lane: Lane) -> bool:
        """Whether an open lane other than this one can hold a group, and as far: else it would be placed here again."""
        able = able_lanes(group, [[each] for each in self.lanes.values()])
        return any(each is not lane and each.is_open and not each.draining for each in able)

    def outgrows(self, group: SequenceGroup, lane: Lane) -> bool:
        """Whether a group that fills the pool of this lane can go on with another lane's larger pool.

        It is not placed on a pool of this size again.
        """
        larger = [[each] for each in self.lanes.values() if each.num_kv_tokens > lane.num_kv_tokens]
        if not holding_lanes(group, larger):
            return False
        group.outgrown_kv_tokens = max(group.outgrown_kv_tokens, lane.num_kv_tokens)
        return True

    def record_admission(self, group: SequenceGroup, lane: Lane) -> None:
        """Record that a group, or a part of it, was admitted to a lane."""
        if not group.waiting_sequences:
            self._leave_queue(group)
        elif group.queued:
            self.placer.on_bound(group, lane)
        if group.spec.adapter_index:
            self._begin_adapter(group, lane)
        if not group.was_admitted:
            group.was_admitted = True
            self.policies.order.on_admission(group)

    def record_new_admissions(self, groups: list[SequenceGroup], lane: Lane) -> None:
        """Record that groups, the next ones of a lane by arrival, were admitted there, the first time."""
        if len(self.lanes) == 1:
            self.waiting.remove_first(len(groups))
        else:
            for group in groups:
                self._leave_queue(group)
        lane_id, numerics, on_admission = lane.executor_id, lane.spec.numerics, self.policies.order.on_admission
        for group in groups:
            group.lane_id, group.numerics = lane_id, numerics
            if group.spec.adapter_index:
                self._begin_adapter(group, lane)
            group.was_admitted = True
            on_admission(group)

    def requeue(self, sequence: Sequence, *, swapped: bool = False) -> None:
        """Put a sequence that ran back into the waiting queue, at its old place.

        It keeps its tokens, including pending ones. Its KV is lost, or in the host pool if `swapped`.
        """
        if swapped:
            sequence.change_state(SequenceState.SWAPPED)
        else:
            sequence.reset_computed_tokens()
            sequence.change_state(SequenceState.WAITING)
        group = sequence.group
        if not group.queued and group not in self.adapters.parked:
            self.enqueue(group, again=True)
        else:
            self._replace_unbound(group)

    def _replace_unbound(self, group: SequenceGroup) -> None:
        """Place a waiting group anew that waited for a draining lane only because a sequence of it ran there."""
        lane = self.lane_of(group)
        if group.queued and lane is not None and lane.draining and not group.is_bound:
            self.placer.replace(group)

    def _begin_adapter(self, group: SequenceGroup, lane: Lane) -> None:
        lane.adapters.on_admitted(group)
        self.adapters.on_begun(group.spec.adapter_index)

    def _leave_queue(self, group: SequenceGroup) -> None:
        self.placer.on_left(group)
        self.waiting.remove(group)

    def finish(self, sequence: Sequence, finish: Finish, *, report: bool = True) -> None:
        """Finish a sequence in any state and free what it holds; without `report` no output is made for the engine."""
        group = sequence.group
        lane = self.lane_of(group)
        if lane is not None:
            lane.drop(sequence)
            self.placer.on_lane_used(lane.executor_id)
        sequence.change_state(SequenceState.FINISHED)
        sequence.finish = finish
        if group.queued and not group.waiting_sequences:
            self._leave_queue(group)
        else:
            self._replace_unbound(group)
        self._finished.append(sequence)
        if report and sequence.sample_index < group.spec.num_samples:
            self._outputs.finishes[sequence] = finish
        for begun in self.begun.values():
            begun.computed.pop(sequence, None)
        sequence.suspected = None
        if group in self.suspects:
            self.suspects[group].positions.pop(sequence, None)
            if not self.suspects[group].positions:
                del self.suspects[group]
        if group.finished:
            del self.groups[group.key]
            self.adapters.on_finished(group)
            for lane in self.lanes.values():
                if group in lane.unexplained:
                    lane.unexplained -= {group}
        self.policies.order.on_finish(sequence)

    def finish_all(self, lane: Lane, finishes: dict[Sequence, Finish]) -> None:
        """Finish sequences that a lane runs: as `finish` for each, but those in a row that decode alone all at once."""
        if lane.resuming or self.suspects or self.begun or any(each.unexplained for each in self.lanes.values()):
            for sequence, finish in finishes.items():
                self.finish(sequence, finish)
            return
        for decodes_alone, found in groupby(finishes, key=_decodes_alone):
            sequences = list(found)
            if decodes_alone:
                self._finish_alone(lane, sequences, finishes)
            else:
                for sequence in sequences:
                    self.finish(sequence, finishes[sequence])

    def _finish_alone(self, lane: Lane, sequences: list[Sequence], finishes: dict[Sequence, Finish]) -> None:
        lane.finish_all(sequences)
        self._finished += sequences
        groups, outputs, on_finish = self.groups, self._outputs.finishes, self.policies.order.on_finish
        for sequence in sequences:
            sequence.finish = outputs[sequence] = finishes[sequence]
            del groups[sequence.group.key]
            if sequence.group.spec.adapter_index:
                self.adapters.on_finished(sequence.group)
            on_finish(sequence)

    def finish_group(self, group: SequenceGroup, finish: Finish) -> None:
        """Finish all unfinished sequences of a group."""
        for sequence in group.sequences:
            if sequence.state is not SequenceState.FINISHED:
                self.finish(sequence, finish)


def _decodes_alone(sequence: Sequence) -> bool:
    """Whether a sequence is in the decode batch, and the only one of its group."""
    return sequence.is_decoding and sequence.described and len(sequence.group.sequences) == 1
