"""The whole service over real gRPC: streaming, sessions, abort, deadline, disconnect, slow readers, a full queue.

Each test runs against both services in this process, on port 0, and against two real processes. After each all blocks,
slots and tasks are free again.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import code_pb2, error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from cadenza.v1 import admin_pb2, generation_pb2, types_pb2
from cadenza_launcher.local import LocalServices
from tests.checkpoints import make_llama
from tests.helpers.services import Running, connection, executor_service, scheduler_service

FINISH = types_pb2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("model"), tokenizer=True, vocab_size=300, max_position_embeddings=16384)


EXECUTOR = {"num_threads": 1, "num_gpu_blocks": 5000, "max_num_seqs": 4, "max_num_batched_tokens": 64}
SCHEDULER = {"max_queued_requests": 8}


@pytest.fixture(scope="module")
def processes(model: Path) -> Iterator[str]:
    """Both services as processes of their own; their address."""
    with LocalServices(str(model), port=0, **EXECUTOR, **SCHEDULER) as services:
        yield services.target


@pytest.fixture(params=["in process", "two processes"])
async def running(model: Path, request: pytest.FixtureRequest) -> AsyncIterator[Running]:
    async with AsyncExitStack() as stack:
        if request.param == "two processes":
            service = await stack.enter_async_context(connection(request.getfixturevalue("processes")))
        else:
            address = await stack.enter_async_context(executor_service(model, **EXECUTOR))
            service = await stack.enter_async_context(scheduler_service(address, **SCHEDULER))
        yield service
        await service.wait_until_free()


def request(request_id: str = "", max_tokens: int = 20, prompt: list[int] | None = None, **params: Any) -> Any:
    return generation_pb2.GenerateRequest(
        request_id=request_id,
        prompt=[types_pb2.PromptPart(tokens=types_pb2.TokenIds(ids=prompt or [5, 6, 7]))],
        sampling_params=types_pb2.SamplingParams(
            max_tokens=max_tokens, temperature=params.pop("temperature", 0.0), ignore_eos=True, **params
        ),
    )


def endless(request_id: str = "") -> Any:
    return request(request_id, max_tokens=16000)


async def collect(call: AsyncIterator[Any]) -> tuple[list[int], str, Any]:
    """All token ids, all text and the last finish of a single-sample stream, positions checked."""
    tokens: list[int] = []
    text, finish = "", None
    async for response in call:
        for output in response.outputs:
            assert output.first_token_index == len(tokens)
            assert output.text_offset == len(text)
            tokens += output.token_ids
            text += output.text
            finish = output.finish if output.HasField("finish") else None
    return tokens, text, finish


async def first_token(call: Any) -> Any:
    async for response in call:
        if response.outputs and response.outputs[0].token_ids:
            return response
    raise AssertionError("the stream ended without a token")


async def test_generate_streams_and_ends(running: Running) -> None:
    tokens, text, finish = await collect(running.generation.Generate(request(max_tokens=20)))
    assert len(tokens) == 20
    assert finish.detail == FINISH.FINISH_DETAIL_MAX_TOKENS
    decoded = await running.generation.Detokenize(generation_pb2.DetokenizeRequest(token_ids=tokens))
    assert text == decoded.text


async def test_many_requests_in_one_session(running: Running) -> None:
    alone = {}
    for index in range(12):
        call = running.generation.Generate(request(prompt=[index + 3, 9, 2], max_tokens=5 + index))
        alone[f"r{index}"] = (await collect(call))[0]
    session = running.generation.Session()
    for index in range(8):
        await session.write(
            generation_pb2.SessionRequest(generate=request(f"r{index}", 5 + index, prompt=[index + 3, 9, 2]))
        )
    await session.write(generation_pb2.SessionRequest(generate=request("bad", top_p=2.0)))
    got: dict[str, list[int]] = {}
    errors: dict[str, Any] = {}
    done: set[str] = set()
    next_index = 8
    async for response in session:
        for event in response.events:
            if event.HasField("error"):
                errors[event.request_id] = event.error
            for output in event.response.outputs:
                got.setdefault(event.request_id, []).extend(output.token_ids)
            if event.done:
                done.add(event.request_id)
        while next_index < 12 and len(done) > next_index - 8:
            await session.write(
                generation_pb2.SessionRequest(
                    generate=request(f"r{next_index}", 5 + next_index, prompt=[next_index + 3, 9, 2])
                )
            )
            next_index += 1
        if next_index == 12:
            await session.done_writing()
            next_index += 1
    assert got == alone
    assert set(errors) == {"bad"}
    assert errors["bad"].code == code_pb2.INVALID_ARGUMENT
    violation = error_details_pb2.BadRequest()
    assert errors["bad"].details[0].Unpack(violation)
    assert violation.field_violations[0].field == "sampling_params.top_p"
    assert done == {*alone, "bad"}


async def test_abort_ends_a_request_at_once(running: Running) -> None:
    call = running.generation.Generate(endless("victim"))
    await first_token(call)
    answer = await running.generation.Abort(generation_pb2.AbortRequest(request_id="victim"))
    assert answer.aborted
    finish = None
    async for response in call:
        finish = response.outputs[0].finish if response.outputs else finish
    assert finish is not None
    assert finish.detail == FINISH.FINISH_DETAIL_ABORTED
    again = await running.generation.Abort(generation_pb2.AbortRequest(request_id="victim"))
    assert not again.aborted


async def test_a_deadline_frees_everything(running: Running) -> None:
    call = running.generation.Generate(endless(), timeout=0.3)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_timeout_ends_a_request_with_what_it_has(running: Running) -> None:
    wanted = endless()
    wanted.timeout_s = 0.3
    _, _, finish = await collect(running.generation.Generate(wanted))
    assert finish.detail == FINISH.FINISH_DETAIL_DEADLINE


async def test_a_waiting_request_is_ended_by_its_deadline(running: Running) -> None:
    blockers = [running.generation.Generate(endless()) for _ in range(4)]
    for blocker in blockers:
        await first_token(blocker)
    waiting = endless()
    waiting.timeout_s = 0.05
    tokens, _, finish = await collect(running.generation.Generate(waiting))
    assert tokens == []
    assert finish.detail == FINISH.FINISH_DETAIL_DEADLINE
    for blocker in blockers:
        blocker.cancel()


async def test_a_client_that_hangs_up_frees_everything(running: Running) -> None:
    calls = [running.generation.Generate(endless()) for _ in range(6)]
    await first_token(calls[0])
    for call in calls:
        call.cancel()


async def test_a_session_that_hangs_up_frees_everything(running: Running) -> None:
    session = running.generation.Session()
    for index in range(6):
        await session.write(generation_pb2.SessionRequest(generate=endless(f"r{index}")))
    await session.read()
    session.cancel()


VICTIM = """
import sys, grpc
from cadenza.v1 import generation_pb2, generation_pb2_grpc
stub = generation_pb2_grpc.GenerationServiceStub(grpc.insecure_channel(sys.argv[1]))
wanted = generation_pb2.GenerateRequest.FromString(bytes.fromhex(sys.argv[2]))
calls = [stub.Generate(wanted) for _ in range(3)]
for call in calls:
    next(call)
print("streaming", flush=True)
sys.stdin.read()
"""


async def test_a_killed_client_frees_everything(running: Running) -> None:
    """Its process is gone without a word."""
    client = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", VICTIM, running.target, endless().SerializeToString().hex()),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert client.stdout is not None
    assert await client.stdout.readline() == b"streaming\n"
    assert (await running.load()).num_running == 3
    client.kill()
    await client.wait()


async def test_a_slow_reader_slows_nobody_and_loses_nothing(running: Running) -> None:
    slow = running.generation.Generate(request("slow", max_tokens=400, logprobs=20))
    first = await first_token(slow)
    quick = [collect(running.generation.Generate(request(max_tokens=30, prompt=[i + 3]))) for i in range(6)]
    async with asyncio.timeout(60):
        for tokens, _, _ in await asyncio.gather(*quick):
            assert len(tokens) == 30
    tokens = list(first.outputs[0].token_ids)
    async for response in slow:
        for output in response.outputs:
            assert output.first_token_index == len(tokens)
            tokens += output.token_ids
            assert len(output.logprobs.top_token_ids) == 20 * len(output.token_ids)
    assert len(tokens) == 400


async def test_a_full_queue_says_when_to_come_back(running: Running) -> None:
    calls = [running.generation.Generate(endless(f"r{index}")) for index in range(4)]
    for call in calls:
        await first_token(call)
    waiting = [running.generation.Generate(endless(f"w{index}")) for index in range(8)]
    async with asyncio.timeout(10):
        while (await running.load()).num_waiting < 8:
            pass
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await first_token(running.generation.Generate(endless()))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    status = rpc_status.from_call(caught.value)
    retry = error_details_pb2.RetryInfo()
    assert status is not None
    assert status.details[0].Unpack(retry)
    assert retry.retry_delay.ToTimedelta().total_seconds() > 0
    for call in (*calls, *waiting):
        call.cancel()


async def test_what_can_never_fit_is_refused(running: Running) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="max_model_len") as caught:
        await first_token(running.generation.Generate(request(prompt=[3] * 16384)))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_same_id_same_body_is_the_same_request(running: Running) -> None:
    one = running.generation.Generate(endless("twin"))
    await first_token(one)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await first_token(running.generation.Generate(request("twin", max_tokens=3)))
    assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
    one.cancel()


async def test_stop_strings_never_leak(running: Running) -> None:
    _, text, _ = await collect(running.generation.Generate(request(max_tokens=60)))
    stop = text[10:13]
    tokens, cut, finish = await collect(running.generation.Generate(request(max_tokens=60, stop=[stop])))
    assert cut == text[: text.index(stop)]
    assert finish.detail == FINISH.FINISH_DETAIL_STOP_STRING
    assert finish.stop_string == stop
    assert len(tokens) < 60


async def test_watch_steps_shows_what_ran(running: Running) -> None:
    watch = running.admin.WatchSteps(admin_pb2.WatchStepsRequest(include_block_tables=True))
    hello = await watch.read()
    assert not hello.records
    await collect(running.generation.Generate(request("seen", max_tokens=12, prompt=[3] * 100)))
    records: list[Any] = []
    while not any(record.left for record in records):
        records += (await watch.read()).records
    watch.cancel()
    (joined,) = [joined for record in records for joined in record.joined]
    assert (joined.request_id, joined.num_prompt_tokens) == ("seen", 100)
    computed = sum(sum(record.num_tokens) for record in records)
    assert computed in (111, 112), "prompt and output less the last, or one late token more"
    assert [list(record.num_tokens) for record in records[:2]] == [[64], [36]]
    assert sum(sum(record.num_sampled) for record in records) == 12
    blocks = [block for record in records for change in record.block_changes for block in change.appended]
    assert len(blocks) == len(set(blocks)) == 7


async def test_block_tables_can_be_seen(running: Running) -> None:
    call = running.generation.Generate(endless("seen"))
    await first_token(call)
    table = await running.admin.GetBlockTable(admin_pb2.GetBlockTableRequest(request_id="seen"))
    assert list(table.sequences[0].ref_counts) == [1] * len(table.sequences[0].block_tables[0].block_ids)
    call.cancel()


async def test_drain_refuses_and_waits(running: Running) -> None:
    call = running.generation.Generate(request(max_tokens=100))
    await first_token(call)
    health = health_pb2_grpc.HealthStub(running.channel).Watch(health_pb2.HealthCheckRequest())
    assert (await health.read()).status == health_pb2.HealthCheckResponse.SERVING
    waiting = running.admin.Drain(admin_pb2.DrainRequest(timeout_s=60))
    assert (await health.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await first_token(running.generation.Generate(request()))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    rest = [output async for response in call for output in response.outputs]
    assert rest[-1].finish.detail == FINISH.FINISH_DETAIL_MAX_TOKENS, "what ran was finished"
    assert (await waiting).num_remaining == 0
    await running.admin.Resume(admin_pb2.ResumeRequest())
    assert (await health.read()).status == health_pb2.HealthCheckResponse.SERVING
    health.cancel()
    assert len((await collect(running.generation.Generate(request(max_tokens=3))))[0]) == 3


async def test_an_executor_that_comes_back_costs_no_token(model: Path) -> None:
    """The executor goes away in the middle and another one takes its port: the stream goes on where it was."""
    options = {"num_gpu_blocks": 200, "max_num_seqs": 4}
    wanted = request(max_tokens=300, temperature=0.8, seed=3)
    async with AsyncExitStack() as first, AsyncExitStack() as second:
        address = await first.enter_async_context(executor_service(model, **options))
        running = await second.enter_async_context(scheduler_service(address, one_session=False))
        expected, _, _ = await collect(running.generation.Generate(wanted))
        call = running.generation.Generate(wanted)
        tokens = list((await first_token(call)).outputs[0].token_ids)
        await first.aclose()
        async with executor_service(model, listen=address, **options):
            async for response in call:
                for output in response.outputs:
                    assert output.first_token_index == len(tokens)
                    tokens += output.token_ids
            assert tokens == expected
            await running.wait_until_free()
            await second.aclose()
