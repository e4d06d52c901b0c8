"""The requests that are known, where each of them is, and the news of them."""

from __future__ import annotations

from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.outputs import StepOutputs
from scheduler_svc.core.policies.policies import Policies
from scheduler_svc.core.queues.queues import WaitingQueue
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup
from scheduler_svc.core.types import Finish, RequestKey, SequenceState


class RequestTable:
    """Groups by key, the waiting queue, the lanes where they run, and what is to be told."""

    def __init__(self, policies: Policies) -> None:
        self.policies = policies
        self.waiting = WaitingQueue(policies.order, policies.max_wait_s)
        self.draining = False
        """No request will come for now, so nobody need be waited for."""
        self.groups: dict[RequestKey, SequenceGroup] = {}
        self.lanes: dict[int, Lane] = {}
        self.groups_with_failed_steps: set[SequenceGroup] = set()
        """Groups with strikes: they were part of steps that failed."""
        self.num_preemptions = 0
        self._outputs = StepOutputs()
        self._finished: list[Sequence] = []

    @property
    def outputs(self) -> StepOutputs:
        """What happened since it was last taken."""
        return self._outputs

    def take_outputs(self) -> StepOutputs:
        """Hand over what happened."""
        outputs, self._outputs = self._outputs, StepOutputs()
        return outputs

    def take_finished(self) -> list[Sequence]:
        """The sequences that ended since the last call."""
        ended, self._finished = self._finished, []
        return ended

    def add(self, group: SequenceGroup) -> None:
        """Queue a new group."""
        self.groups[group.key] = group
        self.waiting.add(group)

    def admitted(self, group: SequenceGroup) -> None:
        """A group has come in, or those of it that there was room for."""
        if not group.waiting_sequences:
            self.waiting.remove(group)
        if not group.was_admitted:
            group.was_admitted = True
            self.policies.order.admitted(group)

    def requeue(self, sequence: Sequence, *, swapped: bool = False) -> None:
        """A sequence that ran waits, in its old place; its tokens stay, those under way too.

        Its KV is lost, or swapped.
        """
        if swapped:
            sequence.move(SequenceState.SWAPPED)
        else:
            sequence.reset_computed_tokens()
            sequence.move(SequenceState.WAITING)
        if not sequence.group.queued:
            self.waiting.add(sequence.group, again=True)

    def end(self, sequence: Sequence, finish: Finish, *, report: bool = True) -> None:
        """End a sequence wherever it is and free what it holds; without `tell` the engine knows already."""
        for lane in self.lanes.values():
            lane.drop(sequence)
        group = sequence.group
        sequence.move(SequenceState.FINISHED)
        sequence.finish = finish
        if group.queued and not group.waiting_sequences:
            self.waiting.remove(group)
        self._finished.append(sequence)
        if report and sequence.sample_index < group.spec.num_samples:
            self._outputs.finishes[sequence] = finish
        if group.finished:
            del self.groups[group.key]
            self.groups_with_failed_steps.discard(group)
        self.policies.order.ended(sequence)

    def end_group(self, group: SequenceGroup, finish: Finish) -> None:
        """End all of a group's sequences that have not ended."""
        for sequence in group.sequences:
            if sequence.state is not SequenceState.FINISHED:
                self.end(sequence, finish)
