"""Stage of failover: the executor is killed while requests decode; the launcher starts it again, and they go on.

Streams run once undisturbed and once with SIGKILL to the executor when each has a quarter of its tokens. Measured: how
long no stream got a token, the longest wait of all, and how many tokens differ from the undisturbed run. In exact mode
none may differ.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.common.benchmark import SEED
from benchmarks.common.rows import BenchmarkError
from benchmarks.common.workload import Request
from benchmarks.gpu.cases import Goal, Metrics
from benchmarks.gpu.serving.run import Run
from benchmarks.gpu.serving.stages import equal_requests
from cadenza import AsyncClient, LocalServices, SamplingParams

_COUNT, _PROMPT, _OUTPUT, _TRIAL_OUTPUT = 16, 128, 512, 1024
"""A tiny model is faster than streams: it must not have ended when the executor is killed."""
ESTIMATE_S = 45.0
"""Two starts, and all tokens twice."""
_TIME_GOAL = Goal("longest_wait_s", at_most=15)
_TOKENS_GOAL = Goal("different_tokens", at_most=0)


def serve_failover(run: Run, model: Path, trial: bool) -> None:
    """Run the stage of one shape, in the mode of the run."""
    count, output = (3, _TRIAL_OUTPUT) if trial else (_COUNT, _OUTPUT)
    requests = equal_requests(count, _PROMPT, output, SEED, run.shape.vocab_size)
    run.changed = {"max_num_seqs": max(count, 8), "max_model_len": -(-(_PROMPT + output) // 16) * 16}
    estimate = 0.0 if trial else ESTIMATE_S
    mode = "exact" if run.exact else "fast"
    metrics = run.stage(
        f"SIGKILL of the executor, {mode}", estimate, lambda: _measure(run, model, requests), requests, _TIME_GOAL
    )
    if metrics and run.exact:
        found = {"different_tokens": metrics["different_tokens"]}
        run.stage("tokens after SIGKILL, exact", 0.0, lambda: found, requests, _TOKENS_GOAL)


def _measure(run: Run, model: Path, requests: Sequence[Request]) -> Metrics:
    events: list[str] = []
    with (run.output.files / "services.log").open("a", encoding="utf-8") as log:
        services = LocalServices(
            str(model), on_event=events.append, on_log=lambda name, line: print(name, line, file=log, flush=True),
            skip_tokenizer_init=True, start_timeout_s=max(1.0, run.end_at - time.monotonic()), **run.options(),
        )  # fmt: skip
        with services:
            calm: list[Watched] = run.limited(_streams(services, requests, kills=False))
            broken: list[Watched] = run.limited(_streams(services, requests, kills=True))
    if len(events) < 2:
        raise BenchmarkError(f"the executor was not started again: {events}")
    pairs = zip(calm, broken, strict=True)
    different = sum(a != b for one, other in pairs for a, b in zip(one.tokens, other.tokens, strict=True))
    waits = [watched.longest_wait_s for watched in broken]
    return {
        "longest_wait_s": max(waits),
        "shortest_wait_s": min(waits),
        "different_tokens": float(different),
        "tokens": float(sum(len(each.tokens) for each in broken)),
    }


@dataclass(slots=True)
class Watched:
    """The tokens of a stream, and when they came."""

    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    @property
    def longest_wait_s(self) -> float:
        """The longest time between two of its tokens."""
        return max(after - before for before, after in zip(self.times, self.times[1:], strict=False))


async def _streams(services: LocalServices, requests: Sequence[Request], *, kills: bool) -> list[Watched]:
    watched = [Watched() for _ in requests]
    async with AsyncClient(services.target) as client:
        await client.model_info()
        every = [asyncio.create_task(_follow(client, each, into)) for each, into in zip(requests, watched, strict=True)]
        if kills:
            await _all_have(watched, requests[0].output_len // 4, every)
            os.kill(services.pids()["executor"], signal.SIGKILL)
        await asyncio.gather(*every)
    for request, each in zip(requests, watched, strict=True):
        if len(each.tokens) != request.output_len:
            raise BenchmarkError(f"a stream has {len(each.tokens)} tokens instead of {request.output_len}")
    return watched


async def _follow(client: AsyncClient, request: Request, into: Watched) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=request.output_len, ignore_eos=True, detokenize=False)
    async for delta in client.stream(request.prompt, params):
        for sample in delta.outputs:
            into.tokens += sample.token_ids
            into.times += [time.perf_counter()] * len(sample.token_ids)


async def _all_have(watched: Sequence[Watched], count: int, every: Sequence[asyncio.Task[None]]) -> None:
    while min(len(each.tokens) for each in watched) < count:
        if any(task.done() for task in every):
            raise BenchmarkError("a stream had ended before the executor was killed")
        await asyncio.sleep(0.001)
