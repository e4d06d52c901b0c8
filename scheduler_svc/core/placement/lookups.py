"""Lookups of groups in the prefix caches of all lanes that take groups, as far as they go in one plan."""

from __future__ import annotations

from collections.abc import Sequence as Ids
from typing import NamedTuple

from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.memory.prefix_cache import Key
from scheduler_svc.core.memory.prefix_lookups import first_block
from scheduler_svc.core.placement.lane_queue import LaneQueue
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup
from scheduler_svc.core.types import SequenceState

_MAX_LOOKED_UP = 16_384
"""Tokens that one plan looks up for placements, in 0.5 ms, or 1 ms in cold memory: the next plans go on with the rest.
"""
_PLACED_TOKENS = 192
"""A group counts as so many tokens, with whatever is to be done for it,"""
_CANDIDATE_TOKENS = 32
"""with so many more for each lane that takes groups,"""
_MIN_LOOKED_UP = 128
"""and so many more for each lane that has its first block."""
MIN_BLOCK_TOKENS = 16
"""Looking up a smaller block takes as long as one of this size."""
_WHOLE = 1 << 62
"""In place of a number of blocks: the lookup is complete."""


class KnownHits(NamedTuple):
    """What prefix caches had of a group when it was placed."""

    tokens: dict[int, int]
    """By executor, where there were any."""
    asked: frozenset[int]
    """The executors that were asked; the others are when the figure is needed."""


class PlacementLookups:
    """By lane, how many tokens of a group's prefix are cached. Lanes without its first block have none, at once."""

    def __init__(self) -> None:
        self._num_left = 0
        """Tokens that this plan may yet look up."""
        self._begun: dict[SequenceGroup, dict[LaneQueue, int]] = {}
        """Of a group whose lookups go on in the next plan: by lane that has its first block, the blocks looked up.

        It does not depend on what lookups are remembered, which a replay does not know.
        """

    def start_plan(self) -> None:
        """The next plan is about to be made."""
        self._num_left = _MAX_LOOKED_UP

    @property
    def may_go_on(self) -> bool:
        """Whether this plan may look up more."""
        return self._num_left > 0

    def forget(self, group: SequenceGroup) -> None:
        """Forget a group that is not to be placed any more."""
        self._begun.pop(group, None)

    def clear(self) -> None:
        """Begin again with all groups: lanes have changed."""
        self._begun.clear()

    def hits(self, group: SequenceGroup, queues: Ids[LaneQueue]) -> dict[int, int] | None:
        """By executor that has any, the tokens of the group's prefix that are cached; None: the next plan goes on."""
        first = first_waiting(group)
        begun = self._begun.get(group)
        if begun is None:
            self._num_left -= _PLACED_TOKENS + len(queues) * _CANDIDATE_TOKENS
            begun = {} if first is None else dict.fromkeys(_with_first_block(first, queues), 0)
            if begun:
                self._begun[group] = begun
        if first is None or not begun:
            self._begun.pop(group, None)
            return {}
        for queue, known in begun.items():
            if not known:
                self._num_left -= _MIN_LOOKED_UP
            if known < _WHOLE and not self._is_whole(queue, first, begun):
                return None
        del self._begun[group]
        return {queue.lane.executor_id: queue.lane.blocks.num_cached_tokens(first) for queue in begun}

    def _is_whole(self, queue: LaneQueue, sequence: Sequence, begun: dict[LaneQueue, int]) -> bool:
        """Go on with one lane; returns whether its lookup is complete."""
        block_tokens = max(MIN_BLOCK_TOKENS, queue.block_size)
        while (known := begun[queue]) < _WHOLE:
            if self._num_left <= 0:
                return False
            most = known + max(1, self._num_left // block_tokens)
            found = queue.lane.blocks.look_up(sequence, most)
            self._num_left -= max(0, found - known) * block_tokens
            begun[queue] = found if found == most else _WHOLE
        return True

    def check_integrity(self, unplaced: dict[SequenceGroup, None]) -> None:
        """Check that lookups have begun of groups that are to be placed only; raises InvariantError."""
        if not self._begun.keys() <= unplaced.keys():
            raise InvariantError("lookups have begun of a group that is not to be placed")


def first_waiting(group: SequenceGroup) -> Sequence | None:
    """The sequence of a group that is looked up: the first that waits without KV; the others share its blocks."""
    return next((each for each in group.waiting_sequences if each.state is SequenceState.WAITING), None)


def _with_first_block(sequence: Sequence, queues: Ids[LaneQueue]) -> list[LaneQueue]:
    """The lanes whose prefix caches have the first block of a waiting sequence: no other one has any of it."""
    blocks: dict[int, Key | None] = {}
    found = []
    for queue in queues:
        size = queue.block_size
        if size not in blocks:
            blocks[size] = first_block(sequence, size)
        if (block := blocks[size]) is not None and block in queue.cached:
            found.append(queue)
    return found
