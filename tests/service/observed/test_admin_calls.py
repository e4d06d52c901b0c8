"""Infos, Tokenize and Detokenize, step records, block tables and draining over gRPC."""

from __future__ import annotations

import asyncio

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2

from cadenza.v1 import admin_pb2, types_pb2
from cadenza.v1 import generation_pb2 as pb
from tests.helpers.models.toy_tokenizers import byte_level
from tests.helpers.scheduler.scheduler_world import collect, error_of, request, violation

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("no_errors_are_logged")]


async def test_tokenize_and_detokenize(w):
    text = "Hello, 你好 😀"
    ids = (await w.stub.Tokenize(pb.TokenizeRequest(prompt=[types_pb2.PromptPart(text=text)]))).token_ids
    assert list(ids) == byte_level().encode(text)
    assert (await w.stub.Detokenize(pb.DetokenizeRequest(token_ids=ids))).text == text
    assert violation(await error_of(w.stub.Detokenize(pb.DetokenizeRequest(token_ids=[1, 512])))) == "token_ids[1]"
    assert violation(await error_of(w.stub.Tokenize(pb.TokenizeRequest()))) == "prompt"
    long = (await w.stub.Tokenize(pb.TokenizeRequest(prompt=[types_pb2.PromptPart(text=text * 2000)]))).token_ids
    assert len(long) > 2000


async def test_infos(w, tokenizer_folder):
    info = await w.stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (info.model, info.vocab_size, info.max_model_len, list(info.eos_token_ids)) == ("toy", 512, 256, [0])
    assert info.has_tokenizer
    assert info.has_chat_template
    assert not info.HasField("bos_token_id")
    assert info.fingerprint.digest == b"d" * 32
    server = await w.stub.GetServerInfo(pb.GetServerInfoRequest())
    assert server.options["tokenizer"] == tokenizer_folder
    assert server.options["max_num_seqs"] == "64"
    assert server.options["skip_tokenizer_init"] == "false"
    assert server.executors[0].connected
    assert server.executors[0].incarnation == 7
    assert server.load.num_device_blocks == 256
    assert not server.draining


async def test_memory_of_both_processes(w):
    async def server_info():
        return await w.stub.GetServerInfo(pb.GetServerInfoRequest())

    server = await server_info()
    assert server.resident_bytes == pytest.approx(psutil.Process().memory_info().rss, rel=0.1)
    assert server.executors[0].resident_bytes == 5_000
    assert tuple(server.executors[0].memory) == w.executor.memory
    w.executor.resident_bytes = 6_000
    async with asyncio.timeout(10):
        while (await server_info()).executors[0].resident_bytes != 6_000:
            pass
    w.executor.refuse = grpc.StatusCode.UNAVAILABLE, "not now"
    await w.executor.break_up()
    await w.until(lambda: not w.engine.connected)
    assert (await server_info()).executors[0].resident_bytes == 0


async def test_watch_steps_and_block_tables(w):
    watch = w.admin.WatchSteps(admin_pb2.WatchStepsRequest(include_block_tables=True))
    first = await watch.read()
    assert not first.records
    w.executor.going.clear()
    call = w.stub.Generate(request(ids=[3] * 20, request_id="a"))
    await w.until(lambda: w.engine.load().num_running == 1)
    table = await w.admin.GetBlockTable(admin_pb2.GetBlockTableRequest(request_id="a"))
    assert len(table.sequences[0].block_tables[0].block_ids) == 2
    assert list(table.sequences[0].ref_counts) == [1, 1]
    w.executor.going.set()
    await collect(call)
    records = []
    while sum(sum(r.num_sampled) for r in records) < 8:
        records += (await watch.read()).records
    assert records[0].joined[0].request_id == "a"
    assert list(records[0].num_tokens) == [20]
    assert records[0].status == 1
    assert any(change.appended for change in records[0].block_changes)
    # Without KV groups and states nothing else is sent.
    sent = {field.name for record in records for change in record.block_changes for field, _ in change.ListFields()}
    assert sent <= {"sequence_id", "appended", "cleared"}
    assert not any(record.freed_pages or record.state_copies for record in records)
    watch.cancel()
    status = await error_of(w.admin.GetBlockTable(admin_pb2.GetBlockTableRequest(request_id="a")))
    assert status.code == grpc.StatusCode.NOT_FOUND.value[0]


async def test_a_watch_with_an_interval_gets_the_records_of_many_steps_in_one_message(w):
    watch = w.admin.WatchSteps(admin_pb2.WatchStepsRequest(min_interval_s=0.25))
    assert not (await watch.read()).records
    ids = (await collect(w.stub.Generate(request(max_tokens=100, ignore_eos=True)))).ids
    messages = []
    while sum(sum(record.num_sampled) for message in messages for record in message.records) < len(ids):
        messages.append(await watch.read())
    steps = [record.step_id for message in messages for record in message.records]
    assert steps == list(range(steps[0], steps[0] + len(steps)))
    assert len(steps) >= 100
    assert len(messages) < len(steps) / 8
    watch.cancel()


async def test_drain_and_resume(w):
    w.executor.going.clear()
    call = w.stub.Generate(request(request_id="a"))
    await w.until(lambda: w.engine.find("", "a") is not None)
    assert (await w.admin.Drain(admin_pb2.DrainRequest(timeout_s=0.05))).num_remaining == 1
    assert (await w.stub.GetServerInfo(pb.GetServerInfoRequest())).draining
    status = await error_of(w.stub.Generate(request()))
    assert status.code == grpc.StatusCode.UNAVAILABLE.value[0]
    check = await w.health.Check(health_pb2.HealthCheckRequest())
    assert check.status == health_pb2.HealthCheckResponse.NOT_SERVING
    draining = w.admin.Drain(admin_pb2.DrainRequest())
    w.executor.going.set()
    assert (await draining).num_remaining == 0
    assert len((await collect(call)).ids) == 8
    await w.admin.Resume(admin_pb2.ResumeRequest())
    assert len((await collect(w.stub.Generate(request()))).ids) == 8
    assert violation(await error_of(w.admin.Drain(admin_pb2.DrainRequest(timeout_s=-1)))) == "timeout_s"
