"""Allocations: the sequences of a waiting group that this step can admit, with the blocks that each one needs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.memory.prefix_cache import NO_PREFIX, CachedPrefix
from scheduler_svc.core.request_table import RequestTable
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup
from scheduler_svc.core.types import SequenceState


@dataclass(slots=True)
class Allocation:
    """A sequence to admit, and the origin of its blocks."""

    sequence: Sequence
    num_to_take: int
    """Number of free device pages that it takes."""
    num_tokens: int = 0
    """Number of tokens that its blocks hold."""
    found: CachedPrefix = NO_PREFIX
    source: Sequence | None = None
    """Another sequence of its group, whose first blocks it shares."""
    num_shared: int = 0
    """Number of blocks shared with `source`."""
    num_reserved_blocks: int = 0
    """Number of blocks, included in num_to_take, reserved for the growth of its group's beams."""
    chunk: int = 0
    """With windows, the tokens of the chunks that it is to compute; 0: the most."""


def allocations_of(requests: RequestTable, lane: Lane, group: SequenceGroup, chunk: int = 0) -> list[Allocation]:
    """The sequences of a waiting group that can be admitted, each with its allocation; `chunk`: as there."""
    if group.swapped:
        return _swap_in_allocations(
            lane, [sequence for sequence in group.sequences if sequence.state is SequenceState.SWAPPED]
        )
    if not group.forked:
        return _prompt_allocations(requests, lane, group, chunk)
    if lane.blocks.states is not None and group.beam_search is None:
        # Each goes on behind a copy of a state, and looks up its own: the others come later in this step.
        return [_allocation(requests, lane, group.waiting_sequences[0], [], chunk)]
    allocations: list[Allocation] = []
    sources: list[Sequence] = []
    if lane.blocks.windows is None:
        sources += [sequence for sequence in group.running if sequence.block_ids]
    num_found = 0
    for sequence in group.waiting_sequences:
        if sequence.is_spare_beam:
            allocations.append(Allocation(sequence, lane.spec.pages_per_state))
            continue
        allocation = _allocation(requests, lane, sequence, sources, chunk)
        if lane.blocks.states is not None and sources and allocation.num_shared < allocations[0].found.num_blocks:
            # The state of the first is known behind its hit only.
            allocations[0] = _without_hit(lane, allocations[0])
        if sources and allocation.num_shared < num_found:
            break  # The first goes on behind what this one shares: with windows, it looks up the cache by itself.
        allocations.append(allocation)
        if lane.blocks.windows is None:
            sources.append(sequence)
        elif not sources:
            # Running ones have given back what others would need.
            sources, num_found = [sequence], allocation.found.num_blocks
    return allocations


def have_blocks(
    lane: Lane, group: SequenceGroup, allocations: list[Allocation], *, alone: bool, num_more: int = 0
) -> bool:
    """Whether there are blocks for these allocations.

    `alone`: nothing else runs, so the watermark does not count. `num_more`: additional free blocks to assume.
    """
    count = sum(allocation.num_to_take for allocation in allocations)
    if not alone and not group.forked and group.sequences[0].num_prompt_tokens % lane.spec.block_size:
        count += (len(allocations) - 1) * lane.blocks.block_pages  # The fork will copy the last block.
    return lane.blocks.can_take(count, alone=alone, num_more=num_more)


def _swap_in_allocations(lane: Lane, swapped: list[Sequence]) -> list[Allocation]:
    """Swapped sequences return with all their blocks, and one more each for a next token without a block of its own."""
    allocations: list[Allocation] = []
    writers: Counter[int] = Counter()
    for sequence in swapped:
        num_tokens = 0 if sequence.is_spare_beam else sequence.num_tokens
        host_block_ids = sequence.host_block_ids
        num_more = max(0, lane.blocks.num_blocks_for(num_tokens) - len(host_block_ids))
        num_pages = 0 if sequence.state_pages else lane.spec.pages_per_state
        index = sequence.num_computed_tokens // lane.spec.block_size
        if sequence.group.forked and index < len(host_block_ids):
            writers[host_block_ids[index]] += 1
            num_more += writers[host_block_ids[index]] > 1
        num_pages += 0 if allocations else lane.blocks.num_to_swap_in(swapped)
        allocations.append(Allocation(sequence, num_pages + num_more * lane.blocks.block_pages, num_tokens))
    return allocations


def _prompt_allocations(requests: RequestTable, lane: Lane, group: SequenceGroup, chunk: int) -> list[Allocation]:
    """The first sequence computes the prompt; the others share its blocks and get those reserved beyond it."""
    first, *others = group.sequences
    allocations = [_allocation(requests, lane, first, [], chunk)]
    num_shared = lane.blocks.num_blocks_for(first.num_prompt_tokens)
    for other in others:
        num_tokens = first.num_prompt_tokens if other.is_beam else _num_reserved_tokens(requests, lane, other)
        num_new = lane.blocks.num_blocks_for(num_tokens) - num_shared
        num_pages = num_new * lane.blocks.block_pages + lane.spec.pages_per_state
        allocations.append(Allocation(other, num_pages, num_tokens, source=first, num_shared=num_shared))
    if first.is_beam and (num_reserved_blocks := _num_reserved_blocks(requests, lane, first)):
        num_to_take = allocations[0].num_to_take + num_reserved_blocks * lane.blocks.block_pages
        allocations[0] = replace(allocations[0], num_to_take=num_to_take, num_reserved_blocks=num_reserved_blocks)
    return allocations


def _num_reserved_blocks(requests: RequestTable, lane: Lane, first: Sequence) -> int:
    """Blocks to reserve for a beam search beyond its prompt; 0 if the policy reserves none or the pool is too small.

    In the worst case, beams share only the full blocks of the prompt.
    """
    wanted, num_prompt = requests.policies.batching.num_reserved_tokens(first), first.num_prompt_tokens
    num_full = num_prompt // lane.spec.block_size
    own = lane.blocks.num_blocks_for(wanted) - num_full
    num_beams = len(first.group.sequences)
    most = num_full + own * num_beams
    num_pages = most * lane.blocks.block_pages + num_beams * lane.spec.pages_per_state
    reserves = wanted > num_prompt and num_pages <= lane.spec.num_blocks
    reserves = reserves and lane.blocks.windows is None
    return most - lane.blocks.num_blocks_for(num_prompt) if reserves else 0


def _allocation(
    requests: RequestTable, lane: Lane, sequence: Sequence, sources: list[Sequence], chunk: int
) -> Allocation:
    num_tokens = _num_reserved_tokens(requests, lane, sequence)
    num_blocks = lane.blocks.num_blocks_for(num_tokens)
    # Only the first of a group looks up the cache: taking its blocks changes what the others would find.
    found = NO_PREFIX if sources else lane.blocks.find_cached_prefix(sequence)
    source, num_shared = _best_source(sequence, sources, lane.spec.block_size)
    sizes = lane.blocks.sizes
    if sizes is None:
        if num_shared:
            return Allocation(sequence, num_blocks - num_shared, num_tokens, source=source, num_shared=num_shared)
        return Allocation(sequence, found.num_to_take(num_blocks), num_tokens, found)
    if sequence.is_beam and sequence.group.forked and lane.blocks.windows is not None:
        found = NO_PREFIX  # All beams come back at once, and some share with the first.
    if chunk and lane.blocks.states is not None:
        found = NO_PREFIX  # It did not fit with a hit, which needs a copy of the state besides.
    if num_shared:
        num_pages = sizes.num_pages(num_blocks - num_shared, chunk or sizes.max_chunk)
    else:
        num_pages = lane.blocks.num_to_take(found, num_blocks, chunk)
    return Allocation(sequence, num_pages, num_tokens, found, source, num_shared, chunk=chunk)


def _without_hit(lane: Lane, allocation: Allocation) -> Allocation:
    """The same allocation of a sequence that computes all of its tokens."""
    num_blocks = lane.blocks.num_blocks_for(allocation.num_tokens)
    return replace(allocation, num_to_take=lane.blocks.num_pages_for(num_blocks), found=NO_PREFIX)


def _best_source(sequence: Sequence, sources: list[Sequence], size: int) -> tuple[Sequence | None, int]:
    """The source with the most full blocks in common, and their number.

    Samples are assumed to differ from their first token on, so any source is as good as another.
    """
    best, most = None, 0
    num_full = (sequence.num_tokens - 1) // size
    for source in sources if sequence.is_beam else sources[:1]:
        if most == num_full:
            break  # Beams of one length come back together, so the first source may have all of them.
        limit = min(num_full, (source.num_tokens - 1) // size)
        common = min(limit, sequence.num_prompt_tokens // size)
        if sequence.is_beam and limit > most:
            common = _num_common_blocks(sequence, source, common, limit, size)
        if common > most:
            best, most = source, common
    return best, most


def _num_common_blocks(left: Sequence, right: Sequence, least: int, most: int, size: int) -> int:
    """Number of leading full blocks with equal tokens, from `least` to `most`: bisection over slice comparisons."""
    while least < most:
        middle = (least + most + 1) // 2
        if left.tokens(least * size, middle * size) == right.tokens(least * size, middle * size):
            least = middle
        else:
            most = middle - 1
    return least


def _num_reserved_tokens(requests: RequestTable, lane: Lane, sequence: Sequence) -> int:
    """Number of tokens to allocate blocks for: its own, and those reserved, as far as the pool can hold them.

    Nothing is reserved for a group whose whole reservation exceeds the pool. For beams see `_num_reserved_blocks`.
    """
    wanted = 0 if lane.blocks.windows is not None else requests.policies.batching.num_reserved_tokens(sequence)
    others = len(sequence.group.sequences) - 1
    num_pages = lane.blocks.num_pages_for(lane.blocks.num_blocks_for(wanted))
    if sequence.is_beam or (others and num_pages * (others + 1) > lane.spec.num_blocks):
        wanted = 0
    return max(sequence.num_tokens, min(wanted, lane.num_kv_tokens))
