"""Load a Cadenza server over one Session stream, with thousands of requests in flight. Stubs and grpcio alone.

    python examples/session_load.py --target 127.0.0.1:50051 --in-flight 2000    closed loop
    python examples/session_load.py --target 127.0.0.1:50051 --rate 300          open loop, Poisson

A request that finds the server's queue full is sent again after the delay that the server names.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
import uuid
from collections import Counter
from dataclasses import dataclass

import grpc
from google.rpc import error_details_pb2

from cadenza.v1 import generation_pb2 as pb
from cadenza.v1 import generation_pb2_grpc, types_pb2

CHANNEL_OPTIONS = [("grpc.max_receive_message_length", 64 * 1024 * 1024), ("grpc.keepalive_time_ms", 60_000)]


@dataclass(slots=True)
class Request:
    """One request and its outcome; times are in seconds on the monotonic clock."""

    message: pb.GenerateRequest
    due_s: float = 0.0  # latency counts from here, even if the request was sent later
    first_s: float = 0.0
    last_s: float = 0.0
    num_tokens: int = 0
    outcome: str = "unfinished"


class SessionLoad:
    """One Session stream: requests are sent as they become due, and read until each has ended once."""

    def __init__(self, stub: generation_pb2_grpc.GenerationServiceAsyncStub, requests: list[Request]) -> None:
        self.requests, self._num_left = requests, len(requests)
        self.num_messages = self.num_refusals = self.peak_in_flight = 0
        self._open: dict[str, Request] = {}
        self._call = stub.Session()
        self._writing = asyncio.Lock()
        self._tasks = asyncio.TaskGroup()

    async def run(self, in_flight: int, rate: float | None) -> None:
        """Return when every request has ended, or the stream has."""
        self._places = asyncio.Semaphore(in_flight)
        try:
            async with self._tasks:
                self._tasks.create_task(self._arrive(rate))
                async for response in self._call:
                    self._read(response)
                    if self._num_left == 0:  # not earlier: any request may have to be sent again
                        await self._call.done_writing()
        except* (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            print(f"the stream broke: {await self._call.code()}: {await self._call.details()}", file=sys.stderr)
        finally:
            self._call.cancel()  # no effect after a normal end; otherwise the server aborts the running requests

    async def _arrive(self, rate: float | None) -> None:
        due_s = time.monotonic()
        for request in self.requests:
            if rate is None:  # closed loop: as soon as a slot is free
                await self._places.acquire()
                due_s = time.monotonic()
            else:  # open loop: by the clock, even if the server is slow
                due_s += random.expovariate(rate)
            request.due_s = due_s
            await self._send(request, due_s - time.monotonic())

    async def _send(self, request: Request, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        self._open[request.message.request_id] = request
        self.peak_in_flight = max(self.peak_in_flight, len(self._open))
        async with self._writing:  # one write at a time; it waits while the server accepts no more
            await self._call.write(pb.SessionRequest(generate=request.message))

    def _read(self, response: pb.SessionResponse) -> None:
        now = time.monotonic()
        self.num_messages += 1
        for event in response.events:
            request = self._open[event.request_id]  # a KeyError would mean output of a request that has ended
            for output in event.response.outputs:
                assert output.first_token_index == request.num_tokens, "tokens were lost or repeated"
                request.first_s, request.last_s = request.first_s or now, now
                request.num_tokens += len(output.token_ids)
            if event.done:
                del self._open[event.request_id]
                self._ended(request, event)

    def _ended(self, request: Request, event: pb.SessionEvent) -> None:
        retry = error_details_pb2.RetryInfo()
        if any(detail.Unpack(retry) for detail in event.error.details):
            if not self.num_refusals:
                print(f"refused, to be sent again: {event.error.message}", file=sys.stderr, flush=True)
            self.num_refusals += 1
            # A little later than the server's delay, each at its own time; otherwise all would be sent at once.
            delay_s = retry.retry_delay.ToTimedelta().total_seconds() * random.uniform(1, 1.5)
            self._tasks.create_task(self._send(request, delay_s))
            return
        whole = request.num_tokens == request.message.sampling_params.max_tokens
        request.outcome = event.error.message or ("ok" if whole else "of wrong length")
        self._num_left -= 1
        self._places.release()

    def report(self, elapsed_s: float) -> None:
        """Print counts, throughput, and two rows of latencies."""
        num_tokens = sum(request.num_tokens for request in self.requests)
        outcomes = Counter(request.outcome for request in self.requests).most_common()
        print("requests    " + ", ".join(f"{count} {outcome}" for outcome, count in outcomes))
        print(f"in flight   {self.peak_in_flight} at most; {self.num_refusals} refusals, each sent again later")
        print(f"received    {num_tokens} tokens in {self.num_messages} messages: {num_tokens / elapsed_s:.1f} tokens/s")
        ttft = [1000 * (r.first_s - r.due_s) for r in self.requests if r.num_tokens]
        tpot = [1000 * (r.last_s - r.first_s) / (r.num_tokens - 1) for r in self.requests if r.num_tokens > 1]
        for name, values in ("TTFT, ms", sorted(ttft)), ("TPOT, ms", sorted(tpot)):
            shares = [(p, values[(len(values) - 1) * p // 100]) for p in (50, 90, 99, 100) if values]
            print(f"{name}    " + "".join(f"p{percent} {value:<10.1f}" for percent, value in shares))


def make_request(vocab_size: int, prompt_tokens: int, max_tokens: int) -> Request:
    """Random token ids, which need no tokenizer, and an output length that can be checked."""
    prompt = types_pb2.TokenIds(ids=random.choices(range(vocab_size), k=prompt_tokens))
    params = types_pb2.SamplingParams(max_tokens=random.randint(1, max_tokens), ignore_eos=True)
    part = types_pb2.PromptPart(tokens=prompt)
    return Request(pb.GenerateRequest(request_id=uuid.uuid4().hex, prompt=[part], sampling_params=params))


async def main() -> bool:
    """Run with the options of the command line; returns True if a request did not end as expected."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="127.0.0.1:50051", help="HOST:PORT of a running server")
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--in-flight", type=int, default=2000, help="closed loop: this many at any time")
    parser.add_argument("--rate", type=float, help="open loop: this many requests a second")
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=32, help="each request draws its length from 1 to this")
    args = parser.parse_args()
    async with grpc.aio.insecure_channel(args.target, options=CHANNEL_OPTIONS) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        vocab_size = (await stub.GetModelInfo(pb.GetModelInfoRequest())).vocab_size
        requests = [make_request(vocab_size, args.prompt_tokens, args.max_tokens) for _ in range(args.requests)]
        load = SessionLoad(stub, requests)
        start_s = time.monotonic()
        await load.run(args.in_flight, args.rate)
        load.report(time.monotonic() - start_s)
    return any(request.outcome != "ok" for request in requests)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
