"""Executor profiles and the published ones; a step costs the same as on the simulated executor."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cadenza_loadtest.requests import LoadTestError
from cadenza_simulator import lanes
from cadenza_simulator.executor_profiles import ExecutorProfile, Overheads, ProfileLimits, read_profile, write_profile
from cadenza_simulator.lanes import step_cost_function
from cadenza_simulator.published import A100_40GB, LLAMA_3_1_8B, OPT_13B, PUBLISHED
from executor_svc.simulated.costs import StepCosts, StepWork, read_costs
from tests.helpers.core.core_executor import CoreExecutor
from tests.helpers.loadtest.simulations import options, profile, random_schedule, simulation

COSTS = StepCosts(
    step_us=900, token_us=70, context_token_us=0.11, sample_us=3, moved_block_us=21, kv_token_us=0.7, hidden_tokens=5
)
amounts = st.floats(0, 1e6, allow_nan=False)
counts = st.integers(0, 10**7)


@given(
    st.builds(
        StepCosts,
        **dict.fromkeys(
            ("step_us", "token_us", "context_token_us", "sample_us", "moved_block_us", "kv_token_us", "hidden_tokens"),
            amounts,
        ),
    ),
    st.tuples(counts, counts, counts, counts, counts),
)
def test_prices_are_those_of_the_costs(costs: StepCosts, numbers: tuple[int, ...]) -> None:
    tokens, context_tokens, kv_tokens, samples, moved_blocks = numbers
    work = StepWork(tokens, context_tokens, samples, moved_blocks, kv_tokens)
    assert step_cost_function(costs)(*numbers) == (costs.forward_ns(work), costs.sample_ns(work), costs.move_ns(work))


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_step_costs_what_the_simulated_executor_says(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same plans for both: forks, beams, chunks, copies, swaps and preemptions among them."""
    limits = {"block_size": 4, "num_blocks": 40, "num_host_blocks": 20, "max_num_seqs": 8}
    executor = profile(COSTS.model_dump(), max_num_batched_tokens=24, max_model_len=120, **limits)
    config = options(preemption="swap" if seed % 2 else "recompute", max_inflight_plans=1 + seed % 2)
    model = CoreExecutor(executor.spec(config), vocab_size=64, costs=COSTS)
    compared = [0, 0, 0]
    launch = lanes.SimulatedLane.launch

    def both(lane, step, planned_at, *, beams):
        inflight_step = launch(lane, step, planned_at, beams=beams)
        ours, theirs = inflight_step.result, model.run(step.plan)
        assert replace(ours.timings, queue_ns=0) == replace(theirs.timings, queue_ns=0)
        assert {*ours.slots, *ours.candidates} == set(theirs.slots)
        assert ours.candidates.keys() == theirs.candidates.keys()
        compared[0] += 1
        compared[1] += len(ours.candidates)
        compared[2] += ours.timings.moves_ns > 0
        return inflight_step

    monkeypatch.setattr(lanes.SimulatedLane, "launch", both)
    outcome = simulation(random_schedule(seed, 100, rate=200.0, longest=50), executor, config=config).run()
    assert outcome.num_preemptions > 0
    assert min(compared) > 20


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = str(tmp_path / "profile.json")
    made = ExecutorProfile(
        costs=COSTS, overheads=Overheads(plan_us=5), limits=ProfileLimits(num_blocks=9), name="mine", source="a test"
    )
    write_profile(path, made)
    assert read_profile(path) == made
    # The executor itself takes the same file.
    assert read_costs(path) == COSTS


def test_costs_alone_are_a_profile_too(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text('{"step_us": 500}')
    found = read_profile(str(path))
    assert found == ExecutorProfile(costs=StepCosts(step_us=500), name="costs")
    assert found.limits.pool_size == 64 * 256


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        ("{", "this is not JSON"),
        ("[1]", "must be an object with costs, not list"),
        ('{"step_ms": 1}', "costs.step_ms: Extra inputs"),
        ('{"costs": {}, "limits": {"max_num_seqs": 0}}', "limits.max_num_seqs: Input should be greater"),
        (
            '{"costs": {}, "limits": {"max_num_seqs": 99, "max_num_batched_tokens": 9}}',
            "limits: max_num_batched_tokens (9)",
        ),
        ('{"costs": {}, "extra": 1}', "extra: Extra inputs"),
    ],
)
def test_a_wrong_file_is_named(content: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(LoadTestError) as caught:
        read_profile(str(path))
    assert str(caught.value).startswith(f"--executor {path}: {message}")


def test_the_executors_options_change_its_limits() -> None:
    made = profile({"moved_block_us": 100.0}, num_blocks=100)
    assert made.changed({}) == made
    other = made.changed({"num_gpu_blocks": 7, "num_cpu_blocks": 3, "max_num_seqs": 5, "max_num_batched_tokens": "16"})
    assert other.limits == ProfileLimits(num_blocks=7, num_host_blocks=3, max_num_seqs=5, max_num_batched_tokens=16)
    # The pool keeps its bytes, and a block of twice the size takes twice as long to move.
    larger = made.changed({"block_size": 32})
    assert (larger.limits.num_blocks, larger.costs.moved_block_us) == (50, 200.0)
    both = made.changed({"num_cpu_blocks": 33}).changed({"block_size": 8})
    assert (both.limits.num_blocks, both.limits.num_host_blocks, both.costs.moved_block_us) == (200, 66, 50.0)
    for name, value in (("max_num_seqs", 0), ("block_size", 0), ("block_size", "small")):
        with pytest.raises(LoadTestError, match=f"executor toy: {name}"):
            made.changed({name: value})


def test_limits_are_narrowed_by_the_scheduler() -> None:
    made = profile(num_blocks=100, num_host_blocks=4, max_num_seqs=32, max_num_batched_tokens=256, max_model_len=1000)
    spec = made.spec(options(max_num_seqs=8, max_model_len=5000, watermark=0.5))
    assert (spec.max_num_seqs, spec.max_num_batched_tokens, spec.max_model_len) == (8, 256, 1000)
    assert (spec.num_slots, spec.num_blocks, spec.num_host_blocks, spec.watermark) == (64, 100, 4, 0.5)


def test_published_profiles_are_what_their_numbers_say() -> None:
    """Computed here by hand from data sheets and shapes."""
    a100, h200 = PUBLISHED["a100-40gb-opt-13b"], PUBLISHED["h200-llama-3.1-8b"]
    assert OPT_13B.kv_bytes == 819_200  # 800 KB a token, as the vLLM paper has it
    assert LLAMA_3_1_8B.kv_bytes == 131_072
    assert a100.limits.num_blocks == 981  # 15.7K slots
    # 26 GB at 70.4% of 1.555 TB/s; 26 GFLOP a token at 86.9% of 312 TFLOP/s.
    assert a100.costs.step_us == pytest.approx(26e9 / (1.555e12 * 0.70404) * 1e6, rel=1e-3)
    assert a100.costs.token_us == pytest.approx(26e9 / 271.2e12 * 1e6, rel=1e-3)
    assert a100.costs.hidden_tokens == pytest.approx(a100.costs.step_us / a100.costs.token_us, rel=1e-3)
    assert a100.costs.moved_block_us == pytest.approx(16 * 819_200 / (0.8 * 32e9) * 1e6, rel=1e-3)
    # 15 GB at the same share of 4.8 TB/s.
    assert h200.costs.step_us == pytest.approx(15.01e9 / (4.8e12 * 0.70404) * 1e6, rel=1e-3)
    for name, each in PUBLISHED.items():
        assert each.name == name
        assert "https://" in each.source
        assert json.loads(each.model_dump_json())["limits"]["block_size"] == 16
    assert A100_40GB.flops == 312e12
