"""Prefix cache lookups before the plan that needs them, in slices.

The first lookup of a long cached prompt takes several ms, on each lane. Lookups are remembered, so what is looked up
here takes the plan little time. The plan is the same without it: `plan_step` looks up what is missing.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator

from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.request_table import RequestTable
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup
from scheduler_svc.core.steps.budget import MAX_ADMITTED_SEQUENCES, MAX_ADMITTED_TOKENS
from scheduler_svc.core.types import SequenceState

_SLICE_TOKENS = 16_384
"""Tokens of one slice: looking them up takes 0.5 ms, or 1 ms in cold memory."""
_MIN_BLOCK_TOKENS = 16
"""Looking up a smaller block takes as long as one of this size."""
_SHORT_TOKENS = 256
"""Shorter sequences are left to the plan: all that it may admit take 1 ms together."""


def look_ahead(requests: RequestTable, lane: Lane, now: float) -> Generator[None, None, None]:
    """Look up the sequences that the next plan of a lane may place or admit; pauses after each slice.

    In the pauses requests may come and go, and other plans may be made.
    """
    num_left = _SLICE_TOKENS
    for sequence, each in list(_due_lookups(requests, lane, now)):
        block_tokens = max(_MIN_BLOCK_TOKENS, each.spec.block_size)
        num_missing = sequence.num_tokens // each.spec.block_size
        while num_missing > 0 and sequence.state is SequenceState.WAITING:
            most = max(1, num_left // block_tokens)
            num_found = each.blocks.look_up_more(sequence, most)
            # Counted here, since lookups may be forgotten in a pause: it must come to an end.
            num_missing = num_missing - num_found if num_found == most else 0
            num_left -= num_found * block_tokens
            if num_left < block_tokens:
                yield
                num_left = _SLICE_TOKENS


def _due_lookups(requests: RequestTable, lane: Lane, now: float) -> Iterator[tuple[Sequence, Lane]]:
    """The sequences to be looked up, each with the lane in whose cache."""
    placer = requests.placer
    open_lanes = [each for each in requests.lanes.values() if each.is_open]
    for group in placer.next_to_place():
        for sequence in _looked_up(group):
            yield from ((sequence, each) for each in open_lanes)
    num_groups = min(MAX_ADMITTED_SEQUENCES, lane.spec.max_num_seqs - len(lane.running))
    num_tokens = 0
    for group in placer.admissible(lane, now, num_groups) if num_groups > 0 else ():
        for sequence in _looked_up(group):
            num_tokens += sequence.num_tokens
            yield sequence, lane
        if num_tokens > MAX_ADMITTED_TOKENS:
            return


def _looked_up(group: SequenceGroup) -> list[Sequence]:
    """The sequence of a waiting group that is looked up, if it is long: its first one; the others share its blocks."""
    first = next((each for each in group.waiting_sequences if each.state is SequenceState.WAITING), None)
    return [] if first is None or first.num_tokens < _SHORT_TOKENS else [first]
