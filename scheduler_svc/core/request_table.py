"""The request table: all unfinished requests, their queues and lanes, and the outputs not yet taken."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.outputs import StepOutputs
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
        self.draining = False
        """No new requests are expected, so batches start without waiting for more."""
        self.groups: dict[RequestKey, SequenceGroup] = {}
        self.lanes: dict[int, Lane] = {}
        self.suspects: dict[SequenceGroup, Suspicion] = {}
        """Requests that may have killed an executor."""
        self.begun: dict[int, BegunSteps] = {}
        """By executor, while it has no session: the steps that it may have begun in the last one."""
        self.num_deaths = 0
        """Number of deaths of executors for which requests were suspected, without deaths in trials."""
        self.num_preemptions = 0
        self._outputs = StepOutputs()
        self._finished: list[Sequence] = []

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
        self.waiting.add(group)

    def record_admission(self, group: SequenceGroup) -> None:
        """Record that a group, or a part of it, was admitted."""
        if not group.waiting_sequences:
            self.waiting.remove(group)
        if not group.was_admitted:
            group.was_admitted = True
            self.policies.order.on_admission(group)

    def requeue(self, sequence: Sequence, *, swapped: bool = False) -> None:
        """Put a sequence that ran back into the waiting queue, at its old place.

        It keeps its tokens, including pending ones. Its KV is lost, or in the host pool if `swapped`.
        """
        if swapped:
            sequence.change_state(SequenceState.SWAPPED)
        else:
            sequence.reset_computed_tokens()
            sequence.change_state(SequenceState.WAITING)
        if not sequence.group.queued:
            self.waiting.add(sequence.group, again=True)

    def finish(self, sequence: Sequence, finish: Finish, *, report: bool = True) -> None:
        """Finish a sequence in any state and free what it holds; without `report` no output is made for the engine."""
        for lane in self.lanes.values():
            lane.drop(sequence)
        group = sequence.group
        sequence.change_state(SequenceState.FINISHED)
        sequence.finish = finish
        if group.queued and not group.waiting_sequences:
            self.waiting.remove(group)
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
        self.policies.order.on_finish(sequence)

    def finish_group(self, group: SequenceGroup, finish: Finish) -> None:
        """Finish all unfinished sequences of a group."""
        for sequence in group.sequences:
            if sequence.state is not SequenceState.FINISHED:
                self.finish(sequence, finish)
