"""The prefix cache through the block manager: what is found, what never is, what is evicted and what comes back."""

from __future__ import annotations

import itertools

import pytest

from cadenza_common.plan.sampling import SequenceSampling
from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.memory import prefix_lookups
from scheduler_svc.core.memory.block_manager import BlockManager
from scheduler_svc.core.memory.prefix_cache import NO_PREFIX, CachedPrefix
from scheduler_svc.core.memory.rates import MeasuredRates
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup
from scheduler_svc.core.types import RequestSpec

SIZE = 4
ALIKE = 2**31
"""Two ids with this difference differ in one bit, the highest of the four bytes of an id."""


_IDS = itertools.count(1)


def make(token_ids: list[int], num_prompt_logprobs: int | None = None, **fields: object) -> Sequence:
    sampling = SequenceSampling(num_prompt_logprobs=num_prompt_logprobs)
    spec = RequestSpec("r", tuple(token_ids), sampling, max_tokens=100, **fields)
    return Sequence(next(_IDS), SequenceGroup(spec, 0, 0.0, 10_000), 0)


def manager(num_blocks: int = 20, num_host_blocks: int = 0, rates: MeasuredRates | None = None) -> BlockManager:
    return BlockManager(num_blocks, SIZE, 0.0, num_host_blocks=num_host_blocks, caching=True, rates=rates)


def enter(blocks: BlockManager, token_ids: list[int], **fields: object) -> tuple[Sequence, CachedPrefix]:
    """Let a sequence in, compute all of its tokens, and confirm one more."""
    sequence = make(token_ids, **fields)
    found = blocks.find_cached_prefix(sequence)
    blocks.allocate(sequence, len(token_ids) + 1, found=found)
    sequence.schedule(len(token_ids))
    sequence.output_ids.append(0)
    blocks.cache_full_blocks(sequence)
    return sequence, found


def rates(token_ns: int, block_ns: int) -> MeasuredRates:
    measured = MeasuredRates()
    measured.observe(1000, 1000, 1000 * token_ns, 1000 * block_ns)
    return measured


def num_found(blocks: BlockManager, token_ids: list[int], **fields: object) -> int:
    return blocks.find_cached_prefix(make(token_ids, **fields)).num_tokens


def test_whole_blocks_of_a_common_prefix_are_shared_while_in_use() -> None:
    blocks = manager()
    first, nothing = enter(blocks, list(range(10)))
    assert (nothing.num_blocks, nothing.num_queried) == (0, 10)
    second, found = enter(blocks, [*range(9), 77, 78, 79])
    assert (found.num_tokens, found.num_blocks, found.num_idle, found.num_host) == (8, 2, 0, 0)
    assert second.block_ids[:2] == first.block_ids[:2]
    assert second.block_ids[2] != first.block_ids[2]
    assert blocks.num_shared_refs == 2
    assert (blocks.prefix_counts.num_queried, blocks.prefix_counts.num_hits) == (22, 8)


def test_looking_up_changes_nothing() -> None:
    blocks = manager()
    sequence, _ = enter(blocks, list(range(10)))
    blocks.free(sequence)
    before = blocks.num_free, blocks.num_cached, list(blocks.pool.ref_counts)
    found = blocks.find_cached_prefix(make(list(range(10))))
    assert (found.num_idle, found.num_to_take(3)) == (2, 3)
    assert (blocks.num_free, blocks.num_cached, blocks.pool.ref_counts) == before
    assert blocks.prefix_counts.num_queried == 10


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12), (20, 12)]
)
def test_the_last_token_is_always_computed(num_tokens: int, expected: int) -> None:
    blocks = manager()
    enter(blocks, list(range(14)))
    assert num_found(blocks, list(range(num_tokens))) == expected


def test_tokens_that_differ_in_one_bit_are_distinguished() -> None:
    blocks = manager()
    prompt, alike = [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5 + ALIKE, 6, 7, 8, 9]
    assert enter(blocks, prompt)[1].num_tokens == 0
    assert enter(blocks, alike)[1].num_tokens == 4
    first, second = blocks.find_cached_prefix(make(prompt)), blocks.find_cached_prefix(make(alike))
    assert first.num_tokens == second.num_tokens == 8
    assert first.nodes[0] == second.nodes[0]
    assert first.nodes[1] != second.nodes[1]


def test_equal_blocks_after_different_prefixes_are_distinguished() -> None:
    blocks = manager()
    enter(blocks, [1, 1, 1, 1, 5, 5, 5, 5, 0])
    assert num_found(blocks, [2, 2, 2, 2, 5, 5, 5, 5, 0]) == 0
    assert num_found(blocks, [5, 5, 5, 5, 0]) == 0


@pytest.mark.parametrize("fields", [{"tenant": "t"}, {"cache_salt": b"s"}, {"uses_prefix_cache": False}])
def test_other_tenants_and_salts_and_those_who_opt_out_find_nothing(fields: dict[str, object]) -> None:
    blocks = manager()
    prompt = list(range(10))
    enter(blocks, prompt)
    assert num_found(blocks, prompt) == 8
    assert num_found(blocks, prompt, **fields) == 0
    enter(blocks, prompt, **fields)
    assert num_found(blocks, prompt, **fields) == (0 if "uses_prefix_cache" in fields else 8)


def test_who_opts_out_leaves_nothing_behind() -> None:
    blocks = manager()
    sequence, found = enter(blocks, list(range(10)), uses_prefix_cache=False)
    blocks.free(sequence)
    assert found is NO_PREFIX
    assert (blocks.num_cached, num_found(blocks, list(range(10)))) == (0, 0)
    assert blocks.prefix_counts.num_queried == 0


def test_prompt_logprobs_are_computed_not_found_until_they_are_known() -> None:
    blocks = manager()
    prompt = list(range(10))
    enter(blocks, prompt)
    sequence = make(prompt, num_prompt_logprobs=1)
    assert blocks.find_cached_prefix(sequence) is NO_PREFIX
    sequence.prompt_logprobs_end = 10
    assert blocks.find_cached_prefix(sequence).num_tokens == 8


def test_without_caching_nothing_is_kept() -> None:
    blocks = BlockManager(20, SIZE, 0.0)
    sequence, found = enter(blocks, list(range(10)))
    blocks.free(sequence)
    assert found is NO_PREFIX
    assert (blocks.num_cached, blocks.num_free) == (0, 20)


def test_a_token_is_cached_only_when_another_came_after_it() -> None:
    blocks = manager()
    sequence, _ = enter(blocks, list(range(6)))  # and token 0
    sequence.output_ids.append(5)  # a stop token, whose KV the plan in flight will not compute
    sequence.schedule(2)
    blocks.free(sequence)
    assert num_found(blocks, [*range(6), 0, 5, 8]) == 4


def test_pending_tokens_are_not_cached() -> None:
    blocks = manager()
    sequence = make(list(range(6)))
    blocks.allocate(sequence, 20)
    sequence.schedule(6)
    for _ in range(8):
        sequence.schedule(1)
    blocks.cache_full_blocks(sequence)
    assert sequence.num_cached_blocks == 1


def test_a_content_that_is_cached_keeps_its_first_block() -> None:
    blocks = manager()
    one, two = make(list(range(9))), make(list(range(9)))
    for sequence in (one, two):
        blocks.allocate(sequence, 10)
        sequence.schedule(9)
        sequence.output_ids.append(0)
    blocks.cache_full_blocks(one)
    blocks.cache_full_blocks(two)
    assert two.num_cached_blocks == 2
    kept, other = list(one.block_ids), list(two.block_ids)
    blocks.free(two)
    assert blocks.num_cached == 0
    third, _ = enter(blocks, list(range(9)))
    assert third.block_ids[:2] == kept[:2]
    assert not set(third.block_ids[:2]) & set(other)


def test_the_least_recently_used_goes_first_and_tails_before_heads() -> None:
    blocks = manager(num_blocks=8)
    old, _ = enter(blocks, [1] * 9)
    new, _ = enter(blocks, [2] * 9)
    blocks.free(old)
    blocks.free(new)
    assert (blocks.num_free, blocks.num_cached) == (8, 4)
    blocks.take(5)
    assert (num_found(blocks, [1] * 9), num_found(blocks, [2] * 9)) == (4, 8)
    blocks.take(1)
    assert (num_found(blocks, [1] * 9), num_found(blocks, [2] * 9)) == (0, 8)
    blocks.take(1)
    assert num_found(blocks, [2] * 9) == 4
    with pytest.raises(InvariantError, match="2 more blocks needed"):
        blocks.take(2)


def test_use_makes_recent() -> None:
    blocks = manager(num_blocks=8)
    for token in (1, 2):
        blocks.free(enter(blocks, [token] * 9)[0])
    blocks.free(enter(blocks, [1] * 9)[0])
    blocks.take(5)
    assert (num_found(blocks, [1] * 9), num_found(blocks, [2] * 9)) == (8, 4)


def test_what_was_found_is_not_evicted_for_its_own_remainder() -> None:
    blocks = manager(num_blocks=5)
    blocks.free(enter(blocks, [1] * 9)[0])
    sequence = make([1] * 18)
    found = blocks.find_cached_prefix(sequence)
    assert (found.num_tokens, found.num_to_take(5)) == (8, 5)
    assert blocks.can_take(5, alone=True)
    blocks.allocate(sequence, 18, found=found)
    assert (blocks.num_free, len(set(sequence.block_ids))) == (0, 5)


def test_a_chain_that_was_evicted_elsewhere_is_registered_anew() -> None:
    blocks = manager(num_blocks=8)
    one, two = make([1] * 9), make([1] * 9)
    for sequence in (one, two):
        blocks.allocate(sequence, 10)
        sequence.schedule(9)
        sequence.output_ids += [1, 1, 1, 1]
    blocks.cache_full_blocks(one)
    blocks.cache_full_blocks(two)  # its chain is that of the first
    blocks.free(one)
    blocks.take(5)
    assert num_found(blocks, [1] * 9) == 0
    two.schedule(3)
    blocks.cache_full_blocks(two)
    assert num_found(blocks, [1] * 13) == 12
    assert blocks.find_cached_prefix(make([1] * 13)).num_idle == 0


def test_invalidated_blocks_are_not_found() -> None:
    blocks = manager()
    sequence, _ = enter(blocks, list(range(10)))
    blocks.free(sequence, invalid_kv=True)
    assert (num_found(blocks, list(range(10))), blocks.num_cached, blocks.num_free) == (0, 0, 20)


# ------------------------------------------------------------- the host tier


def evict_to_host(rate: MeasuredRates | None, num_host_blocks: int = 4) -> BlockManager:
    """Three blocks of ones are evicted, and may go to the host pool."""
    blocks = manager(4, num_host_blocks, rate)
    blocks.free(enter(blocks, [1] * 13)[0])
    taken = make([9] * 16)
    blocks.allocate(taken, 16)
    assert (blocks.num_free, num_found(blocks, [1] * 13)) == (0, 0)  # not by the plan that moves them out
    assert len(blocks.take_moves().swapped_out) == (min(3, num_host_blocks) if rate is CHEAP else 0)
    blocks.free(taken)
    blocks.check_integrity([])
    return blocks


CHEAP, DEAR = rates(1000, 1), rates(1, 1000)


def test_evicted_blocks_come_back_from_the_host() -> None:
    blocks = evict_to_host(CHEAP)
    assert blocks.num_used_host == 0
    sequence = make([1] * 13)
    found = blocks.find_cached_prefix(sequence)
    assert (found.num_tokens, found.num_host, found.num_to_take(4)) == (12, 3, 4)
    blocks.allocate(sequence, 13, found=found)
    moves = blocks.take_moves()
    assert [block_id for _, block_id in moves.swapped_in] == sequence.block_ids[:3]
    assert not moves.swapped_out
    assert not moves.copied
    assert blocks.find_cached_prefix(make([1] * 13)).num_host == 0
    assert blocks.host_pool.num_free == 4
    blocks.check_integrity([sequence])


def test_what_is_dear_to_move_is_dropped() -> None:
    assert num_found(evict_to_host(DEAR), [1] * 13) == 0


def test_a_full_host_pool_keeps_the_newest() -> None:
    blocks = evict_to_host(CHEAP, num_host_blocks=2)
    # Tails went first, and had to go for the heads.
    assert num_found(blocks, [1] * 13) == 8


def test_blocks_out_of_reach_are_not_worth_a_move() -> None:
    blocks = manager(8, 4, CHEAP)
    one, two = make([1] * 9), make([1] * 9)
    for sequence in (one, two):
        blocks.allocate(sequence, 10)
        sequence.schedule(9)
        sequence.output_ids.append(1)
    blocks.cache_full_blocks(one)
    blocks.cache_full_blocks(two)
    two.schedule(1)
    two.output_ids += [1] * 3
    two.schedule(2)
    blocks.cache_full_blocks(two)  # its third block hangs from the second of the other
    blocks.free(one, invalid_kv=True)
    blocks.free(two)
    assert blocks.num_cached == 1
    blocks.take(8)
    assert not blocks.take_moves().swapped_out


@pytest.mark.parametrize(("measured", "expected"), [(rates(1, 5), 4), (rates(1, 4), 4), (rates(1, 3), 12), (None, 12)])
def test_host_blocks_at_the_end_are_used_while_moving_is_cheaper_than_computing(
    measured: MeasuredRates | None, expected: int
) -> None:
    blocks = manager(4, 4, CHEAP)
    first, _ = enter(blocks, [1] * 13)
    head = make([1] * 5)
    blocks.free(first)
    blocks.allocate(head, 4, found=blocks.find_cached_prefix(head))  # holds the first block
    taken = make([9] * 12)
    blocks.allocate(taken, 12)
    blocks.take_moves()
    blocks.tiers._rates = measured
    found = blocks.find_cached_prefix(make([1] * 13))
    assert (found.num_tokens, found.num_host) == (expected, expected // 4 - 1)


def test_what_left_the_cache_since_it_was_found_is_refused() -> None:
    blocks = manager(4)
    blocks.free(enter(blocks, [1] * 9)[0])
    late = make([1] * 9)
    found = blocks.find_cached_prefix(late)
    blocks.take(4)
    with pytest.raises(InvariantError, match="has left the prefix cache"):
        blocks.allocate(late, 9, found=found)
    assert late.block_ids == []


def test_a_lookup_without_a_change_is_the_last_one() -> None:
    """Also while other sequences come, are cached and are evicted: the chain of 500 blocks is not walked."""
    blocks = manager(num_blocks=520)
    long_prompt = list(range(500 * SIZE + 1))
    holder, _ = enter(blocks, long_prompt)
    waiting = make(long_prompt)
    found = blocks.find_cached_prefix(waiting)
    assert blocks.num_cached_tokens(waiting) == found.num_tokens == 500 * SIZE
    for first in range(0, 4000, 10):
        other, _ = enter(blocks, list(range(9000 + first, 9000 + first + 9)))
        blocks.free(other)
        assert blocks.find_cached_prefix(waiting).nodes is found.nodes
    assert blocks.find_cached_prefix(waiting) is blocks.find_cached_prefix(waiting)
    blocks.free(holder)
    assert blocks.find_cached_prefix(waiting).num_idle == 500
    blocks.take(30)  # evicts the end of the chain
    assert 460 * SIZE < blocks.num_cached_tokens(waiting) < 500 * SIZE


def test_the_lookups_used_last_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_lookups, "_MAX_LOOKUPS", 3)
    monkeypatch.setattr(prefix_lookups, "_MAX_NODES", 8)
    blocks = manager()
    enter(blocks, list(range(13)))
    one, two, three, four = (make(list(range(length))) for length in (13, 13, 13, 5))
    first = blocks.find_cached_prefix(one)
    blocks.find_cached_prefix(two)
    assert blocks.find_cached_prefix(one) is first
    blocks.find_cached_prefix(three)  # nine nodes in all: the second one, used least recently, is dropped
    assert blocks.find_cached_prefix(one) is first
    again = blocks.find_cached_prefix(four)
    assert blocks.find_cached_prefix(three).num_blocks == 3
    assert blocks.find_cached_prefix(four) is again
    assert len(blocks._lookups._lookups) <= 3
    assert blocks._lookups._num_nodes == sum(len(each.nodes) for each in blocks._lookups._lookups.values()) <= 8
