"""`cadenza executors` against a server that has two executors and does what it is asked to."""

from __future__ import annotations

import asyncio
import json

import grpc
import pytest

from cadenza.calls.loop_thread import LoopThread
from cadenza.v1 import admin_pb2, admin_pb2_grpc, generation_pb2, generation_pb2_grpc, types_pb2
from cadenza_cli.app import run

FIRST, SECOND = "127.0.0.1:50052", "[::1]:50053"


class FakeServer(generation_pb2_grpc.GenerationServiceServicer, admin_pb2_grpc.AdminServiceServicer):
    """Notes the calls about executors; knows two, of which the second is refused."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, float | None]] = []
        self.num_remaining = 0
        self.drains_until_shown = False
        self.num_infos = 0
        self.shown = asyncio.Event()

    async def GetServerInfo(self, request, context):
        self.num_infos += 1
        if self.num_infos == 2:  # the first one has been shown
            self.shown.set()
        first = generation_pb2.ExecutorInfo(
            target=FIRST, connected=True, incarnation=2**63, device="cpu", index=0, num_running=3, num_waiting=2,
            num_swapped=1, num_device_blocks=2048, num_used_device_blocks=12, num_steps=1234, num_output_tokens=56789,
            num_prefix_queries=4, num_prefix_hits=3,
        )  # fmt: skip
        memory = [
            types_pb2.MemoryPart(name="weights\x1b", computed_bytes=15 << 30, measured_bytes=16 << 30),
            types_pb2.MemoryPart(name="KV blocks", computed_bytes=50 << 20, measured_bytes=-(1 << 20)),
        ]
        second = generation_pb2.ExecutorInfo(
            target=SECOND, index=4, device="gpu\x1b", refusal="another model, b\x1b", memory=memory
        )
        return generation_pb2.GetServerInfoResponse(executors=[first, second])

    async def _note(self, name, request, context):
        timeout_s = request.timeout_s if name == "drain" and request.HasField("timeout_s") else None
        self.calls.append((name, request.target, timeout_s))
        if name != "add" and request.target not in (FIRST, SECOND):
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no executor {request.target}")

    async def AddExecutor(self, request, context):
        await self._note("add", request, context)
        if request.target == FIRST:
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, f"executor {FIRST} is there already")
        return admin_pb2.AddExecutorResponse()

    async def DrainExecutor(self, request, context):
        await self._note("drain", request, context)
        if self.drains_until_shown:
            await self.shown.wait()
        return admin_pb2.DrainExecutorResponse(num_remaining=self.num_remaining)

    async def ResumeExecutor(self, request, context):
        await self._note("resume", request, context)
        return admin_pb2.ResumeExecutorResponse()

    async def RemoveExecutor(self, request, context):
        await self._note("remove", request, context)
        if request.target == SECOND:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "it is the last executor")
        return admin_pb2.RemoveExecutorResponse()


@pytest.fixture
def server():
    return FakeServer()


@pytest.fixture
def executors(server):
    """Runs `cadenza executors` with these arguments on that server."""

    async def start():
        made = grpc.aio.server()
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(server, made)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(server, made)
        port = made.add_insecure_port("127.0.0.1:0")
        await made.start()
        return made, f"127.0.0.1:{port}"

    loop = LoopThread.shared()
    started, address = loop.run(start())
    yield lambda *arguments: run(["executors", *arguments, "--target", address])
    loop.run(started.stop(0))


def test_the_list_has_a_line_for_each_executor_and_the_reason_of_a_refusal(executors, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    assert executors("list") == 0
    head, first, second, reason, memory = capsys.readouterr().out.splitlines()
    assert head.split()[:5] == ["executor", "state", "device", "KV", "blocks"]
    assert first.split() == [FIRST, "serving", "cpu", "12/2,048", "3", "2", "1", "1,234", "56,789", "75%"]
    assert second.split() == [SECOND, "refused", "gpu", "-", "0", "0", "0", "0", "0", "-"]
    assert reason == f"{SECOND} is refused: another model, b"
    assert memory == (
        f"{SECOND} has of its GPU: weights 16.0 GiB (15.0 GiB computed), KV blocks -1.0 MiB (50.0 MiB computed)"
    )


def test_the_list_as_json(executors, capsys):
    assert executors("list", "--json") == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["target"], first["state"], first["num_output_tokens"]) == (FIRST, "serving", 56789)
    assert first["incarnation"] == "8000000000000000", "too large for a number of JSON"
    assert (second["index"], second["state"], second["refusal"]) == (4, "refused", "another model, b\x1b")
    assert (first["memory"], second["memory"][0]["computed_bytes"]) == ([], 15 << 30)


@pytest.mark.parametrize(
    ("arguments", "call", "output"),
    [
        (["add", "10.0.0.7"], ("add", "10.0.0.7:50052", None), "10.0.0.7:50052 is added and takes requests once it"),
        (["drain", FIRST], ("drain", FIRST, None), f"{FIRST} is empty and takes no new requests\n"),
        (["drain", "::1", "--timeout-s", "0"], ("drain", "[::1]:50052", 0.0), ""),
        (["drain", SECOND, "--timeout-s", "2.5"], ("drain", SECOND, 2.5), f"{SECOND} is empty"),
        (["resume", FIRST], ("resume", FIRST, None), f"{FIRST} takes new requests again\n"),
        (["remove", FIRST], ("remove", FIRST, None), f"{FIRST} is removed\n"),
    ],
)
def test_each_command_is_one_call(executors, server, capsys, arguments, call, output):
    code = executors(*arguments)
    out, err = capsys.readouterr()
    assert server.calls == [call]
    if output:
        assert (code, err) == (0, "")
        assert out.startswith(output)
    else:
        assert (code, out, err) == (1, "", "cadenza: there is no executor [::1]:50052\n")


def test_an_empty_address_is_refused(executors, server, capsys):
    assert executors("add", "") == 2
    assert capsys.readouterr().err == "cadenza: executor: must be HOST:PORT\n"
    assert server.calls == []


def test_requests_that_are_left_are_a_failure(executors, server, capsys):
    server.num_remaining = 1
    assert executors("drain", FIRST, "--timeout-s", "0.5") == 1
    assert capsys.readouterr().out == f"{FIRST} has 1 request left after 0.5 s, and takes no new ones\n"


def test_a_terminal_shows_how_many_are_left(executors, server, capsys, monkeypatch):
    server.drains_until_shown = True
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert executors("drain", FIRST) == 0
    assert f"draining {FIRST}: 4 requests left, 0 s" in capsys.readouterr().err, "running and swapped ones"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["add", FIRST], 1, f"executor {FIRST} is there already"),
        (["remove", SECOND], 1, "it is the last executor"),
        (["resume", "elsewhere:1"], 1, "there is no executor elsewhere:1"),
        (["add", "http://x"], 2, "executor: 'http://x' is not HOST:PORT: it must not have a scheme, path or space"),
        (["drain", FIRST, "--timeout-s", "-1"], 2, "option timeout-s: must be 0 or more seconds, not -1"),
        (["drain"], 2, "Missing argument 'HOST:PORT'."),
    ],
)
def test_errors_are_one_line(executors, capsys, arguments, code, message):
    assert executors(*arguments) == code
    assert capsys.readouterr() == ("", f"cadenza: {message}\n")


def test_without_a_command_they_are_named(capsys):
    assert run(["executors"]) == 2
    commands = "list, add, drain, resume, remove"
    assert capsys.readouterr().err == f"cadenza: `cadenza executors` needs one of its commands: {commands}\n"
    assert run(["executors", "list", "--target", "127.0.0.1:1"]) == 1
    assert capsys.readouterr().err.startswith("cadenza: no service at 127.0.0.1:1")
