"""Recurrent states in the core: where they are saved, which requests go on behind them, and who has whose."""

from __future__ import annotations

import random
from collections.abc import Sequence as Ids
from typing import Any

import pytest

from scheduler_svc.core import kv_groups
from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.kv_groups import KVGroup
from scheduler_svc.core.memory.paged_pool import PagedPool
from scheduler_svc.core.memory.rates import MeasuredRates
from scheduler_svc.core.policies.policies import Policies
from scheduler_svc.core.queues.orders import PriorityOrder
from scheduler_svc.core.types import ExecutorSpec
from tests.helpers.core.core_bench import Bench
from tests.helpers.core.known import VOCAB_SIZE

FULL, WINDOW = KVGroup(0), KVGroup(1, 16, 3)
GROUPS = {"full": (FULL,), "full and window": (FULL, WINDOW), "window": (KVGroup(0, 16),)}
# A model without attention has a group that reads its own position alone.
GROUPS["state alone"] = (KVGroup(0, 1),)
KINDS = pytest.mark.parametrize("groups", GROUPS.values(), ids=list(GROUPS))


def stateful(num_blocks: int = 400, groups: Ids[KVGroup] = (FULL,), **changes: Any) -> Bench:
    """Blocks of 4 tokens, and states of 3 pages."""
    changes = {"max_model_len": 400, "max_num_batched_tokens": 64, "pages_per_state": 3, **changes}
    policies = changes.pop("policies", None) or Policies(prefix_caching=True)
    return Bench(policies, num_blocks=num_blocks, kv_groups=tuple(groups), **changes)


def draw(count: int, seed: int = 0) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(VOCAB_SIZE) for _ in range(count))


def hits(bench: Bench, request_id: str, *args: Any, **more: Any) -> int:
    """Serve a request to its end; returns the tokens that it found in the cache. Its tokens must be right."""
    before = bench.lane.blocks.prefix_counts.num_hits
    bench.add(request_id, *args, **more)
    bench.run()
    assert bench.tokens[request_id] == bench.known(request_id)
    return bench.lane.blocks.prefix_counts.num_hits - before


def fill(bench: Bench, count: int) -> None:
    """Serve other requests of 15 blocks and a state: what is not held goes, the oldest first."""
    for index in range(len(bench.specs), len(bench.specs) + count):
        bench.add(f"filler {index}", draw(60, 1000 + index), max_tokens=1)
        bench.run()


def pool_of(bench: Bench) -> PagedPool:
    pool = bench.lane.blocks.pool
    assert isinstance(pool, PagedPool)
    return pool


@KINDS
def test_a_prompt_is_found_at_its_end_and_a_branch_once_it_was_seen_twice(groups: Ids[KVGroup]) -> None:
    bench, text = stateful(groups=groups), draw(120)
    assert hits(bench, "first", text, 4) == 0
    # The state was saved behind the last whole block before the prompt's last token.
    assert hits(bench, "longer", (*text, *draw(9, 1)), 3) == 116
    assert hits(bench, "cut", (*text[:61], *draw(9, 2)), 3) == 0
    assert hits(bench, "cut again", (*text[:61], *draw(9, 3)), 3) == 60
    assert hits(bench, "cut elsewhere", (*text[:80], *draw(9, 4)), 3) == 60
    assert hits(bench, "cut there again", (*text[:83], *draw(9, 5)), 3) == 80


@KINDS
@pytest.mark.parametrize("max_drafts", [0, 3])
def test_states_are_saved_after_every_interval_also_in_an_answer(
    groups: Ids[KVGroup], max_drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_LEAST_INTERVAL", "_MOST_INTERVAL", "_INTERVAL_WITHOUT_FULL"):
        monkeypatch.setattr(kv_groups, name, 32)
    bench, text = stateful(groups=groups, max_drafts=max_drafts), draw(50)
    assert hits(bench, "first", text, 60) == 0
    answered = (*text, *bench.tokens["first"])
    assert hits(bench, "in the answer", (*answered[:100], *draw(9, 1)), 3) == 96
    assert hits(bench, "in the prompt", (*answered[:47], *draw(9, 2)), 3) == 32


@pytest.mark.parametrize("missing", [0, 1, 100])
def test_requests_that_share_a_shortened_prefix_hit_as_the_rules_say(missing: int) -> None:
    """vLLM (issues 45238 and 57610) finds nothing if the end of what was cached is not in the shared part: 0 of 64."""
    bench = stateful(
        4000, block_size=16, max_model_len=4096, max_num_batched_tokens=2048, num_slots=64, max_num_seqs=64,
        pages_per_state=32,
    )  # fmt: skip
    text = draw(1300)
    assert hits(bench, "first", text, 2) == 0
    shared = text[: len(text) - missing]
    found = [hits(bench, f"r{number}", (*shared, *draw(20, 1 + number)), 2) for number in range(64)]
    # Periodic saves are 512 tokens apart, and the second request saves where it branched off.
    assert found == [1296] * 64 if missing < 100 else found == [1024] + [1200] * 63


@pytest.mark.slow
@KINDS
def test_a_long_talk_finds_all_but_its_last_turn(groups: Ids[KVGroup]) -> None:
    """40 turns with a tool's answer each time, in a pool that holds a few turns' states."""
    bench, talk, before = stateful(230, groups, block_size=16, max_model_len=2048, max_num_batched_tokens=512), (), 0
    talk = draw(200)
    for turn in range(40):
        found = hits(bench, f"turn {turn}", talk, 6)
        assert found >= before
        before = (len(talk) - 1) // 16 * 16
        talk = (*talk, *bench.tokens[f"turn {turn}"], *draw(20 + turn % 5, turn))


def test_a_talk_outlives_others_that_end_before() -> None:
    """What is idle longest goes first: a state with its chain, and not before it."""
    bench, texts = stateful(75), [draw(60, seed) for seed in range(3)]
    for number, text in enumerate(texts):
        assert hits(bench, f"a{number}", text, 9) == 0
    for number, text in enumerate(texts[1:]):
        assert hits(bench, f"b{number}", (*text, *draw(3, 9)), 2) == 56


@KINDS
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("max_drafts", [0, 3])
def test_samples_have_states_of_their_own(groups: Ids[KVGroup], depth: int, max_drafts: int) -> None:
    bench = stateful(groups=groups, max_drafts=max_drafts)
    for number, num_prompt in enumerate([30, 32, 3]):
        bench.add(f"n{number}", draw(num_prompt, number), 12, n=3)
        bench.run(depth)
        assert [bench.samples[f"n{number}", index] for index in range(3)] == [
            bench.known(f"n{number}", index) for index in range(3)
        ]
    assert not pool_of(bench).states


@KINDS
@pytest.mark.parametrize("num_host_blocks", [0, 300])
@pytest.mark.parametrize("max_drafts", [0, 3])
def test_preempted_requests_go_on_behind_a_state(groups: Ids[KVGroup], num_host_blocks: int, max_drafts: int) -> None:
    num_blocks = {(FULL,): 70, (FULL, WINDOW): 150, (KVGroup(0, 16),): 60, (KVGroup(0, 1),): 30}[tuple(groups)]
    preemption = "swap" if num_host_blocks else "recompute"
    policies = Policies(PriorityOrder(), prefix_caching=True, preemption=preemption)
    limits = {"num_host_blocks": num_host_blocks, "max_drafts": max_drafts, "max_num_batched_tokens": 16}
    bench = stateful(num_blocks, groups, policies=policies, **limits)
    for number in range(6):
        bench.add(f"r{number}", draw(40, number), 70, priority=1)
    for _ in range(30):
        bench.step(2)
    bench.add("urgent", draw(20, 9), 5, n=4, priority=0)
    bench.run(2)
    assert bench.lane.counts.num_preemptions > 0
    assert bool(bench.lane.counts.num_swap_preemptions) == bool(num_host_blocks)
    for number in range(6):
        assert bench.tokens[f"r{number}"] == bench.known(f"r{number}")


@KINDS
def test_samples_that_come_back_look_up_each_its_own(groups: Ids[KVGroup]) -> None:
    bench = stateful(groups=groups, policies=Policies(PriorityOrder(), prefix_caching=True))
    bench.add("n", draw(30), 60, n=3, priority=1)
    for _ in range(30):
        bench.step(2)
    bench.add("urgent", draw(20, 1), 5, n=4, priority=0)
    bench.run(2)
    assert bench.lane.counts.num_preemptions > 0
    for index in range(3):
        assert bench.samples["n", index] == bench.known("n", index)


def test_states_move_to_the_host_with_their_blocks_and_are_saved_again_when_they_come_back() -> None:
    bench, text = stateful(60, num_host_blocks=200), draw(60)
    assert hits(bench, "a", text, 4) == 0
    fill(bench, 4)
    assert bench.lane.blocks.prefix_counts.num_host_hits == 0
    assert hits(bench, "b", (*text, *draw(5, 1)), 4) == 56
    assert bench.lane.blocks.prefix_counts.num_host_hits > 0
    assert hits(bench, "c", (*text[:59], *draw(5, 2)), 4) == 56


@KINDS
def test_a_sequence_that_a_lost_plan_was_to_compute_goes_on_behind_a_saved_state(groups: Ids[KVGroup]) -> None:
    bench, text = stateful(groups=groups), draw(60)
    bench.add("decoding", text, 30)
    for _ in range(6):
        bench.step(2)
    bench.plan()
    before = bench.num_computed_tokens
    bench.cut_session()
    assert not len(bench.lane.running)
    bench.run()
    assert bench.tokens["decoding"] == bench.known("decoding")
    assert bench.num_computed_tokens - before < 30 + 12


def test_a_sequence_that_no_lost_plan_computed_keeps_its_state() -> None:
    """Its plans have their results: it goes on where it was."""
    bench = stateful(max_num_batched_tokens=16)
    bench.add("long", draw(100), 4)
    bench.plan()
    bench.apply()
    (sequence,) = bench.sequences("long")
    state = sequence.state_pages
    bench.cut_session()
    assert sequence in bench.lane.running.sequences
    assert sequence.num_computed_tokens == 16
    assert sequence.state_pages == state
    bench.run()
    assert bench.tokens["long"] == bench.known("long")


def test_a_copy_is_cached_only_when_a_result_names_it() -> None:
    bench, text = stateful(), draw(60)
    bench.add("a", text, 1)
    plan = bench.plan()
    assert plan is not None
    assert (list(plan.state_saves.slots), list(plan.state_saves.positions)) == ([plan.admitted[0].slot], [56])
    # The request's last token is planned: it holds nothing any more, and the copy is not made yet.
    assert not len(bench.lane.running)
    bench.add("b", (*text, *draw(5, 1)), 2)
    assert bench.lane.blocks.num_cached_tokens(bench.sequences("b")[0]) == 0
    result = bench.apply()
    assert (list(result.saved_slots), list(result.saved_positions)) == (list(plan.state_saves.slots), [56])
    assert bench.lane.blocks.num_cached_tokens(bench.sequences("b")[0]) == 56
    bench.run()
    assert bench.tokens["b"] == bench.known("b")


def test_results_that_name_impossible_copies_are_refused() -> None:
    bench = stateful()
    bench.add("a", draw(20), 4)
    assert bench.plan() is not None
    result = bench.executor.run(bench.plans.popleft())
    for slots, positions in (([0], []), ([bench.spec.num_slots], [4]), ([0], [5])):
        result.saved_slots, result.saved_positions = slots, positions
        with pytest.raises(InvariantError, match="states saved"):
            bench.core.apply_result(0, result, 0.0)


def test_a_wrong_state_makes_wrong_tokens() -> None:
    """Of whatever page: else the tests above would show nothing."""
    for page in range(3):
        bench = stateful()
        bench.add("a", draw(30), 9)
        bench.step()
        (sequence,) = bench.sequences("a")
        bench.executor.inner.pools.device_states[sequence.state_pages[page]] += 1
        bench.run()
        assert bench.tokens["a"] != bench.known("a")


def test_copies_take_no_page_that_is_needed() -> None:
    """In a pool that all that runs fills, none is made, and nobody is preempted for one."""
    bench = stateful(2 * (15 + 3) + 3, max_num_seqs=2, max_num_batched_tokens=128)
    for number in range(2):
        bench.add(f"r{number}", draw(60, number), 4)
    bench.run(2)
    assert bench.lane.counts.num_preemptions == 0
    assert bench.lane.blocks.prefix_counts.num_hits == 0


def test_a_pool_holds_a_state_beside_the_longest_sequence() -> None:
    spec = ExecutorSpec(4, 40, 8, 8, 64, 400, pages_per_state=5)
    assert spec.group_sizes is not None
    assert spec.group_sizes.capacity(40, 400) == 35 * 4
    assert spec.footprint(100) == 25 + 5


def test_requests_that_opted_out_save_nothing() -> None:
    bench, text = stateful(), draw(60)
    assert hits(bench, "a", text, 4, uses_prefix_cache=False) == 0
    assert hits(bench, "b", text, 4) == 0
    assert hits(bench, "c", text, 4, salt=b"other") == 0
    assert hits(bench, "d", text, 4) == 56


def test_a_flush_frees_all_states() -> None:
    bench = stateful()
    hits(bench, "a", draw(60), 4)
    assert any(pool_of(bench).windows[-1])
    while bench.core.flush_prefix_caches(7):
        pass
    assert len(pool_of(bench).unused_pages) == bench.spec.num_blocks
    assert hits(bench, "b", draw(60), 4) == 0


def test_copies_that_a_lost_session_was_to_make_are_given_up() -> None:
    """Their pages are free, also of a sequence that keeps its state and goes on."""
    bench = stateful(max_num_batched_tokens=16, max_drafts=3)
    bench.add("long", draw(21), 20)
    for _ in range(2):
        bench.plan()
        bench.apply()
    # With drafts the state of the prompt's end is saved a step later: the copy is armed.
    assert len(pool_of(bench).states) == 2
    bench.cut_session()
    assert len(bench.lane.running) == len(pool_of(bench).states) == 1
    bench.run()
    assert bench.tokens["long"] == bench.known("long")


def test_the_last_state_of_a_talk_goes_with_its_end() -> None:
    """A talk's last state was saved long before its last block is idle. The blocks behind it go first."""
    bench, text = stateful(44), draw(60)
    bench.add("talk", text, 40)
    for _ in range(9):
        bench.step()
    bench.add("short", draw(5), 1)
    bench.run()
    # 25 blocks and a state of 3 pages are idle; others need 15 blocks and a state.
    fill(bench, 1)
    assert hits(bench, "on", (*text, *draw(5, 1)), 2) == 56


def test_a_sequence_that_has_no_room_for_a_copy_comes_without_a_hit() -> None:
    """The pool holds the sequence alone: its state and the snapshot that it would be copied from do not both fit."""
    bench, text = stateful(23), draw(60)
    assert hits(bench, "a", text, 4) == 0
    assert any(pool_of(bench).windows[-1])
    assert hits(bench, "b", (*text, *draw(19, 1)), 1) == 0
    assert hits(bench, "c", draw(40, 2), 2) == 0
    assert hits(bench, "d", (*draw(40, 2), *draw(5, 3)), 2) == 36


@pytest.mark.parametrize(("n", "num_prompt", "swaps"), [(1, 57, False), (1, 60, True), (3, 57, False), (3, 60, True)])
def test_auto_compares_with_the_tokens_behind_the_last_snapshot(
    n: int, num_prompt: int, swaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """56 tokens have a snapshot; all of them would always cost more than all moves."""
    policies = Policies(PriorityOrder(), prefix_caching=True, preemption="auto")
    bench = stateful(policies=policies, num_host_blocks=300, max_num_seqs=4)
    bench.add("r", draw(num_prompt), 30, n=n, priority=1)
    for _ in range(5):
        bench.step(1)
    sequences = bench.sequences("r")
    num_moves = 2 * bench.lane.blocks.num_to_swap(sequences)
    num_tokens = sum(each.num_computed_tokens - (num_prompt - 1) // 4 * 4 for each in sequences)
    distinct = bench.lane.num_distinct_tokens(sequences)
    assert n * 4 < num_tokens < n * 9 < distinct
    # All moves together cost as much as so many tokens: between what is computed again of 57 and of 60 prompt tokens.
    monkeypatch.setattr(MeasuredRates, "costs", (1000.0, 1000.0 * n * 6.5 / num_moves))
    bench.add("urgent", draw(20, 1), 5, n=4, priority=0)
    bench.run(1)
    assert (bench.lane.counts.num_swap_preemptions > 0) is swaps
    assert bench.lane.counts.num_preemptions > 0
    assert [bench.samples["r", index] for index in range(n)] == [bench.known("r", index) for index in range(n)]
