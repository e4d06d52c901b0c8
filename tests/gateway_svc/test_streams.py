"""What happens to streams when a client leaves or does not read, and when the scheduler goes away."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time

import pytest

from cadenza_common.wire.transport import parse_address
from scheduler_svc.app import Service
from scheduler_svc.config import SchedulerConfig
from tests.helpers.gateway.gateway import completion_text, gateway, read_events
from tests.helpers.machine.loopback import new_address
from tests.helpers.models.toy_tokenizers import byte_level
from tests.helpers.scheduler.scheduler_world import script, world
from tests.helpers.scheduler.scripted_executor import ScriptedExecutor, serve

PATH = "/v1/completions"
ENDLESS = {"prompt": [5, 6, 7], "max_tokens": 200, "seed": 7, "ignore_eos": True}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_request(w, g, stream):
    script(w, "The quick brown fox", seed=7, end=False)
    w.executor.pause_after = 3
    asking = asyncio.create_task(g.http.post(PATH, json={**ENDLESS, "stream": stream}))
    if stream:
        response = await asking
        await response.content.readany()
        response.close()
    else:
        await w.until(lambda: w.engine._live)
        asking.cancel()
    await w.until(lambda: not w.engine._live)
    w.executor.pause_after = None
    w.executor.going.set()
    await w.idle()
    await w.until(lambda: not g.state.link.num_requests and not g.state.counts.num_running)


async def test_one_of_many_prompts_that_fails_ends_the_others(w, g):
    error = (await g.post(PATH, {**ENDLESS, "prompt": [[5], [6], [511, 10**6]]}, 400))["error"]
    assert error["param"] == "prompt"
    await w.idle()


@pytest.mark.slow
async def test_a_client_that_does_not_read_is_disconnected_and_harms_nobody(tokenizer_folder):
    executor = ScriptedExecutor(max_model_len=100_000, num_blocks=20_000, max_logprobs=128)
    async with world(executor, tokenizer=tokenizer_folder) as w, gateway(w.target, http_write_timeout_s=0.3) as g:
        body = json.dumps(
            {"prompt": [5] * 3, "max_tokens": 50_000, "seed": 7, "ignore_eos": True, "logprobs": 20, "stream": True}
        )
        reader = socket.create_connection(parse_address(g.address, default_port=0))
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        with contextlib.closing(reader):
            reader.sendall((head + body).encode())
            await w.until(lambda: w.engine._live)
            fast = await g.post(PATH, {**ENDLESS, "max_tokens": 20})
            assert fast["usage"]["completion_tokens"] == 20
            async with asyncio.timeout(60):
                while g.state.counts.num_slow_readers == 0:
                    await g.post(PATH, {**ENDLESS, "max_tokens": 5})
            await w.until(lambda: not w.engine._live)
    assert not w.engine._live


@pytest.mark.slow
async def test_a_client_that_does_not_read_a_whole_answer_is_disconnected(tokenizer_folder):
    """An answer that is no stream: some 700 KB of logprobs."""
    executor = ScriptedExecutor(max_logprobs=128)
    async with world(executor, tokenizer=tokenizer_folder) as w, gateway(w.target, http_write_timeout_s=0.3) as g:
        asked = {"prompt": [[5]] * 48, "max_tokens": 50, "seed": 7, "ignore_eos": True, "logprobs": 20}
        whole = await g.post(PATH, asked)
        assert [len(each["logprobs"]["tokens"]) for each in whole["choices"]] == [50] * 48
        body = json.dumps(asked)
        reader = socket.create_connection(parse_address(g.address, default_port=0))
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with contextlib.closing(reader):
            reader.sendall(
                f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
            )
            await w.until(lambda: g.state.counts.num_slow_readers == 1)
        await w.until(lambda: not g.state.counts.num_running)
        assert g.state.counts.ended_requests[PATH, 499] == 1


class Restarting:
    """A scheduler with a journal, in this process, that is stopped and started again at its address."""

    def __init__(self, executor_address: str, folder, **options):
        self._options = {"executor": [executor_address], "journal": str(folder / "journal"), **options}
        self._address = f"{new_address()}:0"
        self.service: Service | None = None

    async def start(self) -> str:
        self.service = Service(SchedulerConfig(listen=self._address, **self._options))
        self._address = await self.service.start()
        await self.service.open()
        return self._address

    async def stop(self) -> None:
        service, self.service = self.service, None
        if service is not None:
            await service.stop()


@contextlib.asynccontextmanager
async def restarting(tmp_path, tokenizer_folder):
    executor = ScriptedExecutor()
    server, address = await serve(executor)
    scheduler = Restarting(address, tmp_path, tokenizer=tokenizer_folder)
    target = await scheduler.start()
    try:
        async with gateway(target) as g:
            yield executor, scheduler, g
    finally:
        await scheduler.stop()
        await server.stop(0)


async def test_a_restarted_scheduler_is_a_pause(tmp_path, tokenizer_folder):
    """A stream that has begun, an answer that waits for its end, and a request that comes meanwhile."""
    text = "The quick brown fox jumps over the lazy dog."
    async with restarting(tmp_path, tokenizer_folder) as (executor, scheduler, g):
        executor.scripts[1] = [*byte_level().encode(text), 0]
        executor.pause_after = 6
        body = {"prompt": "Hello", "seed": 1, "max_tokens": 100}
        whole = asyncio.create_task(g.post(PATH, body))
        async with g.http.post(PATH, json={**body, "stream": True}) as response:
            events = read_events(response)
            seen = [await anext(events)]
            await scheduler.stop()
            late = asyncio.create_task(g.post(PATH, body))
            executor.pause_after = None
            executor.going.set()
            await scheduler.start()
            seen += [event async for event in events]
        assert completion_text(seen) == text
        assert seen[-1] == "[DONE]"
        assert (await whole)["choices"][0]["text"] == text
        assert (await late)["choices"][0]["text"] == text


CALLS = {
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [5, 6, 7]},
    "/v1/responses/input_tokens": {"input": "Hello"},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "Hello"}]},
    PATH: {"prompt": [5, 6, 7], "echo": True, "max_tokens": 1, "seed": 1},
}


async def test_calls_without_a_stream_wait_for_a_restarted_scheduler_too(tmp_path, tokenizer_folder):
    async with restarting(tmp_path, tokenizer_folder) as (_, scheduler, g):
        before = [await g.get("/v1/models"), *[await g.post(path, body) for path, body in CALLS.items()]]
        await scheduler.stop()
        asked = [g.get("/v1/models"), *[g.post(path, body) for path, body in CALLS.items()]]
        tasks = [asyncio.create_task(each) for each in asked]
        async with asyncio.timeout(10):
            while g.state.counts.num_running < len(tasks):  # noqa: ASYNC110  # the other side of a socket
                await asyncio.sleep(0.002)
        await scheduler.start()
        after = await asyncio.gather(*tasks)
        assert after[:-1] == before[:-1]
        assert after[-1]["choices"][0]["text"] == before[-1]["choices"][0]["text"]


async def test_calls_do_not_wait_for_a_scheduler_that_stays_away(tmp_path, tokenizer_folder):
    async with restarting(tmp_path, tokenizer_folder) as (_, scheduler, g):
        await g.get("/v1/models")
        await scheduler.stop()
        g.state.link.is_serving, g.state.link._unserved_since = False, time.monotonic() - 60
        error = (await g.post("/tokenize", CALLS["/tokenize"], 503))["error"]
        assert error["type"] == "service_unavailable_error"


async def test_a_stream_whose_rest_is_lost_says_so(w, g, tokenizer_folder):
    """Without a journal the next scheduler knows nothing of it; an answer that nobody has seen is begun anew."""
    text = "The quick brown fox"
    script(w, text)
    w.executor.pause_after = 4
    body = {"prompt": "Hello", "seed": 1, "max_tokens": 100}
    whole = asyncio.create_task(g.post(PATH, body))
    address = w.target
    async with g.http.post(PATH, json={**body, "stream": True}) as response:
        events = read_events(response)
        await anext(events)
        await w.service.stop()
        w.executor.pause_after = None
        w.executor.going.set()
        config = w.service._config.model_copy(update={"listen": address})
        second = Service(config)
        try:
            await second.start()
            await second.open()
            rest = [event async for event in events]
            assert rest[-1] == "[DONE]"
            assert "was lost" in rest[-2]["error"]["message"]
            assert (await whole)["choices"][0]["text"] == text
        finally:
            await second.stop()


async def test_all_that_one_step_brings_is_written_at_once(w, g):
    body = {**ENDLESS, "prompt": [[5]] * 8, "max_tokens": 20}
    await g.events(PATH, body)
    counts = g.state.counts
    assert counts.num_deltas >= 160
    assert counts.num_writes < counts.num_deltas / 3
