"""Who of a group that waits would come in, with which blocks, and what that takes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.memory.prefix_cache import NOTHING, Found
from scheduler_svc.core.request_table import RequestTable
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup
from scheduler_svc.core.types import SequenceState


@dataclass(frozen=True, slots=True)
class Placement:
    """A sequence that is to come in, and where its blocks come from."""

    sequence: Sequence
    num_to_take: int
    """Free device blocks that it takes."""
    num_tokens: int = 0
    """Tokens that it has blocks for."""
    found: Found = NOTHING
    source: Sequence | None = None
    """Another one of its group with which it shares its first blocks."""
    num_shared: int = 0
    """Blocks that it shares with it."""
    num_reserve: int = 0
    """Of num_to_take, blocks that are held for its group's beams to grow into."""


def placements_of(requests: RequestTable, lane: Lane, group: SequenceGroup) -> list[Placement]:
    """Who would come in, and what that takes."""
    if group.swapped:
        return _swap_in_placements(
            lane, [sequence for sequence in group.sequences if sequence.state is SequenceState.SWAPPED]
        )
    if not group.forked:
        return _prompt_placements(requests, lane, group)
    placements: list[Placement] = []
    sources = [sequence for sequence in group.running if sequence.block_ids]
    for sequence in group.waiting_sequences:
        if sequence.is_spare_beam:
            placements.append(Placement(sequence, 0))
        else:
            placements.append(_placement(requests, lane, sequence, sources))
            sources.append(sequence)
    return placements


def have_blocks(
    lane: Lane, group: SequenceGroup, placements: list[Placement], *, alone: bool, num_more: int = 0
) -> bool:
    """Would there be blocks for them: with nobody else there all are theirs; with so many more free than there are."""
    count = sum(placement.num_to_take for placement in placements)
    if not alone and not group.forked and group.sequences[0].num_prompt_tokens % lane.spec.block_size:
        count += len(placements) - 1  # Their fork will copy the last block.
    return lane.blocks.can_take(count, alone=alone, num_more=num_more)


def _swap_in_placements(lane: Lane, swapped: list[Sequence]) -> list[Placement]:
    """They come back with all their blocks, and with one for their next token where they had none of their own."""
    placements: list[Placement] = []
    writers: Counter[int] = Counter()
    for sequence in swapped:
        num_tokens = 0 if sequence.is_spare_beam else len(sequence.token_ids)
        host_block_ids = sequence.host_block_ids
        num_more = max(0, lane.blocks.num_blocks_for(num_tokens) - len(host_block_ids))
        index = sequence.num_computed_tokens // lane.spec.block_size
        if sequence.group.forked and index < len(host_block_ids):
            writers[host_block_ids[index]] += 1
            num_more += writers[host_block_ids[index]] > 1
        num_back = 0 if placements else lane.blocks.num_to_swap_in(swapped)
        placements.append(Placement(sequence, num_back + num_more, num_tokens))
    return placements


def _prompt_placements(requests: RequestTable, lane: Lane, group: SequenceGroup) -> list[Placement]:
    """The first computes the prompt; the others share its blocks, and get what is reserved for them beyond."""
    first, *others = group.sequences
    placements = [_placement(requests, lane, first, [])]
    num_shared = lane.blocks.num_blocks_for(first.num_prompt_tokens)
    for other in others:
        num_tokens = first.num_prompt_tokens if other.is_beam else _num_reserved(requests, lane, other)
        num_new = lane.blocks.num_blocks_for(num_tokens) - num_shared
        placements.append(Placement(other, num_new, num_tokens, source=first, num_shared=num_shared))
    if first.is_beam and (num_reserve := _num_reserve(requests, lane, first)):
        num_to_take = placements[0].num_to_take + num_reserve
        placements[0] = replace(placements[0], num_to_take=num_to_take, num_reserve=num_reserve)
    return placements


def _num_reserve(requests: RequestTable, lane: Lane, first: Sequence) -> int:
    """Blocks that a search may need beyond its prompt's, if the policy reserves and the pool could hold them all.

    Beams share the full blocks of the prompt, and at worst nothing else.
    """
    wanted, num_prompt = requests.policies.batching.num_reserved_tokens(first), first.num_prompt_tokens
    num_full = num_prompt // lane.spec.block_size
    own = lane.blocks.num_blocks_for(wanted) - num_full
    most = num_full + own * len(first.group.sequences)
    reserves = wanted > num_prompt and most <= lane.spec.num_blocks
    return most - lane.blocks.num_blocks_for(num_prompt) if reserves else 0


def _placement(requests: RequestTable, lane: Lane, sequence: Sequence, sources: list[Sequence]) -> Placement:
    num_tokens = _num_reserved(requests, lane, sequence)
    num_blocks = lane.blocks.num_blocks_for(num_tokens)
    # Only the first of a group asks the cache: what it takes out changes what others would find.
    found = NOTHING if sources else lane.blocks.find(sequence)
    source, num_shared = _best_source(sequence, sources, lane.spec.block_size)
    if num_shared:
        return Placement(sequence, num_blocks - num_shared, num_tokens, source=source, num_shared=num_shared)
    return Placement(sequence, found.num_to_take(num_blocks), num_tokens, found)


def _best_source(sequence: Sequence, sources: list[Sequence], size: int) -> tuple[Sequence | None, int]:
    """Of the others the one with which it has the most full blocks in common, and how many these are.

    Samples are taken to differ from their first token on, so that one of them is as good as another.
    """
    best, most = None, 0
    for source in sources if sequence.is_beam else sources[:1]:
        limit = (min(len(sequence.token_ids), len(source.token_ids)) - 1) // size
        common = min(limit, sequence.num_prompt_tokens // size)
        if sequence.is_beam and limit > most:
            common = _num_common_blocks(sequence.token_ids, source.token_ids, common, limit, size)
        if common > most:
            best, most = source, common
    return best, most


def _num_common_blocks(ours: list[int], theirs: list[int], least: int, most: int, size: int) -> int:
    """Full blocks with the same tokens, `least` to `most` of them: by bisection, as slices compare quickly."""
    while least < most:
        middle = (least + most + 1) // 2
        if ours[least * size : middle * size] == theirs[least * size : middle * size]:
            least = middle
        else:
            most = middle - 1
    return least


def _num_reserved(requests: RequestTable, lane: Lane, sequence: Sequence) -> int:
    """Tokens that a newcomer gets blocks for: its own, and what is reserved, as far as the pool could hold that.

    A group gets no more than its own if it could not have all that is reserved for it. For beams see `_num_reserve`.
    """
    wanted = requests.policies.batching.num_reserved_tokens(sequence)
    others = len(sequence.group.sequences) - 1
    if sequence.is_beam or (others and lane.blocks.num_blocks_for(wanted) * (others + 1) > lane.spec.num_blocks):
        wanted = 0
    return max(len(sequence.token_ids), min(wanted, lane.spec.num_blocks * lane.spec.block_size))
