"""Real Ray Serve, by the manifest's configuration: answers, streams, a killed scheduler, a killed replica, the end."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from cadenza import AsyncClient, SamplingParams
from tests.helpers.machine.loopback import new_address
from tests.helpers.paths import ROOT
from tests.helpers.ray_cluster import end_within, ray_machines
from tests.helpers.ray_serve import Served, serve_config, served
from tests.helpers.service_scripts import until

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        importlib.util.find_spec("starlette") is None, reason="Ray Serve is not installed: the extra ray-serve"
    ),
]
MODEL = "demo"
CHAT: dict[str, Any] = {
    "model": MODEL, "messages": [{"role": "user", "content": "What is 27 + 48?"}], "max_tokens": 40, "seed": 1,
    "temperature": 0.8, "ignore_eos": True,
}  # fmt: skip
OF_MESSAGES = ("model", "messages", "max_tokens")
ASKED: list[tuple[str, str, dict[str, Any]]] = [
    ("GET", "/v1/models", {}),
    ("POST", "/v1/chat/completions", {"json": CHAT}),
    ("POST", "/v1/chat/completions", {"json": {**CHAT, "stream": True, "stream_options": {"include_usage": True}}}),
    ("POST", "/v1/messages", {"json": {**{key: CHAT[key] for key in OF_MESSAGES}, "temperature": 0}}),
    ("POST", "/v1/messages", {"json": CHAT}),
    ("POST", "/v1/chat/completions", {"json": {**CHAT, "model": "other"}}),
    ("POST", "/v1/chat/completions", {"data": b"{"}),
    ("POST", "/v1/completions", {"json": CHAT, "headers": {"Host": "site.example"}}),
    ("DELETE", "/v1/models", {}),
    ("GET", "/none?a=%20", {}),
    ("HEAD", "/v1/models", {}),
]
OF_CONNECTIONS = {"date", "server"}


async def answers(url: str) -> list[Any]:
    """Statuses, headers and bodies, without what differs from one request to the next."""
    found = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(30), skip_auto_headers=["User-Agent"]) as client:
        for index, (method, path, more) in enumerate(ASKED):
            more = {**more, "headers": {"X-Request-ID": f"r{index}", **more.get("headers", {})}}
            async with client.request(method, url + path, **more) as answer:
                headers = sorted((name.lower(), value) for name, value in answer.headers.items())
                body = [_body(line) for line in (await answer.text()).splitlines()]
                found.append((answer.status, [each for each in headers if each[0] not in OF_CONNECTIONS], body))
    return found


def _body(line: str) -> Any:
    """A line of a stream, or a whole body, without ids and times."""
    text = line.removeprefix("data: ")
    return json.loads(text, object_hook=_without_ids) if text.startswith("{") else line


def _without_ids(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in ("id", "created", "request_id")}


async def serves(url: str) -> None:
    """Return once it does."""
    async with aiohttp.ClientSession() as client, asyncio.timeout(90):
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with client.get(f"{url}/health") as answer:
                    if answer.status == 200:
                        return


async def serves_as_before(url: str, expected: list[Any]) -> None:
    await serves(url)
    found = await answers(url)
    async with asyncio.timeout(60):
        while any(status == 503 for status, _, _ in found):  # the gateway had not seen yet that the scheduler is away
            found = await answers(url)
    assert found == expected


async def a_client_leaves(url: str, grpc: AsyncClient) -> None:
    """The first piece of a stream comes long before its end; a client that leaves then ends its request."""
    endless = {**CHAT, "stream": True, "max_tokens": 3000}
    async with aiohttp.ClientSession() as client, client.post(f"{url}/v1/chat/completions", json=endless) as answer:
        await answer.content.readuntil(b"\n\n")
        await requests_are(1, grpc)
        answer.close()
    await requests_are(0, grpc)


async def requests_are(count: int, grpc: AsyncClient) -> None:
    """Return once there are so many."""
    async with asyncio.timeout(60):
        while sum(each.num_running + each.num_waiting for each in (await grpc.server_info()).executors) != count:
            pass


async def the_replica_is_replaced(running: Served, grpc: AsyncClient) -> None:
    """All of it ends; a request over gRPC goes on at the next replica, which has the same port and journal."""
    prompt, params = [5, 6, 7], SamplingParams(max_tokens=400, temperature=0.8, seed=3, ignore_eos=True)
    (expected,) = await grpc.generate(prompt, params)
    going = asyncio.create_task(grpc.generate(prompt, params))
    await requests_are(1, grpc)
    replica = running.replica()
    own = replica.children(recursive=True)
    replica.kill()
    await asyncio.to_thread(end_within, own, 20)
    (output,) = await going
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids


async def the_application_ends(url: str, running: Served, config: dict[str, Any]) -> None:
    """A stream that has begun comes whole."""
    stream = {**CHAT, "stream": True, "max_tokens": 1200}
    async with aiohttp.ClientSession() as client, client.post(f"{url}/v1/chat/completions", json=stream) as answer:
        await answer.content.readuntil(b"\n\n")
        await asyncio.to_thread(running.apply, {**config, "applications": []})
        assert (await answer.text()).endswith("data: [DONE]\n\n")


async def test_a_server_below_ray_serve(tmp_path: Path) -> None:
    """Executors are on another machine than the replica, which is on the head as in the manifest."""
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({"step_us": 5000}))
    host = new_address()
    args = {
        "model": str(ROOT / "models" / "cadenza-demo"), "served_model_name": MODEL, "simulate": str(costs),
        "num_threads": 1, "num_gpu_blocks": 600, "journal": str(tmp_path / "journal"),
    }  # fmt: skip
    url, config = f"http://{host}:8000", serve_config(host, **args)
    with ray_machines(2, of_head=0) as machines, served(machines, config, tmp_path) as running:
        await serves(url)
        async with AsyncClient(f"{host}:50051", reconnect_timeout_s=60) as grpc:
            expected = await answers(f"http://{running.gateway()}")
            assert [status for status, _, _ in expected] == [200, 200, 200, 200, 400, 404, 400, 403, 405, 404, 200]
            await serves_as_before(url, expected)
            await a_client_leaves(url, grpc)

            (scheduler,) = running.below("scheduler_svc")
            scheduler.kill()
            await asyncio.to_thread(end_within, [scheduler], 10)
            await serves_as_before(url, expected)

            await the_replica_is_replaced(running, grpc)
            await serves_as_before(url, expected)
        await the_application_ends(url, running, config)
        await asyncio.to_thread(until, lambda: not running.below("cadenza"), 60)
