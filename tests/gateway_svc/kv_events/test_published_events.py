"""A gateway that publishes KV events over ZeroMQ: what a router hears, also of a restart and a refusal."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys

import pytest

from cadenza import AsyncClient, LocalServices, SamplingParams
from cadenza.v1 import execution_pb2
from tests.helpers.gateway.gateway import gateway
from tests.helpers.scheduler.scheduler_world import collect, request, world
from tests.helpers.scheduler.scripted_executor import ScriptedExecutor
from tests.helpers.service_process import service_process
from tests.helpers.tenants import bearer, token, write_tenants

msgpack = pytest.importorskip("msgpack", reason="the extra kv-events")
zmq = pytest.importorskip("zmq", reason="the extra kv-events")
sockets = pytest.importorskip("zmq.asyncio")
LOGGER = "gateway_svc.kv_events.publisher"


class Subscriber:
    """A router: the token that each cached block begins with, and the last number."""

    def __init__(self, socket):
        self._socket = socket
        self.first_ids, self.num_states, self.number = [], 0, None

    async def until(self, *first_ids):
        """Follow until these are all that is cached."""
        async with asyncio.timeout(20):
            while sorted(self.first_ids) != sorted(first_ids) or not self.num_states:
                _, number, payload = await self._socket.recv_multipart()
                number = int.from_bytes(number, "big")
                assert self.number is None or number == self.number + 1
                self.number = number
                for event in msgpack.unpackb(payload)[1]:
                    if event["type"] == "AllBlocksCleared":
                        self.first_ids.clear()
                        self.num_states += 1
                    elif event["type"] == "BlockStored":
                        self.first_ids.append(event["token_ids"][0])


@contextlib.asynccontextmanager
async def subscriber(endpoint):
    context = sockets.Context()
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.connect(endpoint)
    try:
        yield Subscriber(socket)
    finally:
        socket.close(linger=0)
        context.term()


def sharing():
    """An executor whose requests may share prefixes."""
    return ScriptedExecutor(features=(execution_pb2.EXECUTOR_FEATURE_SHARED_PREFIXES,))


async def serve(w, token_id, **options):
    """Run a request whose prompt fills one block."""
    await collect(w.stub.Generate(request(ids=[token_id] * 17, max_tokens=1), **options))


async def test_a_router_hears_of_a_scheduler_that_is_restarted(tmp_path, tokenizer_folder, caplog):
    endpoint = f"ipc://{tmp_path}/events"
    async with contextlib.AsyncExitStack() as stack:
        async with world(sharing(), tokenizer=tokenizer_folder) as w:
            await serve(w, 5)
            g = await stack.enter_async_context(gateway(w.target, kv_events_endpoint=endpoint))
            router = await stack.enter_async_context(subscriber(endpoint))
            assert g.addresses["kv_events_endpoint"] == endpoint
            assert (tmp_path / "events").stat().st_mode & 0o777 == 0o600, "no other user may read tokens of prompts"
            await router.until(5)
            await serve(w, 6)
            await router.until(5, 6)
        num_states = router.num_states
        await w.until(lambda: not g.state.link.is_serving)
        async with world(sharing(), tokenizer=tokenizer_folder, listen=w.target) as again:
            await serve(again, 7)
            await router.until(7)
            assert router.num_states > num_states, "it began anew, and numbers go on"
    lines = [record for record in caplog.records if record.name == LOGGER]
    assert 1 <= len(lines) <= 2
    assert all(f"the scheduler at {w.target} gives none" in line.message for line in lines)


async def test_with_tenants_it_needs_the_token_of_an_admin(tmp_path, tokenizer_folder, caplog):
    tenants = write_tenants(tmp_path / "tenants.toml", {"gold": {}, "ops": {"admin": True}})
    async with world(sharing(), tokenizer=tokenizer_folder, tenants=tenants) as w:
        await serve(w, 5, metadata=bearer("gold"))
        for name in ("", "gold", "ops"):
            caplog.clear()
            (tmp_path / "own").write_text(token(name))
            own = {"http_token_file": str(tmp_path / "own")} if name else {}
            endpoint = f"ipc://{tmp_path}/events{name}"
            async with gateway(w.target, kv_events_endpoint=endpoint, **own), subscriber(endpoint) as router:
                if name == "ops":
                    await router.until(5)
                    break

                def refused():
                    return [record for record in caplog.records if record.name == LOGGER]

                await w.until(refused)
                (line,) = refused()
                assert line.levelname == "ERROR"
                assert "--http-token-file must hold the token of a tenant with admin" in line.message
                assert token("gold") not in line.message


@pytest.mark.slow
async def test_a_gateway_for_kv_events_alone_listens_nowhere_else(tokenizer_folder):
    async with (
        world(sharing(), tokenizer=tokenizer_folder) as w,
        service_process(
            "gateway_svc", "--target", w.target, by="--kv-events-endpoint", listen="tcp://127.0.0.1:*"
        ) as running,
        subscriber(f"tcp://{running.address}") as router,
    ):
        line = await running.logged("serving")
        assert line.endswith(f"serving {w.target} at tcp://{running.address} (kv-events)")
        await serve(w, 5)
        await router.until(5)
        running.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(20):
            assert await running.process.wait() == 0


@pytest.mark.slow
def test_an_endpoint_that_cannot_be_used_is_one_line(tmp_path):
    command = [sys.executable, "-m", "gateway_svc", "--kv-events-endpoint", f"ipc://{tmp_path}/none/events"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (answer.returncode, answer.stdout) == (1, "")
    (line,) = answer.stderr.splitlines()
    assert line.startswith(f"error: --kv-events-endpoint ipc://{tmp_path}/none/events: ")


@pytest.mark.slow
def test_cadenza_up_starts_a_gateway_for_kv_events_alone(tmp_path, tokenizer_folder):
    endpoint = f"ipc://{tmp_path}/events"
    options = {"simulate": "instant", "tokenizer": tokenizer_folder, "kv_events_endpoint": endpoint}

    async def hear(services):
        async with subscriber(endpoint) as router, AsyncClient(services.target) as client:
            await client.generate([[5] * 17], SamplingParams(max_tokens=1))
            await router.until(5)

    with LocalServices("simulated", simulate_vocab_size=400, **options) as services:
        assert set(services.pids()) == {"executor", "scheduler", "gateway"}
        assert (services.addresses["gateway"], services.http, services.gateway) == (endpoint, None, {})
        asyncio.run(hear(services))
