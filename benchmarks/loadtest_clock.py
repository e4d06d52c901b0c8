"""Is the load test's clock right? TTFT and TPOT measured by the client beside the server's own, at 100 requests/s.

Both services run as processes, with a simulated executor whose steps take a known time: Poisson arrivals over Session,
over Generate, and by a plain asyncio client independent of the harness, the same schedule one after the other. The goal
is a median difference within 1 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.common.benchmark import Benchmark, positive, positive_number, progress
from benchmarks.common.other_load import OtherLoad, wait_quiet
from benchmarks.common.rows import BenchmarkError, Row, make_row
from cadenza import AsyncClient, LocalServices, SamplingParams
from cadenza_loadtest.arrivals import make_arrivals
from cadenza_loadtest.driving.driver import drive
from cadenza_loadtest.requests import Floats, RequestShape
from cadenza_loadtest.targets.generate import GenerateTarget
from cadenza_loadtest.targets.session import SessionTarget
from cadenza_loadtest.workloads.prompts import Prompts

NAME = "loadtest_clock"
_VOCAB_SIZE = 32768
_WARM_UP = 50
_EMPTY_CALLS = 200
Load = Sequence[tuple[float, RequestShape]]


def make_load(count: int, rate: float, output_len: int, seed: int) -> Load:
    """Poisson arrivals; prompts of 16 to 256 tokens."""
    arrivals = make_arrivals("poisson", rate).times(seed)
    lengths = np.random.default_rng(seed).integers(16, 257, count).tolist()
    return [(next(arrivals), RequestShape(index, length, output_len)) for index, length in enumerate(lengths)]


async def by_harness(target: SessionTarget | GenerateTarget, load: Load) -> dict[str, Floats]:
    """[n] seconds each, by the client's clock and by the server's."""
    await target.start()
    try:
        columns = await drive(load, target, Prompts(0, _VOCAB_SIZE))
    finally:
        await target.close()
    wanted = [shape.num_output_tokens for _, shape in load]
    if not columns.ok.all() or columns.num_output_tokens.tolist() != wanted:
        raise BenchmarkError(f"requests failed: {sorted(set(columns.error))}")
    return {
        "ttft_s": columns.first_s - columns.due_s,
        "e2e_s": columns.last_s - columns.due_s,
        "lag_s": columns.sent_s - columns.due_s,
        "server_first_s": columns.server_first_s,
        "server_total_s": columns.server_total_s,
        "num_tokens": columns.num_output_tokens.astype(np.float64),
    }


async def by_plain_client(address: str, load: Load) -> dict[str, Floats]:
    """The same with one task for each request that sleeps until the request is due."""
    prompts = Prompts(0, _VOCAB_SIZE)
    planned = [(due_s, prompts.token_ids(shape), shape.num_output_tokens) for due_s, shape in load]
    async with AsyncClient(address) as client:
        await client.model_info()
        start = time.perf_counter()

        async def one(due_s: float, prompt: list[int], length: int) -> tuple[float, ...]:
            await asyncio.sleep(start + due_s - time.perf_counter())
            sent_s = time.perf_counter() - start
            params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False)
            times = []
            async for delta in client.stream(prompt, params):
                if delta.outputs:
                    times.append(time.perf_counter() - start)
            assert delta.metrics is not None
            server = delta.metrics.first_token_s, delta.metrics.total_s
            return times[0] - due_s, times[-1] - due_s, sent_s - due_s, *server, length

        rows = np.array(await asyncio.gather(*(one(*each) for each in planned)))
    names = ("ttft_s", "e2e_s", "lag_s", "server_first_s", "server_total_s", "num_tokens")
    return {name: rows[:, place] for place, name in enumerate(names)}


async def empty_call_s(address: str) -> float:
    """Median round trip of an empty call: the lower bound for any client."""
    async with AsyncClient(address) as client:
        times = []
        for _ in range(_EMPTY_CALLS):
            start = time.perf_counter()
            await client.model_info()
            times.append(time.perf_counter() - start)
    return float(np.median(times))


def differences(name: str, times: dict[str, Floats]) -> dict[str, float]:
    """The client's measurements less the server's: medians over the requests, and the tails."""
    after_first = times["num_tokens"] - 1
    ttft = times["ttft_s"] - times["server_first_s"]
    tpot = (times["e2e_s"] - times["ttft_s"] - times["server_total_s"] + times["server_first_s"]) / after_first
    return {
        f"{name}_ttft_difference_ms": 1e3 * float(np.median(ttft)),
        f"{name}_ttft_difference_p99_ms": 1e3 * float(np.quantile(ttft, 0.99)),
        f"{name}_tpot_difference_us": 1e6 * float(np.median(tpot)),
        f"{name}_tpot_difference_p99_us": 1e6 * float(np.quantile(np.abs(tpot), 0.99)),
        f"{name}_lag_ms": 1e3 * float(np.median(times["lag_s"])),
        f"{name}_lag_p99_ms": 1e3 * float(np.quantile(times["lag_s"], 0.99)),
        f"{name}_ttft_p50_ms": 1e3 * float(np.median(times["ttft_s"])),
        f"{name}_tpot_p50_ms": 1e3 * float(np.median((times["e2e_s"] - times["ttft_s"]) / after_first)),
    }


def measure_once(address: str, load: Load) -> dict[str, float]:
    """One repeat: all three clients, one after the other."""
    found = {"empty_call_ms": 1e3 * asyncio.run(empty_call_s(address))}
    for target in (SessionTarget(address), GenerateTarget(address)):
        found |= differences(target.api, asyncio.run(by_harness(target, load)))
    return found | differences("plain", asyncio.run(by_plain_client(address, load)))


def _run(options: argparse.Namespace) -> Iterator[Row]:
    if options.output_len < 2:
        raise BenchmarkError("--output-len must be 2 or more: there is no TPOT of one token")
    costs = {"step_us": 1000.0 * options.step_ms}
    repeats, other_cores = [], []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "costs.json"
        file.write_text(json.dumps(costs), encoding="utf-8")
        events: list[str] = []
        with LocalServices(
            "simulated",
            simulate=str(file),
            simulate_vocab_size=_VOCAB_SIZE,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            on_event=events.append,
        ) as services:
            measure_once(services.target, make_load(_WARM_UP, options.rate, options.output_len, options.seed + 1))
            wait_quiet(options.quiet_wait_s)
            load = make_load(options.requests, options.rate, options.output_len, options.seed)
            for index in range(options.repeats):
                progress(f"{NAME}: repeat {index + 1} of {options.repeats}")
                with OtherLoad() as other:
                    repeats.append(measure_once(services.target, load))
                other_cores.append(other.cores)
        if events:
            raise BenchmarkError("; ".join(events))
    params = {
        "rate_per_s": options.rate,
        "requests": options.requests,
        "output_tokens": options.output_len,
        "step_ms": options.step_ms,
    }
    yield make_row(NAME, seed=options.seed, params=params, repeats=repeats, other_cores=other_cores)


def _describe(row: Row) -> str:
    found, params = row.medians, row.params
    lines = [
        f"{params['rate_per_s']:g} requests/s, steps of {params['step_ms']:g} ms; an empty call takes "
        f"{found['empty_call_ms']:.2f} ms; client less server:"
    ]
    for name in ("session", "generate", "plain"):
        lines.append(
            f"  {name:8} TTFT {found[f'{name}_ttft_difference_ms']:.2f} ms "
            f"(p99 {found[f'{name}_ttft_difference_p99_ms']:.2f}), "
            f"TPOT {found[f'{name}_tpot_difference_us']:.1f} us (p99 of its size "
            f"{found[f'{name}_tpot_difference_p99_us']:.0f}); lag {found[f'{name}_lag_ms']:.2f} ms "
            f"(p99 {found[f'{name}_lag_p99_ms']:.2f}); TTFT {found[f'{name}_ttft_p50_ms']:.1f} ms, "
            f"TPOT {found[f'{name}_tpot_p50_ms']:.2f} ms"
        )
    return "\n".join(lines)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rate", type=positive_number, default=100.0, help="requests per second (default 100)")
    parser.add_argument("--requests", type=positive, default=1000, help="of each client in a repeat (default 1000)")
    parser.add_argument("--output-len", type=positive, default=32, help="tokens of each output, 2 or more (default 32)")
    parser.add_argument("--step-ms", type=positive_number, default=10.0, help="time of a step (default 10)")


BENCHMARK = Benchmark(NAME, "is the load test's clock right?", _add_options, _run, _describe)
