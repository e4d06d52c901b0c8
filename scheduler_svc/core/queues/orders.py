"""Orders of service: who goes first, and who is the first victim."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Protocol

from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup
from scheduler_svc.core.types import FinishDetail

OrderKey = tuple[float, ...]

PROMPT_TOKEN_COST = 1.0
OUTPUT_TOKEN_COST = 2.0
"""What a token of prompt and of output counts in the fair order, as in its paper."""
_MEAN_SHARE = 0.05
"""Weight of the newest output in the mean that lengths are predicted by."""
_FIRST_GUESS = 128.0
"""Output tokens that are expected before any request has ended."""
_BY_ITSELF = frozenset({FinishDetail.EOS, FinishDetail.STOP_TOKEN, FinishDetail.STOP_STRING, FinishDetail.MAX_TOKENS})
_MAX_TENANTS = 10_000
"""Counters kept; beyond that those are dropped that say nothing."""


class OrderPolicy(Protocol):
    """An order of service. Groups stand in lines; a line's order never changes, that of the lines may."""

    preemptive: bool
    """May a group that waits push out running ones of a higher level."""

    def subqueue(self, group: SequenceGroup) -> str:
        """The subqueue that a group stands in."""

    def rank(self, subqueue: str) -> float:
        """The place of a subqueue among the others now: smaller goes first."""

    def key(self, group: SequenceGroup) -> OrderKey:
        """A group's place in its subqueue: smaller goes first. No two groups have the same."""

    def level(self, group: SequenceGroup) -> int:
        """Groups of one level never push each other out; a smaller one may push out a larger one."""

    def arrived(self, group: SequenceGroup, waiting_subqueues: Iterable[str]) -> None:
        """A group is about to join the lines that are there."""

    def admitted(self, group: SequenceGroup) -> None:
        """A group begins to run, for the first time."""

    def computed(self, sequences: Iterable[Sequence]) -> None:
        """These sequences have got a token each."""

    def ended(self, sequence: Sequence) -> None:
        """A sequence has ended, for the reason that it names."""


class FcfsOrder:
    """First come, first served. A preempted group keeps its place."""

    preemptive = False

    def subqueue(self, group: SequenceGroup) -> str:
        """One for all."""
        return ""

    def rank(self, subqueue: str) -> float:
        """There is only one."""
        return 0.0

    def key(self, group: SequenceGroup) -> OrderKey:
        """The number of its arrival."""
        return (group.arrival_number,)

    def level(self, group: SequenceGroup) -> int:
        """All are alike."""
        return 0

    def arrived(self, group: SequenceGroup, waiting_subqueues: Iterable[str]) -> None:
        """Nothing to note."""

    def admitted(self, group: SequenceGroup) -> None:
        """Nothing to note."""

    def computed(self, sequences: Iterable[Sequence]) -> None:
        """Nothing to note."""

    def ended(self, sequence: Sequence) -> None:
        """Nothing to note."""


class PriorityOrder(FcfsOrder):
    """Smaller priorities first, in each first come, first served; a smaller one pushes out larger ones that run."""

    preemptive = True

    def key(self, group: SequenceGroup) -> OrderKey:
        """Its priority, then the number of its arrival."""
        return (group.spec.priority, group.arrival_number)

    def level(self, group: SequenceGroup) -> int:
        """Its priority."""
        return group.spec.priority


class ShortestFirstOrder(FcfsOrder):
    """Short outputs first: the length that the client expects, or else the mean of the past, at most max_tokens."""

    def __init__(self) -> None:
        self._mean = _FIRST_GUESS
        self._expected: dict[SequenceGroup, float] = {}

    def key(self, group: SequenceGroup) -> OrderKey:
        """Output tokens expected when it arrived, then the number of its arrival."""
        return (self._expected[group], group.arrival_number)

    def arrived(self, group: SequenceGroup, waiting_subqueues: Iterable[str]) -> None:
        """Predict its length, once, so that its place stays."""
        if group in self._expected:
            return
        spec = group.spec
        guess = self._mean if spec.expected_output_tokens is None else float(spec.expected_output_tokens)
        self._expected[group] = guess if spec.max_tokens is None else min(guess, spec.max_tokens)

    def ended(self, sequence: Sequence) -> None:
        """Learn from its length, if it came to its own end."""
        if sequence.finish is not None and sequence.finish.detail in _BY_ITSELF:
            self._mean += _MEAN_SHARE * (sequence.num_output_tokens - self._mean)
        if sequence.group.finished:
            self._expected.pop(sequence.group, None)


class FairOrder(FcfsOrder):
    """The tenant that has been served least goes first: virtual token counters (Sheng et al., OSDI 2024), weighted.

    A tenant that comes back is lifted to the least counter of those that wait, so that it cannot save up its absence.
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        self._served: dict[str, float] = {}
        self._last_subqueue = ""

    def subqueue(self, group: SequenceGroup) -> str:
        """Its tenant's."""
        return group.spec.tenant

    def rank(self, subqueue: str) -> float:
        """What the tenant has been served, over its weight."""
        return self._served.get(subqueue, 0.0)

    def arrived(self, group: SequenceGroup, waiting_subqueues: Iterable[str]) -> None:
        """Lift the counter of a tenant of whom nobody waits."""
        tenant, others = group.spec.tenant, list(waiting_subqueues)
        if tenant not in others:
            least = min(map(self.rank, others), default=self.rank(self._last_subqueue))
            if len(self._served) > _MAX_TENANTS:  # who is below will be lifted anyway
                self._served = {name: cost for name, cost in self._served.items() if cost > least or name in others}
            self._served[tenant] = max(self.rank(tenant), least)

    def admitted(self, group: SequenceGroup) -> None:
        """Count its prompt."""
        self._last_subqueue = group.spec.tenant
        self._charge(group.spec.tenant, PROMPT_TOKEN_COST * len(group.spec.prompt_token_ids))

    def computed(self, sequences: Iterable[Sequence]) -> None:
        """Count the tokens of each tenant."""
        for tenant, count in Counter(sequence.group.spec.tenant for sequence in sequences).items():
            self._charge(tenant, OUTPUT_TOKEN_COST * count)

    def _charge(self, tenant: str, cost: float) -> None:
        self._served[tenant] = self.rank(tenant) + cost / self._weights.get(tenant, 1.0)
