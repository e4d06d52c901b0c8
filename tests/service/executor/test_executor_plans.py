"""Plans and results over real gRPC, with a counting fake: order, failures, what is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from cadenza.v1 import execution_pb2 as pb
from cadenza.v1 import types_pb2
from tests.helpers.executor.executor_harness import INCARNATION, Harness, admit, fake_executor, scheduled


@pytest.fixture
async def fake() -> AsyncIterator[Harness]:
    async with fake_executor() as harness:
        yield harness


# ---------------------------------------------------------------- plans and results


async def test_results_come_in_order_and_tokens_stay_on_the_executor(fake: Harness) -> None:
    stream = await fake.open(1)
    admitted = [admit(3, [5, 6], [0]), admit(1, [20], [1])]
    await stream.plan(7, admitted=admitted, scheduled=scheduled((3, 2, True), (1, 1, True)))
    for step_id in (8, 9, 10):
        await stream.plan(step_id, decode_ready=True)
    results = [await stream.result() for _ in range(4)]
    assert [result.step_id for result in results] == [7, 8, 9, 10]
    assert [list(result.slots) for result in results] == [[1, 3]] * 4
    assert [list(result.token_ids) for result in results] == [[21, 7], [22, 8], [23, 9], [24, 10]]
    assert all(result.epoch == 1 and result.incarnation == INCARNATION for result in results)
    assert not results[0].num_tokens
    assert results[0].timings.total_ns > 0


async def test_forks_candidates_and_given_tokens(fake: Harness) -> None:
    """Slot 2 forks from slot 1, which stops; slot 4, which would fork from it then, stops with it."""
    stopping = types_pb2.SequenceSampling(top_p=1, repetition_penalty=1, stop_token_ids=[7])
    asking = types_pb2.SequenceSampling(top_p=1, repetition_penalty=1, num_candidates=3, stop_token_ids=[9])
    stream = await fake.open(1)
    await stream.plan(
        1, admitted=[admit(1, [5, 6], [0], stopping), admit(2, [5, 6], [1]), admit(0, [8], [2], asking)],
        scheduled=scheduled((1, 2, True), (0, 1, True)), forks=pb.SampleForks(source_slots=[1], slots=[2]),
    )  # fmt: skip
    await stream.plan(
        2, admitted=[admit(4, [5, 6, 7], [3])], decode_ready=True, forks=pb.SampleForks(source_slots=[1], slots=[4])
    )
    await stream.plan(3, given=pb.GivenTokens(slots=[0], token_ids=[9]), decode_ready=True)
    first, second, third = [await stream.result() for _ in range(3)]
    assert (list(first.slots), list(first.num_tokens), list(first.token_ids)) == ([0, 1, 2], [0, 1, 1], [7, 7])
    (item,) = first.candidates
    assert (item.slot, list(item.token_ids)) == (0, [9, 0, 1])
    assert item.logprobs[1] == item.logprobs[2] < item.logprobs[0]
    assert (list(second.slots), list(second.num_tokens), list(second.token_ids)) == ([2, 4], [1, 0], [8])
    assert not second.candidates
    assert (list(third.slots), list(third.num_tokens), list(third.token_ids)) == ([0, 2], [0, 1], [9])
    assert list(third.candidates[0].token_ids) == [10, 0, 1]


async def test_half_close_answers_what_was_sent(fake: Harness) -> None:
    stream = await fake.open(1)
    await stream.plan(1, admitted=[admit(0, [5], [0])], decode_ready=True)
    await stream.plan(2, decode_ready=True)
    await stream.call.done_writing()
    assert list((await stream.result()).token_ids) == [6]
    assert list((await stream.result()).token_ids) == [7]
    assert await stream.status() is grpc.StatusCode.OK


async def test_stop_ids_end_a_slot_on_the_executor(fake: Harness) -> None:
    stopping = types_pb2.SequenceSampling(top_p=1, repetition_penalty=1, stop_token_ids=[7, 40])
    stream = await fake.open(1)
    admitted = [admit(0, [5], [0], stopping), admit(1, [20], [1])]
    await stream.plan(1, admitted=admitted, decode_ready=True)
    await stream.plan(2, decode_ready=True)
    await stream.plan(3, decode_ready=True)
    await stream.plan(4, decode_ready=True, scheduled=scheduled((0, 1, True)))
    results = [await stream.result() for _ in range(4)]
    assert [list(result.token_ids) for result in results] == [[6, 21], [7, 22], [23], [24]]
    # Not ready any more, so decode_ready does not name it; named outright, it reports no token.
    assert list(results[2].slots) == [1]
    assert list(results[3].slots) == [0, 1]
    assert list(results[3].num_tokens) == [0, 1]


async def test_non_finite_logits_fail_their_slot_alone(fake: Harness) -> None:
    fake.runner.nan_tokens.add(5)
    stream = await fake.open(1)
    await stream.plan(1, admitted=[admit(0, [5], [0]), admit(1, [20], [1])], decode_ready=True)
    await stream.plan(2, decode_ready=True)
    first, second = await stream.result(), await stream.result()
    assert first.status == pb.STEP_STATUS_OK
    assert (list(first.slots), list(first.num_tokens), list(first.token_ids)) == ([0, 1], [0, 1], [21])
    assert list(first.error_slots) == [0]
    assert list(first.errors) == [pb.SLOT_ERROR_NON_FINITE_LOGITS]
    assert (list(second.slots), list(second.token_ids)) == ([1], [22])


async def test_a_slot_without_an_allowed_token_fails_alone(fake: Harness) -> None:
    """Its whitelist holds 7 and 9; 7 is a bad word, and 9 must not follow 9."""
    words = [types_pb2.TokenIds(ids=[7]), types_pb2.TokenIds(ids=[9, 9])]
    narrow = types_pb2.SequenceSampling(top_p=1, repetition_penalty=1, allowed_token_ids=[7, 9], bad_words=words)
    stream = await fake.open(1)
    await stream.plan(1, admitted=[admit(0, [5], [0], narrow), admit(1, [20], [1])], decode_ready=True)
    for step_id in (2, 3):
        await stream.plan(step_id, decode_ready=True)
    first, second, third = [await stream.result() for _ in range(3)]
    assert list(first.token_ids) == [9, 21]
    assert (list(second.slots), list(second.num_tokens), list(second.token_ids)) == ([0, 1], [0, 1], [22])
    assert list(second.error_slots) == [0]
    assert list(second.errors) == [pb.SLOT_ERROR_NO_ALLOWED_TOKEN]
    assert (list(third.slots), list(third.token_ids)) == ([1], [23])


async def test_a_slot_whose_candidates_cannot_be_reported_fails_alone(fake: Harness) -> None:
    """Slot 1 by its logits, slot 3 as all that it allows is a bad word; slot 2 requests more than is left."""
    fake.runner.nan_tokens.add(5)
    asking = types_pb2.SequenceSampling(top_p=1, repetition_penalty=1, num_candidates=4)
    few = types_pb2.SequenceSampling(top_p=1, repetition_penalty=1, num_candidates=4, allowed_token_ids=[7, 20, 3])
    none = types_pb2.SequenceSampling(
        top_p=1, repetition_penalty=1, num_candidates=4, allowed_token_ids=[7], bad_words=[types_pb2.TokenIds(ids=[7])]
    )
    stream = await fake.open(1)
    admitted = [admit(0, [30], [0]), admit(1, [5], [1], asking), admit(2, [6], [2], few), admit(3, [6], [3], none)]
    result = await stream.step(1, admitted=admitted, decode_ready=True)
    assert (list(result.slots), list(result.num_tokens), list(result.token_ids)) == ([0, 1, 2, 3], [1, 0, 0, 0], [31])
    assert list(result.error_slots) == [1, 3]
    assert list(result.errors) == [pb.SLOT_ERROR_NON_FINITE_LOGITS, pb.SLOT_ERROR_NO_ALLOWED_TOKEN]
    assert [(item.slot, list(item.token_ids)) for item in result.candidates] == [(2, [7, 3, 20])]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RuntimeError("boom"), pb.STEP_STATUS_FAILED),
        (MemoryError("full"), pb.STEP_STATUS_OUT_OF_MEMORY),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), pb.STEP_STATUS_OUT_OF_MEMORY),
    ],
)
async def test_after_a_failure_plans_are_skipped_until_a_new_session(
    fake: Harness, error: Exception, status: int
) -> None:
    stream = await fake.open(1)
    fake.runner.errors.append(error)
    await stream.plan(1, admitted=[admit(0, [5], [0])], decode_ready=True)
    await stream.plan(2, decode_ready=True)
    first, second = await stream.result(), await stream.result()
    assert first.status == status
    assert str(error) in first.error_message
    assert second.status == pb.STEP_STATUS_SKIPPED
    assert (await stream.step(3)).status == pb.STEP_STATUS_SKIPPED
    again = await fake.open(2)
    assert again.opened.last_completed_step_id == 0
    assert list((await again.step(4, admitted=[admit(0, [5], [0])], decode_ready=True)).token_ids) == [6]


INVALID: list[tuple[dict[str, Any], str]] = [
    ({"epoch": 9}, "epoch 9"),
    ({"released_slots": [2]}, "slot 2 is not admitted"),
    ({"released_slots": [99]}, "slot 99 is out of range"),
    ({"admitted": [admit(0, [50], [0])]}, "token id 50"),
    ({"admitted": [admit(0, [1], [64])]}, "block 64"),
    ({"admitted": [admit(0, [1], [0]), admit(0, [1], [0])]}, "slot 0 is not free"),
    ({"admitted": [admit(0, [1] * 9, [0])], "scheduled": scheduled((0, 9, True))}, "table of slot 0 is too short"),
    ({"admitted": [admit(0, [1, 2], [0])], "scheduled": scheduled((0, 3, True))}, "only 2"),
    ({"admitted": [admit(0, [1, 2], [0])], "scheduled": scheduled((0, 1, True))}, "must compute all"),
    ({"admitted": [admit(0, [1, 2], [0])], "scheduled": scheduled((0, 1, False), (0, 1, False))}, "named twice"),
    ({"admitted": [admit(i, [1], [i]) for i in range(9)], "decode_ready": True}, "max_num_seqs 8"),
    ({"scheduled": pb.ScheduledTokens(slots=[1], num_tokens=[1])}, "different lengths"),
    ({"forks": pb.SampleForks(source_slots=[0], slots=[1])}, "forks: slot 1 is not admitted"),
    ({"forks": pb.SampleForks(source_slots=[0], slots=[1, 2])}, "forks: columns of different lengths"),
    ({"admitted": [admit(0, [1], [0]), admit(1, [1], [1])], "forks": pb.SampleForks(source_slots=[0], slots=[1])},
     "forks: the source 0 of slot 1 does not sample"),
    ({"max_drafts": 1}, "max_drafts 1 is over the executor's 0"),
    ({"admitted": [admit(0, [1], [0], max_drafts=1)]}, "slot 0: max_drafts 1 is not 0 to 0"),
    ({"admitted": [admit(0, [1, 2], [0], max_len=2)]}, "slot 0: max_len 2 is not 3 to 64"),
    ({"transfers": [pb.KvTransfer()]}, "transfers"),
    ({"copies": [pb.BlockMoves(kv_group=1, sources=[1], destinations=[2])]}, "kv_group 1"),
    ({"copies": [pb.BlockMoves(sources=[1, 2], destinations=[2, 3])]}, "both source and destination"),
    ({"swap_out": [pb.BlockMoves(sources=[1], destinations=[16])]}, "destination block 16"),
    ({"admitted": [admit(0, [1], [0], types_pb2.SequenceSampling(repetition_penalty=0))]}, "repetition_penalty 0.0"),
    ({"admitted": [admit(0, [1], [0], types_pb2.SequenceSampling(top_p=1, repetition_penalty=1, num_candidates=51))]},
     "slot 0: num_candidates 51 is not 0 to 50"),
    ({"admitted": [admit(0, [1], [0], adapter_index=1)]}, "adapter_index"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "message"), INVALID, ids=[message for _, message in INVALID])
async def test_contradictory_plans_are_named(fake: Harness, fields: dict, message: str) -> None:
    stream = await fake.open(1)
    result = await stream.step(1, **fields)
    assert result.status == pb.STEP_STATUS_INVALID_PLAN
    assert message in result.error_message
    assert not fake.runner.batches
    assert not fake.pools.calls
    assert (await stream.step(2)).status == pb.STEP_STATUS_SKIPPED


async def test_an_error_names_only_some_of_very_many(fake: Harness) -> None:
    stream = await fake.open(1)
    result = await stream.step(1, appends=[pb.BlockAppends(kv_group=1 + index) for index in range(1000)])
    assert result.status == pb.STEP_STATUS_INVALID_PLAN
    assert "appends.kv_group 1, appends.kv_group 2, " in result.error_message
    assert len(result.error_message) < 400


async def test_step_ids_rise_by_one(fake: Harness) -> None:
    stream = await fake.open(1)
    assert (await stream.step(4)).status == pb.STEP_STATUS_OK
    result = await stream.step(6)
    assert result.status == pb.STEP_STATUS_INVALID_PLAN
    assert "6 does not follow 4" in result.error_message
    again = await fake.open(2)
    assert "not above the last completed step 4" in (await again.step(4)).error_message


async def test_too_many_plans_in_flight(fake: Harness) -> None:
    fake.runner.gate.clear()
    stream = await fake.open(1)
    await stream.plan(1, admitted=[admit(0, [5], [0])], decode_ready=True)
    for step_id in range(2, 7):
        await stream.plan(step_id, decode_ready=True)
    while not stream.heartbeats or stream.heartbeats[-1].num_queued_plans < 5:
        stream.heartbeats.append((await stream.receive()).heartbeat)
    fake.runner.gate.set()
    statuses = [(await stream.result()).status for _ in range(6)]
    assert statuses == [pb.STEP_STATUS_OK] * 4 + [pb.STEP_STATUS_INVALID_PLAN, pb.STEP_STATUS_SKIPPED]


async def test_heartbeats_while_a_step_runs(fake: Harness) -> None:
    fake.runner.gate.clear()
    stream = await fake.open(1)
    await stream.plan(1, admitted=[admit(0, [5], [0])], decode_ready=True)
    await stream.plan(2, decode_ready=True)
    await stream.send(heartbeat=pb.Heartbeat())
    beats: list[pb.Heartbeat] = []
    while not beats or beats[-1].num_queued_plans == 0 or beats[-1].running_step_id == 0:
        beats.append((await stream.receive()).heartbeat)
    later = (await stream.receive()).heartbeat
    assert later.running_step_id == 1
    assert later.running_age_ns > beats[-1].running_age_ns
    assert later.num_queued_plans == 1
    fake.runner.gate.set()
    assert (await stream.result()).step_id == 1
    assert (await stream.result()).step_id == 2


async def test_a_scheduler_learns_since_when_it_has_been_alone(fake: Harness) -> None:
    """Between the epochs 5 and 7 another one has used the pools."""
    since = []
    for epoch, scheduler_id in ((3, "A"), (4, "A"), (5, "A"), (6, "B"), (7, "A"), (8, "A")):
        stream = await fake.open(epoch, scheduler_id)
        since.append(stream.opened.sole_since_epoch)
        await stream.call.done_writing()
        assert await stream.status() is grpc.StatusCode.OK
    assert since == [3, 3, 3, 6, 7, 7]


async def test_a_step_that_is_to_be_announced_is_named_before_it_runs() -> None:
    """No other heartbeat is due: only the announcement can be it."""
    async with fake_executor(heartbeat_s=60.0) as fake:
        fake.runner.gate.clear()
        stream = await fake.open(1)
        await stream.plan(1, admitted=[admit(0, [5], [0])], decode_ready=True, announces_start=True)
        assert (await stream.receive()).heartbeat.running_step_id == 1
        fake.runner.gate.set()
        assert (await stream.result()).step_id == 1
        assert not stream.heartbeats


async def test_block_moves_reach_the_pools_in_order(fake: Harness) -> None:
    stream = await fake.open(1)
    result = await stream.step(
        1,
        copies=[pb.BlockMoves(sources=[1], destinations=[2]), pb.BlockMoves(sources=[1], destinations=[3])],
        swap_in=[pb.BlockMoves(sources=[4], destinations=[5])],
        swap_out=[pb.BlockMoves(sources=[6], destinations=[7])],
    )
    assert result.status == pb.STEP_STATUS_OK
    assert fake.pools.calls == [("swap_out", [6], [7]), ("copy", [1, 1], [2, 3]), ("swap_in", [4], [5])]


async def test_logprobs_and_digest(fake: Harness) -> None:
    asking = types_pb2.SequenceSampling(top_p=1, repetition_penalty=1, num_logprobs=2)
    stream = await fake.open(1)
    result = await stream.step(
        1, admitted=[admit(2, [5, 6], [0], asking), admit(0, [8], [1])], decode_ready=True, debug_digest=True,
        scheduled=scheduled((2, 2, True)),
    )  # fmt: skip
    (item,) = result.logprobs
    assert (item.slot, item.start) == (2, 2)
    assert list(item.columns.chosen_ranks) == [1]
    assert list(item.columns.top_token_ids) == [7, 0]
    assert item.columns.top_logprobs[0] == item.columns.chosen_logprobs[0]
    assert len(result.debug_digest) == 32
