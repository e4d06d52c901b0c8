"""Placement policies: the executor that a waiting group is to run on."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field
from math import inf
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
    """A lane as every group finds it that is placed before the lane's next plan or result. Times are in seconds."""

    num_running: int
    max_num_seqs: int
    block_size: int
    num_free_blocks: int
    num_held_blocks: int
    num_prefill_tokens: int
    """Number of tokens that its running sequences have yet to compute before they decode."""
    room: int
    """Number of tokens that a step computes beside its decoding sequences."""
    token_s: float
    """What a token adds to a step."""
    step_s: float
    """A step in which its decoding sequences alone have a token."""
    due_at: float
    """When the result of its first plan in flight is expected."""
    later_s: float
    """What its later plans in flight take."""
    finish_s: float
    """Between two finishes."""


@dataclass(slots=True, eq=False)
class Candidate:
    """A lane on which a group may be placed, with what waits there before it."""

    lane: Lane
    num_queued: int = 0
    """Number of sequences that wait there."""
    num_queued_tokens: int = 0
    """Number of tokens that these sequences need computed."""
    seen: LaneOutlook | None = None
    """What `look` has found; None: the lane has changed since."""

    def look(self) -> LaneOutlook:
        """The lane as it is; `seen or look()` looks once between two changes."""
        self.seen = found = _outlook(self.lane)
        return found

    @property
    def num_sequences(self) -> int:
        """Number of sequences that run or wait there."""
        return self.num_queued + len(self.lane.running)


class NeededTokens(NamedTuple):
    """The tokens whose KV a group needs before its next token."""

    num_tokens: int
    hits: Mapping[int, int]
    """By executor: the number of these tokens that its prefix cache has; none where it is not named."""


class PlacementPolicy(Protocol):
    """Chooses an executor for each waiting group, when it arrives or has to move."""

    rebalances: ClassVar[bool]
    """Whether a group may be taken over by another lane that serves it sooner; otherwise it stays where it was put."""

    def choose(self, group: SequenceGroup, candidates: Ids[Candidate], needed: NeededTokens, now: float) -> Candidate:
        """Choose one of the candidates; there is at least one."""


@dataclass(slots=True)
class RoundRobin:
    """Each executor in turn, whatever it holds."""

    rebalances: ClassVar[bool] = False
    _last: int = -1

    def choose(self, group: SequenceGroup, candidates: Ids[Candidate], needed: NeededTokens, now: float) -> Candidate:
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

    def choose(self, group: SequenceGroup, candidates: Ids[Candidate], needed: NeededTokens, now: float) -> Candidate:
        """The first one with the least expected time, and of these with the fewest sequences."""
        num_tokens, hits = needed
        counts = [each.num_queued + (each.seen or each.look()).num_running for each in candidates]
        least = min(counts)
        most = least + max(self.max_excess, self.max_excess_share * least)
        chosen, chosen_s, fewest = candidates[0], inf, 0
        for each, count in zip(candidates, counts, strict=True):
            if count > most:
                continue
            num_new = num_tokens - hits.get(each.lane.executor_id, 0) if hits else num_tokens
            found_s = expected_s(each, num_new, now)
            if found_s < chosen_s or (found_s == chosen_s and count < fewest):
                chosen, chosen_s, fewest = each, found_s, count
        return chosen


def expected_s(candidate: Candidate, num_tokens: int, now: float) -> float:
    """Expected seconds to a group's next token if it is placed there now, with so many tokens to compute.

    The lane completes its plans in flight, computes what is queued there, then the group's own tokens, in steps that
    also decode all running sequences; before that, as many sequences must finish as the group lacks slots or blocks.
    """
    (
        num_running, max_num_seqs, block_size, num_free, num_held, num_prefill_tokens, room, token_s, step_s, due_at,
        later_s, finish_s,
    ) = candidate.seen or candidate.look()  # fmt: skip
    num_tokens += candidate.num_queued_tokens
    num_missing: float = num_running + candidate.num_queued + 1 - max_num_seqs
    num_short = -(-num_tokens // block_size) - num_free
    if num_short > 0 and num_running:
        num_missing = max(num_missing, num_short * num_running / max(1, num_held))
    num_tokens += num_prefill_tokens
    found = later_s + (-(-num_tokens // room) or 1) * step_s + num_tokens * token_s
    if due_at > now:
        found += due_at - now
    return found + num_missing * finish_s if num_missing > 0 else found


def _outlook(lane: Lane) -> LaneOutlook:
    token_ns, step_ns = lane.rates.line
    token_s, step_s = token_ns / 1e9, step_ns / 1e9
    due_at = later_s = 0.0
    if lane.inflight:
        # The executor began the first one after its plan, and after the result before.
        first_s, *later = [step_s + step.total_tokens * token_s for step in lane.inflight]
        due_at, later_s = max(lane.inflight[0].planned_at, lane.last_result_at) + first_s, sum(later)
    spec, num_decoding, block_pages = lane.spec, len(lane.decode_batch), max(1, lane.blocks.block_pages)
    num_free = lane.blocks.num_free // block_pages
    return LaneOutlook(
        len(lane.running),
        spec.max_num_seqs,
        spec.block_size,
        num_free,
        spec.num_blocks // block_pages - num_free,
        lane.num_prefill_tokens,
        max(1, spec.max_num_batched_tokens - num_decoding),
        token_s,
        step_s + num_decoding * token_s,
        due_at,
        later_s,
        lane.turnover.interval_s or _UNKNOWN_S,
    )
