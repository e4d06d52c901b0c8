"""Experiment 4's runs: samples and beams that share blocks, prompts that share a prefix.

In virtual time, and on the real services: the demo model on this machine's CPU.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.common.checkpoints import DEMO_MODEL
from benchmarks.common.rows import BenchmarkError
from benchmarks.experiments.experiment import Repeated, RunSettings, ratio
from benchmarks.experiments.memory_runs import ALPACA, SHAREGPT
from benchmarks.experiments.served import Server
from benchmarks.experiments.simulated import Case, a100_13b, about, apart, drawn, poisson, step_through
from benchmarks.experiments.simulated import run as run_case
from cadenza import AsyncClient, LocalServices
from cadenza.info import ServerLoad
from cadenza_loadtest.driving.driver import drive
from cadenza_loadtest.measures.columns import RequestColumns
from cadenza_loadtest.measures.metrics import measure
from cadenza_loadtest.requests import RequestShape
from cadenza_loadtest.targets.session import SessionTarget
from cadenza_loadtest.workloads.prompts import Prompts
from cadenza_simulator.executor_profiles import ExecutorProfile
from scheduler_svc.core.scheduler import Scheduler

SAMPLES, BEAMS = "samples", "beams"
_SEQUENCES = {"ShareGPT": 300, "Alpaca": 1800}
"""Samples or beams of a run: several times the pool's capacity, so that memory is the limit."""
_MAX_NUM_SEQS = 1024
_LOAD = 0.8
"""Share of the server's throughput without the prefix cache: the rate at which TTFT is measured."""
_OWN_LEN = _OUTPUT_LEN = "uniform:16:64"


@dataclass(frozen=True, slots=True)
class Shared:
    """Results of one algorithm with one width."""

    saved: Repeated
    """Blocks saved, as a share of the blocks without sharing."""
    gain: Repeated
    """Ratio of the throughput to that of as many requests without sharing."""


@dataclass(frozen=True, slots=True)
class Prefixed:
    """Results for one prefix, with the prefix cache or without."""

    requests_per_s: Repeated
    """All at once."""
    ttft_p50_s: Repeated
    ttft_p99_s: Repeated
    """Both at a rate that the server can serve without the cache."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """All results of the experiment at one place."""

    setup: Mapping[str, str]
    groups: Mapping[str, Mapping[tuple[str, int], Shared]]
    """By load; then by algorithm and width."""
    prefixes: Mapping[int, tuple[Prefixed, Prefixed]]
    """By the prefix's length: without the cache, and with it."""


class Saving:
    """Blocks saved by sharing while requests wait for memory; each step is weighted by its duration."""

    def __init__(self, num_requests: int) -> None:
        self._begins_at = 0.75 * num_requests
        self._saved = self._whole = 0.0

    def look(self, core: Scheduler, seconds: float) -> None:
        """Observe the core; called by `step_through`."""
        if len(core.waiting) and len(core.groups) <= self._begins_at:
            lane = core.lanes[0]
            saved = lane.blocks.num_shared_refs
            self._saved += seconds * saved
            self._whole += seconds * (saved + lane.spec.num_blocks - lane.blocks.num_free)

    @property
    def share(self) -> float:
        """Share of the blocks without sharing that was saved; raises BenchmarkError if no request waited."""
        if not self._whole:
            raise BenchmarkError("no request waited for memory: the load is too small for the pool")
        return self._saved / self._whole


def widened(shapes: Sequence[RequestShape], algorithm: str, width: int) -> list[RequestShape]:
    """The same requests with `width` samples or beams each."""
    if algorithm == BEAMS:
        return [replace(shape, beam_width=width) for shape in shapes]
    return [replace(shape, n=width) for shape in shapes]


def simulated(settings: RunSettings) -> Outcome:
    """On the published A100 with a 13B model."""
    profile = a100_13b().changed({"max_num_seqs": _MAX_NUM_SEQS})
    if settings.quick:
        profile = profile.changed({"num_gpu_blocks": 256})
    widths, prefixes = ((2, 4), (64,)) if settings.quick else ((2, 4, 6), (80, 341, 1024))
    seeds = range(settings.seed, settings.seed + (1 if settings.quick else 3))
    loads = {"ShareGPT": SHAREGPT, "Alpaca": ALPACA}
    scale, num_prefixed = (4, 40) if settings.quick else (1, 600)
    groups = {
        load: {
            (algorithm, width): _shared(profile, load, options, algorithm, width, seeds, scale)
            for algorithm in (SAMPLES, BEAMS)
            for width in widths
        }
        for load, options in loads.items()
    }
    counts = ", ".join(f"{load} {count // scale}" for load, count in _SEQUENCES.items())
    return Outcome(
        setup={
            **about(profile),
            "samples or beams of a run": f"{counts}, all at once; beams have made-up candidates",
            "prefixes": f"{num_prefixed} requests with one prefix, then {_OWN_LEN} tokens of their own, and "
            f"{_OUTPUT_LEN} of output; TTFT at {_LOAD:.0%} of what is held without the cache",
            "ranges in brackets": f"over {len(seeds)} seeds",
        },
        groups=groups,
        prefixes={length: _prefixed(profile, length, num_prefixed, seeds) for length in prefixes},
    )


def _shared(
    profile: ExecutorProfile,
    load: str,
    options: Mapping[str, str],
    algorithm: str,
    width: int,
    seeds: Sequence[int],
    scale: int,
) -> Shared:
    saved, together_s, apart_s = [], [], []
    for seed in seeds:
        shapes = widened(drawn(options, _SEQUENCES[load] // scale // width, seed), algorithm, width)
        saving = Saving(len(shapes))
        together_s.append(step_through(profile, shapes, saving.look).duration_s)
        apart_s.append(step_through(profile, apart(shapes), lambda core, seconds: None).duration_s)
        saved.append(saving.share)
    return Shared(Repeated(tuple(saved)), ratio(Repeated(tuple(apart_s)), Repeated(tuple(together_s))))


def _prefixed(profile: ExecutorProfile, length: int, count: int, seeds: Sequence[int]) -> tuple[Prefixed, Prefixed]:
    options = {"input_len": _OWN_LEN, "output_len": _OUTPUT_LEN, "num_prefixes": 1, "prefix_len": str(length)}
    at_once: dict[bool, list[float]] = {False: [], True: []}
    p50: dict[bool, list[float]] = {False: [], True: []}
    p99: dict[bool, list[float]] = {False: [], True: []}
    for seed in seeds:
        shapes = drawn({"workload": "shared-prefix", **options}, count, seed)
        for cached in (False, True):
            case = Case(profile, shapes, scheduler={"enable_prefix_caching": cached}, prompt_seed=seed)
            at_once[cached].append(count / run_case(case).duration_s)
            times = poisson(_LOAD * at_once[False][-1], count, seed)
            ttft = run_case(replace(case, times=times)).measure().ttft_s
            assert ttft is not None
            p50[cached].append(ttft.p50)
            p99[cached].append(ttft.p99)
    without, with_it = (
        Prefixed(*(Repeated(tuple(values[cached])) for values in (at_once, p50, p99))) for cached in (False, True)
    )
    return without, with_it


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
    with LocalServices(DEMO_MODEL, num_gpu_blocks=_NUM_BLOCKS, speculative="off", **_OPTIONS) as services:
        shared = {
            (algorithm, width): _shared_on_cpu(
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
        prefixes={length: _prefixed_on_cpu(length, num_prefixed, settings.seed) for length in prefixes},
    )


def _shared_on_cpu(address: str, algorithm: str, width: int, count: int, seed: int, repeats: int) -> Shared:
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


def _prefixed_on_cpu(length: int, count: int, seed: int) -> tuple[Prefixed, Prefixed]:
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
