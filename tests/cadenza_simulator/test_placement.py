"""The placement policies that simulations compare, and what they make of prefix-heavy chat."""

from __future__ import annotations

import numpy as np
import pytest

from cadenza_common.plan.sampling import SequenceSampling
from cadenza_loadtest.requests import LoadTestError, RequestShape
from cadenza_loadtest.workloads.prompts import Prompts
from cadenza_simulator.placement import LlmdScores, PlacementName, SglangCacheAware, read_placement
from cadenza_simulator.run import Simulation
from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.policies.placement import Candidate, NeededTokens
from scheduler_svc.core.queues.orders import FcfsOrder
from scheduler_svc.core.sequences.sequence import SequenceGroup
from scheduler_svc.core.types import ExecutorSpec, RequestSpec
from tests.helpers.loadtest.simulations import options, profile, simulation

SPEC = ExecutorSpec(
    block_size=16, num_blocks=64, num_slots=64, max_num_seqs=32, max_num_batched_tokens=64, max_model_len=1024,
    watermark=0.0,
)  # fmt: skip
NOTHING_CACHED = NeededTokens(128, {})


def lanes(count: int = 2) -> list[Lane]:
    return [Lane(executor_id, SPEC, FcfsOrder()) for executor_id in range(count)]


def group(*token_ids: int) -> SequenceGroup:
    return SequenceGroup(RequestSpec("r", token_ids, SequenceSampling(), 8), 0, 0.0, 1024)


def candidates(of: list[Lane], *num_queued: int) -> list[Candidate]:
    return [Candidate(lane, count) for lane, count in zip(of, num_queued, strict=True)]


def test_llmd_follows_the_prefix_until_the_queue_weighs_more() -> None:
    """Weights 3 for the prefix, 2 for the queue and 2 for the pool: a whole prefix outweighs the longest queue, half a
    prefix does not."""
    policy, both = LlmdScores(refresh_s=0.0), lanes()
    prompt = tuple(range(128))
    assert policy.choose(group(*prompt), candidates(both, 1, 0), NOTHING_CACHED, 0.0).lane is both[1]
    assert policy.choose(group(*prompt), candidates(both, 0, 5), NOTHING_CACHED, 1.0).lane is both[1]
    assert (
        policy.choose(group(*prompt[:64], *range(500, 564)), candidates(both, 0, 5), NOTHING_CACHED, 2.0).lane
        is both[0]
    )


def test_llmd_reads_queues_every_50_ms() -> None:
    policy, both = LlmdScores(), lanes()
    assert policy.choose(group(1), candidates(both, 0, 1), NOTHING_CACHED, 0.0).lane is both[0]
    assert policy.choose(group(2), candidates(both, 9, 0), NOTHING_CACHED, 0.04).lane is both[0]
    assert policy.choose(group(3), candidates(both, 9, 0), NOTHING_CACHED, 0.06).lane is both[1]


def test_llmd_forgets_the_oldest_blocks_of_a_full_executor() -> None:
    policy, both = LlmdScores(refresh_s=0.0), lanes()
    prompt = tuple(range(64))
    assert policy.choose(group(*prompt), candidates(both, 1, 0), NOTHING_CACHED, 0.0).lane is both[1]
    for first in range(1, 65):
        policy.choose(group(*range(1000 * first, 1000 * first + 64)), candidates(both, 1, 0), NOTHING_CACHED, 0.0)
    assert policy.choose(group(*prompt), candidates(both, 0, 1), NOTHING_CACHED, 0.0).lane is both[0]


def test_sglang_follows_a_prefix_of_over_three_tenths() -> None:
    policy, both = SglangCacheAware(), lanes()
    prompt = tuple(range(100))
    assert policy.choose(group(*prompt), candidates(both, 1, 0), NOTHING_CACHED, 0.0).lane is both[1]
    assert (
        policy.choose(group(*prompt[:31], *range(500, 569)), candidates(both, 0, 1), NOTHING_CACHED, 0.0).lane
        is both[1]
    )
    assert (
        policy.choose(group(*prompt[:30], *range(700, 770)), candidates(both, 0, 1), NOTHING_CACHED, 0.0).lane
        is both[0]
    )
    # The first 30 tokens were sent to executor 1 first; what follows in the third prompt, to executor 0.
    assert (
        policy.choose(group(*prompt[:30], *range(700, 720)), candidates(both, 1, 0), NOTHING_CACHED, 0.0).lane
        is both[0]
    )


def test_sglang_takes_the_shortest_queue_while_loads_differ_much() -> None:
    policy, both = SglangCacheAware(), lanes()
    prompt = tuple(range(100))
    policy.choose(group(*prompt), candidates(both, 1, 0), NOTHING_CACHED, 0.0)
    assert policy.choose(group(*prompt), candidates(both, 0, 64), NOTHING_CACHED, 0.0).lane is both[1]
    assert policy.choose(group(*prompt), candidates(both, 0, 65), NOTHING_CACHED, 0.0).lane is both[0]
    assert (
        policy.choose(group(*prompt, 7), candidates(both, 135, 200), NOTHING_CACHED, 0.0).lane is both[1]
    )  # under 1.5 times


def test_a_preempted_request_stays_with_its_executor() -> None:
    both, preempted = lanes(), group(1, 2, 3)
    preempted.lane_id = 1
    for policy in (LlmdScores(), SglangCacheAware()):
        assert policy.choose(preempted, candidates(both, 0, 30), NOTHING_CACHED, 0.0).lane is both[1]


def test_an_unknown_policy_is_refused() -> None:
    assert read_placement("llm-d") == "llm-d"
    with pytest.raises(LoadTestError, match="--placement random: must be one of expected-time, round-robin"):
        read_placement("random")


def chat(num_system_prompts: int, num_sessions: int, rate: float) -> list[tuple[float, RequestShape]]:
    """Sessions of three turns that begin with one of some system prompts of 256 tokens."""
    rng = np.random.default_rng(1)
    schedule: list[tuple[float, RequestShape]] = []
    for session, due_s in enumerate(np.cumsum(rng.exponential(1 / rate, num_sessions)).tolist()):
        prefix = int(rng.integers(num_system_prompts))
        for turn in range(3):
            first = {"prefix": prefix, "num_prefix_tokens": 256} if turn == 0 else {"think_s": 0.3}
            length = 32 + 256 * (turn == 0)
            schedule.append((due_s, RequestShape(len(schedule), length, 16, session=session, turn=turn, **first)))
    return schedule


def chat_run(placement: PlacementName, schedule: list[tuple[float, RequestShape]]) -> Simulation:
    executor = profile(
        {"step_us": 5000.0, "token_us": 100.0}, num_blocks=400, max_num_seqs=16, max_num_batched_tokens=256
    )
    return simulation(
        schedule, [executor] * 2, config=options(enable_prefix_caching=True), prompts=Prompts(1), placement=placement
    )


@pytest.mark.long
@pytest.mark.slow
def test_expected_time_shortens_the_tail_of_round_robin() -> None:
    schedule = chat(num_system_prompts=12, num_sessions=150, rate=15.0)
    ttft, cached = {}, {}
    for placement in ("expected-time", "round-robin", "llm-d", "sglang"):
        requests = chat_run(placement, schedule).run().requests
        assert requests.ok.all()
        ttft[placement] = np.percentile(requests.first_s - requests.due_s, 95)
        cached[placement] = requests.num_cached_tokens.sum()
    assert ttft["round-robin"] > 1.5 * ttft["expected-time"]
    assert min(cached["expected-time"], cached["llm-d"], cached["sglang"]) > 1.05 * cached["round-robin"]


@pytest.mark.slow
def test_a_prompt_that_all_share_does_not_gather_them_on_one_executor() -> None:
    """The other executor has nothing cached at first; it serves its share all the same."""
    schedule = chat(num_system_prompts=1, num_sessions=150, rate=25.0)
    made = chat_run("expected-time", schedule)
    requests = made.run().requests
    tokens = [lane.counts.num_output_tokens for lane in made._core.lanes.values()]
    assert min(tokens) > 0.4 * sum(tokens)
    assert np.nanmax(requests.queue_s) < 1.0
