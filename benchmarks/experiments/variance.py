"""Experiment 1: throughput of static, dynamic and continuous batches as output lengths vary more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.common.checkpoints import random_checkpoint
from benchmarks.experiments.experiment import (
    DYNAMIC,
    PAGED,
    RESERVED,
    STATIC,
    Experiment,
    ExperimentResult,
    Figure,
    Finding,
    RunSettings,
    Series,
    Table,
    policies,
)
from benchmarks.experiments.served import Server
from benchmarks.experiments.simulated import Case, a100_13b, about, drawn, fixed, run
from cadenza_loadtest.measures.latencies import end_of
from cadenza_loadtest.requests import Floats, Ints, RequestShape
from cadenza_loadtest.seeds import stream
from cadenza_loadtest.workloads.lengths import lognormal_text

MEAN = 128
"""Mean of the outputs in `equal_means`."""

Serve = Callable[[str, Sequence[RequestShape], int], float]
"""Tokens per second (prompts and outputs, as in the post) of a policy, from policy, requests and batch size."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes for one place; lengths are in tokens."""

    prompt_len: int
    mean: int
    """Mean of the exponential distribution of outputs."""
    maxima: tuple[int, ...]
    """Limits of the outputs; larger draws are redrawn, as in the post."""
    pool_tokens: int
    num_requests: int
    """Minimum number of requests."""
    seeds: range

    def num_reserved(self, maximum: int) -> int:
        """Number of sequences whose greatest length fits in the pool."""
        return self.pool_tokens // (self.prompt_len + maximum)

    def num_loaded(self, maximum: int) -> int:
        """Number of requests in whole batches, as in the post: an incomplete static batch waits forever."""
        size = self.num_reserved(maximum)
        return -(-self.num_requests // size) * size


@dataclass(frozen=True, slots=True)
class Point:
    """Results for one workload."""

    label: str
    num_reserved: int
    """Sequences in a batch."""
    cv: float
    """Standard deviation of the outputs over their mean."""
    longest_over_mean: float
    """Longest output over the mean in static batches: steps of a batch for each step that a sequence needs."""
    tokens_per_s: dict[str, Floats]
    """[seeds] by policy."""

    def ratio(self, policy: str, over: str = STATIC) -> float:
        """Ratio of the mean throughput to another policy's."""
        return float(self.tokens_per_s[policy].mean() / self.tokens_per_s[over].mean())

    def spread(self, policy: str) -> tuple[float, float]:
        """Minimum and maximum over the runs of the ratio to static batches with the same load."""
        ratios = self.tokens_per_s[policy] / self.tokens_per_s[STATIC]
        return float(ratios.min()), float(ratios.max())


def growing_maxima(scale: Scale, names: Sequence[str], serve: Serve) -> list[Point]:
    """The post's workloads: exponential outputs with increasing limits, each with the largest batch that fits."""
    found = []
    for maximum in scale.maxima:
        loads = [_exponential(scale, maximum, seed) for seed in scale.seeds]
        found.append(_point(str(maximum), scale.num_reserved(maximum), loads, scale, names, serve))
    return found


def equal_means(scale: Scale, names: Sequence[str], serve: Serve, every: int = 1) -> list[Point]:
    """Outputs of equal mean and maximum, hence equal batch size, and of growing variance; every `every`-th workload."""
    maximum = scale.maxima[-1]
    lengths = [
        ("constant", str(MEAN)),
        ("uniform 64 to 192", "uniform:64:192"),
        ("uniform 1 to 255", "uniform:1:255"),
        ("exponential", f"exponential:{MEAN}:1:{maximum}"),
        ("log-normal, σ = 1.2", lognormal_text(MEAN, 1.2, 1, maximum)),
        ("log-normal, σ = 1.6", lognormal_text(MEAN, 1.6, 1, maximum)),
    ]
    found = []
    for label, text in lengths[::every]:
        loads = [_drawn(scale, text, seed) for seed in scale.seeds]
        found.append(_point(label, scale.num_reserved(maximum), loads, scale, names, serve))
    return found


def _exponential(scale: Scale, maximum: int, seed: int) -> Ints:
    rng = stream(seed, f"experiment-1 {maximum}")
    count, draws = scale.num_loaded(maximum), np.zeros(0, np.int64)
    while len(draws) < count:
        more = np.rint(rng.exponential(scale.mean, 2 * count)).astype(np.int64)
        draws = np.concatenate((draws, more[(more >= 1) & (more <= maximum)]))
    return draws[:count]


def _drawn(scale: Scale, lengths: str, seed: int) -> Ints:
    shapes = drawn(
        {"input_len": str(scale.prompt_len), "output_len": lengths}, scale.num_loaded(scale.maxima[-1]), seed
    )
    return np.array([shape.num_output_tokens for shape in shapes])


def _point(label: str, size: int, loads: Sequence[Ints], scale: Scale, names: Sequence[str], serve: Serve) -> Point:
    requests = [fixed([scale.prompt_len] * len(load), load.tolist()) for load in loads]
    rates = {name: np.array([serve(name, shapes, size) for shapes in requests]) for name in names}
    outputs = np.concatenate(loads)
    longest = [load[first : first + size].max() for load in loads for first in range(0, len(load), size)]
    mean = float(outputs.mean())
    return Point(label, size, float(outputs.std()) / mean, float(np.mean(longest)) / mean, rates)


_POST = "[Anyscale](https://www.anyscale.com/blog/continuous-batching-llm-inference)"
_POLICIES = (STATIC, DYNAMIC, RESERVED, PAGED)
_CONFIGURED = (
    "[its code](https://github.com/anyscale/llm-continuous-batching-benchmarks/blob/main/benchmark_configs/"
    "hf_tgi_variable_size)"
)
_HALF = "continuous, half the memory reserved"
_PUBLISHED = {RESERVED: 8.0, PAGED: 23.0}
_FASTER_TRANSFORMER = 4.0
"""Throughput of static batches in FasterTransformer over those in Hugging Face's pipelines, by the same post."""


def _run(settings: RunSettings) -> ExperimentResult:
    return _on_cpu(settings) if settings.place == "cpu" else _simulated(settings)


def _simulated(settings: RunSettings) -> ExperimentResult:
    profile = a100_13b()
    pool_tokens = profile.limits.pool_size * profile.limits.block_size
    seeds = range(settings.seed, settings.seed + (1 if settings.quick else 2))
    maxima = (32, 1536) if settings.quick else (32, 128, 512, 1536)
    scale = Scale(512, 128, maxima, pool_tokens, 40 if settings.quick else 1000, seeds)

    def serve(policy: str, shapes: Sequence[RequestShape], size: int) -> float:
        options = policies(size // 2)[RESERVED] if policy == _HALF else policies(size)[policy]
        return run(Case(profile, shapes, scheduler=options)).tokens_per_s

    points = growing_maxima(scale, (*_POLICIES, _HALF), serve)
    equal = equal_means(scale, (STATIC, RESERVED, PAGED), serve, every=5 if settings.quick else 1)
    return ExperimentResult(
        experiment=EXPERIMENT.name,
        place="simulate",
        seed=settings.seed,
        setup=about(profile) | _setup(scale),
        findings=[*_findings(points), _half_finding(points), _window_finding(points), *_equal_findings(equal)],
        figures=[_over_maxima(points), _over_cv(equal)],
        tables=[
            _table("Exponential outputs, truncated at increasing lengths:", points),
            _table(f"Outputs of {MEAN} on average:", equal),
        ],
    )


def _on_cpu(settings: RunSettings) -> ExperimentResult:
    maxima = (16, 96) if settings.quick else (16, 96, 480)
    scale = Scale(32, 48, maxima, 2048, 12 if settings.quick else 160, range(settings.seed, settings.seed + 1))
    options = {"num_gpu_blocks": scale.pool_tokens // 16, "max_num_seqs": 64, "max_num_batched_tokens": 512}
    model = random_checkpoint("10m")

    def serve(policy: str, shapes: Sequence[RequestShape], size: int) -> float:
        with Server(model, {**options, **policies(size)[policy]}) as server:
            server.load(shapes[:size], seed=settings.seed + 1)
            columns = server.load(shapes, seed=settings.seed)
        return float((columns.num_prompt_tokens + columns.num_output_tokens).sum()) / end_of(columns)

    points = growing_maxima(scale, _POLICIES, serve)
    services = ", ".join(f"{name} {value}" for name, value in options.items())
    return ExperimentResult(
        experiment=EXPERIMENT.name,
        place="cpu",
        seed=settings.seed,
        setup={"model": f"{model.name}, 10.5M parameters", "services": services} | _setup(scale),
        findings=[*_findings(points), _window_finding(points)],
        figures=[_over_maxima(points)],
        tables=[_table("", points)],
    )


def _setup(scale: Scale) -> dict[str, Any]:
    return {
        "load": f"{scale.num_requests:,} requests at once, prompts of {scale.prompt_len} tokens",
        "outputs": f"exponential, mean {scale.mean}, drawn again where over {', '.join(map(str, scale.maxima))}",
        "runs of each": len(scale.seeds),
    }


def _over_maxima(points: Sequence[Point]) -> Figure:
    maxima: list[float | str] = [float(point.label) for point in points]
    return Figure(
        name="throughput-by-maximum",
        title="Throughput as output lengths vary more",
        x_label="longest output (tokens)",
        y_label="throughput over static batches'",
        series=[_ratios(policy, maxima, points) for policy in _POLICIES],
        log_x=True,
        caption="Multiples of static batches' throughput: mean of the runs, and a band from the least to the greatest.",
    )


def _over_cv(points: Sequence[Point]) -> Figure:
    cvs: list[float | str] = [round(point.cv, 3) for point in points]
    lost = Series(label="longest of a static batch over the mean", x=cvs, y=[each.longest_over_mean for each in points])
    return Figure(
        name="throughput-by-variance",
        title="The same mean and more variance",
        x_label="standard deviation of output lengths over their mean",
        y_label="throughput over static batches'",
        series=[_ratios(STATIC, cvs, points), lost, *(_ratios(policy, cvs, points) for policy in (RESERVED, PAGED))],
        caption=f"Outputs are of {MEAN} tokens on average and of 1,536 at most everywhere. The second line is what "
        "it costs to wait for the longest of a batch, if all steps take the same time and nothing else costs any.",
    )


def _ratios(policy: str, x: list[float | str], points: Sequence[Point]) -> Series:
    spreads = [point.spread(policy) for point in points]
    ratios: list[float | None] = [point.ratio(policy) for point in points]
    return Series(label=policy, x=x, y=ratios, low=[low for low, _ in spreads], high=[high for _, high in spreads])


def _table(title: str, points: Sequence[Point]) -> Table:
    columns = [
        "outputs (tokens)",
        "deviation / mean",
        "batch size",
        "longest of a batch / mean",
        *(f"{name} (tokens/s)" for name in points[0].tokens_per_s),
    ]
    rows = [
        [point.label, f"{point.cv:.2f}", str(point.num_reserved), f"{point.longest_over_mean:.2f}"]
        + [f"{rates.mean():,.0f}" for rates in point.tokens_per_s.values()]
        for point in points
    ]
    return Table(title=title, columns=columns, rows=rows)


def _findings(points: Sequence[Point]) -> list[Finding]:
    first, last = points[0], points[-1]
    reserved = [point.ratio(RESERVED) for point in points]
    doubled = [point.ratio(PAGED, RESERVED) for point in points]
    return [
        Finding(
            claim=f"Continuous batches gain more over static ones the more output lengths vary ({_POST}). Holds if the "
            "gain grows from each workload to the next",
            held=all(less < more for less, more in pairwise(reserved)),
            evidence=f"in as much memory {_times(reserved)} for outputs of up to {_labels(points)}",
        ),
        Finding(
            claim=f"Where they vary least, both do about the same ({_POST}). Holds if within 15%",
            held=abs(reserved[0] - 1) <= 0.15,
            evidence=f"up to {first.label} tokens: {reserved[0]:.2f}x",
        ),
        *(_multiple(last, policy) for policy in (RESERVED, PAGED)),
        Finding(
            claim=f"Paging more than doubles what continuous batches do without it ({_POST}). Holds if everywhere",
            held=min(doubled) > 2,
            evidence=f"{_times(doubled)} for outputs of up to {_labels(points)}",
        ),
    ]


def _multiple(point: Point, policy: str) -> Finding:
    published, here = _PUBLISHED[policy], point.ratio(policy)
    alike = published / _FASTER_TRANSFORMER
    return Finding(
        claim=f"{policy[0].upper()}{policy[1:]}: up to {published:g}x the throughput of naive static batches, or "
        f"{alike:g}x that of static batches in an optimized engine ({_POST}). Holds if 90% of the latter are reached",
        held=here >= 0.9 * alike,
        evidence=f"{here:.1f}x with outputs of up to {point.label} tokens, where both run the same engine",
    )


def _half_finding(points: Sequence[Point]) -> Finding:
    ratios = [point.ratio(PAGED, _HALF) for point in points]
    return Finding(
        claim="It does if the server without it reserves only half of the memory, as the post's did (see below). Holds "
        "if everywhere",
        held=min(ratios) > 2,
        evidence=f"{_times(ratios)} for outputs of up to {_labels(points)}",
    )


def _window_finding(points: Sequence[Point]) -> Finding:
    return Finding(
        claim="A time window is no help where all requests are there at once (expected here). Holds if within 5%",
        held=all(abs(point.ratio(DYNAMIC) - 1) < 0.05 for point in points),
        evidence=f"dynamic over static batches: {_times([point.ratio(DYNAMIC) for point in points])}",
    )


def _equal_findings(points: Sequence[Point]) -> list[Finding]:
    reserved = [point.ratio(RESERVED) for point in points]
    first, last = points[0], points[-1]
    return [
        Finding(
            claim="With one mean and one batch size the gain grows with variance alone (expected here). Holds if from "
            "each workload to the next",
            held=all(less < more for less, more in pairwise(reserved)),
            evidence=f"{_times(reserved)} at deviations of {', '.join(f'{point.cv:.2f}' for point in points)} of the "
            f"mean; waiting for the longest alone: {first.longest_over_mean:.2f}x to {last.longest_over_mean:.2f}x",
        ),
    ]


def _times(ratios: Sequence[float]) -> str:
    return ", ".join(f"{ratio:.2f}x" for ratio in ratios)


def _labels(points: Sequence[Point]) -> str:
    return ", ".join(point.label for point in points) + " tokens"


EXPERIMENT = Experiment(
    name="1-variance",
    title="Static, dynamic and continuous batches as output lengths vary more",
    hypothesis=f"""
A static batch runs until its longest sequence has ended; those that ended before it leave their places empty. So the
more output lengths vary, the more continuous batches should gain. {_POST} (OPT-13B on an A100 of 40 GB, 1,000 requests
at once, prompts of 512 tokens, outputs exponential with mean 128, draws over 32, 128, 512 or 1,536 left out) reports
up to 8 times the throughput of static batches in Hugging Face's pipelines for continuous batches that reserve memory
up to the greatest length, up to 23 times with paged memory (vLLM), and 4 times for static batches in
FasterTransformer. [Orca](https://www.usenix.org/conference/osdi22/presentation/yu) had shown it first: 36.9 times
FasterTransformer's throughput at the same latency, with GPT-3 175B.

The same here. Batch sizes are what a pool of 15,700 tokens can hold if each sequence is given its greatest length, as
whoever runs a server without paging has to choose them: {STATIC} and {DYNAMIC} batches and "{RESERVED}" all have that
size; "{PAGED}" takes as many as there are blocks for. Engine and costs are the same everywhere, so the factor 4
between Hugging Face's pipelines and an optimized engine is not in it: 8/4 = 2 and 23/4 = 5.75 are what to expect. The
post counts tokens of prompts and outputs; so does this.
""",
    run=_run,
    places=("simulate", "cpu"),
    notes=f"""
Where it came out otherwise, in virtual time:

- From 512 to 1,536 tokens the gain falls a little, because the batch shrinks from 15 sequences to 7, and the longest
  of 7 is nearer to the mean. With one batch size it grows with each workload.
- The first workload does not vary little: exponential lengths under 32 are almost uniform. Where all outputs have one
  length, continuous batches gain 2%. With outputs so short, prompts take most of the time, and no policy saves that.
- What paging can gain is what reservation wastes, and of 544 tokens reserved for an output of up to 32 that is little.
  The post's servers without paging were given 7,500 to 8,700 tokens ({_CONFIGURED}), half of what the pool holds. That
  explains the factor for long outputs, and more than it; for short ones the rest must be between the engines.

On the CPU a step takes longer with each sequence in it, as there is little reading of weights to share: a batch that is
kept full, or a larger one, then gains less than in virtual time. Each line is one run, so that a difference of a tenth
or two between static and dynamic batches says nothing.
""",
)
