"""Tenants on a whole service over gRPC: tokens, isolation, and changes of the file while streams run."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import sys

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cadenza import AsyncClient, Client, PermissionDeniedError, SamplingParams, UnauthenticatedError
from cadenza.v1 import admin_pb2, generation_pb2_grpc
from cadenza.v1 import generation_pb2 as pb
from cadenza.v1.admin_pb2_grpc import AdminServiceStub
from scheduler_svc.app import Service
from scheduler_svc.config import SchedulerConfig
from tests.helpers.scheduler.scheduler_world import collect, error_of, request, world
from tests.helpers.services import Running, executor_service
from tests.helpers.tenants import bearer, token, write_tenants

NEEDS_TOKEN = "this service needs a valid token, in the call's metadata: authorization: Bearer TOKEN"
PROMPT = list(range(5, 69))  # four blocks of 16 tokens


@pytest.fixture
def file(tmp_path):
    return tmp_path / "tenants.toml"


@contextlib.asynccontextmanager
async def serving(file, tenants=None, **options):
    tenants = tenants or {"gold": {}, "free": {}, "ops": {"admin": True}}
    async with world(tenants=write_tenants(file, tenants), skip_tokenizer_init=True, **options) as w:
        yield w


def change(w, file, tenants):
    """Replace the file; the service reads it as after SIGHUP."""
    write_tenants(file, tenants)
    w.service.reload_tenants()


def ids_request(seed=1, **fields):
    return request(ids=PROMPT, seed=seed, ignore_eos=True, **fields)


def code_of(status):
    return next(code for code in grpc.StatusCode if code.value[0] == status.code)


async def cached_tokens(running, name, **fields):
    out = await collect(running.generation.Generate(ids_request(**fields), metadata=bearer(name)))
    return out.stats.num_cached_tokens


async def test_cached_prefixes_are_shared_within_a_tenant_and_on_purpose_alone(file):
    tenants = {"gold": {}, "free": {}, "a": {"shared_prefixes": "team"}, "b": {"shared_prefixes": "team"}, "team": {}}
    async with executor_service("simulated", simulate="instant", max_model_len=256, block_size=16) as address:
        service = Service(
            SchedulerConfig(
                executor=[address], listen="127.0.0.1:0", skip_tokenizer_init=True, tenants=write_tenants(file, tenants)
            )
        )
        try:
            target = await service.start()
            await service.open()
            async with grpc.aio.insecure_channel(target) as channel:
                running = Running(target, channel)
                assert await cached_tokens(running, "gold") == 0
                assert await cached_tokens(running, "gold") == 48, "the last block is computed"
                for name in ("free", "a", "team"):
                    assert await cached_tokens(running, name) == 0
                assert await cached_tokens(running, "b") == 48
                assert await cached_tokens(running, "b", cache_salt=b"own") == 0
        finally:
            await service.stop()


async def test_ids_of_another_tenant_are_unknown_and_free(file):
    async with serving(file) as w:
        w.executor.going.clear()
        call = w.stub.Generate(ids_request(request_id="a", resume_grace_s=60), metadata=bearer("gold"))
        await w.until(lambda: w.engine.find("gold", "a") is not None)
        messages = []
        for request_id in ("a", "unknown"):
            message = pb.GenerateRequest(request_id=request_id, resume=pb.ResumePoint())
            status = await error_of(w.stub.Generate(message, metadata=bearer("free")))
            assert code_of(status) is grpc.StatusCode.NOT_FOUND
            messages.append(status.message.replace(repr(request_id), "ID"))
            assert not (await w.stub.Abort(pb.AbortRequest(request_id=request_id), metadata=bearer("free"))).aborted
        assert len(set(messages)) == 1, "exactly as an unknown id"
        session = w.stub.Session(metadata=bearer("free"))
        await session.write(pb.SessionRequest(abort=pb.AbortRequest(request_id="a")))
        own = w.stub.Generate(ids_request(request_id="a", seed=2), metadata=bearer("free"))
        await w.until(lambda: w.engine.find("free", "a") is not None)
        await session.done_writing()
        assert await session.read() is grpc.aio.EOF
        w.executor.going.set()
        assert len((await collect(call)).ids) == len((await collect(own)).ids) == 8


async def test_what_a_tenant_sees_of_the_server(file):
    async with serving(file) as w:
        w.executor.going.clear()
        calls = [w.stub.Generate(ids_request(seed=seed), metadata=bearer("gold")) for seed in range(3)]
        calls.append(w.stub.Generate(ids_request(), metadata=bearer("free")))
        await w.until(lambda: w.engine.num_unfinished == 4)

        async def info(name):
            return await w.stub.GetServerInfo(pb.GetServerInfoRequest(), metadata=bearer(name))

        free, gold, ops = await info("free"), await info("gold"), await info("ops")
        assert {field.name for field, _ in free.load.ListFields()} <= {"num_running", "num_waiting"}
        assert [info.load.num_running + info.load.num_waiting for info in (free, gold, ops)] == [1, 3, 4]
        assert [each.name for each in free.tenants] == ["free"]
        assert not free.executors
        assert not free.resident_bytes
        assert "tenants" not in free.options
        assert free.options["order"] == "fair"
        unfinished = [(each.name, each.num_running + each.num_waiting) for each in ops.tenants]
        assert unfinished == [("free", 1), ("gold", 3), ("ops", 0)]
        assert ops.executors
        assert ops.load.num_used_device_blocks
        assert token("gold") not in str(ops)
        w.executor.going.set()
        for call in calls:
            await collect(call)


async def test_health_and_reflection_need_no_token(file):
    async with serving(file) as w:
        assert (await w.health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
        stub = reflection_pb2_grpc.ServerReflectionStub(w.channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="*")]))
        answer = await call.read()
        assert "cadenza.v1.GenerationService" in {each.name for each in answer.list_services_response.service}


async def test_each_call_is_checked_whoever_called_first(file):
    """Interceptors keep handlers by method: none may keep the answer to one caller's token."""
    async with serving(file) as w:
        await w.admin.Resume(admin_pb2.ResumeRequest(), metadata=bearer("ops"))
        for metadata, code in (
            (None, grpc.StatusCode.UNAUTHENTICATED),
            (bearer("gold"), grpc.StatusCode.PERMISSION_DENIED),
        ):
            status = await error_of(w.admin.Resume(admin_pb2.ResumeRequest(), metadata=metadata))
            assert code_of(status) is code
        status = await error_of(w.stub.GetModelInfo(pb.GetModelInfoRequest()))
        assert code_of(status) is grpc.StatusCode.UNAUTHENTICATED
        assert (await w.stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=bearer("gold"))).vocab_size


async def test_a_revoked_token_starts_nothing_and_what_runs_goes_on(file):
    async with serving(file) as w:
        w.executor.going.clear()
        running = w.stub.Generate(ids_request(request_id="g", resume_grace_s=60), metadata=bearer("gold"))
        session = w.stub.Session(metadata=bearer("gold"))
        await session.write(pb.SessionRequest(generate=ids_request(request_id="s", seed=2)))
        await w.until(lambda: w.engine.num_unfinished == 2)
        change(w, file, {"gold": {"tokens": [1]}, "ops": {"admin": True}})
        again = pb.SessionRequest(generate=ids_request(request_id="t", seed=3))
        resumed = pb.SessionRequest(generate=pb.GenerateRequest(request_id="g", resume=pb.ResumePoint()))
        for message in (again, resumed):
            await session.write(message)
            (event,) = (await session.read()).events
            assert event.error.code == grpc.StatusCode.UNAUTHENTICATED.value[0]
            assert (event.error.message, event.done) == (NEEDS_TOKEN, True)
        status = await error_of(w.stub.Generate(ids_request(seed=4), metadata=bearer("gold")))
        assert (code_of(status), status.message) == (grpc.StatusCode.UNAUTHENTICATED, NEEDS_TOKEN)
        status = await error_of(w.stub.Generate(resumed.generate, metadata=bearer("gold")))
        assert code_of(status) is grpc.StatusCode.UNAUTHENTICATED, "a replay of a revoked token"
        w.executor.going.set()
        assert len((await collect(running)).ids) == 8
        await session.done_writing()
        events = []
        while (message := await session.read()) is not grpc.aio.EOF:
            events += message.events
        assert sum(len(output.token_ids) for event in events for output in event.response.outputs) == 8
        assert events[-1].done
        # The next token of the same tenant gets at its requests.
        out = await collect(w.stub.Generate(resumed.generate, metadata=bearer("gold", 1)))
        assert len(out.ids) == 8


async def test_a_token_may_be_used_from_two_connections_and_reaches_its_own_requests_alone(file):
    """What a replay can do: all that the token can, until it is revoked. See docs/tenants.md."""
    async with serving(file) as w, grpc.aio.insecure_channel(w.target) as channel:
        other = generation_pb2_grpc.GenerationServiceStub(channel)
        first = w.stub.Generate(ids_request(request_id="a", resume_grace_s=60), metadata=bearer("gold"))
        assert len((await collect(first)).ids) == 8
        again = pb.GenerateRequest(request_id="a", resume=pb.ResumePoint())
        assert len((await collect(other.Generate(again, metadata=bearer("gold")))).ids) == 8
        status = await error_of(other.Generate(again, metadata=bearer("free")))
        assert code_of(status) is grpc.StatusCode.NOT_FOUND


async def test_a_watch_of_steps_ends_when_its_token_is_revoked(file):
    async with serving(file) as w:
        watch = w.admin.WatchSteps(admin_pb2.WatchStepsRequest(), metadata=bearer("ops"))
        await watch.read()
        change(w, file, {"gold": {}, "ops": {"admin": True, "tokens": [1]}})
        await collect(w.stub.Generate(ids_request(), metadata=bearer("gold")))
        assert await watch.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_tokens_rotate_under_load_without_a_stream_lost(file):
    """A second token, clients that take it, the first one revoked: every stream brings all of its tokens."""
    async with serving(file) as w:
        current = [0]
        stop = asyncio.Event()
        counts = []

        async def user(index):
            while not stop.is_set():
                async with AsyncClient(w.target, token=token("gold", current[0])) as client:
                    params = SamplingParams(max_tokens=20, ignore_eos=True, seed=index)
                    deltas = [delta async for delta in client.stream(PROMPT, params)]
                    counts.append(sum(len(sample.token_ids) for delta in deltas for sample in delta.outputs))

        async with asyncio.TaskGroup() as group:
            for index in range(8):
                group.create_task(user(index))
            for rotation in range(1, 6):
                done = len(counts)
                change(w, file, {"gold": {"tokens": [rotation - 1, rotation]}})
                current[0] = rotation
                await w.until(lambda done=done: len(counts) >= done + 16)
                change(w, file, {"gold": {"tokens": [rotation]}})
                await w.until(lambda done=done: len(counts) >= done + 24)
            stop.set()
        assert set(counts) == {20}
        assert w.engine.quotas.usage("gold").num_output_tokens == 20 * len(counts)


async def test_the_client_library_and_its_errors(file):
    async with serving(file) as w:
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        async with AsyncClient(w.target, token=token("gold")) as client:
            (output,) = await client.generate([PROMPT], params)
            assert len(output.outputs[0].token_ids) == 4
            assert [each.name for each in (await client.server_info()).tenants] == ["gold"]
            stub = client.stub_of(AdminServiceStub)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Drain(admin_pb2.DrainRequest())
            assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
            assert token("gold") not in repr(client)
        async with AsyncClient(w.target) as client:
            for call in (client.model_info(), client.generate([PROMPT], params), client.abort("a")):
                with pytest.raises(UnauthenticatedError, match="needs a valid token"):
                    await call
        with Client(w.target, token=token("gold")) as blocking:
            outputs = await asyncio.to_thread(blocking.generate, [PROMPT] * 3, params)
            assert len(outputs) == 3


async def test_limits_are_waited_for_by_the_client(file):
    """RESOURCE_EXHAUSTED with RetryInfo: a batch takes its time and loses nothing."""
    async with serving(file, {"gold": {"max_requests": 2}}) as w, AsyncClient(w.target, token=token("gold")) as client:
        outputs = await client.generate([PROMPT] * 8, SamplingParams(max_tokens=4, ignore_eos=True))
        assert [len(each.outputs[0].token_ids) for each in outputs] == [4] * 8
        assert w.engine.quotas.usage("gold").num_rejected > 0


async def test_no_token_is_written_anywhere(file, tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    options = {"record": str(tmp_path / "log"), "journal": str(tmp_path / "journal"), "log_requests": True}
    async with serving(file, **options) as w:
        await collect(w.stub.Generate(ids_request(resume_grace_s=60), metadata=bearer("gold")))
        await error_of(w.stub.Generate(ids_request(), metadata=bearer("gold", 1)))
        await error_of(w.admin.Drain(admin_pb2.DrainRequest(), metadata=bearer("gold")))
        info = await w.stub.GetServerInfo(pb.GetServerInfoRequest(), metadata=bearer("ops"))
        change(w, file, {"gold": {"tokens": [1]}})
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert any(b"gold" in content for content in written), "the journal knows the tenant"
    for text in (caplog.text.encode(), str(info).encode(), *written):
        assert not re.search(rb"cadenza_token", text)


async def test_refused_calls_are_counted_by_reason_and_logged_once_for_each(file, caplog):
    async with serving(file, {"gold": {"tokens": [0, 1]}, "ops": {"admin": True}}) as w:
        change(w, file, {"gold": {"tokens": [0]}, "ops": {"admin": True}})
        calls = {
            "no_token": [None, (("authorization", "Bearer "),)],
            "unknown_token": [bearer("gold", 7), bearer("gold", 8), (("authorization", "Bearer " + "x" * 600),)],
            "revoked_token": [bearer("gold", 1)],
        }
        messages = set()
        for metadata in (each for group in calls.values() for each in group):
            messages.add((await error_of(w.stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=metadata))).message)
        await error_of(w.admin.Drain(admin_pb2.DrainRequest(), metadata=bearer("gold")))
        await w.stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=bearer("gold"))
        assert messages == {NEEDS_TOKEN}, "the reason is for the operator alone"
        counts = w.service._metrics.snapshot().service.listener.refused
        expected = {**{reason: len(group) for reason, group in calls.items()}, "no_admin": 1}
        assert {reason: count for reason, count in counts.items() if count} == expected
        assert counts["late_message"] == 0, "a series that has not begun cannot be alerted on"
    lines = [line.getMessage() for line in caplog.records if line.name == "cadenza_common.metrics.listener_counts"]
    assert sorted(lines) == sorted(f"refused a call of ipv4:127.0.0.1: {reason}" for reason in expected)
    assert "cadenza_token" not in caplog.text


async def test_without_a_file_no_token_is_needed_and_one_is_ignored():
    async with world(skip_tokenizer_init=True) as w:
        out = await collect(w.stub.Generate(ids_request(), metadata=bearer("gold")))
        assert len(out.ids) == 8
        info = await w.stub.GetServerInfo(pb.GetServerInfoRequest())
        assert [(each.name, each.num_output_tokens) for each in info.tenants] == [("", 8)]
        assert info.options["order"] == "fcfs"
        await w.admin.Drain(admin_pb2.DrainRequest(timeout_s=0))


async def test_an_admin_call_of_the_library_is_refused_by_name(file):
    from cadenza.steps.watch import watch_steps

    async with serving(file) as w, AsyncClient(w.target, token=token("gold")) as client:
        with pytest.raises(PermissionDeniedError, match="a tenant with admin = true"):
            async with watch_steps(client):
                pass


async def command(*words, **environment):
    """The exit code of a process, and what it wrote to stderr."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *words, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **environment},
    )  # fmt: skip
    _, errors = await process.communicate()
    return process.returncode, errors.decode()


async def test_commands_say_which_token_is_missing(file):
    where = "--token-file FILE or CADENZA_TOKEN"
    async with serving(file) as w:
        to = ("--target", w.target)
        found = await asyncio.gather(
            command("cadenza", "drain", *to),
            command("cadenza", "top", "--once", *to, CADENZA_TOKEN=token("gold", 1)),
            command("cadenza", "executors", "list", *to, CADENZA_TOKEN=token("gold")),
            command("cadenza", "top", "--once", *to, CADENZA_TOKEN=token("gold")),
            command("scheduler_svc", "--tenants", str(file.with_name("none")), "--listen", "127.0.0.1:0"),
        )
    assert [code for code, _ in found] == [1] * 5
    drain, wrong, listed, top, service = [errors for _, errors in found]
    assert drain == f"cadenza: {NEEDS_TOKEN} (give one with {where})\n"
    assert wrong == f"cadenza: {NEEDS_TOKEN} (that of {where} is unknown or revoked)\n"
    assert listed.endswith(f"a tenant with admin = true (give an admin's with {where})\n")
    assert top.endswith(f"a tenant with admin = true (give an admin's with {where})\n")
    assert re.search(r"error: --tenants .*none: no such file or directory\n", service)
