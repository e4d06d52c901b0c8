"""Clients whose connection is cut again and again: every token, text and logprob comes exactly once, as undisturbed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from cadenza import AsyncClient, Client, RequestOutput, SamplingParams
from cadenza.errors import AlreadyExistsError, InvalidRequestError, RequestLostError, UnavailableError
from cadenza.v1 import generation_pb2 as pb
from scheduler_svc.app import Service
from scheduler_svc.config import SchedulerConfig
from tests.helpers.machine.loopback import new_address
from tests.helpers.machine.relay import Relay, relay
from tests.helpers.services import Running, executor_service, scheduler_service

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

SIZES: dict[str, Any] = {
    "simulate_vocab_size": 512, "max_model_len": 2048, "max_num_seqs": 64, "num_gpu_blocks": 2000,
    "max_num_batched_tokens": 512,
}  # fmt: skip
KINDS = {
    "greedy": SamplingParams(temperature=0.0, seed=2, max_tokens=700),
    "samples": SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=500),
    "logprobs": SamplingParams(temperature=1.0, seed=4, n=2, max_tokens=400, logprobs=2, prompt_logprobs=1),
    "best_of": SamplingParams(temperature=1.0, seed=5, n=2, best_of=4, max_tokens=30),
    "beams": SamplingParams(temperature=0.0, seed=6, beam_width=3, n=2, max_tokens=20),
}
PROMPT = "The quick brown fox jumps over the lazy dog. Hello, world!"


@dataclass
class Served:
    """A scheduler on a simulated executor whose steps take 2 ms, and a relay before it."""

    running: Running
    relay: Relay


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("costs") / "costs.json"
    path.write_text(json.dumps({"step_us": 2000}))
    return str(path)


@pytest.fixture
async def served(costs: str, tokenizer_folder: str) -> AsyncIterator[Served]:
    async with (
        executor_service("", simulate=costs, **SIZES) as executor,
        scheduler_service(executor, tokenizer=tokenizer_folder) as running,
        relay(running.target) as between,
    ):
        yield Served(running, between)


def cuts(served: Served, seed: int, sizes: Sequence[int] = (350, 500, 800, 1500, 30_000)) -> None:
    """The relay cuts each connection after some bytes. The first ones are gRPC's own, and a call that comes first."""
    rng = random.Random(seed)
    first = iter([3000])
    served.relay.cut_after = lambda: next(first, None) or rng.choice(sizes)


def whole(deltas: list[RequestOutput]) -> Any:
    """What a stream's deltas add up to, in a form that compares."""
    samples: dict[int, dict[str, Any]] = {}
    prompt_logprobs: list[Any] = []
    for delta in deltas:
        prompt_logprobs += delta.prompt_logprobs or []
        for sample in delta.outputs:
            total = samples.setdefault(sample.index, {"text": "", "token_ids": [], "logprobs": [], "ends": []})
            total["text"] += sample.text
            total["token_ids"] += sample.token_ids
            total["logprobs"] += sample.logprobs or []
            if sample.finished():
                total["ends"].append((sample.finish_detail, sample.stop_reason, sample.cumulative_logprob))
    assert all(len(total["ends"]) == 1 for total in samples.values())
    assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    return samples, prompt_logprobs, deltas[-1].seed, deltas[-1].prompt_token_ids


async def stream(client: AsyncClient, params: SamplingParams, request_id: str | None = None) -> list[RequestOutput]:
    return [delta async for delta in client.stream(PROMPT, params, request_id)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("kind", "min_cuts"),
    [("greedy", 6), pytest.param("samples", 6, marks=pytest.mark.long), ("logprobs", 6), ("best_of", 1), ("beams", 1)],
)
async def test_a_stream_that_is_cut_again_and_again_is_the_undisturbed_one(
    served: Served, kind: str, min_cuts: int
) -> None:
    async with AsyncClient(served.running.target) as direct:
        wanted = whole(await stream(direct, KINDS[kind]))
    async with AsyncClient(served.relay.address) as client:
        cuts(served, seed=1, sizes=(400, 5000, 20_000, 60_000) if kind == "logprobs" else (350, 500, 800, 1500, 8000))
        await client.model_info()
        for number in range(2):
            assert whole(await stream(client, KINDS[kind], f"{kind} {number}")) == wanted
    assert served.relay.num_cuts >= min_cuts
    await served.running.wait_until_free()


def flat(outputs: list[RequestOutput]) -> Any:
    return [
        (
            output.prompt_logprobs,
            output.finished,
            [
                (each.text, each.token_ids, each.logprobs, each.cumulative_logprob, each.finish_detail)
                for each in output.outputs
            ],
        )
        for output in outputs
    ]


async def test_fifty_requests_of_a_session_survive_every_cut(served: Served) -> None:
    """All kinds at once, final-only; the server's prompt logprobs alone are several cuts long."""
    params = [replace(KINDS[kind], max_tokens=60) for kind in list(KINDS) * 10]
    prompts = [f"{PROMPT} {index}" for index in range(len(params))]
    async with AsyncClient(served.running.target) as direct:
        wanted = flat(await direct.generate(prompts, params))
    async with AsyncClient(served.relay.address) as client:
        cuts(served, seed=2, sizes=(2000, 20_000, 400_000))
        await client.model_info()
        assert flat(await client.generate(prompts, params)) == wanted
    assert served.relay.num_cuts >= 5
    await served.running.wait_until_free()


@pytest.mark.long
async def test_the_blocking_client_goes_on_as_well(served: Served) -> None:
    def run() -> tuple[Any, Any]:
        with Client(served.relay.address) as client:
            cuts(served, seed=3)
            client.model_info()
            return whole(list(client.stream(PROMPT, KINDS["samples"]))), flat(client.generate([PROMPT] * 3, params))

    params = replace(KINDS["logprobs"], max_tokens=100)
    async with AsyncClient(served.running.target) as direct:
        wanted = whole(await stream(direct, KINDS["samples"])), flat(await direct.generate([PROMPT] * 3, params))
    assert await asyncio.to_thread(run) == wanted
    assert served.relay.num_cuts >= 2


async def test_after_the_time_limit_the_loss_is_an_error(served: Served) -> None:
    """The grace of the request is over soon after; nothing runs on."""
    params = SamplingParams(temperature=0.0, max_tokens=1900, ignore_eos=True)
    async with AsyncClient(served.relay.address, reconnect_timeout_s=0.3) as client:
        await client.model_info()
        deltas = client.stream(PROMPT, params)
        await anext(deltas)
        served.relay.refuses = True
        served.relay.cut()
        loop = asyncio.get_running_loop()
        began = loop.time()
        with pytest.raises(UnavailableError, match="went away"):
            async for _ in deltas:
                pass
        assert 0.3 <= loop.time() - began < 5.0
        with pytest.raises(UnavailableError):
            await client.generate([PROMPT], params)
    await served.running.wait_until_free()


async def test_without_a_time_limit_and_before_the_first_answer_it_is_an_error_at_once(served: Served) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=1900, ignore_eos=True)
    async with AsyncClient(served.relay.address, reconnect_timeout_s=0) as client:
        deltas = client.stream(PROMPT, params)
        await anext(deltas)
        served.relay.cut()
        with pytest.raises(UnavailableError):
            async for _ in deltas:
                pass
    await served.running.wait_until_free()
    served.relay.refuses = True
    async with AsyncClient(served.relay.address) as client, asyncio.timeout(5):
        with pytest.raises(UnavailableError):
            await client.generate([PROMPT])
        with pytest.raises(UnavailableError):
            await stream(client, params)


@pytest.mark.parametrize("way", ["close", "cancel", "client", "batch", "batch client"])
async def test_a_loop_that_is_left_aborts_its_request_despite_the_grace(served: Served, way: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=1900, ignore_eos=True)
    client = AsyncClient(served.relay.address, reconnect_timeout_s=600)
    if way.startswith("batch"):
        task = asyncio.create_task(client.generate([PROMPT] * 20, params))
        while (await served.running.load()).num_running < 20:
            pass
        await (client.close() if way == "batch client" else cancel(task))
        with pytest.raises(UnavailableError if way == "batch client" else asyncio.CancelledError):
            await task
    else:
        deltas = client.stream(PROMPT, params)
        await anext(deltas)
        match way:
            case "close":
                await deltas.aclose()
            case "client":
                await client.close()
            case "cancel":
                task = asyncio.create_task(drain(deltas))
                await asyncio.sleep(0)
                await cancel(task)
        assert served.running is not None
    await served.running.wait_until_free()
    await client.close()


async def cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def drain(deltas: Any) -> None:
    async for _ in deltas:
        pass


async def test_another_clients_take_over_and_users_errors_are_not_repeated(served: Served) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=1900, ignore_eos=True)
    async with AsyncClient(served.relay.address) as client, AsyncClient(served.running.target) as other:
        deltas = client.stream(PROMPT, params, "mine")
        await anext(deltas)
        with pytest.raises(AlreadyExistsError, match="in use with another body"):
            await anext(other.stream(PROMPT, SamplingParams(), "mine"))
        with pytest.raises(InvalidRequestError):
            await anext(other.stream([1, 600]))
        taken = other._stub().Generate(pb.GenerateRequest(request_id="mine", resume=pb.ResumePoint()))
        await taken.read()
        with pytest.raises(Exception, match="another stream has taken this request over") as caught:
            async for _ in deltas:
                pass
        assert caught.value.code is grpc.StatusCode.ABORTED
        taken.cancel()
        assert await other.abort("mine")


class Restarting:
    """A scheduler that is stopped and started again at its port, without a journal: it forgets its requests."""

    def __init__(self, executor: str, tokenizer: str) -> None:
        self._options: dict[str, Any] = {"executor": [executor], "tokenizer": tokenizer}
        self.target = f"{new_address()}:0"
        self._service: Service | None = None

    async def start(self) -> None:
        self._service = Service(SchedulerConfig(**self._options, listen=self.target))
        self.target = await self._service.start()
        await self._service.open()

    async def stop(self) -> None:
        assert self._service is not None
        await self._service.stop()


@pytest.fixture
async def restarting(costs: str, tokenizer_folder: str) -> AsyncIterator[Restarting]:
    async with executor_service("", simulate=costs, **SIZES) as executor:
        service = Restarting(executor, tokenizer_folder)
        await service.start()
        yield service
        await service.stop()


async def test_a_restarted_server_that_has_forgotten_a_stream_says_so(restarting: Restarting) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=1900, ignore_eos=True)
    async with AsyncClient(restarting.target) as client:
        deltas = client.stream(PROMPT, params, "mine")
        await anext(deltas)
        await restarting.stop()
        await restarting.start()
        with pytest.raises(RequestLostError, match="request mine was lost: the server was restarted") as caught:
            await drain(deltas)
        assert caught.value.code is grpc.StatusCode.NOT_FOUND


async def test_prompts_whose_output_nobody_has_seen_start_anew(restarting: Restarting) -> None:
    """`generate` shows nothing before the end, so a restart costs time only, with or without a journal."""
    params = [SamplingParams(temperature=1.0, seed=index, n=2, max_tokens=200 + 10 * index) for index in range(12)]
    prompts = [f"{PROMPT} {index}" for index in range(12)]
    async with AsyncClient(restarting.target) as client:
        wanted = flat(await client.generate(prompts, params))
        task = asyncio.create_task(client.generate(prompts, params))
        while not (await client.server_info()).load.num_running:
            pass
        await restarting.stop()
        await restarting.start()
        assert flat(await task) == wanted


async def test_a_request_of_a_client_waits_for_a_server_that_restarts(restarting: Restarting) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=10)
    async with AsyncClient(restarting.target) as client:
        wanted = flat(await client.generate([PROMPT], params))
        await restarting.stop()
        task = asyncio.create_task(client.generate([PROMPT], params))
        streamed = asyncio.create_task(stream(client, params))
        await asyncio.sleep(0)
        await restarting.start()
        assert flat(await task) == wanted
        assert whole(await streamed)[0][0]["token_ids"] == wanted[0][2][0][1]
