"""Experiment 5's runs: short requests, long prompts among them, and limits on the prompt tokens of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.common.checkpoints import random_checkpoint
from benchmarks.common.rows import BenchmarkError
from benchmarks.experiments.experiment import RunSettings
from benchmarks.experiments.repeats import Repeated
from benchmarks.experiments.served import Server
from benchmarks.experiments.simulated import Case, about, drawn, fixed, h200_8b, poisson, run
from cadenza_loadtest.measures.metrics import Group, Metrics, Spread, measure
from cadenza_simulator.executor_profiles import ExecutorProfile

BUDGET = "tokens of a step"
PER_PROMPT = "tokens of one prompt in a step"
"""The two limits: --max-num-batched-tokens, and --long-prefill-token-threshold."""


@dataclass(frozen=True, slots=True)
class Chunked:
    """Results under one limit; latencies are in seconds."""

    short_itl_p50: Repeated
    short_itl_p99: Repeated
    short_itl_max: Repeated
    short_tpot_p99: Repeated
    short_ttft_p99: Repeated
    long_ttft_p50: Repeated
    output_tokens_per_s: Repeated


@dataclass(frozen=True, slots=True)
class Outcome:
    """All results of the experiment at one place."""

    setup: Mapping[str, str]
    limits: Mapping[str, Mapping[int, Chunked]]
    """By the kind of limit, then by the limit, ascending. The largest budget does not limit: whole prompts fit."""
    quarter: int
    """A quarter of a long prompt: one of the budgets."""
    alone_s: Mapping[int, float]
    """TTFT of one long prompt alone, by budget; empty if it was not measured."""


@dataclass(frozen=True, slots=True)
class _Load:
    """The load."""

    rate: float
    """Requests per second."""
    count: int
    options: Mapping[str, Any]
    """Options of the workload long-short."""

    @property
    def quarter(self) -> int:
        """A quarter of a long prompt, in tokens."""
        return int(self.options["long_len"]) // 4

    @property
    def text(self) -> str:
        """The load as text, for the setup."""
        options = self.options
        return (
            f"{self.count} requests at {self.rate:g}/s (Poisson), {options['long_share']:.0%} with long prompts "
            f"({options['long_len']} tokens), the others with short ones ({options['input_len']}); "
            f"outputs {options['output_len']}"
        )


_H200_LOAD = _Load(
    16.0,
    800,
    {"input_len": "uniform:64:256", "output_len": "exponential:128:16:512", "long_len": "4096", "long_share": 0.25},
)
_CPU_LOAD = _Load(
    12.0, 240, {"input_len": "uniform:16:64", "output_len": "uniform:48:96", "long_len": "512", "long_share": 0.3}
)
_BUDGETS = (128, 256, 512, 1024, 2048, 4096, 8192)
_PER_PROMPT = (128, 256, 512, 1024)
_PER_PROMPT_BUDGET = 2048
_CPU_BUDGETS = (48, 64, 128, 256, 1024)
_CPU_PER_PROMPT = (32, 64)
_CPU_PER_PROMPT_BUDGET = 256


def simulated(settings: RunSettings) -> Outcome:
    """On the published H200 with an 8B model."""
    profile = h200_8b().changed({"max_num_seqs": 128, "max_model_len": 16_384})
    load = replace(_H200_LOAD, count=60) if settings.quick else _H200_LOAD
    budgets, per_prompt = ((512, 1024, 8192), (256,)) if settings.quick else (_BUDGETS, _PER_PROMPT)
    seeds = range(settings.seed, settings.seed + (1 if settings.quick else 5))

    def under(budget: int, threshold: int) -> Chunked:
        return _chunked([_simulate(profile, load, seed, budget, threshold) for seed in seeds])

    return Outcome(
        setup={**about(profile), "load": load.text, "ranges in brackets": f"over {len(seeds)} seeds"},
        limits={
            BUDGET: {budget: under(budget, 0) for budget in budgets},
            PER_PROMPT: {threshold: under(_PER_PROMPT_BUDGET, threshold) for threshold in per_prompt},
        },
        quarter=load.quarter,
        alone_s={budget: _alone(profile, load, budget) for budget in budgets},
    )


def measured(settings: RunSettings) -> Outcome:
    """The 10.5M shape on this machine's CPU."""
    load = replace(_CPU_LOAD, count=16) if settings.quick else _CPU_LOAD
    budgets, per_prompt = ((128, 1024), (64,)) if settings.quick else (_CPU_BUDGETS, _CPU_PER_PROMPT)
    shapes = drawn({"workload": "long-short", **load.options}, load.count, settings.seed)
    times = poisson(load.rate, load.count, settings.seed)

    def under(budget: int, threshold: int) -> Chunked:
        options = {"device": "cpu", "max_num_seqs": 32, "max_num_batched_tokens": budget, "num_gpu_blocks": 2048}
        with Server(random_checkpoint("10m"), {**options, "long_prefill_token_threshold": threshold}) as server:
            columns = server.load(shapes, times, seed=settings.seed, keep_gaps=True)
        return _chunked([measure(columns, window=None, slo=None)])

    return Outcome(
        setup={"model": "random Llama of 10.5M parameters on the CPU, bf16", "load": load.text},
        limits={
            BUDGET: {budget: under(budget, 0) for budget in budgets},
            PER_PROMPT: {threshold: under(_CPU_PER_PROMPT_BUDGET, threshold) for threshold in per_prompt},
        },
        quarter=load.quarter,
        alone_s={},
    )


def _simulate(profile: ExecutorProfile, load: _Load, seed: int, budget: int, threshold: int) -> Metrics:
    case = Case(
        profile,
        drawn({"workload": "long-short", **load.options}, load.count, seed),
        poisson(load.rate, load.count, seed),
        scheduler={"long_prefill_token_threshold": threshold},
        executor={"max_num_batched_tokens": budget},
        keep_gaps=True,
    )
    return run(case).measure()


def _alone(profile: ExecutorProfile, load: _Load, budget: int) -> float:
    case = Case(profile, fixed([int(load.options["long_len"])], [2]), executor={"max_num_batched_tokens": budget})
    return float(run(case).requests.first_s[0])


def _chunked(runs: Sequence[Metrics]) -> Chunked:
    short, long = ([run.by_kind[kind] for run in runs] for kind in ("short", "long"))
    return Chunked(
        short_itl_p50=_over(short, "itl_s", "p50"),
        short_itl_p99=_over(short, "itl_s", "p99"),
        short_itl_max=_over(short, "itl_s", "max"),
        short_tpot_p99=_over(short, "tpot_s", "p99"),
        short_ttft_p99=_over(short, "ttft_s", "p99"),
        long_ttft_p50=_over(long, "ttft_s", "p50"),
        output_tokens_per_s=Repeated(tuple(run.output_tokens_per_s or 0.0 for run in runs)),
    )


def _over(groups: Sequence[Group], latency: str, quantile: str) -> Repeated:
    values = []
    for group in groups:
        spread: Spread | None = getattr(group, latency)
        if spread is None:
            raise BenchmarkError(f"no request has a {latency}: the load is too small")
        values.append(float(getattr(spread, quantile)))
    return Repeated(tuple(values))
