"""Groups that wait come in: who of them, with which blocks, and what they share.

A group comes in as a whole where it can. Before its fork the first sequence computes the prompt and the others hold a
slot and a share of its blocks. Afterwards those that were put out come back, each with its own tokens: what they have
in common with each other, in full blocks, one computes for all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from scheduler_svc.core.book import RequestBook
from scheduler_svc.core.budget import StepBudget
from scheduler_svc.core.chunks import plan_chunk
from scheduler_svc.core.lane import Lane, PlannedStep
from scheduler_svc.core.prefix_cache import NOTHING, Found
from scheduler_svc.core.searching import cut_short
from scheduler_svc.core.sequence import Sequence, SequenceGroup, held_slot
from scheduler_svc.core.types import Finish, FinishDetail, SequenceState


@dataclass(frozen=True, slots=True)
class Arrival:
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


def admit(book: RequestBook, lane: Lane, step: PlannedStep, budget: StepBudget, num_admissible: int) -> list[Sequence]:
    """Let waiting groups in while there is room. Returns those whose only token this step plans."""
    ending: list[Sequence] = []
    memory_is_full, num_joined = False, 0
    while num_joined < num_admissible and (group := book.waiting.head(step.planned_at)) is not None:
        just_went = any(sequence.group is group for sequence in step.swapped_out)
        if budget.exhausted or just_went or not _is_settled(group):
            break
        if _end_too_long(book, lane, group):
            continue
        num_seats = _num_seats(lane)
        if not num_seats or not lane.blocks.can_take(1, alone=not len(lane.running)):
            memory_is_full = num_seats > 0
            break
        arrivals = _arrivals(book, lane, group)
        if num_seats < len(arrivals):
            arrivals = arrivals[:num_seats] if _may_split(group) else []
        memory_is_full = not _has_blocks(lane, group, arrivals)
        while memory_is_full and len(arrivals) > 1 and _may_split(group):
            arrivals.pop()
            memory_is_full = not _has_blocks(lane, group, arrivals)
        if memory_is_full and not len(lane.running):
            _end_at_capacity(book, group)
            continue
        if memory_is_full or not arrivals:
            break
        _enter(lane, step, arrivals)
        book.admitted(group)
        num_joined += 1
        for sequence in [arrival.sequence for arrival in arrivals if arrival.sequence.may_compute]:
            if not budget.exhausted:
                ending += plan_chunk(lane, step, budget, sequence)
    book.rules.batching.joined(num_joined, memory_is_full=memory_is_full)
    return ending


def wanted(book: RequestBook, lane: Lane, group: SequenceGroup) -> tuple[int, int] | None:
    """Sequences and blocks that a group needs to come in as a whole; None while results of it are awaited."""
    if not _is_settled(group):
        return None
    arrivals = _arrivals(book, lane, group)
    return len(arrivals), sum(arrival.num_to_take for arrival in arrivals)


def _is_settled(group: SequenceGroup) -> bool:
    """Nothing that plans in flight will tell of it is missing."""
    return not group.num_awaited and not any(sequence.num_pending for sequence in group.entrants)


def _may_split(group: SequenceGroup) -> bool:
    """Can a part of it run: samples that have forked, whose KV must be computed again."""
    return group.forked and group.search is None and not group.swapped


def _num_seats(lane: Lane) -> int:
    return min(lane.spec.max_num_seqs - len(lane.running), lane.slots.num_free)


def _has_blocks(lane: Lane, group: SequenceGroup, arrivals: list[Arrival]) -> bool:
    alone = not len(lane.running)
    count = sum(arrival.num_to_take for arrival in arrivals)
    if not alone and not group.forked and group.sequences[0].num_prompt_tokens % lane.spec.block_size:
        count += len(arrivals) - 1  # Their fork will copy the last block.
    return lane.blocks.can_take(count, alone=alone)


def _end_too_long(book: RequestBook, lane: Lane, group: SequenceGroup) -> bool:
    """End what has to end here, as it may have begun when the executor held more; did anything."""
    ended = False
    if group.search is not None:
        group.search.limit(lane.spec.max_model_len, FinishDetail.MAX_MODEL_LEN)
    for sequence in group.entrants if group.forked else group.sequences:
        if sequence.state is SequenceState.FINISHED or (detail := lane.too_long(sequence)) is None:
            continue
        ended = True
        if group.search is not None:
            cut_short(book, group, detail)
            break
        book.end(sequence, Finish(detail))
    return ended


def _end_at_capacity(book: RequestBook, group: SequenceGroup) -> None:
    """With nobody else there it does not fit."""
    if group.search is not None:
        cut_short(book, group, FinishDetail.KV_CAPACITY)
    else:
        book.end_group(group, Finish(FinishDetail.KV_CAPACITY))


def _arrivals(book: RequestBook, lane: Lane, group: SequenceGroup) -> list[Arrival]:
    """Who would come in, and what that takes."""
    if group.swapped:
        return _returns(lane, [sequence for sequence in group.entrants if sequence.state is SequenceState.SWAPPED])
    if not group.forked:
        return _first_arrivals(book, lane, group)
    arrivals: list[Arrival] = []
    sources = [sequence for sequence in group.running if sequence.block_ids]
    for sequence in group.entrants:
        if sequence.is_parked:
            arrivals.append(Arrival(sequence, 0))
        else:
            arrivals.append(_arrival(book, lane, sequence, sources))
            sources.append(sequence)
    return arrivals


def _returns(lane: Lane, swapped: list[Sequence]) -> list[Arrival]:
    """They come back with all their blocks, and with one for their next token where they had none for it yet."""
    arrivals: list[Arrival] = []
    for sequence in swapped:
        num_tokens = len(sequence.token_ids)
        num_more = max(0, lane.blocks.num_blocks_for(num_tokens) - len(sequence.host_block_ids))
        num_back = 0 if arrivals else lane.blocks.num_to_swap_in(swapped)
        arrivals.append(Arrival(sequence, num_back + num_more, num_tokens))
    return arrivals


def _first_arrivals(book: RequestBook, lane: Lane, group: SequenceGroup) -> list[Arrival]:
    """The first computes the prompt; the others share its blocks, and get what is reserved for them beyond."""
    first, *others = group.sequences
    arrivals = [_arrival(book, lane, first, [])]
    num_shared = lane.blocks.num_blocks_for(first.num_prompt_tokens)
    for other in others:
        num_tokens = first.num_prompt_tokens if other.is_beam else _num_reserved(book, lane, other)
        num_new = lane.blocks.num_blocks_for(num_tokens) - num_shared
        arrivals.append(Arrival(other, num_new, num_tokens, source=first, num_shared=num_shared))
    return arrivals


def _arrival(book: RequestBook, lane: Lane, sequence: Sequence, sources: list[Sequence]) -> Arrival:
    num_tokens = _num_reserved(book, lane, sequence)
    num_blocks = lane.blocks.num_blocks_for(num_tokens)
    # Only the first of a group asks the cache: what it takes out changes what others would find.
    found = NOTHING if sources else lane.blocks.find(sequence)
    source, num_shared = _closest(sequence, sources, lane.spec.block_size)
    if num_shared:
        return Arrival(sequence, num_blocks - num_shared, num_tokens, source=source, num_shared=num_shared)
    return Arrival(sequence, found.num_to_take(num_blocks), num_tokens, found)


def _closest(sequence: Sequence, sources: Iterable[Sequence], size: int) -> tuple[Sequence | None, int]:
    """Of the others the one with which it has the most full blocks in common, and how many these are.

    Samples are taken to differ from their first token on.
    """
    best, most = None, 0
    for source in sources:
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


def _num_reserved(book: RequestBook, lane: Lane, sequence: Sequence) -> int:
    """Tokens that a newcomer gets blocks for: never more than the whole pool holds."""
    most = lane.spec.num_blocks * lane.spec.block_size
    return max(len(sequence.token_ids), min(book.rules.batching.num_reserved_tokens(sequence), most))


def _enter(lane: Lane, step: PlannedStep, arrivals: list[Arrival]) -> None:
    """Give them slots and blocks."""
    swapped = [arrival.sequence for arrival in arrivals if arrival.sequence.state is SequenceState.SWAPPED]
    if swapped:
        lane.blocks.swap_in(swapped)
        step.swapped_in += swapped
    for arrival in arrivals:
        sequence, source = arrival.sequence, arrival.source
        came_back = sequence.state is SequenceState.SWAPPED
        lane.enter(sequence)
        step.joined.append(sequence)
        step.joined_slots.append(held_slot(sequence))
        if came_back:
            num_more = lane.blocks.num_blocks_for(arrival.num_tokens) - len(sequence.block_ids)
            sequence.block_ids += lane.blocks.take(max(0, num_more))
        elif not arrival.num_tokens:
            continue  # A slot for a later beam.
        elif source is None:
            lane.blocks.allocate(sequence, arrival.num_tokens, found=arrival.found)
            sequence.share_computed(arrival.found.num_tokens)
            sequence.num_hit_tokens = arrival.found.num_tokens
        elif sequence.is_attached:
            lane.blocks.share_table(source, sequence, sequence.num_prompt_tokens)
            sequence.block_ids += lane.blocks.take(arrival.num_to_take)
        else:
            lane.blocks.allocate(sequence, arrival.num_tokens, shared=source.block_ids[: arrival.num_shared])
            sequence.share_computed(arrival.num_shared * lane.spec.block_size)
            sequence.awaits = source
