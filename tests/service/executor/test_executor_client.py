"""The plan stream over gRPC: opening, results, heartbeats, and every end that it can have."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from array import array

import grpc
import pytest

from cadenza.v1 import execution_pb2
from cadenza_common.plan.plan import AdmittedSequence, StepPlan
from cadenza_common.plan.result import StepStatus, TokenLogprobs
from cadenza_common.plan.sampling import SequenceSampling
from cadenza_common.wire.transport import STATUS_DETAILS_KEY, make_status
from scheduler_svc.executors import client as executor_client
from scheduler_svc.executors.client import GrpcExecutor
from scheduler_svc.plan_loop.ports import ExecutorFencedError, ExecutorLostError, StaleEpochError
from tests.helpers.machine.relay import relay
from tests.helpers.scheduler.scripted_executor import ScriptedExecutor, serve

pytestmark = pytest.mark.timeout(30)


@contextlib.asynccontextmanager
async def connected(executor, **options):
    server, target = await serve(executor)
    client = GrpcExecutor(target, "me", **options)
    try:
        yield client
    finally:
        await client.aclose()
        await server.stop(0)


def plan(step_id, *, admit=(), decode_ready=True, **fields):
    return StepPlan(step_id, 0, admitted=list(admit), decode_ready=decode_ready, **fields)


def sequence(slot=0, **sampling):
    return AdmittedSequence(slot, (1, 2), 2, 0, (4,), SequenceSampling(seed=3, **sampling), 0)


def first_plan(**sampling):
    return plan(
        1, admit=[sequence(**sampling)], scheduled_slots=[0], scheduled_num_tokens=[2], scheduled_samples=[True]
    )


async def test_describe():
    async with connected(ScriptedExecutor()) as client:
        model = await client.describe()
        assert (model.name, model.vocab_size, model.eos_token_ids, model.bos_token_id) == ("toy", 512, (0,), None)
        assert (model.block_size, model.num_device_blocks, model.num_slots, model.max_logprobs) == (16, 256, 128, 20)
        assert model.incarnation == 7


async def test_a_connection_on_which_a_session_was_lost_is_not_used_again():
    """Calls that follow on it may be taken for others: both ends disagree about compressed headers."""
    server, target = await serve(ScriptedExecutor())
    async with relay(target) as path:
        client = GrpcExecutor(path.address, "me")
        await client.describe()
        await client.describe()
        stream = await client.open(1)
        (first,) = path.connections
        await stream.close()
        await client.describe()
        assert len(path.connections - {first}) == 1
        await client.aclose()
    await server.stop(0)


async def test_a_connection_that_brings_no_answer_is_replaced(monkeypatch):
    """As when a router forgets it: nothing says that it is dead."""
    monkeypatch.setattr(executor_client, "_DESCRIBE_TIMEOUT_S", 0.2)
    server, target = await serve(ScriptedExecutor())
    async with relay(target) as path:
        client = GrpcExecutor(path.address, "me")
        await client.describe()
        (first,) = path.connections
        first.silent = True
        async with asyncio.timeout(5):
            assert (await client.describe()).name == "toy"
        await client.aclose()
    await server.stop(0)


async def test_describe_waits_and_says_so(monkeypatch, caplog):
    monkeypatch.setattr(executor_client, "_FIRST_NOTICE_S", 0.01)
    monkeypatch.setattr(executor_client, "_DESCRIBE_TIMEOUT_S", 0.1)
    server, target = await serve(ScriptedExecutor())
    await server.stop(0)
    client = GrpcExecutor(target, "me")
    with caplog.at_level(logging.WARNING):
        describing = asyncio.create_task(client.describe())
        await first_record(caplog)
        assert f"no executor listens at {target}" in caplog.text
        server, _ = await serve(ScriptedExecutor(), target)
        assert (await describing).name == "toy"
    await client.aclose()
    await server.stop(0)


async def test_an_executor_that_loads_its_model_is_no_reason_to_warn(monkeypatch, caplog):
    """It is bound and accepts connections, but answers nothing before its model is loaded."""
    monkeypatch.setattr(executor_client, "_FIRST_NOTICE_S", 0.01)
    loading = grpc.aio.server()
    client = GrpcExecutor(f"127.0.0.1:{loading.add_insecure_port('127.0.0.1:0')}", "me")
    with caplog.at_level(logging.INFO):
        describing = asyncio.create_task(client.describe())
        record = await first_record(caplog)
    describing.cancel()
    await asyncio.gather(describing, return_exceptions=True)
    assert (record.levelno, record.getMessage()[:24]) == (logging.INFO, f"the executor at {client.target}"[:24])
    assert "is loading its model" in record.getMessage()
    await client.aclose()
    await loading.stop(None)


async def first_record(caplog) -> logging.LogRecord:
    async with asyncio.timeout(10):
        while not caplog.records:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return caplog.records[0]


async def test_another_protocol_is_refused():
    async with connected(ScriptedExecutor(protocol_version=2)) as client:
        with pytest.raises(ExecutorLostError, match="protocol version 2"):
            await client.describe()


async def test_plans_and_results():
    executor = ScriptedExecutor(scripts={3: [7, 8, 9]})
    async with connected(executor) as client:
        stream = await client.open(5)
        assert (stream.opened.incarnation, stream.opened.last_completed_step_id) == (7, 0)
        await stream.send(first_plan(num_logprobs=2))
        await stream.send(plan(2))
        results = stream.results()
        one, two = await anext(results), await anext(results)
        assert (one.step_id, one.status, one.slots, one.num_tokens, one.token_ids) == (1, StepStatus.OK, [0], [1], [7])
        # Arrays, not tuples: they are kept as long as the request lives, and may hold a vocabulary for each token.
        (logprobs,) = one.logprobs[0].tokens()
        assert logprobs == TokenLogprobs(-0.5, 1, array("I", [0, 1]), array("f", [-0.5, -1.5]))
        assert (one.timings.total_ns, one.timings.device_ns) == (1000, 900)
        assert (two.step_id, two.token_ids) == (2, [8])
        admitted = executor.slots[0].admitted
        assert admitted.sampling.seed == 3
        assert not admitted.sampling.HasField("repetition_penalty"), "absent is off"
        assert list(admitted.block_tables[0].block_ids) == [4]
        assert admitted.sampling.num_logprobs == 2
        await stream.close()
        await stream.close()
        with pytest.raises(ExecutorLostError, match="closed"):
            await anext(results)
        with pytest.raises(ExecutorLostError):
            await stream.send(plan(3))


async def test_a_decode_plan_is_a_few_bytes():
    from cadenza_common.plan_wire.writing import plan_to_wire

    assert plan_to_wire(plan(1000), 1_700_000_000_000).ByteSize() < 16


async def test_heartbeats_go_both_ways(monkeypatch):
    monkeypatch.setattr(executor_client, "HEARTBEAT_S", 0.02)
    executor = ScriptedExecutor()
    async with connected(executor, silence_s=5) as client:
        stream = await client.open(1)
        reading = asyncio.create_task(anext(stream.results()))
        async with asyncio.timeout(5):
            while stream.last_heartbeat is None or executor.num_heartbeats < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        assert reading.cancelled()
        await stream.close()


async def test_silence_is_loss(monkeypatch):
    monkeypatch.setattr(executor_client, "HEARTBEAT_S", 0.02)
    async with connected(ScriptedExecutor(silent=True), silence_s=0.1) as client:
        stream = await client.open(1)
        with pytest.raises(ExecutorLostError, match="no message for"):
            await anext(stream.results())
        await stream.close()


async def test_an_executor_that_is_silent_while_a_session_opens_is_lost(monkeypatch):
    async def hang(requests, context):
        await asyncio.Event().wait()

    executor = ScriptedExecutor()
    monkeypatch.setattr(executor, "Execute", hang)
    async with connected(executor, silence_s=0.1) as client, asyncio.timeout(5):
        with pytest.raises(ExecutorLostError, match=r"no message for 0\.1 s"):
            await client.open(1)


async def test_a_small_epoch_is_refused_with_the_next_one():
    async with connected(ScriptedExecutor(last_epoch=40)) as client:
        with pytest.raises(StaleEpochError, match="the epoch is not larger") as caught:
            await client.open(40)
        assert caught.value.next_epoch == 41
        await (await client.open(41)).close()


@pytest.mark.parametrize("details", [b"\xff\xff", b"", make_status(grpc.StatusCode.ABORTED, "x").SerializeToString()])
async def test_details_that_are_no_refusal_are_left_alone(monkeypatch, details):
    async def refuse(requests, context):
        metadata = ((STATUS_DETAILS_KEY, details),)
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "because", metadata)

    executor = ScriptedExecutor()
    monkeypatch.setattr(executor, "Execute", refuse)
    async with connected(executor) as client:
        with pytest.raises(ExecutorLostError, match="because") as caught:
            await client.open(1)
        assert type(caught.value) is ExecutorLostError


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (grpc.StatusCode.PERMISSION_DENIED, ExecutorFencedError),
        (grpc.StatusCode.ABORTED, ExecutorFencedError),
        (grpc.StatusCode.FAILED_PRECONDITION, ExecutorLostError),
        (grpc.StatusCode.INTERNAL, ExecutorLostError),
    ],
)
async def test_refusals_at_opening(code, error):
    async with connected(ScriptedExecutor(refuse=(code, "because"))) as client:
        with pytest.raises(ExecutorLostError, match="because") as caught:
            await client.open(1)
        assert type(caught.value) is error


@pytest.mark.parametrize(
    ("code", "error"),
    [(grpc.StatusCode.ABORTED, ExecutorFencedError), (grpc.StatusCode.UNAVAILABLE, ExecutorLostError)],
)
async def test_breaks(code, error):
    executor = ScriptedExecutor()
    async with connected(executor) as client:
        stream = await client.open(1)
        await executor.break_up(code)
        with pytest.raises(ExecutorLostError, match="broken by the test") as caught:
            await anext(stream.results())
        assert type(caught.value) is error
        with pytest.raises(ExecutorLostError):
            await stream.send(plan(1))
        await stream.close()


async def test_an_executor_that_goes_away():
    server, target = await serve(ScriptedExecutor())
    client = GrpcExecutor(target, "me")
    stream = await client.open(1)
    reading = asyncio.create_task(anext(stream.results()))
    await server.stop(0)
    with pytest.raises(ExecutorLostError):
        await reading
    await stream.close()
    with pytest.raises(ExecutorLostError):
        await client.open(2)
    await client.aclose()


async def test_results_that_contradict_the_protocol():
    result = execution_pb2.StepResult(status=execution_pb2.STEP_STATUS_OK, slots=[0, 1], token_ids=[5])
    async with connected(ScriptedExecutor(fail_with=result)) as client:
        stream = await client.open(1)
        await stream.send(first_plan())
        with pytest.raises(ExecutorLostError, match="2 slots, 0 counts, 1 token ids"):
            await anext(stream.results())
        await stream.close()


async def test_many_writers_do_not_interleave():
    executor = ScriptedExecutor()
    async with connected(executor) as client:
        stream = await client.open(1)
        await stream.send(first_plan())
        await asyncio.gather(*(stream.send(plan(step_id)) for step_id in range(2, 50)))
        results = stream.results()
        assert [(await anext(results)).step_id for _ in range(49)] == list(range(1, 50))
        await stream.close()
