"""The prefix cache in the scheduler: hits, tokens computed in spite of hits, and evictions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler_svc.core.policies.policies import Policies
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.types import BeamSpec, FinishDetail
from tests.helpers.core.core_bench import Bench

SYSTEM_PROMPT = tuple(range(16))
"""Four blocks."""


def caching(**limits: int) -> Bench:
    return Bench(Policies(prefix_caching=True), **limits)


def hits(bench: Bench, request_id: str, *args: object, **more: object) -> int:
    """Serve a request to its end; returns the tokens that it found in the cache."""
    before = bench.lane.blocks.prefix_counts.num_hits
    bench.add(request_id, *args, **more)  # type: ignore[arg-type]
    bench.run()
    for index in range(bench.specs[request_id].num_samples):
        if not bench.specs[request_id].beams:
            assert bench.samples[request_id, index] == bench.known(request_id, index)
    return bench.lane.blocks.prefix_counts.num_hits - before


def test_a_shared_system_prompt_is_computed_once() -> None:
    bench = caching()
    assert hits(bench, "a", (*SYSTEM_PROMPT, 30, 31)) == 0
    before = bench.num_computed_tokens
    assert hits(bench, "b", (*SYSTEM_PROMPT, 40, 41, 42), max_tokens=1) == 16
    assert bench.num_computed_tokens - before == 3


def test_without_the_cache_nothing_is_found() -> None:
    bench = Bench()
    assert hits(bench, "a", (*SYSTEM_PROMPT, 30)) == hits(bench, "b", (*SYSTEM_PROMPT, 30)) == 0
    assert bench.lane.blocks.num_cached == 0


def test_an_executor_whose_blocks_must_not_be_shared_has_no_cache() -> None:
    bench = caching()
    bench.spec = replace(bench.spec, shares_prefixes=False)
    bench.core = Scheduler(Policies(prefix_caching=True))
    bench.core.add_executor(0, bench.spec)
    assert hits(bench, "a", (*SYSTEM_PROMPT, 30)) == hits(bench, "b", (*SYSTEM_PROMPT, 30)) == 0


def test_a_prefix_is_shared_while_it_is_in_use() -> None:
    bench = caching()
    bench.add("a", (*SYSTEM_PROMPT, 30, 31), max_tokens=20)
    for _ in range(3):
        bench.step(depth=1)
    bench.add("b", (*SYSTEM_PROMPT, 40, 41), max_tokens=20)
    bench.step(depth=1)
    (first,), (second,) = bench.sequences("a"), bench.sequences("b")
    assert second.block_ids[:4] == first.block_ids[:4]
    assert bench.lane.blocks.num_shared_refs == 4
    bench.run()
    assert bench.tokens["b"] == bench.known("b")


def test_the_next_turn_of_a_talk_finds_prompt_and_answer() -> None:
    bench = caching()
    prompt = (*SYSTEM_PROMPT, 30, 31)
    assert hits(bench, "first turn", prompt, max_tokens=13) == 0
    talk = (*prompt, *bench.tokens["first turn"], 44, 45, 46)
    assert hits(bench, "second turn", talk, max_tokens=9) == 28, "of 31"
    talk = (*talk, *bench.tokens["second turn"], 47)
    assert hits(bench, "third turn", talk) == 40, "of 43"


@pytest.mark.parametrize(("num_prompt", "num_found"), [(15, 12), (16, 12), (17, 16), (4, 0), (5, 4)])
def test_the_last_token_is_computed_in_any_case(num_prompt: int, num_found: int) -> None:
    bench = caching()
    prompt = tuple(range(num_prompt))
    hits(bench, "a", prompt, max_tokens=1)
    before = bench.num_computed_tokens
    assert hits(bench, "b", prompt, max_tokens=1) == num_found
    assert bench.num_computed_tokens - before == num_prompt - num_found >= 1


@pytest.mark.parametrize(
    ("other", "num_found"),
    [({}, 16), ({"salt": b"mine"}, 0), ({"tenant": "other"}, 0), ({"uses_prefix_cache": False}, 0)],
    ids=["same", "salt", "tenant", "opted out"],
)
def test_only_equals_share(other: dict[str, object], num_found: int) -> None:
    bench = caching()
    hits(bench, "a", (*SYSTEM_PROMPT, 30))
    assert hits(bench, "b", (*SYSTEM_PROMPT, 30), **other) == num_found
    assert hits(bench, "c", (*SYSTEM_PROMPT, 30), **other) == (0 if "uses_prefix_cache" in other else 16)


def test_who_opted_out_leaves_nothing_for_others() -> None:
    bench = caching()
    hits(bench, "a", (*SYSTEM_PROMPT, 30), uses_prefix_cache=False)
    assert hits(bench, "b", (*SYSTEM_PROMPT, 30)) == 0


def test_a_request_for_prompt_logprobs_takes_no_hit() -> None:
    bench = caching()
    hits(bench, "a", (*SYSTEM_PROMPT, 30))
    before = bench.num_computed_tokens
    assert hits(bench, "b", (*SYSTEM_PROMPT, 30), max_tokens=1, num_prompt_logprobs=1) == 0
    assert bench.num_computed_tokens - before == 17
    assert sum(len(part.logprobs) for part in bench.prompt_logprobs["b"]) == 16
    assert hits(bench, "c", (*SYSTEM_PROMPT, 30)) == 16, "others do"


@pytest.mark.parametrize("more", [{"n": 3}, {"beams": BeamSpec(3)}], ids=["n", "beams"])
def test_a_group_finds_its_prompt_once(more: dict[str, object]) -> None:
    bench = caching()
    hits(bench, "a", (*SYSTEM_PROMPT, 30, 31))
    assert hits(bench, "r", (*SYSTEM_PROMPT, 40, 41), max_tokens=8, **more) == 16
    if "beams" in more:
        assert bench.found("r") == bench.known_beams("r")


def test_hits_count_once_for_each_admission() -> None:
    bench = caching(max_num_batched_tokens=4)
    hits(bench, "a", (*SYSTEM_PROMPT, 30))
    blocks = bench.lane.blocks
    assert (blocks.prefix_counts.num_queried, blocks.prefix_counts.num_hits) == (17, 0)
    # One that waits looks again with every step, and one of many chunks is admitted once.
    others = [bench.add(f"other {index}", 2, max_tokens=30) for index in range(4)]
    for _ in range(5):
        bench.step(depth=1)
    bench.add("b", (*SYSTEM_PROMPT, *range(30, 39)))
    for _ in range(5):
        bench.step(depth=1)
    assert blocks.prefix_counts.num_hits == 0, "it waits"
    for spec in others:
        bench.take(bench.core.abort(spec.key, FinishDetail.ABORTED))
    bench.run()
    assert (blocks.prefix_counts.num_queried, blocks.prefix_counts.num_hits) == (17 + 4 * 2 + 25, 16)


def test_a_preempted_sequence_finds_its_own_tokens() -> None:
    bench = caching(num_blocks=9)
    bench.add("old", 8, max_tokens=24)
    bench.add("young", range(30, 38), max_tokens=24)
    bench.run()
    assert bench.core.num_preemptions > 0
    assert bench.lane.blocks.prefix_counts.num_hits > 0
    assert [bench.tokens[name] for name in ("old", "young")] == [bench.known(name) for name in ("old", "young")]


def test_the_least_recently_used_is_evicted_first() -> None:
    bench = caching(num_blocks=12)
    first, second, third = ((*range(start, start + 16), 49) for start in (0, 16, 32))
    for name, prompt in (("a", first), ("b", second), ("a again", first)):
        hits(bench, name, prompt, max_tokens=1)
    hits(bench, "c", third, max_tokens=1)
    assert hits(bench, "a once more", first, max_tokens=1) == 16
    assert hits(bench, "b again", second, max_tokens=1) < 16


def test_memory_that_is_cached_is_free_for_those_who_need_it() -> None:
    bench = caching(num_blocks=8)
    hits(bench, "a", 28, max_tokens=4)
    assert bench.lane.blocks.num_cached == 7
    assert bench.lane.blocks.num_free == 8
    assert hits(bench, "b", range(20, 48), max_tokens=4) == 0
    assert bench.core.num_preemptions == 0


def evicted_to_the_host() -> Bench:
    """The system prompt was cached, then evicted to the host pool."""
    bench = caching(num_blocks=8, num_host_blocks=16)
    hits(bench, "a", (*SYSTEM_PROMPT, 30), max_tokens=1)
    hits(bench, "b", range(20, 48), max_tokens=4)
    assert len(bench.lane.blocks.host_pool.cached) >= 4
    return bench


def test_what_was_evicted_to_the_host_comes_back_by_swap_in() -> None:
    bench = evicted_to_the_host()
    before = bench.num_computed_tokens
    bench.add("c", (*SYSTEM_PROMPT, 40), max_tokens=4)
    plan = bench.plan()
    assert plan is not None
    assert len(plan.swap_in) == 4
    assert bench.num_computed_tokens - before == 1
    bench.run()
    assert bench.tokens["c"] == bench.known("c"), "or what came back was not what went"
    assert bench.num_computed_tokens - before == 1 + 3


def test_it_stays_there_where_computing_is_cheaper() -> None:
    bench = evicted_to_the_host()
    for _ in range(50):
        bench.lane.rates.observe(1000, 1, 1000, 10**9)
    before = bench.num_computed_tokens
    assert hits(bench, "c", (*SYSTEM_PROMPT, 40), max_tokens=1) == 0
    assert bench.num_computed_tokens - before == 17


def test_a_lost_executor_empties_the_cache() -> None:
    bench = evicted_to_the_host()
    hits(bench, "c", (*SYSTEM_PROMPT, 40))
    bench.lose_executor()
    assert bench.lane.blocks.num_cached == 0
    assert not bench.lane.blocks.host_pool.cached
    assert hits(bench, "d", (*SYSTEM_PROMPT, 40)) == 0


def test_a_stop_token_whose_kv_was_never_computed_is_not_found() -> None:
    bench = caching()
    prompt = (*SYSTEM_PROMPT, 30, 31)
    hits(bench, "probe", prompt, max_tokens=2, salt=b"probe")
    stop = bench.tokens["probe"][1]
    assert bench.tokens["probe"][0] != stop
    assert hits(bench, "a", prompt, max_tokens=9, stop_token_ids=(stop,)) == 0
    assert len(bench.tokens["a"]) == 2, "20 tokens fill a block, and the last was not computed"
    assert hits(bench, "b", (*prompt, *bench.tokens["a"], 33)) == 16
