"""The executor's service over real gRPC: a counting fake for sessions and failures, a real model for tokens."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cadenza.transport import bind, channel_options, server_options
from cadenza.v1 import admin_pb2, admin_pb2_grpc, execution_pb2_grpc, types_pb2
from cadenza.v1 import execution_pb2 as pb
from executor_svc.convert import Description
from executor_svc.servicer import add_services
from executor_svc.step import StepExecutor
from executor_svc.worker import Worker
from tests.checkpoints import make_llama
from tests.helpers.fake_executor import LIMITS, CountingRunner, RecordingPools

INCARNATION = 2**63 + 7
GREEDY = pb.SequenceSampling(top_p=1, repetition_penalty=1)


def fake_description() -> Description:
    geometry = SimpleNamespace(
        name="fake", architecture="Counting", vocab_size=LIMITS.vocab_size, hidden_size=4, num_layers=1, num_heads=1,
        num_kv_heads=1, head_size=4, max_model_len=LIMITS.max_model_len, dtype="float32", num_parameters=0,
        weight_bytes=0,
    )  # fmt: skip
    loaded = SimpleNamespace(geometry=geometry, tokenizer="", eos_token_ids=(1, 2), bos_token_id=0)
    fingerprint = SimpleNamespace(
        mode="exact", weights_digest=b"w" * 32, dtype="float32", kv_dtype="float32", kernels="none", isa="none",
        num_threads=1, versions=("fake 1",), digest=b"d" * 32,
    )  # fmt: skip
    return Description(1, INCARNATION, loaded, LIMITS, 128, fingerprint, "fake", "0")


class Harness:
    """A served executor and a channel to it."""

    def __init__(self, channel: grpc.aio.Channel, runner: Any, pools: Any) -> None:
        self.channel = channel
        self.stub = execution_pb2_grpc.ExecutionServiceStub(channel)
        self.runner = runner
        self.pools = pools

    async def open(self, epoch: int, scheduler_id: str = "A", **fields: Any) -> Stream:
        """A stream whose session stands."""
        stream = self.stream()
        await stream.send(
            open=pb.OpenSession(**{"protocol_version": 1} | fields, scheduler_id=scheduler_id, epoch=epoch)
        )
        response = await stream.receive()
        assert response.WhichOneof("message") == "opened", response
        stream.opened, stream.epoch = response.opened, epoch
        return stream

    def stream(self) -> Stream:
        return Stream(self.stub.Execute())


class Stream:
    """One plan stream; `heartbeats` collects those that arrive between results."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.epoch = 0
        self.opened = pb.SessionOpened()
        self.heartbeats: list[pb.Heartbeat] = []

    async def send(self, **message: Any) -> None:
        await self.call.write(pb.ExecuteRequest(**message))

    async def receive(self) -> pb.ExecuteResponse:
        response = await asyncio.wait_for(self.call.read(), 20)
        assert response is not grpc.aio.EOF
        return response

    async def plan(self, step_id: int, **fields: Any) -> None:
        await self.send(plan=pb.StepPlan(**{"epoch": self.epoch} | fields, step_id=step_id))

    async def result(self) -> pb.StepResult:
        while (response := await self.receive()).WhichOneof("message") == "heartbeat":
            self.heartbeats.append(response.heartbeat)
        return response.result

    async def step(self, step_id: int, **fields: Any) -> pb.StepResult:
        await self.plan(step_id, **fields)
        return await self.result()

    async def status(self) -> grpc.StatusCode:
        """How the stream ended."""
        with contextlib.suppress(grpc.RpcError, asyncio.CancelledError):
            while await asyncio.wait_for(self.call.read(), 20) is not grpc.aio.EOF:
                pass
        return await self.call.code()


def admit(
    slot: int, tokens: list[int], blocks: list[int], sampling: pb.SequenceSampling = GREEDY, **fields: Any
) -> Any:
    return pb.AdmittedSequence(
        **{"num_prompt_tokens": len(tokens)} | fields,
        slot=slot,
        token_ids=tokens,
        block_tables=[pb.BlockTable(block_ids=blocks)],
        sampling=sampling,
    )


def scheduled(*rows: tuple[int, int, bool]) -> pb.ScheduledTokens:
    slots, counts, samples = zip(*rows, strict=True)
    return pb.ScheduledTokens(slots=slots, num_tokens=counts, samples=samples)


@contextlib.asynccontextmanager
async def served(worker: Worker, description: Description) -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server(options=server_options())
    address = bind(server, "127.0.0.1:0", default_port=0)
    await add_services(server, worker, description, heartbeat_interval_s=0.02)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
            yield channel
    finally:
        await server.stop(0)


@pytest.fixture
async def fake() -> AsyncIterator[Harness]:
    runner, pools = CountingRunner(), RecordingPools()
    worker = Worker(lambda: StepExecutor(runner, pools, LIMITS))
    worker.start()
    await asyncio.wrap_future(worker.ready)
    try:
        async with served(worker, fake_description()) as channel:
            yield Harness(channel, runner, pools)
    finally:
        runner.gate.set()
        assert await asyncio.to_thread(worker.stop, 20)


# ---------------------------------------------------------------- what stands beside plans


async def test_describe(fake: Harness) -> None:
    described = await fake.stub.Describe(pb.DescribeRequest())
    assert described.protocol_version == 1
    assert described.incarnation == INCARNATION
    assert described.eos_token_ids == [1, 2]
    assert described.HasField("bos_token_id")
    assert described.bos_token_id == 0
    assert described.limits.num_slots == LIMITS.num_slots
    assert described.kv.num_groups == 1
    assert pb.EXECUTOR_FEATURE_SWAP in described.features
    assert pb.EXECUTOR_FEATURE_BEAMS not in described.features


async def test_health_and_reflection(fake: Harness) -> None:
    health = health_pb2_grpc.HealthStub(fake.channel)
    for service in ("", "cadenza.v1.ExecutionService", "cadenza.v1.ExecutorAdminService"):
        response = await health.Check(health_pb2.HealthCheckRequest(service=service))
        assert response.status == health_pb2.HealthCheckResponse.SERVING
    call = reflection_pb2_grpc.ServerReflectionStub(fake.channel).ServerReflectionInfo()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    listed = (await call.read()).list_services_response.service
    assert {"cadenza.v1.ExecutionService", "grpc.health.v1.Health"} <= {service.name for service in listed}
    call.cancel()


async def test_reserved_calls_say_so(fake: Harness) -> None:
    admin = admin_pb2_grpc.ExecutorAdminServiceStub(fake.channel)
    for call in (
        fake.stub.LoadAdapter(pb.LoadAdapterRequest()),
        fake.stub.UnloadAdapter(pb.UnloadAdapterRequest()),
        admin.Profile(admin_pb2.ProfileRequest(num_steps=1)),
    ):
        with pytest.raises(grpc.aio.AioRpcError, match="not built yet") as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


# ---------------------------------------------------------------- sessions


async def test_first_message_must_open(fake: Harness) -> None:
    stream = fake.stream()
    await stream.send(plan=pb.StepPlan(step_id=1))
    assert await stream.status() is grpc.StatusCode.INVALID_ARGUMENT


async def test_second_open_on_a_stream_is_refused(fake: Harness) -> None:
    stream = await fake.open(1)
    await stream.send(open=pb.OpenSession(scheduler_id="A", epoch=2, protocol_version=1))
    assert await stream.status() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_message_that_cannot_be_read_ends_the_stream(fake: Harness) -> None:
    """Left open, it would beat on while no plan is read any more."""
    raw = fake.channel.stream_stream(
        "/cadenza.v1.ExecutionService/Execute", response_deserializer=pb.ExecuteResponse.FromString
    )
    stream = Stream(raw())
    opening = pb.OpenSession(scheduler_id="A", epoch=1, protocol_version=1)
    await stream.call.write(pb.ExecuteRequest(open=opening).SerializeToString())
    await stream.receive()
    await stream.call.write(b"\xff")
    assert await stream.status() is grpc.StatusCode.INVALID_ARGUMENT
    assert (await (await fake.open(2)).step(1)).status == pb.STEP_STATUS_OK


@pytest.mark.parametrize(
    ("opening", "code"),
    [
        ({"epoch": 6, "protocol_version": 2, "scheduler_id": "A"}, grpc.StatusCode.FAILED_PRECONDITION),
        ({"epoch": 5, "protocol_version": 1, "scheduler_id": "A"}, grpc.StatusCode.FAILED_PRECONDITION),
        ({"epoch": 6, "protocol_version": 1, "scheduler_id": "B"}, grpc.StatusCode.PERMISSION_DENIED),
        ({"epoch": 6, "protocol_version": 1, "scheduler_id": ""}, grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_refused_openings_leave_the_holder_alone(fake: Harness, opening: dict, code: grpc.StatusCode) -> None:
    holder = await fake.open(5)
    other = fake.stream()
    await other.send(open=pb.OpenSession(**opening))
    assert await other.status() is code
    assert (await holder.step(1)).status == pb.STEP_STATUS_OK


async def test_newer_epoch_fences_the_old_stream(fake: Harness) -> None:
    old = await fake.open(1)
    new = await fake.open(2)
    assert await old.status() is grpc.StatusCode.ABORTED
    assert (await new.step(1)).status == pb.STEP_STATUS_OK


async def test_another_scheduler_takes_over_when_the_holder_is_gone(fake: Harness) -> None:
    holder = await fake.open(1)
    await holder.step(1)
    await holder.call.done_writing()
    assert await holder.status() is grpc.StatusCode.OK
    other = fake.stream()
    await other.send(open=pb.OpenSession(scheduler_id="B", epoch=1, protocol_version=1))
    assert await other.status() is grpc.StatusCode.FAILED_PRECONDITION
    taken = await fake.open(2, "B")
    assert taken.opened.last_completed_step_id == 1
    assert taken.opened.incarnation == INCARNATION


async def test_opening_waits_for_the_running_step_and_drops_queued_plans(fake: Harness) -> None:
    fake.runner.gate.clear()
    old = await fake.open(1)
    await old.plan(1, admitted=[admit(0, [5, 6], [0])], scheduled=scheduled((0, 2, True)))
    await old.plan(2, decode_ready=True)
    await asyncio.to_thread(fake.runner.entered.acquire)
    opening = asyncio.create_task(fake.open(2))
    assert await old.status() is grpc.StatusCode.ABORTED
    assert not opening.done()
    fake.runner.gate.set()
    new = await opening
    assert new.opened.last_completed_step_id == 1
    assert len(fake.runner.batches) == 1
    # The slots are clear: the slot can be admitted again.
    result = await new.step(2, admitted=[admit(0, [9], [0])], decode_ready=True)
    assert list(result.token_ids) == [10]


async def test_cancelled_stream_drops_its_queued_plans(fake: Harness) -> None:
    fake.runner.gate.clear()
    stream = await fake.open(1)
    await stream.plan(1, admitted=[admit(0, [5, 6], [0])], scheduled=scheduled((0, 2, True)))
    await stream.plan(2, decode_ready=True)
    await stream.plan(3, decode_ready=True)
    await asyncio.to_thread(fake.runner.entered.acquire)
    stream.call.cancel()
    opening = asyncio.create_task(fake.open(2))
    await asyncio.wait([opening], timeout=0.1)
    fake.runner.gate.set()
    assert (await opening).opened.last_completed_step_id == 1
    assert len(fake.runner.batches) == 1


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


async def test_half_close_answers_what_was_sent(fake: Harness) -> None:
    stream = await fake.open(1)
    await stream.plan(1, admitted=[admit(0, [5], [0])], decode_ready=True)
    await stream.plan(2, decode_ready=True)
    await stream.call.done_writing()
    assert list((await stream.result()).token_ids) == [6]
    assert list((await stream.result()).token_ids) == [7]
    assert await stream.status() is grpc.StatusCode.OK


async def test_stop_ids_end_a_slot_on_the_executor(fake: Harness) -> None:
    stopping = pb.SequenceSampling(top_p=1, repetition_penalty=1, stop_token_ids=[7, 40])
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
    ({"forks": pb.SampleForks(source_slots=[0], slots=[1])}, "forks"),
    ({"drafts": pb.DraftTokens()}, "drafts"),
    ({"transfers": [pb.KvTransfer()]}, "transfers"),
    ({"copies": [pb.BlockMoves(kv_group=1, sources=[1], destinations=[2])]}, "kv_group 1"),
    ({"copies": [pb.BlockMoves(sources=[1, 2], destinations=[2, 3])]}, "both source and destination"),
    ({"swap_out": [pb.BlockMoves(sources=[1], destinations=[16])]}, "destination block 16"),
    ({"admitted": [admit(0, [1], [0], pb.SequenceSampling(top_p=1, repetition_penalty=2))]}, "repetition_penalty"),
    ({"admitted": [admit(0, [1], [0], pb.SequenceSampling(top_p=1, repetition_penalty=1, num_candidates=2))]},
     "num_candidates"),
    ({"admitted": [admit(0, [1], [0], adapter_index=1)]}, "adapter_index"),
    ({"admitted": [admit(0, [1], [0], embeddings=[pb.EmbeddingSpan()])]}, "embeddings"),
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
    asking = pb.SequenceSampling(top_p=1, repetition_penalty=1, num_logprobs=2)
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


# ---------------------------------------------------------------- a real model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def real_worker(checkpoint: Path) -> Iterator[tuple[Worker, Description]]:
    from executor_svc.app import build_executor
    from executor_svc.config import ExecutorConfig

    described: Future[Description] = Future()
    config = ExecutorConfig(
        model=str(checkpoint), block_size=8, num_gpu_blocks=64, num_cpu_blocks=8, max_num_seqs=8, num_threads=1
    )
    worker = Worker(lambda: build_executor(config, described))
    worker.start()
    worker.ready.result(60)
    yield worker, described.result()
    assert worker.stop(20)


@pytest.fixture
async def real(real_worker: tuple[Worker, Description]) -> AsyncIterator[Harness]:
    worker, description = real_worker
    async with served(worker, dataclasses.replace(description)) as channel:
        yield Harness(channel, None, None)


def sampled(seed: int, **fields: Any) -> pb.SequenceSampling:
    return pb.SequenceSampling(**{"temperature": 1, "top_p": 1, "repetition_penalty": 1} | fields, seed=seed)


SAMPLINGS = [sampled(1), sampled(2, top_k=5), sampled(3, top_p=0.8), sampled(4, min_p=0.1), GREEDY]
NUM_OUTPUT = 12
EPOCHS = iter(range(1, 1000))


def test_the_logprobs_of_a_full_step_fit_one_message(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A result that is too large would end the session, and be computed again, and end the next one."""
    from executor_svc.app import build_executor
    from executor_svc.config import ExecutorConfig

    limit = 20_000
    monkeypatch.setattr("executor_svc.app.MAX_MESSAGE_BYTES", limit)
    config = ExecutorConfig(model=str(checkpoint), num_gpu_blocks=64, max_num_seqs=64, num_threads=1)
    limits = build_executor(config, Future()).limits
    assert 1 < limits.max_logprobs < limits.vocab_size
    columns = types_pb2.LogprobColumns(
        chosen_logprobs=[-1.0],
        chosen_ranks=[1],
        num_top=limits.max_logprobs,
        top_token_ids=[1 << 20] * limits.max_logprobs,
        top_logprobs=[-1.0] * limits.max_logprobs,
    )
    result = pb.StepResult(logprobs=[pb.SlotLogprobs(slot=slot, start=300, columns=columns) for slot in range(64)])
    assert result.ByteSize() < 1.1 * limit, "of the real limit's 64 MiB the fixed part is nothing"


async def first_step_id(real: Harness) -> tuple[Stream, int]:
    last = 0
    # Every test has a servicer of its own, so epochs begin anew with it; the worker's step ids do not.
    stream = await real.open(next(EPOCHS))
    last = stream.opened.last_completed_step_id
    return stream, last + 1


async def generate(
    real: Harness, depth: int, samplings: list[pb.SequenceSampling], order: list[int]
) -> list[list[int]]:
    """NUM_OUTPUT tokens for each sampling, slot = place in `order`, with `depth` plans in flight."""
    stream, step_id = await first_step_id(real)
    prompts = {i: [2 + i, 30 + i, 7, 9 * i + 4, 11][: 3 + i % 3] for i in order}
    admitted = [
        admit(slot, prompts[i], [3 * slot, 3 * slot + 1, 3 * slot + 2], samplings[i]) for slot, i in enumerate(order)
    ]
    rows = [(slot, len(prompts[i]), True) for slot, i in enumerate(order)]
    plans: list[dict[str, Any]] = [{"admitted": admitted, "scheduled": scheduled(*rows)}]
    plans += [{"decode_ready": True}] * (NUM_OUTPUT - 1)
    outputs: dict[int, list[int]] = {i: [] for i in order}
    sent = 0
    for received in range(len(plans)):
        while sent < len(plans) and sent < received + depth:
            await stream.plan(step_id + sent, **plans[sent])
            sent += 1
        result = await stream.result()
        assert result.status == pb.STEP_STATUS_OK, result.error_message
        for slot, token in zip(result.slots, result.token_ids, strict=True):
            outputs[order[slot]].append(token)
    stream.call.cancel()
    return [outputs[i] for i in order]


async def test_same_tokens_whatever_is_in_flight_and_in_the_batch(real: Harness) -> None:
    everyone = list(range(len(SAMPLINGS)))
    together = await generate(real, 1, SAMPLINGS, everyone)
    assert all(len(tokens) == NUM_OUTPUT for tokens in together)
    assert len({tuple(tokens) for tokens in together}) == len(SAMPLINGS)
    assert await generate(real, 2, SAMPLINGS, everyone) == together
    assert await generate(real, 4, SAMPLINGS, everyone[::-1]) == together[::-1]
    for i in everyone:
        assert await generate(real, 2, SAMPLINGS, [i]) == [together[i]]


async def test_chunks_swaps_and_given_tokens_change_nothing(real: Harness) -> None:
    stream, step = await first_step_id(real)
    prompt = list(range(3, 23))
    result = await stream.step(
        step, admitted=[admit(0, prompt, [0, 1, 2], SAMPLINGS[0])], scheduled=scheduled((0, 20, True))
    )
    expected = list(result.token_ids)
    for i in range(3):
        expected += (await stream.step(step + 1 + i, decode_ready=True)).token_ids
    step += 4
    # In two chunks, then swapped out, released, swapped in elsewhere, and come back with the tokens so far.
    await stream.step(
        step,
        released_slots=[0],
        admitted=[admit(5, prompt, [9, 8, 7], SAMPLINGS[0])],
        scheduled=scheduled((5, 11, False)),
    )
    tokens = list((await stream.step(step + 1, scheduled=scheduled((5, 9, True)))).token_ids)
    await stream.step(step + 2, released_slots=[5], swap_out=[pb.BlockMoves(sources=[9, 8, 7], destinations=[0, 1, 2])])
    result = await stream.step(
        step + 3,
        swap_in=[pb.BlockMoves(sources=[0, 1, 2], destinations=[20, 21, 22])],
        admitted=[
            admit(
                1, prompt + tokens, [20, 21, 22], SAMPLINGS[0], num_prompt_tokens=20, num_computed_tokens=20, held=True
            )
        ],
        decode_ready=True,
    )
    assert not result.slots
    tokens += (await stream.step(step + 4, resumed_slots=[1], decode_ready=True)).token_ids
    # The next token is computed without sampling, and given.
    assert not (await stream.step(step + 5, scheduled=scheduled((1, 1, False)))).slots
    given = pb.GivenTokens(slots=[1], token_ids=[expected[2]])
    tokens += [expected[2], *(await stream.step(step + 6, given=given, decode_ready=True)).token_ids]
    assert tokens == expected
    stream.call.cancel()


# ---------------------------------------------------------------- the process


def start(checkpoint: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "executor_svc", "--model", str(checkpoint), "--num-gpu-blocks", "32", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_process_serves_refuses_a_taken_port_and_stops(checkpoint: Path) -> None:
    process = start(checkpoint, "--listen", "127.0.0.1:0")
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("ready 127.0.0.1:")
        address = line.split()[1]
        with grpc.insecure_channel(address) as channel:
            described = execution_pb2_grpc.ExecutionServiceStub(channel).Describe(pb.DescribeRequest(), timeout=20)
        assert described.kv.num_device_blocks == 32
        second = start(checkpoint, "--listen", address)
        _, errors = second.communicate(timeout=60)
        assert second.returncode == 1
        assert errors.strip().splitlines() == [f"error: cannot listen on {address}: the port is taken or not permitted"]
    finally:
        process.terminate()
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "Traceback" not in errors
