"""What does the journal cost? Output tokens/s and TTFT of a busy Session: without it, in exact mode, and in fast mode.

Scheduler and executor run as processes, the executor simulated; in fast mode it only says so, and works as in exact
mode. One Session has `--running` requests at all times: each that ends is replaced at once. Each repeat measures the
three modes one after the other, on services of their own, so that other load disturbs all of them alike. The
scheduler's CPU time is measured too, which other load disturbs less. The journal is in `--folder`, as is the file whose
fsync is timed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from benchmarks.common.benchmark import Benchmark, positive, progress
from benchmarks.common.other_load import OtherLoad, wait_quiet
from benchmarks.common.rows import BenchmarkError, Row, make_row
from benchmarks.common.service_process import cpu_s, service_process
from benchmarks.common.stats import percentile
from cadenza.v1 import generation_pb2 as pb
from cadenza.v1 import generation_pb2_grpc, types_pb2
from cadenza_common.wire.transport import channel_options

NAME = "journal"
MODES = ("off", "exact", "fast")
_VOCAB_SIZE = 32768
_PROMPT_TOKENS = 100
_NUM_FSYNCS = 50


@dataclass
class Traffic:
    """The requests of one Session, and the times of their first tokens."""

    num_requests: int
    output_tokens: int
    num_sent: int = 0
    num_tokens: int = 0
    sent_at: dict[str, float] = field(default_factory=dict)
    ttft_ms: list[float] = field(default_factory=list)

    def next_request(self) -> pb.SessionRequest:
        """A request of its own prompt; its first token is timed from now."""
        index, self.num_sent = self.num_sent, self.num_sent + 1
        ids = [300 + (index * 7 + place) % (_VOCAB_SIZE - 300) for place in range(_PROMPT_TOKENS)]
        request_id = str(index)
        self.sent_at[request_id] = time.perf_counter()
        return pb.SessionRequest(
            generate=pb.GenerateRequest(
                request_id=request_id,
                prompt=[types_pb2.PromptPart(tokens=types_pb2.TokenIds(ids=ids))],
                sampling_params=types_pb2.SamplingParams(
                    max_tokens=self.output_tokens, temperature=0.8, ignore_eos=True, detokenize=False
                ),
            )
        )

    def take(self, message: pb.SessionResponse) -> int:
        """Count a message; returns the number of requests that ended."""
        now, num_ended = time.perf_counter(), 0
        for event in message.events:
            if event.WhichOneof("event") == "error":
                raise BenchmarkError(f"request {event.request_id}: {event.error.message}")
            count = sum(len(output.token_ids) for output in event.response.outputs)
            if count and (sent_at := self.sent_at.pop(event.request_id, None)) is not None:
                self.ttft_ms.append(1e3 * (now - sent_at))
            self.num_tokens += count
            num_ended += event.done
        return num_ended


async def run_traffic(target: str, traffic: Traffic, running: int) -> dict[str, float]:
    """Keep `running` requests in one Session until all have ended."""
    async with grpc.aio.insecure_channel(target, options=channel_options()) as channel:
        stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        call = stub.Session()
        start = time.perf_counter()
        for _ in range(min(running, traffic.num_requests)):
            await call.write(traffic.next_request())
        num_ended = 0
        while num_ended < traffic.num_requests:
            message = await call.read()
            if message is grpc.aio.EOF:
                raise BenchmarkError("the session ended early")
            count = traffic.take(message)
            num_ended += count
            for _ in range(min(count, traffic.num_requests - traffic.num_sent)):
                await call.write(traffic.next_request())
        wall_s = time.perf_counter() - start
        await call.done_writing()
    if traffic.num_tokens != traffic.num_requests * traffic.output_tokens:
        raise BenchmarkError(f"{traffic.num_tokens} tokens came, which is not what was requested")
    return {
        "tokens_per_s": traffic.num_tokens / wall_s,
        "ttft_p50_ms": percentile(traffic.ttft_ms, 50),
        "ttft_p99_ms": percentile(traffic.ttft_ms, 99),
    }


async def measure(mode: str, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """One run in one mode."""
    with tempfile.TemporaryDirectory(dir=folder) as own:
        costs = Path(own) / "costs.json"
        costs.write_text(json.dumps({"step_us": 1000 * options.step_ms}))
        executor = (
            *("--simulate", str(costs), "--simulate-vocab-size", str(_VOCAB_SIZE), "--max-num-batched-tokens", "4096"),
            *("--max-num-seqs", str(options.running), "--numerics", "fast" if mode == "fast" else "exact"),
            *("--max-model-len", str(_PROMPT_TOKENS + options.output_tokens)),
        )
        journal = () if mode == "off" else ("--journal", str(Path(own) / "journal"))
        async with (
            service_process("executor_svc", *executor) as (_, address),
            service_process("scheduler_svc", "--executor", address, "--skip-tokenizer-init", *journal) as (pid, target),
        ):
            await run_traffic(target, Traffic(options.running, 16), options.running)  # warm up
            before = cpu_s(pid)
            traffic = Traffic(options.requests, options.output_tokens)
            found = await run_traffic(target, traffic, options.running)
            return {**found, "cpu_us_per_token": 1e6 * (cpu_s(pid) - before) / traffic.num_tokens}


def fsync_ms(folder: Path) -> float:
    """Median time of an fsync after 4 KiB were appended to a file: what the disk makes of a small commit."""
    times = []
    with tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(_NUM_FSYNCS):
            file.write(bytes(4096))
            file.flush()
            start = time.perf_counter()
            os.fsync(file.fileno())
            times.append(1e3 * (time.perf_counter() - start))
    return percentile(times, 50)


def _run(options: argparse.Namespace) -> Iterator[Row]:
    folder = Path(options.folder or tempfile.gettempdir())
    wait_quiet(options.quiet_wait_s)
    repeats, other_cores = [], []
    for index in range(options.repeats):
        found = {"fsync_ms": fsync_ms(folder)}
        with OtherLoad() as other:
            for mode in MODES:
                progress(f"{NAME}: repeat {index + 1} of {options.repeats}: {mode}")
                metrics = asyncio.run(measure(mode, folder, options))
                found |= {f"{mode}_{name}": value for name, value in metrics.items()}
        repeats.append(found)
        other_cores.append(other.cores)
    params = {
        "running": options.running,
        "requests": options.requests,
        "prompt_tokens": _PROMPT_TOKENS,
        "output_tokens": options.output_tokens,
        "step_ms": options.step_ms,
    }
    yield make_row(NAME, seed=options.seed, params=params, repeats=repeats, other_cores=other_cores)


def _describe(row: Row) -> str:
    found = row.medians
    lines = [
        f"{row.params['running']} running, steps of {row.params['step_ms']} ms, an fsync takes {found['fsync_ms']} ms:"
    ]
    names = {"off": "no journal", "exact": "exact mode", "fast": "fast mode"}
    for mode in MODES:
        share = found[f"{mode}_tokens_per_s"] / found["off_tokens_per_s"]
        lines.append(
            f"  {names[mode]}: {found[f'{mode}_tokens_per_s']:.0f} output tokens/s ({share:.0%}), TTFT p50 "
            f"{found[f'{mode}_ttft_p50_ms']:.1f} ms, p99 {found[f'{mode}_ttft_p99_ms']:.1f} ms; the scheduler takes "
            f"{found[f'{mode}_cpu_us_per_token']:.1f} us of CPU time a token"
        )
    return "\n".join(lines)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--running", type=positive, default=256, help="requests at any time (default 256)")
    parser.add_argument("--requests", type=positive, default=1024, help="requests in all (default 1024)")
    parser.add_argument("--output-tokens", type=positive, default=128, help="of each request (default 128)")
    parser.add_argument("--step-ms", type=positive, default=25, help="time of a simulated step (default 25)")
    parser.add_argument("--folder", help="folder for the journal (default: the system's temporary folder)")


BENCHMARK = Benchmark(NAME, "what does the journal cost?", _add_options, _run, _describe)
