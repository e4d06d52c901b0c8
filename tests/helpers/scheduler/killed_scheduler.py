"""A scheduler process with a journal that tests kill and start again at its address, and the requests that it runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from cadenza.v1 import generation_pb2 as pb
from cadenza.v1 import generation_pb2_grpc, types_pb2
from cadenza_common.wire.transport import channel_options
from tests.helpers.machine.loopback import new_address
from tests.helpers.service_process import ServiceProcess, service_process

_TIMEOUT_S = 60


@dataclass
class Sample:
    """What a stream has brought of one sample."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    finish: int | None = None
    cumulative_logprob: float | None = None


@dataclass
class Output:
    """What a stream has brought of one request."""

    samples: dict[int, Sample] = field(default_factory=dict)
    seed: int | None = None
    prompt_logprobs: list[float] = field(default_factory=list)
    num_completion_tokens: int | None = None
    error: grpc.StatusCode | None = None
    message: str = ""

    def add(self, response: pb.GenerateResponse) -> None:
        if response.HasField("info"):
            self.seed = response.info.seed
        if response.HasField("stats"):
            self.num_completion_tokens = response.stats.num_completion_tokens
        self.prompt_logprobs += response.prompt_logprobs.chosen_logprobs
        for output in response.outputs:
            sample = self.samples.setdefault(output.sample_index, Sample())
            assert output.first_token_index == len(sample.token_ids), "a token was lost or repeated"
            sample.token_ids += output.token_ids
            assert output.text_offset == len(sample.text), "text was lost or repeated"
            sample.text += output.text
            sample.logprobs += output.logprobs.chosen_logprobs
            if output.HasField("finish"):
                sample.finish = output.finish.detail
                if output.HasField("cumulative_logprob"):
                    sample.cumulative_logprob = output.cumulative_logprob

    def begins_with(self, part: Output) -> bool:
        """Whether all that `part` has is here too."""
        return (part.seed is None or part.seed == self.seed) and all(
            self.samples[index].token_ids[: len(sample.token_ids)] == sample.token_ids
            and self.samples[index].text.startswith(sample.text)
            and (sample.finish is None or sample == self.samples[index])
            for index, sample in part.samples.items()
        )

    @property
    def num_tokens(self) -> int:
        return sum(len(sample.token_ids) for sample in self.samples.values())


def request(request_id: str, prompt: list[int], max_tokens: int, **params: Any) -> pb.GenerateRequest:
    """A request that does not end before `max_tokens`."""
    return pb.GenerateRequest(
        request_id=request_id,
        prompt=[types_pb2.PromptPart(tokens=types_pb2.TokenIds(ids=prompt))],
        sampling_params=types_pb2.SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params),
    )


def mixed_requests(count: int, max_tokens: int, *, stop: str = "") -> list[pb.GenerateRequest]:
    """Greedy, sampled, n = 3, beams, best_of, with logprobs, with a drawn seed, in turn; some end early.

    `stop`: a stop string of the sampled ones.
    """
    stops = {"stop": [stop]} if stop else {}
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "seed": 7, **stops},
        {"temperature": 0.9, "seed": 8, "n": 3, **stops},
        {"beam_width": 3, "n": 2},
        {"temperature": 0.8, "seed": 9, "logprobs": 2, "prompt_logprobs": 1},
        {"temperature": 0.8, "seed": 10, "best_of": 3},
        {"temperature": 1.0},
    ]
    return [
        request(
            f"request {index}",
            [3 + (7 * index + place) % 40 for place in range(3 + 5 * (index % 9))],
            max_tokens // 4 if index % 5 == 0 else max_tokens - index,
            **kinds[index % len(kinds)],
        )
        for index in range(count)
    ]


class KillableScheduler:
    """A scheduler that is started again and again with the same options, at the same address."""

    def __init__(self, executor: str, *options: str) -> None:
        self._options = ("--executor", executor, *options)
        self._listen = f"{new_address()}:0"
        self._stack = contextlib.AsyncExitStack()
        self.process: ServiceProcess | None = None

    async def start(self, *options: str) -> None:
        """Start it, and wait until it serves."""
        running = service_process("scheduler_svc", *self._options, *options, listen=self._listen)
        self.process = await self._stack.enter_async_context(running)
        self._listen = self.process.address

    @property
    def target(self) -> str:
        return self._listen

    async def kill(self) -> None:
        """SIGKILL."""
        await self._stack.aclose()

    async def restart(self, *options: str) -> None:
        """Kill it and start it again."""
        await self.kill()
        await self.start(*options)

    async def load(self) -> pb.SchedulerLoad:
        """Its load now."""
        async with grpc.aio.insecure_channel(self.target) as channel:
            stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
            return (await stub.GetServerInfo(pb.GetServerInfoRequest())).load

    async def queued(self, count: int) -> None:
        """Return once this many requests wait, and their admission is in the journal: a kill does not lose them.

        The scheduler writes its journal off the event loop, so that its load may be ahead. `Abort` returns after all
        that came before it is written, also for a request that does not exist.
        """
        async with asyncio.timeout(20):
            while (await self.load()).num_waiting != count:
                pass
            assert not await self.abort("a request that does not exist")

    async def abort(self, request_id: str) -> bool:
        """Abort a request."""
        async with grpc.aio.insecure_channel(self.target) as channel:
            stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
            return bool((await stub.Abort(pb.AbortRequest(request_id=request_id))).aborted)

    def run(self, requests: list[pb.GenerateRequest]) -> Load:
        """Send requests, each on a stream of its own, over a new channel."""
        return Load(self.target, requests)


class Load:
    """Requests on their streams; `outputs` holds what has come."""

    def __init__(self, target: str, requests: list[pb.GenerateRequest]) -> None:
        self.outputs = {each.request_id: Output() for each in requests}
        self._changed = asyncio.Condition()
        self._channel = grpc.aio.insecure_channel(target, options=channel_options())
        self.stub = generation_pb2_grpc.GenerationServiceStub(self._channel)
        self._tasks = [asyncio.create_task(self._read(each)) for each in requests]

    async def _read(self, each: pb.GenerateRequest) -> None:
        output = self.outputs[each.request_id]
        try:
            async for response in self.stub.Generate(each, timeout=_TIMEOUT_S):
                output.add(response)
                async with self._changed:
                    self._changed.notify_all()
        except grpc.aio.AioRpcError as exc:
            output.error, output.message = exc.code(), str(exc.details())
        async with self._changed:
            self._changed.notify_all()

    async def until(self, condition: Any) -> None:
        """Return once `condition(outputs)` holds; 30 s at most."""
        async with asyncio.timeout(30), self._changed:
            await self._changed.wait_for(lambda: condition(self.outputs))

    async def finished(self) -> dict[str, Output]:
        """All outputs, once every stream has ended."""
        await asyncio.gather(*self._tasks)
        await self._channel.close()
        return self.outputs


@contextlib.asynccontextmanager
async def killable_scheduler(executor: str, journal: Path, *options: str) -> AsyncIterator[KillableScheduler]:
    """A scheduler with a journal, started; killed at the end."""
    scheduler = KillableScheduler(executor, "--journal", str(journal), *options)
    try:
        await scheduler.start()
        yield scheduler
    finally:
        await scheduler.kill()
