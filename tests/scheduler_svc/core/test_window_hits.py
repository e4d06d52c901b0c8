"""The prefix cache where KV groups have windows: where hits end, what is kept longer, and what goes first."""

from __future__ import annotations

import random
from collections.abc import Sequence as Ids

import pytest

from executor_svc.simulated.costs import StepCosts
from scheduler_svc.core.kv_groups import KVGroup
from scheduler_svc.core.policies.policies import Policies
from scheduler_svc.core.queues.orders import PriorityOrder
from scheduler_svc.core.types import BeamSpec
from tests.helpers.core.core_bench import Bench
from tests.helpers.core.known import VOCAB_SIZE

FULL, WINDOW = KVGroup(0), KVGroup(1, 16, 3)
GEMMA = (FULL, KVGroup(1, 1024, 5))


def caching(num_blocks: int = 400, groups: Ids[KVGroup] = (FULL, WINDOW), **limits: int) -> Bench:
    """Blocks of 4 tokens; a window has 5 of them."""
    limits = {"max_model_len": 400, "max_num_batched_tokens": 64, **limits}
    return Bench(Policies(prefix_caching=True), num_blocks=num_blocks, kv_groups=tuple(groups), **limits)  # type: ignore[arg-type]


def draw(count: int, seed: int = 0) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(VOCAB_SIZE) for _ in range(count))


def hits(bench: Bench, request_id: str, *args: object, **more: object) -> int:
    """Serve a request to its end; returns the tokens that it found in the cache. Its tokens must be right."""
    before = bench.lane.blocks.prefix_counts.num_hits
    bench.add(request_id, *args, **more)  # type: ignore[arg-type]
    bench.run()
    assert bench.specs[request_id].beams or bench.tokens[request_id] == bench.known(request_id)
    return bench.lane.blocks.prefix_counts.num_hits - before


def fill(bench: Bench, count: int) -> None:
    """Serve other requests of 15 blocks, which take 60 pages each: what is not held goes, the oldest first."""
    for index in range(len(bench.specs), len(bench.specs) + count):
        bench.add(f"filler {index}", draw(60, 1000 + index), max_tokens=1)
        bench.run()


def test_a_shared_beginning_is_found_wherever_it_ends() -> None:
    bench, text = caching(), draw(120)
    assert hits(bench, "a", text, 4) == 0
    for number, end in enumerate([120, 119, 61, 20, 8, 101]):
        assert hits(bench, f"b{number}", (*text[:end], *draw(9, 1 + number)), 3) == end // 4 * 4


@pytest.mark.slow
def test_the_next_turn_of_a_talk_finds_prompt_and_answer() -> None:
    bench, full, talk = caching(), caching(groups=(FULL,)), draw(70)
    for turn in range(12):
        found = hits(bench, f"turn {turn}", talk, 8)
        assert found == hits(full, f"turn {turn}", talk, 8)
        assert bool(found) == bool(turn)
        talk = (*talk, *bench.tokens[f"turn {turn}"], *draw(5, turn))


def test_two_windows_must_both_be_whole() -> None:
    bench, text = caching(groups=(FULL, KVGroup(1, 16), KVGroup(2, 40, 2))), draw(120)
    assert hits(bench, "a", text, 4) == 0
    assert hits(bench, "b", (*text[:90], *draw(9, 1)), 3) == 88


def test_what_was_only_passed_goes_first_and_the_ends_of_prefixes_stay() -> None:
    """The pool has room for all KV without windows, and for few windows."""
    bench, text = caching(num_blocks=190, max_num_batched_tokens=16), draw(160)
    assert hits(bench, "a", text, 4) == 0
    fill(bench, 2)
    # The middle of the text has no window any more; its end has.
    assert hits(bench, "b", (*text[:100], *draw(5, 2)), 3) == 0
    # It was computed again, for a prefix that two have in common: from now on it is kept there.
    assert hits(bench, "c", (*text[:100], *draw(5, 3)), 3) == 100
    assert hits(bench, "d", (*text[:102], *draw(5, 4)), 3) == 100
    assert hits(bench, "e", (*text, *draw(5, 5)), 3) == 160


def test_a_prefix_that_is_found_often_outlives_others() -> None:
    bench, text = caching(num_blocks=190, max_num_batched_tokens=16), draw(60)
    assert hits(bench, "a", (*text, *draw(6, 1)), 4) == 0
    for number in range(12):
        fill(bench, 1)
        assert hits(bench, f"b{number}", (*text, *draw(6, 2 + number)), 4) == 60


def test_a_window_goes_with_its_chain_and_not_before_it() -> None:
    """vLLM's Gemma 4 (issue 48435) lost the windows at the ends of prefixes first, and with them every hit."""
    bench, texts = caching(num_blocks=260), [draw(60, seed) for seed in range(3)]
    for number, text in enumerate(texts):
        assert hits(bench, f"a{number}", text, 9) == 0
    for number, text in enumerate(texts):
        fill(bench, 1)
        assert hits(bench, f"b{number}", (*text, *draw(3, 9)), 2) == 60


@pytest.mark.parametrize("missing", [0, 1, 100])
def test_requests_that_share_a_shortened_prefix_all_hit(missing: int) -> None:
    """vLLM (issues 45238 and 57610) finds nothing if the end of what was cached is not in the shared part: 0 of 64."""
    bench = caching(
        6000, GEMMA, block_size=16, max_model_len=4096, max_num_batched_tokens=2048, num_slots=64, max_num_seqs=64
    )
    text = draw(1300)
    assert hits(bench, "first", text, 2) == 0
    shared, before = text[: len(text) - missing], bench.lane.blocks.prefix_counts.num_hits
    for number in range(64):
        bench.add(f"r{number}", (*shared, *draw(20, 1 + number)), 2)
    bench.run()
    assert bench.lane.blocks.prefix_counts.num_hits - before == 64 * (len(shared) // 16 * 16)
    assert bench.tokens["r63"] == bench.known("r63")


@pytest.mark.slow
def test_a_long_talk_hits_as_with_full_attention() -> None:
    """40 turns with a tool's answer each time, two talks in turn, in a pool that holds a third of their windows."""
    found = []
    for groups, num_pages in (((FULL, KVGroup(1, 128, 5)), 330), ((FULL,), 330)):
        bench = caching(num_pages, groups, block_size=16, max_model_len=2048, max_num_batched_tokens=512)
        talks, total = [draw(200, seed) for seed in range(2)], 0
        for turn in range(40):
            for number, talk in enumerate(talks):
                before, name = bench.lane.blocks.prefix_counts.num_hits, f"{number} {turn}"
                bench.add(name, talk, 6)
                bench.run()
                found_now = bench.lane.blocks.prefix_counts.num_hits - before
                assert found_now > 0 or turn == 0
                total += found_now
                talks[number] = (*talk, *bench.tokens[name], *draw(20 + turn % 5, 100 * number + turn))
        found.append(total)
    assert found[0] >= 0.95 * found[1] > 0


@pytest.mark.slow
def test_preempted_requests_go_on_where_they_were() -> None:
    bench = caching(num_blocks=130, max_num_batched_tokens=16)
    for number in range(4):
        bench.add(f"r{number}", draw(40, number), 60)
    bench.run()
    assert bench.lane.counts.num_preemptions > 0
    for number in range(4):
        assert bench.tokens[f"r{number}"] == bench.known(f"r{number}")


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2])
def test_samples_that_come_back_look_up_what_they_have_computed(depth: int) -> None:
    """The first one's hit reaches further than the prompt, which the others would share with it."""
    limits = {"num_blocks": 400, "max_num_batched_tokens": 64, "max_model_len": 400}
    bench = Bench(Policies(PriorityOrder(), prefix_caching=True), kv_groups=(FULL, WINDOW), **limits)  # type: ignore[arg-type]
    bench.add("n", draw(30), 60, n=3, priority=1)
    for _ in range(30):
        bench.step(depth)
    bench.add("urgent", draw(20, 1), 5, n=4, priority=0)
    before = bench.num_computed_tokens
    bench.run(depth)
    assert bench.lane.counts.num_preemptions > 0
    for index in range(3):
        assert bench.samples["n", index] == bench.known("n", index)
    # All go on where they were: hardly more is computed than the tokens that were left.
    assert bench.num_computed_tokens - before < 3 * 40 + 20 + 4 * 5 + 3 * 12


def test_beams_hit_as_others_do() -> None:
    bench, text = caching(), draw(60)
    assert hits(bench, "a", text, 4) == 0
    assert hits(bench, "b", (*text, 1, 2), 6, beams=BeamSpec(3, 1.0, False)) == 60
    assert [each.token_ids for each in bench.found("b")] == [each.token_ids for each in bench.known_beams("b")]


def test_windows_move_to_the_host_with_their_blocks() -> None:
    bench = caching(num_blocks=130, num_host_blocks=200, max_num_batched_tokens=16)
    text = draw(60)
    assert hits(bench, "a", text, 4) == 0
    fill(bench, 3)
    assert bench.lane.blocks.prefix_counts.num_host_hits == 0
    assert hits(bench, "b", (*text, *draw(5, 1)), 4) == 60
    assert bench.lane.blocks.prefix_counts.num_host_hits > 0


def test_scopes_do_not_share_windows() -> None:
    bench, text = caching(), draw(60)
    assert hits(bench, "a", text, 4, salt=b"x") == 0
    assert hits(bench, "b", text, 4) == hits(bench, "c", text, 4, tenant="t") == 0
    assert hits(bench, "d", text, 4, uses_prefix_cache=False) == 0
    assert hits(bench, "e", text, 4, salt=b"x") == 56


def test_a_flush_frees_all_pages() -> None:
    bench = caching()
    hits(bench, "a", draw(60), 4)
    blocks = bench.lane.blocks
    assert blocks.num_cached > 60 // 4
    while bench.core.flush_prefix_caches(7):
        pass
    assert blocks.num_cached == 0
    assert blocks.num_free == len(blocks.pool.unused_pages) == bench.spec.num_blocks  # type: ignore[attr-defined]
    assert hits(bench, "b", draw(60), 4) == 0


def test_the_cache_outlives_a_session() -> None:
    bench, text = caching(), draw(60)
    assert hits(bench, "a", text, 4) == 0
    bench.add("b", (*text, *draw(9, 1)), 30)
    for _ in range(4):
        bench.step()
    bench.cut_session()
    bench.run()
    assert bench.tokens["b"] == bench.known("b")
    assert hits(bench, "c", (*text, *draw(9, 2)), 4) == 60


def test_costs_decide_what_is_brought_back() -> None:
    """Moving blocks costs more than computing: what is on the host is computed again."""
    costs = StepCosts(step_us=100, token_us=1, context_token_us=0.0, sample_us=0, moved_block_us=100_000)
    bench = Bench(
        Policies(prefix_caching=True), costs=costs, num_blocks=130, num_host_blocks=200, max_num_batched_tokens=16,
        kv_groups=(FULL, WINDOW), max_model_len=400,
    )  # type: ignore[arg-type]  # fmt: skip
    text = draw(60)
    assert hits(bench, "a", text, 4) == 0
    fill(bench, 6)
    assert hits(bench, "b", (*text, *draw(5, 1)), 4) in (0, 60)
