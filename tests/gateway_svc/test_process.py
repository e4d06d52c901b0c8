"""`python -m gateway_svc` as a process: its start, its end, and what it says."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys

import pytest
from aiohttp import ClientSession

from tests.helpers.scheduler.scheduler_world import script
from tests.helpers.service_process import service_process

pytestmark = pytest.mark.slow
BODY = {"prompt": "Hello", "seed": 1, "max_tokens": 50}
TEXT = "The quick brown fox"


@pytest.mark.interpreter
async def test_it_finishes_what_runs_at_sigterm_and_takes_nothing_new(w):
    script(w, TEXT)
    async with (
        service_process("gateway_svc", "--target", w.target, by="--http") as gateway,
        ClientSession(f"http://{gateway.address}") as http,
    ):
        w.executor.pause_after = 3
        running = asyncio.create_task(http.post("/v1/completions", json=BODY))
        await w.until(lambda: w.engine._live)
        gateway.process.send_signal(signal.SIGTERM)
        await gateway.logged("draining: 1 requests")
        w.executor.pause_after = None
        w.executor.going.set()
        async with await running as response:
            assert (await response.json())["choices"][0]["text"] == TEXT
        async with asyncio.timeout(20):
            assert await gateway.process.wait() == 0


async def test_a_second_signal_ends_what_runs_and_tells_its_clients(w):
    script(w, TEXT)
    async with (
        service_process("gateway_svc", "--target", w.target, by="--http") as gateway,
        ClientSession(f"http://{gateway.address}") as http,
    ):
        w.executor.pause_after = 3
        running = asyncio.create_task(http.post("/v1/completions", json=BODY))
        async with http.post("/v1/completions", json={**BODY, "stream": True}) as stream:
            first = await stream.content.readuntil(b"\n\n")
            await w.until(lambda: len(w.engine._live) == 2)
            gateway.process.send_signal(signal.SIGTERM)
            await gateway.logged("draining")
            gateway.process.send_signal(signal.SIGINT)
            rest = (first + await stream.read()).decode()
        async with asyncio.timeout(20):
            assert await gateway.process.wait() == 0
        *_, failed, done = rest.split("\n\n")[:-1]
        assert json.loads(failed.removeprefix("data: "))["error"]["message"] == "the gateway is stopping"
        assert done == "data: [DONE]"
        async with await running as response:
            assert response.status == 503
            assert "Retry-After" in response.headers
            assert (await response.json())["error"]["message"] == "the gateway is stopping"
        await w.until(lambda: not w.engine._live)
        w.executor.going.set()
    await w.idle()


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        pytest.param(
            *(["--http", "0.0.0.0:0"], 2, "--http: 0.0.0.0 is beyond loopback"), marks=pytest.mark.interpreter
        ),
        (["--htpp", "1"], 2, "--htpp: there is no such option; did you mean --http?"),
        (["--http-tls-cert", "a.pem"], 2, "http-tls-cert and http-tls-key need each other"),
        (["--http-api-key-file", "/nowhere"], 2, "option http-api-key-file: /nowhere: no such file or directory"),
        (["--target", "example.org:1"], 2, "API keys are not sent to example.org without TLS"),
        (["--http", "192.0.2.1:1", "--insecure"], 1, "cannot listen on 192.0.2.1:1"),
    ],
)
def test_what_is_wrong_is_one_line(options, code, message):
    command = [sys.executable, "-m", "gateway_svc", *options]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (answer.returncode, answer.stdout) == (code, "")
    (line,) = answer.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line
