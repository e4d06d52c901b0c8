"""Experiment 4 on the real services: the demo model on this machine's CPU."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from benchmarks.common.checkpoints import DEMO_MODEL
from benchmarks.common.rows import BenchmarkError
from benchmarks.experiments.experiment import Repeated, RunSettings
from benchmarks.experiments.served import Server
from benchmarks.experiments.sharing_runs import BEAMS, SAMPLES, Outcome, Prefixed, Shared, widened
from benchmarks.experiments.simulated import apart, drawn, poisson
from cadenza import AsyncClient, LocalServices
from cadenza.info import ServerLoad
from cadenza_loadtest.driving.driver import drive
from cadenza_loadtest.measures.columns import RequestColumns
from cadenza_loadtest.measures.metrics import measure
from cadenza_loadtest.requests import RequestShape
from cadenza_loadtest.targets.session import SessionTarget
from cadenza_loadtest.workloads.prompts import Prompts

LOAD = "demo model"
_OPTIONS: dict[str, Any] = {"device": "cpu", "max_num_seqs": 64, "enable_prefix_caching": False}
_NUM_BLOCKS = 160
_LENGTHS = {"input_len": "uniform:64:128", "output_len": "uniform:32:96"}
_PREFIX_LENGTHS = {"input_len": "uniform:16:64", "output_len": "uniform:16:48", "num_prefixes": 1}
_LOAD_SHARE = 0.6
"""Lower than in virtual time, because other processes may use this machine's cores at any time."""
_POLL_S = 0.02


def measured(settings: RunSettings) -> Outcome:
    """Measure both parts; takes a few minutes."""
    widths, prefixes = ((2,), (256,)) if settings.quick else ((2, 4, 6), (128, 512, 1024))
    num_sequences, num_prefixed = (48, 16) if settings.quick else (120, 80)
    repeats = 1 if settings.quick else 2
    with LocalServices(DEMO_MODEL, num_gpu_blocks=_NUM_BLOCKS, **_OPTIONS) as services:
        shared = {
            (algorithm, width): _shared(
                services.target, algorithm, width, num_sequences // width, settings.seed, repeats
            )
            for algorithm in (SAMPLES, BEAMS)
            for width in widths
        }
    return Outcome(
        setup={
            "model": "models/cadenza-demo on the CPU, bf16",
            "KV pool": f"{_NUM_BLOCKS} blocks of 16 tokens for samples and beams",
            "samples or beams of a run": f"{num_sequences}, all at once: prompts {_LENGTHS['input_len']}, outputs "
            f"{_LENGTHS['output_len']} tokens",
            "prefixes": f"{num_prefixed} requests, {_PREFIX_LENGTHS['input_len']} tokens of their own, outputs "
            f"{_PREFIX_LENGTHS['output_len']}; TTFT at {_LOAD_SHARE:.0%} of what is held without the cache",
        },
        groups={LOAD: shared},
        prefixes={length: _prefixed(length, num_prefixed, settings.seed) for length in prefixes},
    )


def _shared(address: str, algorithm: str, width: int, count: int, seed: int, repeats: int) -> Shared:
    saved, gains = [], []
    for repeat in range(repeats):
        shapes = widened(drawn(_LENGTHS, count, seed + repeat), algorithm, width)
        loads: list[ServerLoad] = []
        taken_s: dict[bool, float] = {}
        # The order alternates, so that other load on this machine does not favour one of them.
        for shares in (True, False) if repeat % 2 == 0 else (False, True):
            columns, seen = asyncio.run(_watched(address, shapes if shares else apart(shapes), seed + repeat))
            taken_s[shares] = float(columns.last_s.max())
            loads = seen if shares else loads
        saved.append(_saved(loads))
        gains.append(taken_s[False] / taken_s[True])
    return Shared(Repeated(tuple(saved)), Repeated(tuple(gains)))


def _saved(loads: Sequence[ServerLoad]) -> float:
    """Share of blocks saved while requests waited; without the first quarter of that time, when all have the same
    age."""
    waiting = [load for load in loads if load.num_waiting]
    steady = waiting[len(waiting) // 4 :]
    if not steady:
        raise BenchmarkError("no request waited for memory: the load is too small for the pool")
    saved = sum(load.num_shared_block_refs for load in steady)
    return saved / (saved + sum(load.num_used_device_blocks for load in steady))


async def _watched(address: str, shapes: Sequence[RequestShape], seed: int) -> tuple[RequestColumns, list[ServerLoad]]:
    """Send all requests at once, and sample the server's load while they run."""
    target, loads = SessionTarget(address, seed=seed), []
    async with AsyncClient(address) as client:

        async def look() -> None:
            while True:
                loads.append((await client.server_info()).load)
                await asyncio.sleep(_POLL_S)

        try:
            facts = await target.start()
            looking = asyncio.create_task(look())
            try:
                schedule = [(0.0, shape) for shape in shapes]
                columns = await drive(schedule, target, Prompts(seed, facts.vocab_size))
            finally:
                looking.cancel()
                await asyncio.gather(looking, return_exceptions=True)
        finally:
            await target.close()
    if not columns.ok.all():
        raise BenchmarkError(f"some requests failed: {sorted(set(columns.error[~columns.ok].tolist()))}")
    return columns, loads


def _prefixed(length: int, count: int, seed: int) -> tuple[Prefixed, Prefixed]:
    shapes = drawn({"workload": "shared-prefix", **_PREFIX_LENGTHS, "prefix_len": str(length)}, count, seed)
    rates, found = [], []
    for cached in (False, True):
        with Server(DEMO_MODEL, {**_OPTIONS, "enable_prefix_caching": cached}) as server:
            at_once = server.load(shapes, seed=seed)
            rates.append(count / float(at_once.last_s.max()))
            # Prompts of another seed, so that the cache holds no part of them, including the prefix.
            paced = server.load(shapes, poisson(_LOAD_SHARE * rates[0], count, seed), seed=seed + 1)
        ttft = measure(paced, window=None, slo=None).ttft_s
        assert ttft is not None
        found.append(Prefixed(*(Repeated((value,)) for value in (rates[-1], ttft.p50, ttft.p99))))
    return found[0], found[1]
