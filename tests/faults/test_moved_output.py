"""Real processes, a real model on the CPU: requests with output move between executors of equal numerics only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from cadenza import AsyncClient, SamplingParams
from cadenza.v1 import admin_pb2 as pb
from cadenza.v1.admin_pb2_grpc import AdminServiceStub
from tests.checkpoints import make_llama
from tests.helpers.models.golden import transformers_greedy, transformers_model
from tests.helpers.scheduler.rolling import ClientLoad, RollingService, rolling

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
SIZES = ("--device", "cpu", "--num-gpu-blocks", "400", "--max-num-seqs", "16")
ONE = ("--num-threads", "1")
TWO = ("--num-threads", "2")
MAX_TOKENS = 60
NUM_REQUESTS = 12
PROMPT = [7, 8, 9]
LONG_TOKENS = 350
LONG = SamplingParams(temperature=0.9, seed=5, max_tokens=LONG_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("model"), tokenizer=True, vocab_size=300, max_position_embeddings=1024)


@asynccontextmanager
async def services(model: Path, *options: tuple[str, ...]) -> AsyncIterator[tuple[list[RollingService], AsyncClient]]:
    """Executors with these options, and a client of their scheduler, once all serve."""
    async with AsyncExitStack() as stack:
        starting = [rolling("executor_svc", "--model", str(model), *SIZES, *each) for each in options]
        executors = list(await asyncio.gather(*(stack.enter_async_context(each) for each in starting)))
        addresses = [part for each in executors for part in ("--executor", each.address)]
        front = await stack.enter_async_context(rolling("scheduler_svc", *addresses))
        client = await stack.enter_async_context(AsyncClient(front.address))
        async with asyncio.timeout(20):
            while not all(each.connected for each in (await client.server_info()).executors):
                pass
        yield executors, client


@pytest.mark.long
async def test_streams_of_a_killed_executor_go_on_with_transformers_tokens(model: Path) -> None:
    async with services(model, ONE, ONE) as (executors, client):
        expected = await ClientLoad(client.target, MAX_TOKENS, NUM_REQUESTS).finished()
        load = ClientLoad(client.target, MAX_TOKENS, NUM_REQUESTS)
        await load.more(200)
        async with asyncio.timeout(20):
            while not all(each.num_running for each in (await client.server_info()).executors):
                pass
        await executors[0].kill()
        seen = await load.finished()
        assert [each.connected for each in (await client.server_info()).executors] == [False, True]
    assert seen == expected
    reference = transformers_model(model)
    for index in range(0, NUM_REQUESTS, 4):
        wanted = transformers_greedy(reference, load.prompt(index), MAX_TOKENS - index)
        assert seen[index][0].token_ids == wanted.tokens


class Stream:
    """Reads one stream."""

    def __init__(self, client: AsyncClient) -> None:
        self.token_ids: list[int] = []
        self.begun = asyncio.Event()
        self.done = asyncio.create_task(self._read(client))

    async def _read(self, client: AsyncClient) -> None:
        async for delta in client.stream(PROMPT, LONG):
            self.token_ids += delta.outputs[0].token_ids
            self.begun.set()


@asynccontextmanager
async def drained(client: AsyncClient, executor: RollingService) -> AsyncIterator[None]:
    """Requests that come meanwhile start at the other one; a drain moves nothing where numerics differ."""
    admin = AdminServiceStub(client.channel)
    await admin.DrainExecutor(pb.DrainExecutorRequest(target=executor.address, timeout_s=0))
    yield
    await admin.ResumeExecutor(pb.ResumeExecutorRequest(target=executor.address))


async def output(client: AsyncClient) -> list[int]:
    """The tokens of the same request without a fault."""
    (result,) = await client.generate([PROMPT], LONG)
    return list(result.outputs[0].token_ids)


@pytest.mark.long
async def test_output_waits_for_an_executor_of_its_numerics(model: Path) -> None:
    """The number of threads is a part of the fingerprint, so neither stream can go on at the other executor."""
    async with asyncio.timeout(100), services(model, ONE, TWO) as (executors, client):
        undisturbed = []
        for other in reversed(executors):
            async with drained(client, other):
                undisturbed.append(await output(client))
        async with drained(client, executors[0]):
            other_stream = Stream(client)
            await other_stream.begun.wait()
        async with drained(client, executors[1]):
            waiting = Stream(client)
            await waiting.begun.wait()
            await executors[0].kill()  # at once, before the stream has ended
        await other_stream.done
        assert other_stream.token_ids == undisturbed[1] == await output(client), "new requests are served meanwhile"
        assert 0 < len(waiting.token_ids) < LONG_TOKENS
        await executors[0].start()
        await waiting.done
        assert waiting.token_ids == undisturbed[0]
