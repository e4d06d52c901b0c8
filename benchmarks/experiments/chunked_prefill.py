"""Experiment 5: the effect of long prompts on running short requests, and of computing them in chunks.

Short requests run, with long prompts among them, under limits on the prompt tokens of a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.common.checkpoints import random_checkpoint
from benchmarks.common.rows import BenchmarkError
from benchmarks.experiments.experiment import (
    Experiment,
    ExperimentResult,
    Figure,
    Finding,
    Repeated,
    RunSettings,
    Series,
    Table,
    ratio,
    series,
)
from benchmarks.experiments.served import Server
from benchmarks.experiments.simulated import Case, about, drawn, fixed, h200_8b, poisson
from benchmarks.experiments.simulated import run as run_case
from cadenza_loadtest.measures.metrics import Metrics, RequestGroup, Spread, measure
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
    return run_case(case).measure()


def _alone(profile: ExecutorProfile, load: _Load, budget: int) -> float:
    case = Case(profile, fixed([int(load.options["long_len"])], [2]), executor={"max_num_batched_tokens": budget})
    return float(run_case(case).requests.first_s[0])


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


def _over(groups: Sequence[RequestGroup], latency: str, quantile: str) -> Repeated:
    values = []
    for group in groups:
        spread: Spread | None = getattr(group, latency)
        if spread is None:
            raise BenchmarkError(f"no request has a {latency}: the load is too small")
        values.append(float(getattr(spread, quantile)))
    return Repeated(tuple(values))


_SARATHI = "https://arxiv.org/abs/2403.02310"
_VLLM = "https://docs.vllm.ai/en/v0.9.0/api/vllm/core/scheduler.html"
_COLUMNS = {
    "ITL p50": "short_itl_p50",
    "ITL p99": "short_itl_p99",
    "ITL max": "short_itl_max",
    "TPOT p99": "short_tpot_p99",
    "TTFT p99": "short_ttft_p99",
    "TTFT p50, long": "long_ttft_p50",
}


def run(settings: RunSettings) -> ExperimentResult:
    """Run in virtual time or on the CPU, with the same questions."""
    outcome = simulated(settings) if settings.place == "simulate" else measured(settings)
    findings = [_stall_finding(outcome), _tpot_finding(outcome), _queue_finding(outcome)]
    if outcome.alone_s:
        findings.append(_overhead_finding(outcome.alone_s))
    return ExperimentResult(
        experiment=EXPERIMENT.name,
        place=settings.place,
        seed=settings.seed,
        setup=dict(outcome.setup),
        findings=findings,
        figures=_figures(outcome),
        tables=[_table(outcome)],
    )


def _whole(outcome: Outcome) -> Chunked:
    """The results with the largest budget, which holds every prompt whole."""
    budgets = outcome.limits[BUDGET]
    return budgets[max(budgets)]


def _stall_finding(outcome: Outcome) -> Finding:
    whole, chunked = _whole(outcome), outcome.limits[BUDGET][outcome.quarter]
    stalls = ratio(whole.short_itl_p99, chunked.short_itl_p99)
    slower = ratio(chunked.long_ttft_p50, whole.long_ttft_p50)
    return Finding(
        claim="Chunks bring the p99 time between tokens from 0.68 to 0.14 s and from 1.38 to 0.17 s, for a median TTFT "
        f"1.43 and 1.03 times as long ([Sarathi-Serve, table 4]({_SARATHI}), chunks of 1,024). Holds if chunks of a "
        "quarter of the long prompts bring the p99 ITL of short requests under a half, for less than 1.5 times the "
        "long prompts' TTFT",
        held=stalls.mean > 2 and slower.mean < 1.5,
        evidence=f"chunks of {outcome.quarter:,}: ITL p99 from {_ms(whole.short_itl_p99)} to "
        f"{_ms(chunked.short_itl_p99)} ms; TTFT p50 of long prompts from {_ms(whole.long_ttft_p50)} to "
        f"{_ms(chunked.long_ttft_p50)} ms, {slower.text('.2f')} times",
    )


def _tpot_finding(outcome: Outcome) -> Finding:
    budgets = outcome.limits[BUDGET]
    p99 = {budget: chunked.short_tpot_p99 for budget, chunked in budgets.items()}
    smallest, largest, quarter = min(budgets), max(budgets), outcome.quarter
    return Finding(
        claim="A stall is one gap of a request's many, so TPOT shows it less than ITL; expected: its p99 falls with "
        "the chunk too, by less. Holds if it does, from whole prompts to a quarter and on to the smallest chunk",
        held=p99[largest].mean > p99[quarter].mean > p99[smallest].mean
        and p99[largest].mean / p99[quarter].mean
        < budgets[largest].short_itl_p99.mean / budgets[quarter].short_itl_p99.mean,
        evidence=f"TPOT p99 of short requests: {_ms(p99[largest])} ms with whole prompts, {_ms(p99[quarter])} ms with "
        f"chunks of {quarter:,}, {_ms(p99[smallest])} ms with chunks of {smallest:,}",
    )


def _queue_finding(outcome: Outcome) -> Finding:
    budgets, limits = outcome.limits[BUDGET], outcome.limits[PER_PROMPT]
    threshold = min(limits)
    best = min(budgets.values(), key=lambda chunked: chunked.short_ttft_p99.mean)
    limited = limits[threshold]
    return Finding(
        claim="A short request still waits while the budget goes to a long prompt ahead of it; where each prompt is "
        f"held to a part of the budget, short ones go past it ([vLLM says so]({_VLLM})). Holds if such a limit brings "
        "the TTFT p99 of short requests under half of the best that the budget alone does",
        held=limited.short_ttft_p99.mean < best.short_ttft_p99.mean / 2,
        evidence=f"TTFT p99 of short requests: {_ms(best.short_ttft_p99)} ms with the best budget, "
        f"{_ms(limited.short_ttft_p99)} ms with {threshold} tokens of one prompt in a step; TTFT p50 of long prompts "
        f"then {_ms(limited.long_ttft_p50)} ms",
    )


def _overhead_finding(alone_s: Mapping[int, float]) -> Finding:
    whole = alone_s[max(alone_s)]
    longer = {budget: seconds / whole - 1 for budget, seconds in alone_s.items()}
    return Finding(
        claim="Chunks of 512 make a prefill at most 25% longer, chunks of 2,048 hardly "
        f"([Sarathi-Serve, section 5.4.1]({_SARATHI})). Holds if chunks of 512 and more cost at most so much",
        held=all(share <= 0.25 for budget, share in longer.items() if budget >= 512),
        evidence="one long prompt alone takes longer by "
        + ", ".join(
            f"{share:.1%} in chunks of {budget:,}" for budget, share in longer.items() if budget < max(alone_s)
        ),
    )


def _figures(outcome: Outcome) -> list[Figure]:
    budgets: list[float | str] = list(outcome.limits[BUDGET])
    limits: list[float | str] = list(outcome.limits[PER_PROMPT])

    def line(label: str, field: str, limit: str = BUDGET) -> Series:
        values = [getattr(chunked, field) for chunked in outcome.limits[limit].values()]
        return series(label, budgets if limit == BUDGET else limits, values, scale=1e3)

    whole = "the rightmost budget holds every prompt whole. Ranges are over the seeds."
    return [
        Figure(
            name="stalls",
            title="How long short requests wait for their next token",
            x_label="tokens of a step (max_num_batched_tokens)",
            y_label="time between tokens, ms",
            log_x=True,
            log_y=True,
            series=[
                line("ITL, longest", "short_itl_max"),
                line("ITL p99", "short_itl_p99"),
                line("TPOT p99", "short_tpot_p99"),
                line("ITL p50", "short_itl_p50"),
            ],
            caption=f"Long prompts arrive all the while; {whole}",
        ),
        Figure(
            name="ttft",
            title="How long requests wait for their first token",
            x_label="most tokens of a step, or of one prompt in a step",
            y_label="TTFT, ms",
            log_x=True,
            log_y=True,
            series=[
                line("short, p99, by budget", "short_ttft_p99"),
                line("short, p99, by limit per prompt", "short_ttft_p99", PER_PROMPT),
                line("long, p50, by budget", "long_ttft_p50"),
                line("long, p50, by limit per prompt", "long_ttft_p50", PER_PROMPT),
            ],
            caption=f"By budget: max_num_batched_tokens; {whole} By limit per prompt: long_prefill_token_threshold.",
        ),
    ]


def _table(outcome: Outcome) -> Table:
    rows = [
        [
            limit,
            f"{most:,}",
            *(_ms(getattr(chunked, field)) for field in _COLUMNS.values()),
            chunked.output_tokens_per_s.text(".0f"),
        ]
        for limit, cases in outcome.limits.items()
        for most, chunked in cases.items()
    ]
    return Table(
        title="Latencies in ms, of short requests unless said otherwise",
        columns=["limited", "to", *_COLUMNS, "output tokens/s"],
        rows=rows,
    )


def _ms(seconds: Repeated) -> str:
    return seconds.text(".0f" if seconds.mean > 0.02 else ".1f", scale=1e3)


EXPERIMENT = Experiment(
    name="5-chunked-prefill",
    title="Long prompts among short ones: chunked prefill",
    hypothesis=f"""
A step takes as long as the tokens in it, so a long prompt that is computed in one step delays all running sequences: a
stall. [Sarathi-Serve]({_SARATHI}) computes prompts in chunks beside the decodes, within a budget of tokens
for each step. With Yi-34B on two A100s and a budget of 1,024 (table 4) the p99 time between tokens falls from 0.68 to
0.14 s on conversations and from 1.38 to 0.17 s on summaries of papers, for a median TTFT of 0.76 in place of 0.53 s
and 3.90 in place of 3.78 s. Small chunks cost something: the weights and the KV before them are read again for each. A
prefill takes at most 25% longer with chunks of 512, hardly longer with 2,048 (section 5.4.1).

Here `--max-num-batched-tokens` is the budget, and `--long-prefill-token-threshold` holds each prompt to a part of it,
so that a short prompt behind a long one is computed too. Short requests run while long prompts keep arriving; the
largest budget holds each of them whole, which is no chunking.
""",
    notes="""
Chunks cost less here than in Sarathi-Serve: computing 512 tokens takes longer than reading this model's weights, so
the cost model sees no loss in smaller matrices, and with 8 KV heads there is little KV to read again. Chunks under
some 220 tokens do not fill the time that reading the weights takes: with 128, a prefill is 64% longer, and the server
falls behind on its prompts.

The budget alone does nothing for the TTFT of a short request behind a long prompt, as its tokens go to the prompts in
their order. A limit for each prompt does: short ones go past, and the long prompts pay for it. On the CPU that buys no
better TTFT than the largest budget has, but the time between tokens of a far smaller one: a step takes as long as its
tokens do there, so that whole prompts are computed as fast as chunks, and only stall the others.
""",
    run=run,
    places=("simulate", "cpu"),
)
