"""Drafts in the core: how many a step may have, blocks ahead of tokens, results with several tokens of a sequence."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from cadenza_common.plan.result import StepResult, StepStatus
from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.lanes.draft_limits import draft_scope
from scheduler_svc.core.policies.policies import Policies
from scheduler_svc.core.steps.results import check_result
from scheduler_svc.core.types import BeamSpec, FinishDetail
from tests.helpers.core.core_bench import Bench


def run(bench: Bench, depth: int) -> int:
    """Run to the end; returns the number of steps."""
    num_steps = 0
    while True:
        while len(bench.plans) < depth and bench.plan() is not None:
            pass
        if not bench.plans:
            return num_steps
        bench.apply()
        num_steps += 1


@pytest.mark.slow
@given(
    max_drafts=st.integers(1, 7),
    depth=st.integers(1, 4),
    block_size=st.sampled_from([1, 2, 4, 8]),
    num_tokens=st.integers(12, 60),
    preemption=st.sampled_from(["recompute", "swap"]),
    requests=st.lists(
        st.fixed_dictionaries(
            {
                "prompt": st.integers(1, 9),
                "max_tokens": st.none() | st.integers(1, 30),
                "n": st.sampled_from([1, 1, 2]),
                "max_drafts": st.sampled_from([None, None, 0, 2]),
                "seed": st.integers(0, 99),
                "eos": st.lists(st.integers(0, 40), max_size=3),
            }
        ),
        min_size=1,
        max_size=4,
    ),
)
@settings(max_examples=40, deadline=None)
def test_drafts_change_no_token_and_no_end(
    max_drafts: int, depth: int, block_size: int, num_tokens: int, preemption: str, requests: list[dict[str, Any]]
) -> None:
    """In pools that requests outgrow, too: they end at the same token for the same reason."""
    seen = []
    for most in (0, max_drafts):
        bench = Bench(
            Policies(preemption=preemption), block_size=block_size, num_blocks=max(3, num_tokens // block_size),
            num_host_blocks=20, max_model_len=50, num_slots=16, max_num_seqs=16, max_num_batched_tokens=32,
            max_drafts=most,
        )  # fmt: skip
        bench.add_all(requests)
        run(bench, depth)
        assert bench.lane.blocks.num_free == bench.spec.num_blocks
        seen.append((dict(bench.samples), bench.ends))
    assert seen[0] == seen[1]


def test_steps_are_fewer() -> None:
    steps = {}
    for most in (0, 4):
        bench = Bench(max_drafts=most, num_slots=32, max_num_seqs=32, max_num_batched_tokens=64)
        bench.add("a", 5, 60)
        steps[most] = run(bench, 2)
        assert bench.tokens["a"] == bench.known("a")
    assert steps[4] < 0.6 * steps[0]
    drafts = bench.lane.counts.drafts
    assert drafts.drafted[0] > drafts.drafted[3] * 0.9 > drafts.accepted[3] > 0
    assert drafts.accepted == sorted(drafts.accepted, reverse=True)


def decoding(**changes: Any) -> Bench:
    """Three sequences that decode."""
    bench = Bench(**{"max_drafts": 4, "num_slots": 32, "max_num_seqs": 32, "max_num_batched_tokens": 64, **changes})
    for name in "abc":
        bench.add(name, 5, 40)
    bench.step(depth=1)
    return bench


@pytest.mark.parametrize(
    ("changes", "most"),
    [
        ({}, 4),
        ({"max_num_seqs": 8}, 1),
        ({"max_num_seqs": 5}, 0),
        ({"max_num_batched_tokens": 16, "max_num_seqs": 16}, 4),
        ({"max_num_batched_tokens": 15, "max_num_seqs": 15}, 4),
        ({"max_num_batched_tokens": 14, "max_num_seqs": 14}, 3),
    ],
)
def test_drafts_share_what_a_step_leaves_over(changes: dict[str, int], most: int) -> None:
    plan = decoding(**changes).plan()
    assert plan is not None
    assert plan.max_drafts == most


def test_a_prompt_comes_before_drafts() -> None:
    bench = decoding(max_num_batched_tokens=16, max_num_seqs=16)
    bench.add("long", 30, 5)
    plan = bench.plan()
    assert plan is not None
    assert (plan.scheduled_num_tokens, plan.max_drafts) == ([13], 0)


def test_admissions_name_their_limits() -> None:
    bench = Bench(max_drafts=4, num_slots=32, max_num_seqs=32, max_num_batched_tokens=64)
    for name, most in (("all", None), ("two", 2), ("none", 0), ("many", 60)):
        bench.add(name, 5, 20, max_drafts=most)
    bench.add("beams", 5, 20, beams=BeamSpec(2))
    plan = bench.plan()
    assert plan is not None
    admitted = {each.slot: each for each in plan.admitted}
    limits = [(admitted[bench.sequences(name)[0].slot or 0]) for name in ("all", "two", "none", "many", "beams")]
    assert [(each.max_drafts, each.max_len) for each in limits] == [(4, 25), (2, 25), (0, 0), (4, 25), (0, 0)]


def test_the_scope_is_that_of_the_prefix_cache() -> None:
    bench = Bench(max_drafts=4)
    fields: dict[str, dict[str, Any]] = {
        "one": {}, "same": {}, "salted": {"salt": b"s"}, "salted too": {"salt": b"s"}, "other": {"tenant": "t"},
        "out": {"uses_prefix_cache": False},
    }  # fmt: skip
    for name, more in fields.items():
        bench.add(name, 3, 4, **more)
    scopes = {name: draft_scope(bench.sequences(name, more.get("tenant", ""))[0]) for name, more in fields.items()}
    assert scopes["one"] == scopes["same"] != 0
    assert scopes["salted"] == scopes["salted too"]
    assert scopes["out"] == 0
    assert len(set(scopes.values())) == 4


def test_blocks_for_drafts_are_free_ones_only() -> None:
    """A pool that holds just what is known: nobody is preempted for drafts, and they are fewer."""
    roomy, tight = decoding(num_blocks=64), decoding(num_blocks=7)
    for bench in (roomy, tight):
        bench.plan()
    assert len(roomy.plans[0].append_slots) > 3 >= len(tight.plans[0].append_slots)
    assert not tight.lane.counts.num_preemptions
    assert tight.plans[0].max_drafts == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_tokens": [6, 1, 1], "num_drafts": [5, 0, 0], "num_accepted": [5, 0, 0]}, "where 4 were allowed"),
        ({"num_tokens": [3, 1, 1], "num_drafts": [4, 0, 0], "num_accepted": [1, 0, 0]}, "slot 0 gave 3 tokens"),
        ({"num_tokens": [2, 1, 1], "num_drafts": [1, 0, 0], "num_accepted": [2, 0, 0]}, "2 of 1 drafts"),
        ({"num_tokens": [2, 1, 1], "num_drafts": [1, 0], "num_accepted": [1, 0, 0]}, "2 counts of drafts"),
        ({"num_tokens": [2, 1, 1]}, "slot 0 gave 2 tokens"),
        ({"num_drafts": [5, 0, 0], "num_accepted": [0, 0, 0]}, "0 of 5 drafts accepted, where 4 were allowed"),
        ({"num_accepted": [1, 0, 0]}, "1 of 0 drafts"),
    ],
)
def test_results_beyond_the_plan_are_refused(changes: dict[str, Any], message: str) -> None:
    bench = decoding()
    bench.plan()
    step = bench.lane.inflight[0]
    tokens = [7] * sum(changes.get("num_tokens", (1, 1, 1)))
    result = StepResult(step.plan.step_id, StepStatus.OK, slots=[0, 1, 2], token_ids=tokens, **changes)
    with pytest.raises(InvariantError, match=message):
        check_result(bench.lane, step, result)


def test_a_sequence_never_exceeds_its_length() -> None:
    bench = decoding()
    bench.add("short", 5, 2)
    bench.step(depth=1)
    bench.plan()
    step = bench.lane.inflight[0]
    slots, last = step.sampling_slots, bench.sequences("short")[0].last_slot
    drafts = [int(slot == last) for slot in slots]
    counts = [1 + count for count in drafts]
    result = StepResult(
        step.plan.step_id,
        slots=slots,
        num_tokens=counts,
        token_ids=[7] * sum(counts),
        num_drafts=drafts,
        num_accepted=drafts,
    )
    with pytest.raises(InvariantError, match="exceeded its maximum length 7"):
        check_result(bench.lane, step, result)


def test_a_suspect_has_no_more_drafts() -> None:
    bench = decoding()
    while len(bench.plans) < 2 and bench.plan() is not None:
        pass
    bench.die()
    bench.run()
    assert {name: bench.details[name] for name in "abc"} == dict.fromkeys("abc", FinishDetail.MAX_TOKENS)
    assert all(bench.tokens[name] == bench.known(name) for name in "abc")
    assert not sum(bench.lane.counts.drafts.drafted)
