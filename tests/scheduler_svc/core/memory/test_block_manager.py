"""Block tables: sharing, copy-on-write and swaps within one plan, and what is refused."""

from __future__ import annotations

import itertools

import pytest

from cadenza_common.plan.sampling import SequenceSampling
from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.memory.block_manager import BlockManager
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup
from scheduler_svc.core.sequences.shared_blocks import SharedBlocks
from scheduler_svc.core.types import RequestSpec

SIZE = 4


_IDS = itertools.count(1)


def make(num_tokens: int, num_computed: int = 0) -> Sequence:
    spec = RequestSpec("r", (7,) * num_tokens, SequenceSampling(), max_tokens=100)
    sequence = Sequence(next(_IDS), SequenceGroup(spec, 0, 0.0, 10_000), 0)
    sequence.schedule(num_computed)
    return sequence


def manager(num_blocks: int = 10, num_host_blocks: int = 10, **options: bool) -> BlockManager:
    return BlockManager(num_blocks, SIZE, 0.0, num_host_blocks=num_host_blocks, **options)


def family(blocks: BlockManager, num_children: int = 1) -> list[Sequence]:
    """A sequence with 6 computed tokens, and children that share its two blocks."""
    source = make(7, 6)
    blocks.allocate(source, 7)
    children = [make(7, 6) for _ in range(num_children)]
    for child in children:
        blocks.share_blocks(source, child, 6)
    return [source, *children]


def test_the_watermark_is_left_free_unless_one_is_alone() -> None:
    blocks = BlockManager(10, SIZE, 0.2)
    assert blocks.can_take(8, alone=False)
    assert not blocks.can_take(9, alone=False)
    assert blocks.can_take(9, alone=False, num_more=1)
    assert blocks.can_take(10, alone=True)
    assert not blocks.can_take(11, alone=True)


def test_a_fork_shares_all_blocks_and_copies_the_partial_one_when_it_writes() -> None:
    blocks = manager()
    source, child = family(blocks)
    assert (blocks.num_free, blocks.num_shared_refs, child.block_ids) == (8, 2, source.block_ids)
    shared = source.block_ids[1]
    assert blocks.writes_shared(source)
    own = blocks.make_writable(child)
    assert child.block_ids == [source.block_ids[0], own]
    # The copy reads before anything is computed, so the remaining holder may write to its source.
    assert not blocks.writes_shared(source)
    assert blocks.make_writable(source) == shared
    assert list(blocks.take_moves().copied) == [(shared, own)]
    assert (blocks.num_free, blocks.num_shared_refs) == (7, 1)
    blocks.check_integrity([source, child])


def test_who_writes_where_nothing_is_shared_copies_nothing() -> None:
    blocks = manager()
    source = make(9, 8)
    blocks.allocate(source, 9)
    child = make(9, 8)
    blocks.share_blocks(source, child, 8)
    assert not blocks.writes_shared(child)
    with pytest.raises(InvariantError, match="no block for its next token"):
        blocks.make_writable(child)


def test_a_copy_of_a_copy_reads_the_first_source() -> None:
    blocks = manager()
    source, child = family(blocks)
    own = blocks.make_writable(child)
    grandchild = make(7, 6)
    blocks.share_blocks(child, grandchild, 6)
    another = blocks.make_writable(grandchild)
    assert list(blocks.take_moves().copied) == [(source.block_ids[1], own), (source.block_ids[1], another)]


def test_a_copy_of_what_is_swapped_in_is_another_swap_in() -> None:
    blocks = manager()
    group = family(blocks)
    assert blocks.swap_out(group)
    host_block_id = group[0].host_block_ids[1]
    blocks.take_moves()
    blocks.swap_in(group)
    shared = group[0].block_ids[1]
    own = blocks.make_writable(group[1])
    moves = blocks.take_moves()
    assert not moves.copied
    assert {(host_block_id, shared), (host_block_id, own)} < set(moves.swapped_in)


def test_swapping_out_a_copy_moves_what_it_is_copied_from() -> None:
    blocks = manager()
    source, child = family(blocks)
    blocks.make_writable(child)
    assert blocks.swap_out([child])
    moves = blocks.take_moves()
    assert not moves.copied
    assert (source.block_ids[1], child.host_block_ids[1]) in moves.swapped_out
    blocks.check_integrity([source, child])


def test_a_copy_source_stays_until_the_plan_is_complete() -> None:
    blocks = manager(num_blocks=3)
    source, child = family(blocks)
    shared = source.block_ids[1]
    blocks.make_writable(child)
    blocks.free(source)
    assert blocks.num_free == 0
    assert [pair[0] for pair in blocks.take_moves().copied] == [shared]
    assert blocks.num_free == 1
    assert blocks.take(1) == [shared]


def test_a_cached_block_leaves_the_cache_before_its_only_holder_writes_to_it() -> None:
    blocks = manager(caching=True)
    source = make(9, 9)
    blocks.allocate(source, 9)
    source.output_ids.append(7)
    child = make(7, 6)
    blocks.share_blocks(source, child, 6)
    blocks.free(source)
    table = list(child.block_ids)
    assert blocks.find_cached_prefix(make(9)).num_tokens == 8
    assert blocks.writes_shared(child)
    assert blocks.make_writable(child) == table[1]
    assert not blocks.writes_shared(child)
    assert blocks.find_cached_prefix(make(9)).num_tokens == 4
    blocks.check_integrity([child])


def test_a_fork_inherits_what_is_cached_as_far_as_it_goes() -> None:
    blocks = manager(caching=True)
    source = make(9, 9)
    blocks.allocate(source, 9)
    source.output_ids.append(7)
    blocks.cache_full_blocks(source)
    for num_tokens, expected in ((9, 2), (8, 2), (7, 1), (3, 0)):
        child = make(9)
        blocks.share_blocks(source, child, num_tokens)
        assert child.num_cached_blocks == expected
        assert child.cache_node == (blocks.find_cached_prefix(make(9)).nodes[expected - 1] if expected else None)


def test_swapping_keeps_sharing() -> None:
    blocks = manager()
    group = family(blocks, 2)
    assert blocks.num_to_swap(group) == 2
    assert blocks.swap_out(group)
    assert (blocks.num_free, blocks.num_used_host, blocks.num_to_swap_in(group)) == (10, 2, 2)
    assert blocks.num_shared_refs == 0
    blocks.take_moves()
    blocks.swap_in(group)
    assert (blocks.num_free, blocks.num_used_host, blocks.num_shared_refs) == (8, 0, 4)
    assert group[0].block_ids == group[1].block_ids == group[2].block_ids
    # The host blocks are read by this plan: nothing is swapped out to them before the next.
    assert blocks.host_pool.num_free == 8
    blocks.take_moves()
    assert blocks.host_pool.num_free == 10


def test_swapping_part_of_a_group_leaves_the_others_what_they_share() -> None:
    blocks = manager()
    source, child = family(blocks)
    assert blocks.swap_out([child])
    assert (blocks.num_free, blocks.num_used_host, blocks.num_shared_refs) == (8, 2, 0)
    blocks.check_integrity([source, child])


def test_a_host_pool_that_is_too_small_changes_nothing() -> None:
    blocks = manager(num_host_blocks=1)
    source, child = family(blocks)
    before = list(source.block_ids)
    assert not blocks.swap_out([source, child])
    assert (source.block_ids, source.host_block_ids) == (before, [])
    assert not blocks.take_moves().swapped_out


def test_one_plan_does_not_swap_the_same_blocks_both_ways() -> None:
    blocks = manager()
    group = family(blocks)
    assert blocks.swap_out(group)
    with pytest.raises(InvariantError, match="out and in by one plan"):
        blocks.swap_in(group)
    blocks.take_moves()
    blocks.swap_in(group)
    assert not blocks.swap_out(group)
    blocks.check_integrity(group)


def test_what_ends_swapped_out_frees_its_host_blocks_and_is_not_moved() -> None:
    blocks = manager()
    (source, child) = family(blocks)
    assert blocks.swap_out([source, child])
    blocks.free(source)
    assert blocks.num_used_host == 2
    blocks.free(child)
    assert blocks.num_used_host == 0
    assert not blocks.take_moves().swapped_out


def test_swapping_out_evicts_cached_host_blocks() -> None:
    blocks = manager(num_blocks=2, num_host_blocks=2, caching=True)
    source = make(8, 8)
    blocks.allocate(source, 8)
    source.output_ids.append(7)
    blocks.free(source)
    blocks.take(1)
    blocks.take_moves()
    assert (blocks.host_pool.num_idle, blocks.find_cached_prefix(make(9)).num_tokens) == (1, 8)
    blocks.free(made := make(4, 4))
    blocks.allocate(made, 4)
    assert blocks.swap_out([made])
    assert blocks.num_used_host == 1


def test_blocks_of_a_shared_prompt_have_one_count_and_as_many_holders_as_sequences() -> None:
    blocks = manager()
    source, *children = family(blocks, 3)
    first, partial = source.block_ids
    assert {child.shared_blocks for child in children} == {source.shared_blocks}
    assert (blocks.pool.ref_counts[first], blocks.pool.ref_counts[partial]) == (1, 4), "the prompt has one full block"
    assert [blocks.pool.num_holders[block_id] for block_id in (first, partial)] == [4, 4]
    blocks.free(source)
    assert (blocks.pool.ref_counts[first], blocks.pool.num_holders[first], blocks.num_shared_refs) == (1, 3, 4)
    for child in children:
        blocks.free(child)
    assert (blocks.num_free, blocks.num_shared_refs, len(blocks.pool.shared)) == (10, 0, 0)


def test_who_writes_to_a_shared_prompt_gets_a_copy_and_shares_the_rest_on_its_own() -> None:
    """The core writes behind the prompt's full blocks only; the block manager does not rely on it."""
    blocks = manager()
    source, child, other = make(9, 2), make(9, 2), make(9, 2)
    blocks.allocate(source, 9)
    for each in (child, other):
        blocks.share_blocks(source, each, 9)
    first, second, third = source.block_ids
    assert blocks.writes_shared(child)
    own = blocks.make_writable(child)
    assert child.block_ids == [own, second, third]
    assert child.shared_blocks is None
    assert [blocks.pool.num_holders[block_id] for block_id in (own, first, second, third)] == [1, 2, 3, 3]
    assert blocks.num_shared_refs == 1 + 2 + 2
    blocks.take_moves()
    blocks.check_integrity([source, child, other])
    blocks.free(source)
    assert not blocks.shares_unfilled(other)
    blocks.free(other)
    assert blocks.make_writable(child) == own
    blocks.check_integrity([child])


@pytest.mark.parametrize("tampering", ["lost", "twice", "short", "both", "cached", "sharers", "shared"])
def test_the_check_finds_what_does_not_add_up(tampering: str) -> None:
    blocks = manager()
    source, child = family(blocks)
    blocks.check_integrity([source, child])
    if tampering == "lost":
        source.block_ids[0] = 9
    elif tampering == "twice":
        source.block_ids.append(source.block_ids[0])
    elif tampering == "short":
        source.schedule(3)
    elif tampering == "both":
        source.host_block_ids = [1]
    elif tampering == "cached":
        child.num_cached_blocks = 3
    elif tampering == "sharers":
        child.shared_blocks.num_holders += 1
    else:
        child.shared_blocks = SharedBlocks([9])
    with pytest.raises(InvariantError):
        blocks.check_integrity([source, child])


def test_blocks_are_given_once_and_taken_back_once() -> None:
    blocks = manager()
    sequence = make(5)
    blocks.allocate(sequence, 5)
    with pytest.raises(InvariantError, match="has blocks already"):
        blocks.allocate(sequence, 5)
    table = list(sequence.block_ids)
    blocks.free(sequence)
    blocks.free(sequence)
    assert blocks.num_free == 10
    with pytest.raises(InvariantError, match="freed twice"):
        blocks.pool.drop(table)
    with pytest.raises(InvariantError, match="unused and cannot be shared"):
        blocks.pool.share(3)


def test_allocating_beside_others_of_a_group_shares_their_first_blocks() -> None:
    blocks = manager()
    source, mate = make(9, 8), make(9)
    blocks.allocate(source, 9)
    blocks.allocate(mate, 9, source=source, num_shared=2)
    assert mate.block_ids[:2] == source.block_ids[:2]
    assert (mate.block_ids[2] != source.block_ids[2], blocks.num_shared_refs) == (True, 2)
    with pytest.raises(InvariantError, match="not those that it is given"):
        blocks.allocate(make(4), 4, source=source, num_shared=3)
