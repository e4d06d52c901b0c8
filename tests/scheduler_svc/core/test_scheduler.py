"""Directed tests of the core: the traps that random histories meet too rarely."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cadenza_common.plan.plan import StepPlan
from cadenza_common.plan.result import SlotError, StepResult, StepStatus
from cadenza_common.plan.sampling import SequenceSampling
from scheduler_svc.core.errors import InvariantError, LimitsError, RequestExistsError, RequestRejectedError
from scheduler_svc.core.lanes.slot_pool import SlotPool
from scheduler_svc.core.policies.policies import Policies
from scheduler_svc.core.queues.orders import FcfsOrder, OrderPolicy, PriorityOrder
from scheduler_svc.core.types import FinishDetail, RequestSpec, SequenceState
from tests.helpers.core.core_bench import Bench
from tests.helpers.core.known import known_prompt_logprobs, known_sample


def test_chunks_and_decodes_share_a_step_within_the_budget() -> None:
    bench = Bench(max_num_batched_tokens=8)
    bench.add("short", 3)
    bench.add("long", 20)
    first = bench.plan()
    assert first is not None
    assert first.scheduled_num_tokens == [3, 5]
    bench.apply()
    second = bench.plan()
    assert second is not None
    assert second.decode_ready
    assert second.scheduled_num_tokens == [7], "one token of eight goes to the decode"


def test_a_steady_decode_plan_carries_nothing_per_sequence() -> None:
    bench = Bench(block_size=64)
    for index in range(4):
        bench.add(f"r{index}", 2, max_tokens=20)
    bench.plan()
    bench.apply()
    plan = bench.plan()
    assert plan is not None
    assert plan == StepPlan(plan.step_id, 0, decode_ready=True)


def test_a_stop_token_learnt_late_costs_one_dropped_token() -> None:
    bench = Bench()
    unstopped = bench.add("unstopped", 3, max_tokens=10)
    tokens, _ = known_sample(unstopped, 128)
    bench.add("r", 3, max_tokens=10, stop_token_ids=(tokens[1],))
    bench.run(depth=2)
    assert bench.tokens["unstopped"] == tokens
    assert bench.tokens["r"] == tokens[:2]
    assert bench.details["r"] is FinishDetail.STOP_TOKEN
    assert not bench.executor.slots


def test_a_preempted_sequence_waits_for_its_late_token() -> None:
    """Preempted with a token under way, and blocks free again before it arrives: it must not come back too early."""
    bench = Bench(block_size=1, num_blocks=8, max_num_batched_tokens=8)
    bench.add("old", 2, max_tokens=3)
    bench.add("young", 3, max_tokens=3)
    bench.plan()
    young = bench.core.groups["", "young"].sequences[0]
    for _ in range(6):
        if young.state is SequenceState.WAITING and young.num_pending:
            break
        bench.plan()
    assert young.state is SequenceState.WAITING
    assert young.num_pending > 0
    bench.plan()  # "old" is fully planned and gives its blocks up
    bench.plan()
    assert young.state is SequenceState.WAITING, "its token has not arrived"
    bench.run()
    for request_id in ("old", "young"):
        assert bench.tokens[request_id] == bench.known(request_id)


def test_an_old_sequence_is_never_preempted_for_a_young_one() -> None:
    bench = Bench(num_blocks=6)
    bench.add("old", 8, max_tokens=14)
    bench.add("young", 8, max_tokens=14)
    bench.run()
    assert bench.core.num_preemptions > 0
    assert bench.tokens["old"] == bench.tokens["young"] == bench.known("old")


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_sequence_that_fills_the_pool_ends_with_the_reason(depth: int) -> None:
    bench = Bench(num_blocks=3)
    bench.add("r", 4, max_tokens=None)
    bench.run(depth)
    assert bench.details["r"] is FinishDetail.KV_CAPACITY
    assert bench.tokens["r"] == bench.known("r")[:9], "12 positions and one token more"


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    bench = Bench(num_blocks=3)
    with pytest.raises(
        RequestRejectedError, match="12 prompt tokens and one of output need 4 KV blocks of 4 tokens; the"
    ):
        bench.add("big", 12)
    with pytest.raises(RequestRejectedError, match="exceed max_model_len = 128"):
        bench.add("long", 128)
    assert not bench.core.groups


def test_ids_are_unique_within_a_tenant_only() -> None:
    bench = Bench()
    spec = bench.add("r", 3)
    with pytest.raises(RequestExistsError):
        bench.core.add_request(spec, 0.0)
    bench.core.add_request(RequestSpec("r", (1, 2), SequenceSampling(), max_tokens=1, tenant="other"), 0.0)


def test_a_lost_executor_costs_no_token() -> None:
    bench = Bench()
    bench.add("a", 5, max_tokens=50)
    bench.add("b", 30, max_tokens=50)
    for life in range(2, 8):
        for _ in range(life):
            bench.plan()
            bench.plan()
            bench.apply()
        bench.lose_executor()
    bench.run()
    assert bench.tokens["a"] == bench.known("a")
    assert bench.tokens["b"] == bench.known("b")


def test_an_executor_that_comes_back_with_a_shorter_model_ends_what_has_grown_too_long() -> None:
    bench = Bench()
    bench.add("long", 8, max_tokens=50)
    bench.add("short", 3, max_tokens=50)
    for _ in range(6):
        bench.plan()
        bench.apply()
    bench.lose_executor()
    assert len(bench.tokens["long"]) == 6
    bench.core.add_executor(0, replace(bench.spec, max_model_len=12))
    bench.lose_executor()
    bench.run()
    assert bench.tokens["long"] == bench.known("long")[:6], "no token more"
    assert bench.tokens["short"] == bench.known("short")[:9]
    assert set(bench.details.values()) == {FinishDetail.MAX_MODEL_LEN}
    assert not bench.core.groups


def test_a_result_is_read_against_its_own_plan() -> None:
    bench = Bench()
    bench.add("r", 3)
    plan = bench.plan()
    assert plan is not None
    (slot,) = plan.scheduled_slots
    bad = [
        StepResult(plan.step_id + 1, slots=[slot], token_ids=[1]),
        StepResult(plan.step_id, slots=[slot + 1], token_ids=[1]),
        StepResult(plan.step_id, slots=[], token_ids=[]),
        StepResult(plan.step_id, slots=[slot], num_tokens=[2], token_ids=[1, 2]),
        StepResult(plan.step_id, slots=[slot], num_tokens=[0], token_ids=[]),
        StepResult(plan.step_id, status=StepStatus.FAILED),
        StepResult(plan.step_id, slots=[slot], num_tokens=[0], error_slots=[slot]),
        StepResult(plan.step_id, slots=[slot], num_tokens=[0], error_slots=[slot + 1], errors=[SlotError.GRAMMAR]),
        StepResult(plan.step_id, slots=[slot], token_ids=[1], prompt_logprobs={slot: known_prompt_logprobs([1], 0)}),
    ]
    for result in bad:
        with pytest.raises(InvariantError):
            bench.core.apply_result(0, result, 0.0)
    assert bench.core.groups["", "r"].sequences[0].num_pending == 1, "nothing was changed"
    bench.run()
    assert bench.tokens["r"] == bench.known("r")


@pytest.mark.parametrize(
    ("error", "detail"),
    [
        (SlotError.NON_FINITE_LOGITS, FinishDetail.NON_FINITE_LOGITS),
        (SlotError.NO_ALLOWED_TOKEN, FinishDetail.NO_ALLOWED_TOKEN),
        (SlotError.GRAMMAR, FinishDetail.GRAMMAR),
        (SlotError.UNSPECIFIED, FinishDetail.EXECUTOR_ERROR),
    ],
)
def test_a_slot_that_fails_ends_its_sequence_alone(error: SlotError, detail: FinishDetail) -> None:
    bench = Bench()
    bench.add("bad", 3)
    bench.add("good", 4)
    bench.plan()
    result = bench.executor.run(bench.plans.popleft())
    bad_slot = bench.core.groups["", "bad"].sequences[0].slot
    assert bad_slot is not None
    tokens = [t for s, t in zip(result.slots, result.token_ids, strict=True) if s != bad_slot]
    counts = [int(s != bad_slot) for s in result.slots]
    failed = StepResult(
        result.step_id, slots=result.slots, num_tokens=counts, token_ids=tokens, error_slots=[bad_slot], errors=[error]
    )
    bench.take(bench.core.apply_result(0, failed, 0.0)[1])
    bench.run()
    assert bench.details == {"bad": detail, "good": FinishDetail.MAX_TOKENS}
    assert bench.tokens["good"] == bench.known("good")


def test_a_slot_comes_back_after_the_results_of_all_earlier_plans() -> None:
    slots = SlotPool(2)
    first = slots.take()
    slots.take()
    slots.release(first)
    assert slots.take_released(step_id=7) == [first]
    slots.on_result(5)
    assert slots.num_free == 0, "step 6 may still write there"
    slots.on_result(6)
    assert slots.num_free == 1


def test_limits_that_could_not_make_progress_are_refused() -> None:
    with pytest.raises(LimitsError, match="max_num_batched_tokens"):
        Bench(max_num_batched_tokens=2)
    with pytest.raises(LimitsError, match="num_slots"):
        Bench(num_slots=2)


def test_a_slot_may_fail_in_the_middle_of_its_prompt() -> None:
    bench = Bench(max_num_batched_tokens=8)
    bench.add("r", 20)
    plan = bench.plan()
    assert plan is not None
    later = bench.plan()
    assert later is not None
    (slot,) = plan.scheduled_slots
    failed = StepResult(plan.step_id, error_slots=[slot], errors=[SlotError.NON_FINITE_LOGITS])
    bench.take(bench.core.apply_result(0, failed, 0.0)[1])
    bench.take(bench.core.apply_result(0, StepResult(later.step_id), 0.0)[1])
    assert bench.details["r"] is FinishDetail.NON_FINITE_LOGITS
    bench.core.check_integrity()


PRIORITIES = {"a": 5, "b": -1, "c": 5, "d": 0, "e": -1}


@pytest.mark.parametrize(("policy", "order"), [(PriorityOrder(), "bedac"), (FcfsOrder(), "abcde")])
def test_the_order_of_service(policy: OrderPolicy, order: str) -> None:
    bench = Bench(Policies(order=policy), max_num_seqs=1, num_slots=2)
    for request_id, priority in PRIORITIES.items():
        bench.add(request_id, 3, priority=priority)
    bench.run()
    assert "".join(bench.order) == order


def test_victims_are_those_of_the_largest_priority() -> None:
    bench = Bench(Policies(order=PriorityOrder()), num_blocks=8)
    bench.add("later", 8, max_tokens=14, priority=1)
    bench.plan()
    bench.add("first", 8, max_tokens=14, priority=0)
    bench.run()
    assert bench.order == ["later", "first", "later"]
    assert bench.core.num_preemptions == 1
    assert bench.tokens["first"] == bench.tokens["later"] == bench.known("first")
