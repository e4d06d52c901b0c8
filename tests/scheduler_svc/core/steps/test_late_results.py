"""Sequences with grammars whose masks are late: they give no token in a step, and the same tokens in the end."""

from __future__ import annotations

import random
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from cadenza.v1 import types_pb2
from cadenza_common.plan.plan import StepPlan
from cadenza_common.plan.result import StepResult
from cadenza_common.plan.sampling import Grammar
from cadenza_common.plan_wire.reading import plan_from_wire
from cadenza_common.plan_wire.writing import plan_to_wire
from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.placement.candidates import may_continue
from scheduler_svc.core.policies.policies import Policies
from tests.helpers.core.core_bench import Bench
from tests.helpers.core.core_executor import LateSteps

ENGINE = b"engine"
ANY = Grammar(types_pb2.GrammarSpec(json_object=True).SerializeToString(), ENGINE)


class RandomlyLate(LateSteps):
    """Takes rows of slots with grammars for late at random."""

    chance = random.Random(0)
    share = 0.0

    def is_late(self, slot: int) -> bool:
        return self.chance.random() < self.share


@pytest.fixture(autouse=True)
def late_executors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.helpers.core.core_executor.LateSteps", RandomlyLate)


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
        assert num_steps < 5000


@pytest.mark.slow
@given(
    share=st.sampled_from([0.2, 0.5]),
    seed=st.integers(0, 99),
    max_drafts=st.sampled_from([0, 0, 3]),
    depth=st.integers(1, 4),
    block_size=st.sampled_from([1, 2, 4, 8]),
    num_tokens=st.integers(12, 60),
    preemption=st.sampled_from(["recompute", "swap"]),
    requests=st.lists(
        st.fixed_dictionaries(
            {
                "prompt": st.integers(1, 9),
                "max_tokens": st.none() | st.integers(1, 30),
                "n": st.sampled_from([1, 1, 2, 3]),
                "grammar": st.sampled_from([ANY, ANY, None]),
                "seed": st.integers(0, 99),
                "eos": st.lists(st.integers(0, 40), max_size=3),
            }
        ),
        min_size=1,
        max_size=3,
    ),
)
@settings(max_examples=30, deadline=None)
def test_late_rows_change_no_token_and_no_end(
    share: float,
    seed: int,
    max_drafts: int,
    depth: int,
    block_size: int,
    num_tokens: int,
    preemption: str,
    requests: list[dict[str, Any]],
) -> None:
    """In pools that requests outgrow, with samples that share blocks, with drafts, and at their last tokens too."""
    seen = []
    for late in (0.0, share):
        RandomlyLate.share, RandomlyLate.chance = late, random.Random(seed)
        bench = Bench(
            Policies(preemption=preemption), block_size=block_size, num_blocks=max(3, num_tokens // block_size),
            num_host_blocks=20, max_model_len=50, num_slots=16, max_num_seqs=16, max_num_batched_tokens=32,
            max_drafts=max_drafts, grammar_engine=ENGINE,  # type: ignore[arg-type]
        )  # fmt: skip
        bench.add_all(requests)
        run(bench, depth)
        assert bench.lane.blocks.num_free == bench.spec.num_blocks
        seen.append((dict(bench.samples), bench.ends))
    assert seen[0] == seen[1]


def test_others_go_on_meanwhile() -> None:
    """A row that is always late costs its neighbour nothing; it ends once its masks come."""
    RandomlyLate.share, RandomlyLate.chance = 1.0, random.Random(0)
    bench = Bench(grammar_engine=ENGINE)  # type: ignore[arg-type]
    bench.add("late", 5, 6, grammar=ANY)
    bench.add("other", 5, 6)
    for _ in range(8):
        bench.plan()
        bench.apply()
    assert bench.tokens["other"] == bench.known("other")
    assert bench.tokens["late"] == []
    RandomlyLate.share = 0.0
    run(bench, 2)
    assert bench.tokens["late"] == bench.known("late")


def test_a_lost_executor_between() -> None:
    RandomlyLate.share, RandomlyLate.chance = 0.5, random.Random(3)
    bench = Bench(grammar_engine=ENGINE)  # type: ignore[arg-type]
    bench.add("a", 5, 20, grammar=ANY, n=2)
    for index in range(12):
        bench.plan()
        bench.plan()
        bench.apply()
        if index == 5:
            bench.lose_executor()
            bench.core.session_opened(0)
    while bench.plans:
        bench.apply()
    run(bench, 2)
    assert [bench.samples["a", index] for index in (0, 1)] == [bench.known("a", index) for index in (0, 1)]


def test_only_sequences_with_grammars_may_lack_a_token() -> None:
    bench = Bench()
    bench.add("a", 5, 6)
    plan = bench.plan()
    assert isinstance(plan, StepPlan)
    slot = plan.scheduled_slots[0]
    with pytest.raises(InvariantError, match="sampled nothing"):
        bench.core.apply_result(0, StepResult(plan.step_id, slots=[slot], num_tokens=[0], token_ids=[]), 1.0)


def test_plans_say_whose_turn_a_grammar_takes() -> None:
    """A number for each tenant; none without tenants or without a grammar."""
    bench = Bench(grammar_engine=ENGINE, num_slots=16, max_num_seqs=16, max_num_batched_tokens=64)  # type: ignore[arg-type]
    for name, tenant, grammar in (("a", "x", ANY), ("b", "x", ANY), ("c", "y", ANY), ("d", "", ANY), ("e", "x", None)):
        bench.add(name, 5, 6, tenant=tenant, grammar=grammar)
    plan = bench.plan()
    assert isinstance(plan, StepPlan)
    turns = [each.grammar_turn for each in plan_from_wire(plan_to_wire(plan, epoch=1)).admitted]
    assert turns[0] == turns[1] != turns[2]
    assert 0 not in turns[:3]
    assert turns[3:] == [0, 0]


def test_executors_with_another_engine_get_none() -> None:
    """Requests with grammars run only where what follows them is that with which they were checked."""
    for engine, may in ((ENGINE, True), (b"another", False), (b"", False)):
        bench = Bench(grammar_engine=engine)  # type: ignore[arg-type]
        bench.add("a", 5, 6, grammar=ANY)
        bench.add("b", 5, 6)
        found = [may_continue(bench.lane, bench.sequences(name)[0].group) for name in "ab"]
        assert found == [may, True]
