"""Prefix cache lookups before the plan that needs them, in slices.

The first lookup of a long cached prompt takes several ms. Lookups are remembered, so what is looked up here takes the
plan little time. The plan is the same without it: `plan_step` looks up what is missing.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator

from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.placement.lookups import MIN_BLOCK_TOKENS
from scheduler_svc.core.request_table import RequestTable
from scheduler_svc.core.sequences.sequence import Sequence
from scheduler_svc.core.steps.budget import MAX_ADMITTED_TOKENS
from scheduler_svc.core.types import SequenceState

_SLICE_TOKENS = 16_384
"""Tokens of one slice: looking them up takes 0.5 ms, or 1 ms in cold memory."""
_MAX_GROUPS = 64
"""Groups at the head of the queue that are looked at before each plan: 0.1 ms."""
_MAX_PASSES = 3
_SHORT_TOKENS = 256
"""Shorter sequences are left to the plan: all that it may admit take 1 ms together."""


def look_ahead(requests: RequestTable, lane: Lane, now: float) -> Generator[None, None, None]:
    """Look up the sequences that the next plan of a lane may admit; pauses after each slice.

    In the pauses requests may come and go, and other plans may be made. So it looks again, a bounded number of times.
    """
    blocks, size = lane.blocks, lane.spec.block_size
    num_left = slice_blocks = max(1, _SLICE_TOKENS // max(MIN_BLOCK_TOKENS, size))
    for _ in range(_MAX_PASSES):
        has_paused = False
        for sequence in list(_due(requests, lane, now)):
            # Bounded, since in the pauses what is remembered may be dropped.
            for _ in range(2 + sequence.num_tokens // (size * slice_blocks)):
                if sequence.state is not SequenceState.WAITING:
                    break
                known = blocks.num_looked_up(sequence)
                most = known + num_left
                found = blocks.look_up(sequence, most)
                num_left -= max(0, found - known)
                if num_left <= 0:
                    num_left, has_paused = slice_blocks, True
                    yield
                if found < most:
                    break
        if not has_paused:
            return


def _due(requests: RequestTable, lane: Lane, now: float) -> Iterator[Sequence]:
    """The sequences to be looked up."""
    num_groups = min(_MAX_GROUPS, lane.spec.max_num_seqs - len(lane.running))
    num_tokens = 0
    for group in requests.placer.admissible(lane, now, num_groups) if num_groups > 0 else ():
        first = next((each for each in group.waiting_sequences if each.state is SequenceState.WAITING), None)
        if first is not None and first.num_tokens >= _SHORT_TOKENS:
            num_tokens += first.num_tokens
            yield first
        if num_tokens > MAX_ADMITTED_TOKENS:
            return
