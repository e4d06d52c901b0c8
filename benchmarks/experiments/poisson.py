"""Experiment 2: latencies of static, dynamic and continuous batches under Poisson arrivals at growing rates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

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
from benchmarks.experiments.simulated import Case, a100_13b, about, drawn, poisson, run
from cadenza_loadtest.measures.columns import RequestColumns
from cadenza_loadtest.measures.latencies import end_of, per_request
from cadenza_loadtest.requests import Floats, RequestShape

SHARES = np.arange(1, 100) / 100
"""Percentiles at which distributions are compared."""

Load = Callable[[Sequence[RequestShape], Sequence[float]], RequestColumns]
Serving = Callable[[str], AbstractContextManager[Load]]
"""A server with the options of a policy, for any number of loads."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes for one place; lengths in the form of `--input-len`."""

    input_len: str
    output_len: str
    num_requests: int
    seeds: range


@dataclass(frozen=True, slots=True)
class Latencies:
    """Results of one policy at one rate."""

    e2e_s: tuple[Floats, ...]
    """[requests] for each seed."""
    tokens_per_s: float
    """Prompt and output tokens per second, from the first request to the last token, over the seeds."""

    def quantile(self, share: float) -> float:
        """A quantile over the requests of all seeds, in seconds."""
        return float(np.quantile(np.concatenate(self.e2e_s), share))

    def quantiles(self) -> Floats:
        """[99] the quantiles at SHARES, in seconds."""
        found: Floats = np.quantile(np.concatenate(self.e2e_s), SHARES)
        return found

    def ratios(self, other: Latencies, share: float) -> list[float]:
        """[seeds] the ratio of this quantile to the other's, each under the same load."""
        pairs = zip(self.e2e_s, other.e2e_s, strict=True)
        return [float(np.quantile(one, share) / np.quantile(two, share)) for one, two in pairs]


def at_rates(scale: Scale, rates: Sequence[float], serving: Serving) -> dict[float, dict[str, Latencies]]:
    """Latencies by rate (requests per second), then by policy."""
    found: dict[float, dict[str, Latencies]] = {rate: {} for rate in rates}
    for policy in policies(1):
        with serving(policy) as load:
            for rate in rates:
                found[rate][policy] = _latencies([_loaded(scale, rate, seed, load) for seed in scale.seeds])
    return found


def requests_of(scale: Scale, seed: int) -> list[RequestShape]:
    """The requests, which are the same at every rate."""
    return drawn({"input_len": scale.input_len, "output_len": scale.output_len}, scale.num_requests, seed)


def _loaded(scale: Scale, rate: float, seed: int, load: Load) -> RequestColumns:
    return load(requests_of(scale, seed), poisson(rate, scale.num_requests, seed))


def _latencies(runs: Sequence[RequestColumns]) -> Latencies:
    tokens = sum(int((run.num_prompt_tokens + run.num_output_tokens).sum()) for run in runs)
    seconds = sum(end_of(run) - float(run.due_s.min()) for run in runs)
    return Latencies(tuple(per_request(run)["e2e_s"] for run in runs), tokens / seconds)


_POST = "[Anyscale](https://www.anyscale.com/blog/continuous-batching-llm-inference)"
_REPO = "[its code](https://github.com/anyscale/llm-continuous-batching-benchmarks)"
_CONTINUOUS = (RESERVED, PAGED)
_SATURATED = 2.0
"""A server counts as saturated if the median latency is this many times that at the lowest rate."""
ByRate = dict[float, dict[str, Latencies]]


def _run(settings: RunSettings) -> ExperimentResult:
    return _on_cpu(settings) if settings.place == "cpu" else _simulated(settings)


def _simulated(settings: RunSettings) -> ExperimentResult:
    profile = a100_13b()
    size = profile.limits.pool_size * profile.limits.block_size // (512 + 1536)
    seeds = range(settings.seed, settings.seed + (1 if settings.quick else 3))
    scale = Scale("uniform:1:512", "exponential:128:1:1536", 30 if settings.quick else 300, seeds)

    @contextmanager
    def serving(policy: str) -> Iterator[Load]:
        def load(shapes: Sequence[RequestShape], times: Sequence[float]) -> RequestColumns:
            return run(Case(profile, shapes, times, scheduler=policies(size)[policy])).requests

        yield load

    found = at_rates(scale, (1, 4, 32) if settings.quick else (0.25, 0.5, 1, 2, 4, 6, 8, 12, 16, 32), serving)
    findings = [
        _every_percentile(found, 1),
        _every_percentile(found, 4),
        _unchanged(found),
        _saturation(found),
        _shrinks(found),
    ]
    return ExperimentResult(
        experiment=EXPERIMENT.name,
        place="simulate",
        seed=settings.seed,
        setup=about(profile) | _setup(scale, size),
        findings=findings,
        figures=[_cdf(found, 1), _cdf(found, 4), _over_rates(found)],
        tables=[_table(found)],
    )


def _on_cpu(settings: RunSettings) -> ExperimentResult:
    size, model = 4, random_checkpoint("10m")
    scale = Scale(
        "uniform:1:64", "exponential:32:1:256", 16 if settings.quick else 240, range(settings.seed, settings.seed + 1)
    )
    options = {"num_gpu_blocks": size * (64 + 256) // 16, "max_num_seqs": 64, "max_num_batched_tokens": 512}

    @contextmanager
    def serving(policy: str) -> Iterator[Load]:
        with Server(model, {**options, **policies(size)[policy]}) as server:
            server.load(requests_of(scale, settings.seed + 1)[: 2 * size], seed=settings.seed + 1)
            yield lambda shapes, times: server.load(shapes, times, seed=settings.seed)

    with serving(PAGED) as load:
        columns = load(requests_of(scale, settings.seed), [0.0] * scale.num_requests)
    capacity = len(columns) / end_of(columns)
    rates = [
        float(f"{share * capacity:.2g}") for share in ((0.3, 2.0) if settings.quick else (0.1, 0.3, 0.6, 1.0, 2.0))
    ]
    found = at_rates(scale, rates, serving)
    services = ", ".join(f"{name} {value}" for name, value in options.items())
    return ExperimentResult(
        experiment=EXPERIMENT.name,
        place="cpu",
        seed=settings.seed,
        setup={"model": f"{model.name}, 10.5M parameters", "services": services} | _setup(scale, size),
        findings=[_every_percentile(found, rates[0]), _every_percentile(found, rates[1]), _shrinks(found)],
        figures=[_cdf(found, rates[0]), _cdf(found, rates[1]), _over_rates(found)],
        tables=[_table(found)],
    )


def _setup(scale: Scale, size: int) -> dict[str, object]:
    return {
        "load": f"{scale.num_requests} requests by a Poisson process, prompts {scale.input_len}, "
        f"outputs {scale.output_len} tokens",
        "memory can be reserved for": f"{size} sequences: the size of a batch",
        "dynamic batches wait": "50 ms for more requests",
        "runs of each": len(scale.seeds),
    }


def _cdf(found: ByRate, rate: float) -> Figure:
    shares: list[float | None] = [100 * float(share) for share in SHARES]
    series = [
        Series(label=policy, x=[float(f"{value:.4g}") for value in each.quantiles()], y=shares)
        for policy, each in found[rate].items()
    ]
    return Figure(
        name=f"cdf-at-{rate:g}-per-s".replace(".", "-"),
        title=f"Latency at {rate:g} requests/s",
        x_label="time from a request's arrival to its last token (s)",
        y_label="requests that have ended (%)",
        series=series,
        kind="step",
        log_x=True,
        caption=f"Share of the requests that took no longer, at {rate:g} requests/s.",
    )


def _over_rates(found: ByRate) -> Figure:
    series = [
        _ratio_series(found, policy, share, f"{policy}, {name}")
        for policy in _CONTINUOUS
        for share, name in ((0.5, "median"), (0.99, "p99"))
    ]
    return Figure(
        name="latency-ratio",
        title="How much longer dynamic batches take",
        x_label="requests/s",
        y_label="latency in dynamic batches over that in continuous ones",
        series=series,
        log_x=True,
        log_y=True,
        caption="Latencies in dynamic batches over those in continuous ones under the same load: mean of the runs, and "
        "a band from the least to the greatest.",
    )


def _ratio_series(found: ByRate, policy: str, share: float, label: str) -> Series:
    ratios = [by_policy[DYNAMIC].ratios(by_policy[policy], share) for by_policy in found.values()]
    return Series(
        label=label,
        x=list(found),
        y=[float(np.mean(each)) for each in ratios],
        low=[min(each) for each in ratios],
        high=[max(each) for each in ratios],
    )


def _table(found: ByRate) -> Table:
    rows = [
        [f"{rate:g}", *(f"{each.quantile(0.5):.3g} / {each.quantile(0.99):.3g}" for each in by_policy.values())]
        for rate, by_policy in found.items()
    ]
    return Table(title="Median and p99 latency in seconds:", columns=["requests/s", *policies(1)], rows=rows)


def _every_percentile(found: ByRate, rate: float) -> Finding:
    by_policy = found[rate]
    ratios = [
        by_policy[batched].quantiles() / by_policy[policy].quantiles()
        for policy in _CONTINUOUS
        for batched in (STATIC, DYNAMIC)
    ]
    least = float(np.min(ratios))
    p50s = ", ".join(f"{policy} {each.quantile(0.5):.3g} s" for policy, each in by_policy.items())
    return Finding(
        claim=f"Continuous batches are better at every percentile ({_POST}): {rate:g}/s. Holds if from 1 to 99",
        held=least > 1,
        evidence=f"at least {least:.2f} times as fast at each percentile from 1 to 99; medians: {p50s}",
    )


def _unchanged(found: ByRate) -> Finding:
    low, high = (found[rate][PAGED].quantile(0.5) for rate in (1, 4))
    other_low, other_high = (found[rate][RESERVED].quantile(0.5) for rate in (1, 4))
    return Finding(
        claim=f"With paging, latencies stay mostly unchanged from 1 to 4 requests/s ({_POST}). Holds if the median "
        "grows by less than a quarter",
        held=high < 1.25 * low,
        evidence=f"median {low:.2f} s and {high:.2f} s; in reserved memory {other_low:.2f} s and {other_high:.2f} s",
    )


def _saturation(found: ByRate) -> Finding:
    rates = list(found)
    saturated = {policy: _saturated_at(found, policy) for policy in policies(1)}
    at, most = saturated[PAGED], max(each[PAGED].tokens_per_s for each in found.values())
    evidence = ", ".join(f"{name} {_rate(rate)}" for name, rate in saturated.items())
    return Finding(
        claim=f"With paging the server saturates around 8 requests/s, at some 1,900 tokens/s ({_POST}). Holds if the "
        "median has doubled at 8 or 12/s, not before, and the throughput is within a quarter",
        held=at is not None and 8 <= at <= 12 and abs(most / 1900 - 1) < 0.25,
        evidence=f"first of these rates with {_SATURATED:g} times the median latency of {rates[0]:g}/s: {evidence}; "
        f"paged, at most {most:,.0f} tokens/s",
    )


def _saturated_at(found: ByRate, policy: str) -> float | None:
    low = next(iter(found.values()))[policy].quantile(0.5)
    return next((rate for rate, each in found.items() if each[policy].quantile(0.5) > _SATURATED * low), None)


def _rate(rate: float | None) -> str:
    return "none" if rate is None else f"{rate:g}/s"


def _shrinks(found: ByRate) -> Finding:
    evidence, held = [], True
    for policy in _CONTINUOUS:
        ratios = _ratio_series(found, policy, 0.5, "").y
        known = [ratio for ratio in ratios if ratio is not None]
        peak = int(np.argmax(known))
        held &= known[-1] < known[peak]
        evidence.append(
            f"{policy}: {known[peak]:.1f}x at {list(found)[peak]:g}/s, {known[-1]:.1f}x at {list(found)[-1]:g}/s"
        )
    last = list(found.values())[-1]
    capacity = ", ".join(f"{last[policy].tokens_per_s / last[DYNAMIC].tokens_per_s:.1f}x" for policy in _CONTINUOUS)
    return Finding(
        claim=f"The difference shrinks as the server saturates ({_POST}). Holds if the ratio of medians is smaller at "
        "the highest rate than at its peak",
        held=held,
        evidence=f"medians in dynamic batches over those in {'; '.join(evidence)}; throughput there: {capacity}",
    )


EXPERIMENT = Experiment(
    name="2-poisson",
    title="Latency under Poisson arrivals, up to saturation",
    hypothesis=f"""
A request that arrives while a static batch runs waits for the batch's end, and a short one then waits for the longest
in its batch; a continuous batch admits it at the next step. {_POST} sent 100 requests at 1 and at 4 requests/s (prompts
uniform from 1 to 512 tokens, outputs exponential with mean 128 and at most 1,536) and found continuous batches better
at every percentile. As a server saturates, there are fewer places for newcomers, and its curve draws nearer to those of
static batches; with more memory to use that comes later.

The same here with 300 requests, and on to 32 requests/s. "{STATIC}" waits for a full batch; the post's static servers
start with what there is when the batch before has ended, as {_REPO} shows: here that is "{DYNAMIC}". Beyond a server's
capacity the queue grows until the last request has come, so latencies there depend on how long the load lasts: what
can be compared are the policies. From there on the ratio of latencies should go to that of the throughputs, not to 1.
""",
    run=_run,
    places=("simulate", "cpu"),
    notes="""
In virtual time the ratio of medians is still above that of the throughputs at 32 requests/s: a queue grows by the
difference of two rates, which is the smaller part of the faster server's, and throughputs count the end of a run too,
when few sequences are left.
""",
)
