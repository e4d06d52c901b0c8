"""What does HTTP cost beside gRPC? Tokens a second and the time to the first token, in one run on the same services.

Scheduler, executor (simulated) and gateway run as processes. *Throughput*: `--streams` requests at once, each with
`--output-tokens` tokens, steps as fast as they go; once over one gRPC Session, once as server-sent events of
/v1/completions, each on a connection of its own. The gateway's CPU time over the tokens gives what one process could
carry at most with a core to itself; on few cores the services and this client take theirs too. *First token*: as many
streams minus one run in steps of `--step-ms`, and probes of one token go in turns by gRPC and by HTTP, over connections
that are open: the difference of the medians is what HTTP adds.

Checked first: both ways give the same tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

from aiohttp import ClientSession, ClientTimeout, TCPConnector

from benchmarks.common.benchmark import Benchmark, positive, progress
from benchmarks.common.plane_services import cpu_s, service_process
from benchmarks.common.rows import BenchmarkError, OtherLoad, Row, make_row, percentile, wait_quiet
from cadenza import AsyncClient, SamplingParams

NAME = "gateway"
_VOCAB_SIZE = 32768
_STREAMS = (64, 512)
_CHUNK = b'"choices":[{'
_CHECKED_TOKENS = 16


@dataclass(frozen=True, slots=True)
class _Services:
    """What runs."""

    target: str
    """The scheduler's address."""
    url: str
    gateway: int
    """The gateway's process id."""


@contextlib.asynccontextmanager
async def _services(options: argparse.Namespace, streams: int, step_us: int) -> AsyncIterator[_Services]:
    with tempfile.TemporaryDirectory() as folder:
        costs = _write_costs(folder, step_us)
        length = str(options.prompt_tokens + max(options.output_tokens, options.probe_tokens) + 1)
        executor = (
            *("--simulate", costs, "--simulate-vocab-size", str(_VOCAB_SIZE), "--max-model-len", length),
            *("--max-num-seqs", str(streams + 8), "--max-num-batched-tokens", str(32 * (streams + 8))),
            *("--num-gpu-blocks", str((streams + 8) * (int(length) // 16 + 2))),
        )
        scheduler = ("--skip-tokenizer-init", "--max-queued-requests", str(2 * streams + 64))
        async with (
            service_process("executor_svc", *executor) as (_, address),
            service_process("scheduler_svc", "--executor", address, *scheduler) as (_, target),
            service_process("gateway_svc", "--target", target, listen="--http") as (gateway, http),
        ):
            yield _Services(target, f"http://{http}", gateway)


def _write_costs(folder: str, step_us: int) -> str:
    path = Path(folder, "costs.json")
    path.write_text(json.dumps({"step_us": step_us}))
    return str(path)


def _prompt(options: argparse.Namespace, index: int) -> list[int]:
    return [300 + (index * 7919 + each * 31) % (_VOCAB_SIZE - 300) for each in range(options.prompt_tokens)]


def _body(options: argparse.Namespace, index: int, num_tokens: int, **more: object) -> bytes:
    fields = {"prompt": _prompt(options, index), "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    # Without a tokenizer there is no text: with token ids each token has its event all the same.
    return json.dumps({**fields, "return_token_ids": True, "stream": True, **more}).encode()


async def _http_stream(http: ClientSession, url: str, body: bytes) -> tuple[float, int]:
    """Run one request; returns the seconds to its first event, and the number of events."""
    began, first_s, num_events, tail = time.perf_counter(), 0.0, 0, b""
    async with http.post(f"{url}/v1/completions", data=body) as response:
        if response.status != 200:
            raise BenchmarkError(f"HTTP {response.status}: {await response.text()}")
        async for part in response.content.iter_any():
            first_s = first_s or time.perf_counter() - began
            data = tail + part
            num_events += data.count(_CHUNK)
            tail = data[1 - len(_CHUNK) :]  # a mark may be cut in two
    return first_s, num_events


async def _grpc_burst(services: _Services, options: argparse.Namespace, streams: int) -> float:
    """Seconds for all requests over one Session."""
    params = SamplingParams(temperature=0, max_tokens=options.output_tokens, ignore_eos=True, detokenize=False)
    async with AsyncClient(services.target) as client:
        await client.model_info()
        began = time.perf_counter()
        # As deltas: `generate` takes results at the end alone.
        await asyncio.gather(*(_grpc_stream(client, _prompt(options, index), params) for index in range(streams)))
        return time.perf_counter() - began


async def _grpc_stream(client: AsyncClient, prompt: list[int], params: SamplingParams) -> tuple[float, int]:
    """As `_http_stream`, for one gRPC stream; the number is that of tokens."""
    began, first_s, num_tokens = time.perf_counter(), 0.0, 0
    async for delta in client.stream(prompt, params):
        if delta.outputs:
            first_s = first_s or time.perf_counter() - began
            num_tokens += sum(len(each.token_ids) for each in delta.outputs)
    return first_s, num_tokens


def _connections() -> ClientSession:
    return ClientSession(
        connector=TCPConnector(limit=0, keepalive_timeout=60), timeout=ClientTimeout(total=None), read_bufsize=2**20
    )


async def _throughput(options: argparse.Namespace, streams: int) -> dict[str, float]:
    async with _services(options, streams, 0) as services, _connections() as http:
        await _check(services, options, http)
        bodies = [_body(options, index, options.output_tokens) for index in range(streams)]
        grpc_s = await _grpc_burst(services, options, streams)
        cpu, began = cpu_s(services.gateway), time.perf_counter()
        results = await asyncio.gather(*(_http_stream(http, services.url, body) for body in bodies))
        http_s, cpu = time.perf_counter() - began, cpu_s(services.gateway) - cpu
        num_events = sum(count for _, count in results)
    tokens = streams * options.output_tokens
    return {
        "grpc_tokens_per_s": tokens / grpc_s,
        "http_tokens_per_s": tokens / http_s,
        "gateway_us_per_token": 1e6 * cpu / tokens,
        "gateway_max_tokens_per_s": tokens / cpu,
        "tokens_per_event": tokens / num_events,
    }


async def _check(services: _Services, options: argparse.Namespace, http: ClientSession) -> None:
    """Raise BenchmarkError unless both ways give the same tokens."""
    params = SamplingParams(temperature=0, max_tokens=_CHECKED_TOKENS, ignore_eos=True, detokenize=False)
    async with AsyncClient(services.target) as client:
        (expected,) = await client.generate([_prompt(options, 0)], params)
    body = _body(options, 0, _CHECKED_TOKENS, stream=False)
    async with http.post(f"{services.url}/v1/completions", data=body) as response:
        answer = await response.json()
    if response.status != 200 or answer["choices"][0]["token_ids"] != expected.outputs[0].token_ids:
        raise BenchmarkError(f"HTTP and gRPC differ: {response.status} {answer}")


async def _first_token(options: argparse.Namespace, streams: int) -> dict[str, float]:
    async with _services(options, streams, 1000 * options.step_ms) as services, _connections() as http:
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
        async with AsyncClient(services.target) as client:
            await client.model_info()
            load = [
                asyncio.create_task(_http_stream(http, services.url, _body(options, index, options.probe_tokens)))
                for index in range(streams - 1)
            ]
            while (await client.server_info()).load.num_running < streams - 1:  # noqa: ASYNC110  # no event says so
                await asyncio.sleep(0.05)
            await _http_stream(http, services.url, _body(options, streams, 1))  # its connection is open then
            grpc_ms, http_ms = [], []
            for probe in range(options.probes):
                if any(task.done() for task in load):
                    raise BenchmarkError("the streams ended before the probes: give more --probe-tokens")
                prompt = _prompt(options, streams + 1 + 2 * probe)
                grpc_ms.append(1e3 * (await _grpc_stream(client, prompt, params))[0])
                body = _body(options, streams + 2 + 2 * probe, 1)
                http_ms.append(1e3 * (await _http_stream(http, services.url, body))[0])
            for task in load:
                task.cancel()
            await asyncio.gather(*load, return_exceptions=True)
    found = {}
    for mark in (50, 99):
        found[f"grpc_ttft_p{mark}_ms"] = percentile(grpc_ms, mark)
        found[f"http_ttft_p{mark}_ms"] = percentile(http_ms, mark)
    return {**found, "ttft_added_p50_ms": found["http_ttft_p50_ms"] - found["grpc_ttft_p50_ms"]}


def _run(options: argparse.Namespace) -> Iterator[Row]:
    if options.quick:
        options.streams, options.output_tokens, options.probes, options.repeats = [4], 16, 3, 1
        options.probe_tokens, options.step_ms = 400, 5
    else:
        wait_quiet(options.quiet_wait_s)
    for streams in options.streams or _STREAMS:
        repeats, other_cores = [], []
        for index in range(options.repeats):
            with OtherLoad() as other:
                found = asyncio.run(_throughput(options, streams)) | asyncio.run(_first_token(options, streams))
            progress(f"{NAME}: {streams} streams, repeat {index + 1} of {options.repeats}")
            repeats.append(found)
            other_cores.append(other.cores)
        names = ("prompt_tokens", "output_tokens", "step_ms", "probes", "probe_tokens")
        params = {"streams": streams, **{name: getattr(options, name) for name in names}}
        yield make_row(NAME, seed=options.seed, params=params, repeats=repeats, other_cores=other_cores)


def _describe(row: Row) -> str:
    found = row.medians
    return (
        f"{row.params['streams']} streams: gRPC {found['grpc_tokens_per_s']:.0f} tokens/s, HTTP "
        f"{found['http_tokens_per_s']:.0f} tokens/s; the gateway takes {found['gateway_us_per_token']:.1f} us a token, "
        f"so {found['gateway_max_tokens_per_s']:.0f} tokens/s a core\n"
        f"  first token beside {row.params['streams'] - 1} streams: gRPC p50 {found['grpc_ttft_p50_ms']:.1f} ms, HTTP "
        f"{found['http_ttft_p50_ms']:.1f} ms: {found['ttft_added_p50_ms']:+.1f} ms"
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=positive, action="append", help="streams at once; default 64, then 512")
    parser.add_argument("--prompt-tokens", type=positive, default=32, help="of each request (default 32)")
    parser.add_argument("--output-tokens", type=positive, default=256, help="of each request of a burst (default 256)")
    parser.add_argument("--step-ms", type=positive, default=20, help="time of a step beside probes (default 20)")
    parser.add_argument("--probes", type=positive, default=50, help="probes by each way (default 50)")
    parser.add_argument(
        "--probe-tokens", type=positive, default=2000, help="of the streams beside probes (default 2000)"
    )
    parser.add_argument("--quick", action="store_true", help="few streams and short runs: whether it works at all")


BENCHMARK = Benchmark(NAME, "what does HTTP cost beside gRPC?", _add_options, _run, _describe)
