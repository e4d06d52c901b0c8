"""Sessions that end while the executor's process lives: what it has computed for certain is not computed again."""

from __future__ import annotations

import pytest

from scheduler_svc.core.policies.policies import Policies
from scheduler_svc.core.types import BeamSpec, ExecutorSpec, SequenceState, SessionEnd
from tests.helpers.core.core_bench import Bench


def num_computed_after(bench: Bench) -> int:
    """Run to the end; returns the tokens computed from here on."""
    before = bench.num_computed_tokens
    bench.run()
    return bench.num_computed_tokens - before


def test_only_the_steps_without_a_result_are_computed_again() -> None:
    """Three requests decode: two plans are in flight, and each has computed a token for each request."""
    undisturbed, bench = Bench(), Bench()
    for each in (undisturbed, bench):
        for name in ("a", "b", "c"):
            each.add(name, 5, max_tokens=30)
    undisturbed.run()
    while len(bench.plans) < 2 or len(bench.tokens["c"]) < 12:
        bench.plan() if len(bench.plans) < 2 else bench.apply()
    bench.cut_session()
    bench.run()
    assert bench.num_computed_tokens == undisturbed.num_computed_tokens + 2 * 3
    assert bench.samples == undisturbed.samples


def test_a_prompt_goes_on_after_the_last_chunk_with_a_result() -> None:
    bench = Bench(max_num_batched_tokens=16)
    bench.add("r", 100, max_tokens=2)
    for _ in range(4):
        bench.plan()
        bench.apply()
    bench.plan()
    bench.plan()
    bench.cut_session()
    assert bench.sequences("r")[0].num_computed_tokens == 4 * 16
    assert num_computed_after(bench) == 100 - 4 * 16 + 1
    assert bench.tokens["r"] == bench.known("r")


def test_another_incarnation_has_nothing() -> None:
    bench = Bench()
    bench.add("r", 20, max_tokens=6)
    for _ in range(4):
        bench.step()
    bench.die(is_known=False)
    (sequence,) = bench.sequences("r")
    assert sequence.state is SequenceState.WAITING
    assert not sequence.block_ids
    assert num_computed_after(bench) == 20 + 5
    assert bench.tokens["r"] == bench.known("r")


def test_the_prefix_cache_keeps_what_is_certain() -> None:
    """The first request's prompt was computed by steps with results; the second one's last chunk was not."""
    bench = Bench(Policies(prefix_caching=True), max_num_batched_tokens=16)
    first, second = list(range(16)), list(range(16, 48))
    bench.add("first", first, max_tokens=1)
    bench.run()
    bench.add("second", second, max_tokens=2)
    bench.plan()
    bench.apply()
    bench.plan()
    assert bench.lane.blocks.num_cached == 3, "the first prompt but its last block"
    bench.cut_session()
    cache = bench.lane.blocks.tiers.cache
    assert len(cache) == 3 + 4, "and the 16 tokens of the step with a result"
    bench.add("again", first, max_tokens=1)
    bench.run()
    assert bench.core.prefix_counts.num_hits == 12, "all but the block of the last token"
    for name in ("second", "again"):
        assert bench.tokens[name] == bench.known(name)


def test_what_another_request_hit_in_a_step_without_a_result_is_no_hit() -> None:
    """`late` shares blocks that the lost plan was to fill: both are computed again."""
    bench = Bench(Policies(prefix_caching=True), max_num_batched_tokens=32)
    prompt = list(range(30))
    bench.add("early", prompt, max_tokens=4)
    bench.plan()
    bench.add("late", prompt, max_tokens=4)
    bench.plan()
    assert bench.core.prefix_counts.num_hits == 28
    bench.cut_session()
    assert not len(bench.lane.blocks.tiers.cache)
    bench.run()
    assert bench.tokens["early"] == bench.known("early")
    assert bench.tokens["late"] == bench.known("late")


def test_a_swapped_group_stays_in_the_host_pool() -> None:
    bench = Bench(Policies(preemption="swap"), num_blocks=8, num_host_blocks=8)
    bench.add("a", 10, max_tokens=16)
    bench.add("b", 10, max_tokens=16)
    while not any(sequence.state is SequenceState.SWAPPED for sequence in bench.sequences("b")):
        bench.step()
    bench.plan()
    # The swap-out has a result: only what runs was uncertain.
    bench.apply()
    bench.plan()
    bench.cut_session()
    (swapped,) = bench.sequences("b")
    assert swapped.state is SequenceState.SWAPPED
    num_computed = swapped.num_computed_tokens
    assert num_computed >= 10
    bench.run()
    assert swapped.num_hit_tokens == 0
    assert bench.tokens["a"] == bench.known("a")
    assert bench.tokens["b"] == bench.known("b")


def test_a_swap_without_a_result_is_lost() -> None:
    bench = Bench(Policies(preemption="swap"), num_blocks=8, num_host_blocks=8)
    bench.add("a", 10, max_tokens=16)
    bench.add("b", 10, max_tokens=16)
    while not any(sequence.state is SequenceState.SWAPPED for sequence in bench.sequences("b")):
        if len(bench.plans) == 2:
            bench.apply()
        bench.plan()
    bench.cut_session()
    (waiting,) = bench.sequences("b")
    assert waiting.state is SequenceState.WAITING
    assert not waiting.host_block_ids
    assert bench.lane.blocks.num_used_host == 0
    bench.run()
    assert bench.tokens["b"] == bench.known("b")


@pytest.mark.sampled(5)
@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("caching", [False, True])
def test_a_cut_at_any_step_changes_no_token(caching: bool, preemption: str, depth: int) -> None:
    """Samples, beams, prompts in chunks and preemption at once, cut after every number of steps."""
    for num_steps in (1, 2, 3, 5, 8, 13):
        bench = Bench(
            Policies(prefix_caching=caching, preemption=preemption),  # type: ignore[arg-type]
            num_blocks=26,
            num_host_blocks=12,
            max_num_seqs=8,
            num_slots=10,
        )
        bench.add("samples", 13, max_tokens=9, n=3)
        bench.add("beams", 9, max_tokens=7, beams=BeamSpec(3), temperature=0.0)
        bench.add("alike", 13, max_tokens=9)
        bench.add("logprobs", 11, max_tokens=6, num_prompt_logprobs=1)
        for number in range(60):
            bench.step(depth)
            if number % num_steps == num_steps - 1:
                while len(bench.plans) < depth and bench.plan() is not None:
                    pass
                bench.cut_session()
        bench.run(depth)
        for index in range(3):
            assert bench.samples["samples", index] == bench.known("samples", index)
        for name in ("alike", "logprobs"):
            assert bench.tokens[name] == bench.known(name)
        assert bench.found("beams") == bench.known_beams("beams")[:1]
        assert bench.lane.blocks.num_free == 26


def test_samples_and_beams_keep_their_blocks() -> None:
    """No sequence goes back to the queue: each computes again what the plan without a result was to compute."""
    for kind in ({"n": 3}, {"beams": BeamSpec(3), "temperature": 0.0}):
        bench = Bench()
        bench.add("r", 12, max_tokens=20, **kind)  # type: ignore[arg-type]
        for _ in range(7):
            bench.plan()
            bench.apply()
        bench.cut_session()
        assert len(bench.lane.running) == 3
        bench.plan()
        assert bench.lane.inflight[0].total_tokens == 3
        bench.run()


def test_a_request_may_end_while_no_executor_is_there() -> None:
    bench = Bench()
    bench.add("a", 9, max_tokens=20)
    bench.add("b", 9, max_tokens=20)
    for _ in range(4):
        bench.step()
    bench.executor.clear()
    bench.plans.clear()
    bench.take(bench.core.executor_lost(0, bench.now, SessionEnd()))
    bench.core.stop_sample(("", "a"), 0)
    bench.core.check_integrity()
    bench.take(bench.core.session_opened(0, same_incarnation=True, keeps_kv=True))
    bench.run()
    assert bench.tokens["b"] == bench.known("b")
    assert bench.lane.blocks.num_free == bench.spec.num_blocks


def test_an_executor_that_comes_back_with_other_limits_keeps_nothing() -> None:
    bench = Bench()
    bench.add("r", 9, max_tokens=20)
    for _ in range(4):
        bench.step()
    bench.plans.clear()
    bench.take(bench.core.executor_lost(0, bench.now, SessionEnd()))
    bench.core.add_executor(0, smaller(bench.spec))
    bench.core.check_integrity()
    assert bench.sequences("r")[0].state is SequenceState.WAITING
    assert not bench.sequences("r")[0].block_ids


def smaller(spec: ExecutorSpec) -> ExecutorSpec:
    return ExecutorSpec(spec.block_size, 32, spec.num_slots, spec.max_num_seqs, spec.max_num_batched_tokens, 128)
