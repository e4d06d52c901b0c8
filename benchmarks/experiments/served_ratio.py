"""Experiment 7: new requests are held back until enough of them wait: time to first token against time per token.

Poisson arrivals, with increasing ratios, at both places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.common.checkpoints import random_checkpoint
from benchmarks.experiments.experiment import Experiment, ExperimentResult, Figure, Finding, RunSettings, Series, Table
from benchmarks.experiments.served import Server
from benchmarks.experiments.simulated import Case, a100_13b, about, drawn, fixed, poisson, run
from cadenza_loadtest.measures.columns import RequestColumns
from cadenza_loadtest.measures.latencies import end_of, per_request
from cadenza_loadtest.requests import Floats

MIDDLE = 1.2
"""TGI's default for long; 0.3 later."""
BOUND, UNBOUND = 20, 1_000_000
"""Values of max_waiting_steps: the default, and one that is never reached in a run."""
_RATES = (4.0, 7.0)
_LOAD = {"input_len": "uniform:1:512", "output_len": "exponential:128:1:1536"}
_CPU_LOAD = {"input_len": "uniform:1:256", "output_len": "exponential:64:1:512"}
_CPU_RATES = (0.5, 0.8)
"""Shares of the server's throughput with all requests at once."""
_QUANTILES = (("ttft_s", 0.5), ("ttft_s", 0.99), ("tpot_s", 0.5), ("tpot_s", 0.99), ("e2e_s", 0.5))


@dataclass(frozen=True, slots=True)
class Setting:
    """One line of a figure: all ratios at one rate and one bound."""

    rate: float
    max_waiting_steps: int

    @property
    def label(self) -> str:
        """The label in legends."""
        bound = "no bound" if self.max_waiting_steps == UNBOUND else f"at most {self.max_waiting_steps} steps"
        return f"{self.rate:g} requests/s, {bound}"


@dataclass(frozen=True, slots=True)
class Point:
    """Results for one ratio; [seeds] seconds each."""

    ttft_p50_s: Floats
    ttft_p99_s: Floats
    tpot_p50_s: Floats
    tpot_p99_s: Floats
    e2e_p50_s: Floats


@dataclass(frozen=True, slots=True)
class Outcome:
    """All results of the experiment at one place."""

    setup: Mapping[str, Any]
    found: Mapping[Setting, Mapping[float, Point]]
    """By setting, then by ratio, ascending."""

    @property
    def rates(self) -> list[float]:
        """Requests per second."""
        return sorted({setting.rate for setting in self.found})


def simulated(settings: RunSettings) -> Outcome:
    """On the published A100 with a 13B model."""
    profile = a100_13b()
    num_requests, seeds = (30, 1) if settings.quick else (1000, 3)
    rates, ratios = (
        (_RATES[-1:], (0.0, MIDDLE, 4.0)) if settings.quick else (_RATES, (0.0, 0.1, 0.3, 0.6, 1.2, 2.0, 4.0))
    )

    def point(setting: Setting, ratio: float) -> Point:
        runs = []
        for seed in range(settings.seed, settings.seed + seeds):
            times = poisson(setting.rate, num_requests, seed)
            case = Case(profile, drawn(_LOAD, num_requests, seed), times, _options(ratio, setting.max_waiting_steps))
            runs.append(run(case).requests)
        return _point(runs)

    all_settings = [Setting(rate, bound) for rate in rates for bound in (BOUND, UNBOUND)]
    return Outcome(
        setup=about(profile) | {"load": _load_text(num_requests, _LOAD), "runs of each": seeds},
        found={setting: {ratio: point(setting, ratio) for ratio in ratios} for setting in all_settings},
    )


def measured(settings: RunSettings) -> Outcome:
    """The 10.5M shape on this machine's CPU; a few minutes."""
    model, options = random_checkpoint("10m"), {"device": "cpu", "max_num_seqs": 64, "num_gpu_blocks": 2048}
    num_requests, seeds = (16, 1) if settings.quick else (160, 1)
    shares, ratios = (_CPU_RATES[-1:], (0.0, MIDDLE, 4.0)) if settings.quick else (_CPU_RATES, (0.0, 0.3, 1.2, 4.0))
    warm_up = fixed([128] * 8, [16] * 8)
    with Server(model, options) as server:
        server.load(warm_up)
        capacity = num_requests / end_of(server.load(drawn(_CPU_LOAD, num_requests, settings.seed), seed=settings.seed))
    rates = [float(f"{share * capacity:.2g}") for share in shares]

    def points(ratio: float, bound: int) -> dict[float, Point]:
        """Results by rate, on one server."""
        runs: dict[float, list[RequestColumns]] = {rate: [] for rate in rates}
        with Server(model, {**options, **_options(ratio, bound)}) as server:
            server.load(warm_up)
            for seed in range(settings.seed, settings.seed + seeds):
                for rate in rates:
                    times = poisson(rate, num_requests, seed)
                    runs[rate].append(server.load(drawn(_CPU_LOAD, num_requests, seed), times, seed=seed))
        return {rate: _point(each) for rate, each in runs.items()}

    never = points(0.0, BOUND)
    by_bound = {
        bound: {ratio: points(ratio, bound) if ratio else never for ratio in ratios} for bound in (BOUND, UNBOUND)
    }
    services = ", ".join(f"{name} {value}" for name, value in options.items())
    return Outcome(
        setup={
            "model": f"{model.name}, 10.5M parameters",
            "services": services,
            "load": _load_text(num_requests, _CPU_LOAD),
            "rates": f"{', '.join(f'{share:.0%}' for share in shares)} of the {capacity:.1f} requests/s that are "
            "served when all arrive at once",
            "runs of each": seeds,
        },
        found={
            Setting(rate, bound): {ratio: by_rate[rate] for ratio, by_rate in by_ratio.items()}
            for rate in rates
            for bound, by_ratio in by_bound.items()
        },
    )


def _options(ratio: float, bound: int) -> dict[str, Any]:
    return {"waiting_served_ratio": ratio, "max_waiting_steps": bound}


def _load_text(num_requests: int, load: Mapping[str, str]) -> str:
    return (
        f"{num_requests:,} requests by a Poisson process, prompts {load['input_len']}, outputs {load['output_len']} "
        "tokens"
    )


def _point(runs: Sequence[RequestColumns]) -> Point:
    rows = []
    for columns in runs:
        latencies = per_request(columns)
        rows.append([float(np.nanquantile(latencies[name], share)) for name, share in _QUANTILES])
    return Point(*np.array(rows).T)


_TGI = "[TGI](https://huggingface.co/docs/text-generation-inference/basic_tutorials/launcher)"
_TPOTS = ("tpot_p50_s", "tpot_p99_s")

_Found = Mapping[Setting, Mapping[float, Point]]


def _run(settings: RunSettings) -> ExperimentResult:
    outcome: Outcome = measured(settings) if settings.place == "cpu" else simulated(settings)
    found = outcome.found
    return ExperimentResult(
        experiment=EXPERIMENT.name,
        place=settings.place,
        seed=settings.seed,
        setup=dict(outcome.setup),
        findings=[_waits(found), _spared(found), *(_bounded(found, rate) for rate in outcome.rates)],
        figures=[
            _figure(
                found, "ttft", "ttft_p50_s", 1.0, "Waiting for the first token", "median time to the first token (s)"
            ),
            _figure(found, "tpot", "tpot_p50_s", 1e3, "Time per token", "median time per output token (ms)"),
            _figure(found, "tpot-p99", "tpot_p99_s", 1e3, "Time per token, tail", "p99 of time per output token (ms)"),
        ],
        tables=[_table(setting, points) for setting, points in found.items()],
    )


def _figure(found: _Found, name: str, quantity: str, factor: float, title: str, y_label: str) -> Figure:
    num_runs = min(len(getattr(point, quantity)) for points in found.values() for point in points.values())
    return Figure(
        name=name,
        title=title,
        x_label="waiting_served_ratio",
        y_label=y_label,
        series=[_series(setting, points, quantity, factor) for setting, points in found.items()],
        log_y=name == "ttft",
        caption="Mean of the runs, and a band from the least to the greatest." if num_runs > 1 else "",
    )


def _series(setting: Setting, points: Mapping[float, Point], quantity: str, factor: float) -> Series:
    values = [factor * getattr(point, quantity) for point in points.values()]
    return Series(
        label=setting.label,
        x=[f"{ratio:g}" for ratio in points],
        y=[float(each.mean()) for each in values],
        low=[float(each.min()) for each in values],
        high=[float(each.max()) for each in values],
    )


def _table(setting: Setting, points: Mapping[float, Point]) -> Table:
    columns = ["ratio", "TTFT p50 (s)", "TTFT p99 (s)", "TPOT p50 (ms)", "TPOT p99 (ms)", "E2E p50 (s)"]
    rows = []
    for ratio, point in points.items():
        waits = [_seconds(each) for each in (point.ttft_p50_s, point.ttft_p99_s)]
        paces = [f"{1e3 * each.mean():.1f}" for each in (point.tpot_p50_s, point.tpot_p99_s)]
        rows.append([f"{ratio:g}", *waits, *paces, _seconds(point.e2e_p50_s)])
    return Table(title=f"{setting.label}:", columns=columns, rows=rows)


def _waits(found: _Found) -> Finding:
    unbound = {setting: points for setting, points in found.items() if setting.max_waiting_steps == UNBOUND}
    rising = [np.diff([point.ttft_p50_s.mean() for point in points.values()]) > 0 for points in unbound.values()]
    evidence = [
        f"{setting.rate:g}/s: {_seconds(points[0.0].ttft_p50_s)} s without, "
        f"{_seconds(points[MIDDLE].ttft_p50_s)} s at {MIDDLE}, {_seconds(points[4.0].ttft_p50_s)} s at 4"
        for setting, points in unbound.items()
    ]
    return Finding(
        claim=f"Held back, waiting requests may wait for very long ({_TGI}). Holds if the median TTFT grows from each "
        "ratio to the next",
        held=bool(np.all(rising)),
        evidence=f"median TTFT, no bound on the steps: {'; '.join(evidence)}",
    )


def _spared(found: _Found) -> Finding:
    evidence, held = [], True
    for setting, points in found.items():
        changes = [100 * (getattr(points[MIDDLE], name) / getattr(points[0.0], name) - 1) for name in _TPOTS]
        held &= all(bool(change.mean() < -5) for change in changes)
        evidence.append(f"{setting.label}: {_percent(changes[0])}, p99 {_percent(changes[1])}")
    return Finding(
        claim=f"In return running requests are delayed less ({_TGI}). Holds if at {MIDDLE} median and p99 of TPOT "
        "fall by over 5%, under each load",
        held=held,
        evidence=f"median TPOT at {MIDDLE} against none: {'; '.join(evidence)}",
    )


def _percent(changes: Floats) -> str:
    spread = f" ({changes.min():+.0f} to {changes.max():+.0f})" if len(changes) > 1 else ""
    return f"{changes.mean():+.0f}%{spread}"


def _seconds(values: Floats) -> str:
    mean = values.mean()
    return f"{mean:.2f}" if mean >= 1 else f"{mean:.3f}"


def _bounded(found: _Found, rate: float) -> Finding:
    points = found[Setting(rate, BOUND)]
    more = points[4.0].ttft_p50_s - points[0.0].ttft_p50_s
    steps = more / points[4.0].tpot_p50_s
    return Finding(
        claim=f"max_waiting_steps bounds the wait, whatever the ratio (expected here): {rate:g} requests/s. Holds if "
        f"the median TTFT grows by no more than {1.25 * BOUND:g} median steps",
        held=bool(steps.max() <= 1.25 * BOUND),
        evidence=f"a ratio of 4 adds {_seconds(more)} s to the median TTFT, {steps.mean():.0f} median steps; "
        f"without a bound {_seconds(found[Setting(rate, UNBOUND)][4.0].ttft_p50_s - points[0.0].ttft_p50_s)} s",
    )


EXPERIMENT = Experiment(
    name="7-served-ratio",
    title="Holding newcomers back: TTFT against TPOT",
    hypothesis=f"""
In {_TGI} a prompt is computed in a pass of its own, for which the running batch pauses. `waiting_served_ratio` says
when that is worth it: 1.2 (the default for long, then 0.3) admits new requests when there are 1.2 times as many as are
running; `max_waiting_tokens` (20) admits them after this many decoded tokens in any case. If too small, its
description says, prompts always take the compute from running requests; if too big, waiting requests may wait for very
long. So TTFT should grow with the ratio, and TPOT should fall.

`--waiting-served-ratio` and `--max-waiting-steps` do the same here, but this scheduler computes prompts in the same
steps as running sequences. What a newcomer costs the others is then smaller from the start, and so should be what the
option can save.
""",
    run=_run,
    places=("simulate", "cpu"),
    notes="""
Why it came out otherwise in virtual time:

- TPOT does not fall, it rises a little. A step of this kind reads weights for as long as it takes to compute 247
  tokens, so a prompt that comes alone is nearly free beside 20 or 30 decoding sequences; several that were held back
  and come together are not. What the option saves where a prompt has a pass of its own is not there to be saved in
  mixed steps. Even at a ratio of 4 without a bound, with ten seconds and more of TTFT, the median is no lower, and p99
  by 3% at most.
- At 7 requests/s the bound on the steps does not bound the wait. Steps are longer, so more sequences run at once, and
  near the server's capacity (some 8 requests/s) memory fills: the requests that the bound admitted then wait for
    blocks.

So 0, never to hold back, is the right default where weights are what a step waits for. On the CPU it came out as TGI
says: a step takes as long as its tokens do there, so that each prompt that joins holds the others up, and those that
come together hold them up once. TPOT falls by a quarter to a half, for TTFTs that are two to eight times as long; with
one run of each, how much it is at which ratio is not to be read from this.
""",
)
