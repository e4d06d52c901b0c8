"""Both services with --log-format json under `cadenza up`: each line an object, with ids and without texts."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys

import grpc
import pytest

from cadenza import Client, SamplingParams
from cadenza.errors import InvalidRequestError
from cadenza.v1 import generation_pb2 as pb
from tests.helpers.paths import ROOT
from tests.helpers.scheduler.scheduler_world import request, world

MARKER = "marker-7f3a"
DEMO = str(ROOT / "models" / "cadenza-demo")
UP = [sys.executable, "-m", "cadenza", "up", DEMO, "--port", "0", "--log-format", "json"]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_each_line_of_up_is_an_object_without_texts(tmp_path) -> None:
    log = tmp_path / "log"
    with log.open("w") as stderr:
        up = subprocess.Popen(
            [*UP, "--simulate", "instant", "--log-requests"], stdout=subprocess.PIPE, stderr=stderr, text=True
        )
        try:
            assert up.stdout is not None
            target = up.stdout.readline().removeprefix("ready ").strip()
            with Client(target) as client:
                (output,) = client.generate([MARKER], SamplingParams(max_tokens=4, ignore_eos=True))
                with pytest.raises(InvalidRequestError):
                    client.generate([MARKER], SamplingParams(logprobs=10**6, stop=[MARKER]))
                with pytest.raises(InvalidRequestError):
                    client.chat([{"role": MARKER, "content": MARKER * 9000}])
        finally:
            up.send_signal(signal.SIGTERM)
            assert up.wait(30) == 0
            up.stdout.close()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert {line["service"] for line in lines} == {"cadenza", "executor", "scheduler"}
    assert all({"ts", "level", "logger", "message"} <= set(line) for line in lines)
    (ended,) = (line for line in lines if line.get("request_id") == output.request_id)
    assert "output 4 tokens" in ended["message"]
    (opened,) = (line for line in lines if line["service"] == "executor" and line.get("epoch"))
    assert opened["logger"] == "executor_svc.service.servicer"
    (session,) = (line for line in lines if line["service"] == "scheduler" and line.get("epoch"))
    assert session["executor"].startswith("127.0.0.1:")
    assert len([line for line in lines if "refused with" in line["message"]]) == 2
    assert MARKER not in log.read_text()


@pytest.mark.slow
def test_an_error_that_ends_up_is_an_object_too(tmp_path) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text("no costs")
    ended = subprocess.run([*UP, "--simulate", str(costs)], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    *_, last = (json.loads(line) for line in ended.stderr.splitlines())
    assert (last["level"], last["service"]) == ("critical", "cadenza")
    assert last["message"].startswith("the executor did not start: exit code 1: ")


async def test_an_error_inside_is_logged_without_the_text_that_it_quotes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The client has the message: it is about its own request."""

    def fail(*_: object) -> None:
        raise KeyError(MARKER)

    async with world(log_requests=True) as w:
        monkeypatch.setattr(w.engine, "submit", fail)
        call = w.stub.Generate(request(ids=[5]))
        assert await call.code() is grpc.StatusCode.INTERNAL
        assert MARKER in await call.details()
        session = w.stub.Session()
        await session.write(pb.SessionRequest(generate=request(request_id="a", ids=[5])))
        await session.done_writing()
        response = await session.read()
        assert MARKER in response.events[0].error.message
    assert "KeyError" in caplog.text
    assert "in fail" in caplog.text, "the frames are there"
    assert not [record for record in caplog.records if record.levelno >= logging.INFO and MARKER in record.getMessage()]
    assert MARKER not in caplog.text.replace("raise KeyError(MARKER)", "")
