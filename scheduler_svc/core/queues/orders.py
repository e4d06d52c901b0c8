"""Scheduling orders: which group is admitted first, and which sequence is preempted first."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from math import nextafter
from typing import Protocol

from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup
from scheduler_svc.core.types import FinishDetail

OrderKey = tuple[float, ...]

PROMPT_TOKEN_COST = 1.0
OUTPUT_TOKEN_COST = 2.0
"""Cost of a prompt token and of an output token in the fair order, as in its paper."""
_MEAN_SHARE = 0.05
"""Weight of the newest output in the running mean that predicts output lengths."""
_FIRST_GUESS = 128.0
"""Predicted output tokens before any request has finished."""
_NATURAL_FINISHES = frozenset(
    {FinishDetail.EOS, FinishDetail.STOP_TOKEN, FinishDetail.STOP_STRING, FinishDetail.MAX_TOKENS}
)
_MAX_TENANTS = 10_000
"""Minimum number of counters above which those without effect are dropped."""


class WaitingSubqueues(Container[str], Protocol):
    """The names of the subqueues with waiting groups."""

    def __iter__(self) -> Iterator[str]: ...

    @property
    def first(self) -> str | None:
        """The one that goes first; its rank is the smallest."""


class OrderPolicy(Protocol):
    """A scheduling order. The order within a subqueue is fixed; that of the subqueues may change."""

    preemptive: bool
    """Whether a waiting group may preempt running groups of a higher level."""

    shares: bool
    """Whether subqueues share each step and the memory by weight: see `steps.shares`."""

    def subqueue(self, group: SequenceGroup) -> str:
        """The name of a group's subqueue."""

    def rank(self, subqueue: str) -> float:
        """The current rank of a subqueue: the smallest goes first. It never falls while the subqueue has groups."""

    def key(self, group: SequenceGroup) -> OrderKey:
        """A group's sort key in its subqueue: the smallest goes first. Keys are unique."""

    def weight(self, subqueue: str) -> float:
        """The weight of a subqueue's share."""

    def level(self, group: SequenceGroup) -> int:
        """A group's preemption level: a group may preempt groups of a larger level, never of its own."""

    def on_arrival(self, group: SequenceGroup, waiting_subqueues: WaitingSubqueues) -> None:
        """A group is about to be queued; `waiting_subqueues` are the current ones."""

    def on_admission(self, group: SequenceGroup) -> None:
        """A group was admitted for the first time."""

    def on_prompt_tokens(self, group: SequenceGroup, num_tokens: int) -> None:
        """The first tokens of an admitted group's prompt, so many in all, have KV or are planned."""

    def on_tokens(self, num_by_tenant: Mapping[str, int]) -> None:
        """Sequences of these tenants got so many tokens; without `shares` not all tokens are reported."""

    def on_finish(self, sequence: Sequence) -> None:
        """A sequence finished; `sequence.finish` has the reason."""

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Replace the tenants' weights: they apply to what is charged from now on."""


class FcfsOrder:
    """First come, first served. A preempted group keeps its place."""

    preemptive = False
    shares = False

    def subqueue(self, group: SequenceGroup) -> str:
        """One subqueue for all groups."""
        return ""

    def rank(self, subqueue: str) -> float:
        """All the same: there is one subqueue."""
        return 0.0

    def key(self, group: SequenceGroup) -> OrderKey:
        """The arrival number."""
        return (group.arrival_number,)

    def weight(self, subqueue: str) -> float:
        """All the same."""
        return 1.0

    def level(self, group: SequenceGroup) -> int:
        """One level: no group preempts another."""
        return 0

    def on_arrival(self, group: SequenceGroup, waiting_subqueues: WaitingSubqueues) -> None:
        """Not used."""

    def on_admission(self, group: SequenceGroup) -> None:
        """Not used."""

    def on_prompt_tokens(self, group: SequenceGroup, num_tokens: int) -> None:
        """Not used."""

    def on_tokens(self, num_by_tenant: Mapping[str, int]) -> None:
        """Not used."""

    def on_finish(self, sequence: Sequence) -> None:
        """Not used."""

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Not used."""


class PriorityOrder(FcfsOrder):
    """Smaller priorities first, then by arrival; a group may preempt running groups of larger priority."""

    preemptive = True

    def key(self, group: SequenceGroup) -> OrderKey:
        """The priority, then the arrival number."""
        return (group.spec.priority, group.arrival_number)

    def level(self, group: SequenceGroup) -> int:
        """The priority."""
        return group.spec.priority


class ShortestFirstOrder(FcfsOrder):
    """Shortest predicted output first: the client's estimate, else the mean of finished outputs, at most max_tokens."""

    def __init__(self) -> None:
        self._mean = _FIRST_GUESS
        self._expected: dict[SequenceGroup, float] = {}

    def key(self, group: SequenceGroup) -> OrderKey:
        """The output length predicted at arrival, then the arrival number."""
        return (self._expected[group], group.arrival_number)

    def on_arrival(self, group: SequenceGroup, waiting_subqueues: WaitingSubqueues) -> None:
        """Predict the output length, once, so that the key never changes."""
        if group in self._expected:
            return
        spec = group.spec
        guess = self._mean if spec.expected_output_tokens is None else float(spec.expected_output_tokens)
        self._expected[group] = guess if spec.max_tokens is None else min(guess, spec.max_tokens)

    def on_finish(self, sequence: Sequence) -> None:
        """Update the mean with the output length, unless the sequence was ended early."""
        if sequence.finish is not None and sequence.finish.detail in _NATURAL_FINISHES:
            self._mean += _MEAN_SHARE * (sequence.num_output_tokens - self._mean)
        if sequence.group.finished:
            self._expected.pop(sequence.group, None)


class FairOrder(FcfsOrder):
    """The least-served tenant goes first: weighted virtual token counters (Sheng et al., OSDI 2024).

    The counter of a returning tenant is lifted to just below the least counter of the waiting tenants: idle time earns
    no credit, but the tenant goes before one that floods the queue. A prompt is charged by chunks, each token once.
    """

    shares = True

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        self._served: dict[str, float] = {}
        self._last_subqueue = ""
        self._charged: dict[SequenceGroup, int] = {}
        """Prompt tokens that were charged, of groups that were admitted."""
        self._last_lift = -1.0
        """Returning tenants that find each other waiting are equal: the one that came first goes first."""
        self._max_counters = _MAX_TENANTS
        """Number of counters beyond which those without effect are dropped, so that it is done rarely."""

    def subqueue(self, group: SequenceGroup) -> str:
        """One subqueue per tenant."""
        return group.spec.tenant

    def rank(self, subqueue: str) -> float:
        """The tenant's served cost divided by its weight."""
        return self._served.get(subqueue, 0.0)

    def weight(self, subqueue: str) -> float:
        """The tenant's weight."""
        return self._weights.get(subqueue, 1.0)

    def on_arrival(self, group: SequenceGroup, waiting_subqueues: WaitingSubqueues) -> None:
        """Lift the counter of a tenant without waiting groups."""
        tenant = group.spec.tenant
        if tenant in waiting_subqueues:
            return
        first = waiting_subqueues.first
        least = self.rank(self._last_subqueue if first is None else first)
        if len(self._served) > self._max_counters:
            waiting = set(waiting_subqueues)
            # A lower counter is lifted on return anyway.
            self._served = {name: cost for name, cost in self._served.items() if cost > least or name in waiting}
            self._max_counters = max(_MAX_TENANTS, 2 * len(self._served))
        if least != self._last_lift:
            least = max(0.0, nextafter(least, -1.0))
        if self.rank(tenant) <= least:
            self._served[tenant] = self._last_lift = least

    def on_admission(self, group: SequenceGroup) -> None:
        """Note whose group it is."""
        self._last_subqueue = group.spec.tenant

    def on_prompt_tokens(self, group: SequenceGroup, num_tokens: int) -> None:
        """Charge the prompt's tokens that were not charged yet."""
        charged = self._charged.get(group, 0)
        num_tokens = min(num_tokens, len(group.spec.prompt_token_ids))
        if num_tokens > charged:
            self._charged[group] = num_tokens
            self._charge(group.spec.tenant, PROMPT_TOKEN_COST * (num_tokens - charged))

    def on_tokens(self, num_by_tenant: Mapping[str, int]) -> None:
        """Charge each tenant's output tokens."""
        for tenant, count in num_by_tenant.items():
            self._charge(tenant, OUTPUT_TOKEN_COST * count)

    def on_finish(self, sequence: Sequence) -> None:
        """Forget a group that has ended."""
        if sequence.group.finished:
            self._charged.pop(sequence.group, None)

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Replace the weights. What was charged stays, so no rank falls."""
        self._weights = dict(weights)

    def _charge(self, tenant: str, cost: float) -> None:
        self._served[tenant] = self.rank(tenant) + cost / self.weight(tenant)
