"""`python -m scheduler_svc` as a process: its ready line, its signals, its exit codes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys

import grpc
import pytest

from cadenza.v1 import generation_pb2 as pb
from cadenza.v1 import generation_pb2_grpc, types_pb2
from cadenza_common.wire.transport import channel_options
from tests.helpers.scheduler.scripted_executor import ScriptedExecutor, serve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]


@contextlib.asynccontextmanager
async def started(*arguments):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "scheduler_svc", "--listen", "127.0.0.1:0", "--skip-tokenizer-init", *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=environment,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        process._transport.close()


@contextlib.asynccontextmanager
async def executor_served(**options):
    executor = ScriptedExecutor(**options)
    server, target = await serve(executor)
    try:
        yield executor, target
    finally:
        await server.stop(0)


async def address_of(process):
    line = (await process.stdout.readline()).decode()
    assert line.startswith("ready 127.0.0.1:"), (line, (await process.stderr.read()).decode())
    return line.split()[1]


async def ended(process):
    """Exit code, and what is left on stderr."""
    async with asyncio.timeout(40):
        errors = (await process.stderr.read()).decode()
        return await process.wait(), errors


def error_in(errors):
    """The one error line; the log of an executor that has just answered may follow it."""
    (line,) = [each for each in errors.splitlines() if each.startswith("error: ")]
    return line


@pytest.mark.interpreter
@pytest.mark.parametrize(("number", "options"), [(signal.SIGINT, ()), (signal.SIGTERM, ("--drain-timeout-s", "0"))])
async def test_serves_until_a_signal(number, options):
    """Ctrl-C stops it at once, and SIGTERM too if it is not to drain."""
    async with (
        executor_served() as (executor, target),
        started("--executor", target, *options) as process,
        grpc.aio.insecure_channel(await address_of(process), options=channel_options()) as channel,
    ):
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        request = pb.GenerateRequest(
            prompt=[types_pb2.PromptPart(tokens=types_pb2.TokenIds(ids=[1, 2]))],
            sampling_params=types_pb2.SamplingParams(seed=1, max_tokens=3),
        )
        responses = [r async for r in stub.Generate(request)]
        assert [i for r in responses for o in r.outputs for i in o.token_ids] == [101] * 3
        executor.going.clear()
        call = stub.Generate(request)
        async with asyncio.timeout(10):
            while (await stub.GetServerInfo(pb.GetServerInfoRequest())).load.num_running == 0:
                pass
        began = asyncio.get_running_loop().time()
        process.send_signal(number)
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
        code, errors = await ended(process)
        assert code == 0, errors
        assert asyncio.get_running_loop().time() - began < 15, "a drain takes 25 s"
        assert "Traceback" not in errors
        assert "serving toy" in errors
        executor.going.set()


async def test_signal_while_it_waits_for_the_executor():
    async with started("--executor", "127.0.0.1:1") as process:
        async with asyncio.timeout(20):
            while b"connecting to the executor at 127.0.0.1:1" not in await process.stderr.readline():
                pass
        process.terminate()
        code, errors = await ended(process)
        assert code == 0, errors
        assert "Traceback" not in errors


async def test_a_wrong_tokenizer_is_known_before_the_executor():
    arguments = ("--executor", "127.0.0.1:1", "--no-skip-tokenizer-init", "--tokenizer", "/nosuch/folder")
    async with started(*arguments) as process:
        code, errors = await ended(process)
        assert code == 1
        assert error_in(errors).startswith("error: there is no folder '/nosuch/folder'")
        assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% if %}", "the chat template does not compile: line 1: Expected an expression"),
        ("/nosuch/file", "'/nosuch/file' is no template, and no file: No such file or directory"),
    ],
)
async def test_a_wrong_chat_template_is_known_at_once(template, message):
    arguments = ("--executor", "127.0.0.1:1", "--no-skip-tokenizer-init", "--chat-template", template)
    async with started(*arguments) as process:
        code, errors = await ended(process)
        assert code == 2
        assert error_in(errors).startswith(f"error: --chat-template: {message}")
        assert "Traceback" not in errors


async def test_another_scheduler_at_the_start():
    refusal = (grpc.StatusCode.PERMISSION_DENIED, "scheduler x holds this executor")
    async with executor_served(refuse=refusal) as (_, target), started("--executor", target) as process:
        code, errors = await ended(process)
        assert code == 3
        assert "scheduler x holds this executor" in error_in(errors)
        assert error_in(errors).startswith("error: executor ")


async def test_fenced_later():
    async with executor_served() as (executor, target), started("--executor", target) as process:
        await address_of(process)
        async with asyncio.timeout(10):  # ready is said before the plan stream is open
            while not executor.running:  # noqa: ASYNC110 - the scripted executor has no event for it
                await asyncio.sleep(0.01)
        await executor.break_up(grpc.StatusCode.ABORTED)
        code, errors = await ended(process)
        assert code == 3, errors


@pytest.mark.interpreter
async def test_taken_port():
    async with executor_served() as (_, target), started("--executor", target, "--listen", target) as process:
        code, errors = await ended(process)
        assert code == 1
        assert error_in(errors) == f"error: cannot listen on {target}: the port is taken or not permitted"
        assert "Traceback" not in errors


async def test_wrong_option():
    async with started("--max-num-seqs", "0") as process:
        code, errors = await ended(process)
        assert code == 2
        assert errors == "error: --max-num-seqs: Input should be greater than or equal to 1, not '0'\n"


async def test_a_tokenizer_that_is_not_there(tmp_path):
    arguments = ("--no-skip-tokenizer-init", "--tokenizer", str(tmp_path))
    async with executor_served() as (_, target), started("--executor", target, *arguments) as process:
        code, errors = await ended(process)
        assert code == 1
        assert "holds no tokenizer" in error_in(errors)
