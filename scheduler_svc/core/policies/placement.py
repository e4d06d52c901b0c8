"""Placement policies: the executor that a waiting group is to run on."""

from __future__ import annotations

from collections.abc import Sequence as Ids
from dataclasses import dataclass, field
from operator import itemgetter
from typing import ClassVar, NamedTuple, Protocol

from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.sequences.sequence import SequenceGroup

MAX_EXCESS = 32
"""Sequences that a lane may have more than the least busy one, and still get a group for its cached prefix …"""
MAX_EXCESS_SHARE = 0.5
"""… or this share of the least busy lane's sequences, if that is more."""
_UNKNOWN_S = 1.0
"""Assumed time between two finishes before any was measured."""


class LaneOutlook(NamedTuple):
    """A lane's own part of an expected time: the same for all groups that are placed between two plans and results."""

    token_s: float
    step_s: float
    num_decoding: int
    num_prefill_tokens: int
    inflight_s: float
    """Until the result of its last plan in flight."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A lane that can hold a group, with what the group would find there."""

    lane: Lane
    num_tokens: int
    """Number of tokens whose KV the group needs there before its next token."""
    num_hit_tokens: int
    """Number of these that are in its prefix cache."""
    num_queued: int = 0
    """Number of sequences that wait there before it."""
    num_queued_tokens: int = 0
    """Number of tokens that those need computed."""
    outlooks: dict[int, LaneOutlook] | None = None
    """By executor: what is known already, while several groups are placed; None: nothing, and nothing is kept."""

    @property
    def num_sequences(self) -> int:
        """Number of sequences that run or wait there."""
        return self.num_queued + len(self.lane.running)


class PlacementPolicy(Protocol):
    """Chooses an executor for each waiting group, when it arrives or has to move."""

    rebalances: ClassVar[bool]
    """Whether a group may be taken over by another lane that serves it sooner; otherwise it stays where it was put."""

    def choose(self, group: SequenceGroup, candidates: Ids[Candidate], now: float) -> Candidate:
        """One of the candidates, of which there is at least one."""


@dataclass(slots=True)
class RoundRobin:
    """Each executor in turn, whatever it holds."""

    rebalances: ClassVar[bool] = False
    _last: int = -1

    def choose(self, group: SequenceGroup, candidates: Ids[Candidate], now: float) -> Candidate:
        """The first candidate with a larger index than the last choice, or the first of all."""
        chosen = min(candidates, key=lambda each: (each.lane.executor_id <= self._last, each.lane.executor_id))
        self._last = chosen.lane.executor_id
        return chosen


@dataclass(slots=True)
class ExpectedTime:
    """The executor with the least expected time to first token, from its measured rates.

    A cached prefix counts for a lane only while it has at most a bounded number of sequences more than the least busy
    candidate. So a prefix that all requests share does not gather them on one executor.
    """

    rebalances: ClassVar[bool] = True
    max_excess: int = field(default=MAX_EXCESS)
    max_excess_share: float = field(default=MAX_EXCESS_SHARE)

    def choose(self, group: SequenceGroup, candidates: Ids[Candidate], now: float) -> Candidate:
        """The candidate with the least expected time; of equal ones the one with the fewest sequences."""
        counts = [each.num_sequences for each in candidates]
        least = min(counts)
        most = least + max(self.max_excess, self.max_excess_share * least)
        rated = [
            (expected_s(each, now), count, each.lane.executor_id, each)
            for each, count in zip(candidates, counts, strict=True)
            if count <= most
        ]
        return min(rated, key=itemgetter(0, 1, 2))[3]


def expected_s(candidate: Candidate, now: float) -> float:
    """Expected seconds to the group's next token if it is placed there now.

    The lane completes its plans in flight, computes what is queued there, then the group's own tokens, in steps that
    also decode all running sequences; before that, as many sequences must finish as the group lacks slots or blocks.
    """
    lane = candidate.lane
    token_s, step_s, num_decoding, num_prefill_tokens, inflight_s = _outlook(candidate, now)
    num_tokens = candidate.num_queued_tokens + num_prefill_tokens + candidate.num_tokens - candidate.num_hit_tokens
    room = max(1, lane.spec.max_num_batched_tokens - num_decoding)
    num_steps = max(1, -(-num_tokens // room))
    computing_s = num_steps * (step_s + num_decoding * token_s) + num_tokens * token_s
    computing_s += inflight_s
    return computing_s + _num_finishes(candidate) * (lane.turnover.interval_s or _UNKNOWN_S)


def _outlook(candidate: Candidate, now: float) -> LaneOutlook:
    lane, known = candidate.lane, candidate.outlooks
    found = None if known is None else known.get(lane.executor_id)
    if found is None:
        token_ns, step_ns = lane.rates.line
        token_s, step_s = token_ns / 1e9, step_ns / 1e9
        inflight_s = _inflight_s(lane, now, token_s, step_s)
        found = LaneOutlook(token_s, step_s, len(lane.decode_batch), lane.num_prefill_tokens, inflight_s)
        if known is not None:
            known[lane.executor_id] = found
    return found


def _inflight_s(lane: Lane, now: float, token_s: float, step_s: float) -> float:
    """Expected seconds to the result of the last plan in flight. The executor began the first one after its plan, and
    after the result before."""
    steps = [step_s + step.total_tokens * token_s for step in lane.inflight]
    if not steps:
        return 0.0
    elapsed_s = now - max(lane.inflight[0].planned_at, lane.last_result_at)
    return sum(steps) - min(steps[0], max(0.0, elapsed_s))


def _num_finishes(candidate: Candidate) -> float:
    """Number of sequences that must finish on the lane before the group has a slot and its blocks."""
    lane = candidate.lane
    num_running = len(lane.running)
    num_missing: float = num_running + candidate.num_queued + 1 - lane.spec.max_num_seqs
    num_new = candidate.num_queued_tokens + candidate.num_tokens - candidate.num_hit_tokens
    num_short = lane.blocks.num_blocks_for(num_new) - lane.blocks.num_free
    if num_short > 0 and num_running:
        num_missing = max(num_missing, num_short * num_running / max(1, lane.spec.num_blocks - lane.blocks.num_free))
    return max(0.0, num_missing)
