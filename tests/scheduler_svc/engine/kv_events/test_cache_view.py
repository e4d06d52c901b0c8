"""What routers are told the prefix caches hold, against the caches themselves, whatever happens to steps and lanes."""

from __future__ import annotations

import random
from typing import Any

import pytest

from scheduler_svc.core.kv_groups import KVGroup
from scheduler_svc.core.memory.prefix_cache import PrefixCache
from scheduler_svc.core.policies.policies import Policies
from scheduler_svc.engine.kv_events.blocks import Block, Tier, block_hashes, first_block, next_block, token_ids_of
from scheduler_svc.engine.kv_events.cache_view import CacheView
from scheduler_svc.engine.kv_events.events import net
from tests.helpers.core.core_bench import Bench

PLAIN = ("", b"", b"")


class Follower:
    """A router that applies changes, and checks each: what a block follows is there, in whatever tier."""

    def __init__(self) -> None:
        self.view = CacheView()
        self.blocks: set[tuple[bytes, Tier]] = set()
        self._parents: dict[bytes, Block | None] = {}
        """Of each block that was ever told."""

    def collect(self, *benches: Bench) -> list[tuple[Block, Tier, bool]]:
        lanes = {index: bench.lane for index, bench in enumerate(benches)}
        changes = net([change for part in self.view.collect(lanes) for change in part])
        for block, tier, is_stored in changes:
            name = block.digest, tier
            assert (name in self.blocks) is not is_stored
            assert not is_stored or self._has(block.parent), "its parent is not known"
            (self.blocks.add if is_stored else self.blocks.discard)(name)
            self._parents[block.digest] = block.parent
            assert is_stored or self._has_all_parents(), "what follows it is still there"
        return changes

    def check(self) -> None:
        """Check that the present state is what was told, parents first, and that all of it can be reached."""
        seen: set[bytes] = set()
        for block, _, is_stored in self.view.present():
            assert is_stored
            assert block.parent is None or block.parent.digest in seen
            seen.add(block.digest)
        assert {(block.digest, tier) for block, tier, _ in self.view.present()} == self.blocks

    def _has_all_parents(self) -> bool:
        return all(self._has(self._parents[digest]) for digest, _ in self.blocks)

    def _has(self, block: Block | None) -> bool:
        return block is None or any((block.digest, tier) in self.blocks for tier in Tier)


def reachable(cache: PrefixCache) -> set[tuple[bytes, Tier]]:
    """What the cache holds that a lookup can reach, made from its own keys."""
    found: dict[int, Block] = {}
    for node, (parent, content) in cache._keys.items():
        if isinstance(parent, tuple):
            found[node] = first_block(parent, content)
        elif parent in found:
            found[node] = next_block(found[parent], content)
    return {(block.digest, Tier.DEVICE if cache.place(node) >= 0 else Tier.HOST) for node, block in found.items()}


def announced(bench: Bench) -> set[tuple[bytes, Tier]]:
    """What is before the deepest place in a window lane's cache where a hit may end, each counted by itself."""
    cache, pools, sizes = bench.lane.blocks.tiers.cache, bench.lane.blocks.tiers, bench.lane.spec.group_sizes
    assert sizes is not None
    chains: dict[int, list[int]] = {}
    for node, (parent, _) in cache._keys.items():
        if isinstance(parent, tuple) or parent in chains:
            chains[node] = [*(chains[parent] if isinstance(parent, int) else []), node]
    found = set()
    for chain in chains.values():
        if sizes.state_pages and not pools._windows_at(cache.place(chain[-1])) >> len(sizes.windows) & 1:
            continue
        if all(
            pools._windows_at(cache.place(node)) >> number & 1
            for number, group in enumerate(sizes.windows)
            for node in chain[max(0, len(chain) * sizes.block_size - (group.window or 0) + 1) // sizes.block_size :]
        ):
            found.update(chain)
    blocks: dict[int, Block] = {}
    for node, (parent, content) in cache._keys.items():
        if node in chains:
            blocks[node] = (
                first_block(parent, content) if isinstance(parent, tuple) else next_block(blocks[parent], content)
            )
    return {(blocks[node].digest, Tier.DEVICE if cache.place(node) >= 0 else Tier.HOST) for node in found}


def bench_of(**changes: Any) -> Bench:
    return Bench(Policies(prefix_caching=True), **{"max_num_batched_tokens": 16, **changes})


def test_blocks_are_told_once_their_step_has_a_result() -> None:
    bench, follower = bench_of(), Follower()
    assert not follower.collect(bench)
    bench.add("r", list(range(48)), max_tokens=2)
    bench.plan()
    assert not follower.collect(bench), "a plan in flight may fail"
    bench.plan()
    bench.apply()
    assert len(follower.collect(bench)) == 16 // bench.lane.spec.block_size
    bench.apply()
    bench.run()
    follower.collect(bench)
    assert follower.blocks == reachable(bench.lane.blocks.tiers.cache)


def test_a_step_that_is_lost_was_never_told() -> None:
    bench, follower = bench_of(), Follower()
    follower.collect(bench)
    bench.add("r", list(range(48)), max_tokens=2)
    bench.plan()
    bench.apply()
    told = {block.digest for block, _, _ in follower.collect(bench)}
    bench.plan()
    bench.plan()
    bench.cut_session()
    assert {block.digest for block, _, is_stored in follower.collect(bench) if is_stored} == set()
    assert {digest for digest, _ in follower.blocks} == told
    bench.run()
    follower.collect(bench)
    assert follower.blocks == reachable(bench.lane.blocks.tiers.cache)


def test_another_incarnation_has_nothing() -> None:
    bench, follower = bench_of(), Follower()
    bench.add("r", list(range(48)), max_tokens=2)
    bench.run()
    follower.collect(bench)
    assert follower.blocks
    bench.die(is_known=False)
    follower.collect(bench)
    assert not follower.blocks


def test_blocks_of_two_executors_count_as_one_cache() -> None:
    first, second, follower = bench_of(), bench_of(), Follower()
    for bench in (first, second):
        bench.add("r", list(range(48)), max_tokens=2)
        bench.run()
    follower.collect(first)
    assert not follower.collect(first, second), "the second holds nothing that the first has not"
    first.die(is_known=False)
    assert not follower.collect(first, second)
    assert follower.blocks == reachable(second.lane.blocks.tiers.cache)
    follower.collect(first)
    assert not follower.blocks


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_it_agrees_with_the_caches_through_evictions_swaps_and_lost_sessions(seed: int) -> None:
    draw = random.Random(seed)
    bench = bench_of(num_blocks=24, num_host_blocks=16, max_num_batched_tokens=24)
    follower = Follower()
    if seed % 2:
        follower.collect(bench)
    for number in range(30):
        ids = [draw.randrange(3) for _ in range(draw.choice((4, 8, 20, 40)))]
        bench.add(f"r{number}", ids, max_tokens=draw.randrange(1, 12))
        for _ in range(draw.randrange(6)):
            bench.plan() if len(bench.plans) < 2 and draw.random() < 0.6 else bench.step()
            if draw.random() < 0.3:
                follower.collect(bench)
                follower.check()
        if draw.random() < 0.1:
            bench.cut_session()
    bench.run()
    follower.collect(bench)
    assert follower.blocks == reachable(bench.lane.blocks.tiers.cache)
    follower.check()
    follower.view.end()
    assert bench.lane.blocks.tiers.cache._noted is None


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_two_caches_are_told_as_one_through_all_that_happens_to_each(seed: int) -> None:
    draw = random.Random(seed)
    benches = [bench_of(num_blocks=24, num_host_blocks=host, max_num_batched_tokens=24) for host in (0, 12)]
    follower = Follower()
    for number in range(40):
        bench = draw.choice(benches)
        ids = [draw.randrange(2) for _ in range(draw.choice((4, 8, 20, 40)))]
        bench.add(f"r{number}", ids, max_tokens=draw.randrange(1, 12))
        for _ in range(draw.randrange(6)):
            bench.plan() if len(bench.plans) < 2 and draw.random() < 0.6 else bench.step()
            if draw.random() < 0.3:
                follower.collect(*benches)
                follower.check()
        if draw.random() < 0.1:
            bench.die(is_known=False) if draw.random() < 0.5 else bench.cut_session()
    for bench in benches:
        bench.run()
    follower.collect(*benches)
    follower.check()
    assert follower.blocks == set().union(*(reachable(bench.lane.blocks.tiers.cache) for bench in benches))


GROUPS = [
    (KVGroup(0), KVGroup(1, 6, 2)),
    (KVGroup(0), KVGroup(1, 6), KVGroup(2, 14)),
    (KVGroup(0, 1), KVGroup(1, 9)),
    (KVGroup(0), KVGroup(1, 1)),
]


@pytest.mark.slow
@pytest.mark.parametrize("pages_per_state", [0, 2])
@pytest.mark.parametrize("seed", range(8))
def test_with_windows_and_states_routers_are_told_what_lies_before_the_end_of_a_hit(
    seed: int, pages_per_state: int
) -> None:
    draw = random.Random(seed)
    groups = GROUPS[seed % len(GROUPS)]
    if pages_per_state and seed % 3 == 0:
        groups = (KVGroup(0),)
    pages = sum(group.pages_per_block for group in groups)
    host, sizes = draw.choice([0, 16 * pages]), {"kv_groups": groups, "pages_per_state": pages_per_state}
    num_pages = 16 * pages + 8 * pages_per_state
    bench = bench_of(num_blocks=num_pages, num_host_blocks=host, max_num_batched_tokens=24, **sizes)
    follower, texts = Follower(), [[draw.randrange(30) for _ in range(48)] for _ in range(2)]
    if seed % 2:
        follower.collect(bench)
    for number in range(40):
        ids = [*draw.choice(texts)[: draw.choice((4, 8, 20, 40, 48))], draw.randrange(30)]
        bench.add(f"r{number}", ids, max_tokens=draw.randrange(1, 12))
        for _ in range(draw.randrange(6)):
            bench.plan() if len(bench.plans) < 2 and draw.random() < 0.6 else bench.step()
            if draw.random() < 0.3:
                follower.collect(bench)
                follower.check()
        if draw.random() < 0.1:
            bench.cut_session()
        if draw.random() < 0.2:
            bench.run()
            follower.collect(bench)
            assert follower.blocks == announced(bench)
    bench.run()
    follower.collect(bench)
    follower.check()
    assert follower.blocks == announced(bench) <= reachable(bench.lane.blocks.tiers.cache)
    bench.core.flush_prefix_caches(1000)
    follower.collect(bench)
    assert not follower.blocks
    assert not follower.view._blocks


def test_what_follows_a_block_that_has_left_is_removed_and_stored_again_once_it_is_reached() -> None:
    bench, follower = bench_of(num_blocks=24), Follower()
    follower.collect(bench)
    text, cache = list(range(41)), bench.lane.blocks.tiers.cache
    bench.add("first", text, max_tokens=1)
    bench.run()
    follower.collect(bench)
    told = set(follower.blocks)
    assert len(told) == 10
    first = next(node for node, (parent, _) in cache._keys.items() if isinstance(parent, tuple))
    bench.lane.blocks.remove_uncertain(cache.next_node, [cache.place(first)], [])
    assert len(cache) == 9, "the others stay until their blocks are needed"
    assert {(block.digest, tier) for block, tier, _ in follower.collect(bench)} == told
    assert not follower.blocks
    bench.add("again", text, max_tokens=1)
    bench.run()
    follower.collect(bench)
    assert follower.blocks == told
    bench.core.flush_prefix_caches(100)
    follower.collect(bench)
    assert not follower.blocks


def test_hashes_depend_on_the_text_adapter_salt_and_owner_alone() -> None:
    content = bytes(range(16))
    roots = [PLAIN, ("t", b"", b""), ("", b"t", b""), ("", b"", b"t"), ("\0t", b"", b"")]
    hashes = block_hashes([first_block(root, content) for root in roots])
    assert len(set(hashes)) == len(roots)
    # Recorded: another process, and the next version, must make the same.
    second = next_block(first_block(PLAIN, content), content)
    assert (hashes[0], *block_hashes([second])) == (6626867251077369387, 6899230734068582989)
    assert block_hashes([first_block(("t", b"s", b"a"), content)]) == (4718316118394278961,)
    assert token_ids_of([second]) == [50462976, 117835012, 185207048, 252579084]
