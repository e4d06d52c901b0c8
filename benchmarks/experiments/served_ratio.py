"""Experiment 7: new requests are held back until enough of them wait: time to first token against time per token."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from benchmarks.experiments.experiment import Experiment, ExperimentResult, Figure, Finding, RunSettings, Series, Table
from benchmarks.experiments.served_ratio_runs import MIDDLE, Outcome, Point, Setting, measured, simulated
from cadenza_loadtest.requests import Floats
from scheduler_svc.core.policies.batching import MAX_WAITING_STEPS

_TGI = "[TGI](https://huggingface.co/docs/text-generation-inference/basic_tutorials/launcher)"
_MAX_STEPS = 1.25 * MAX_WAITING_STEPS
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
        findings=[_waits(found), _spared(found), *(_bounded(setting, points) for setting, points in found.items())],
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
    rising = [np.diff([point.ttft_p50_s.mean() for point in points.values()]) > 0 for points in found.values()]
    evidence = [
        f"{setting.rate:g}/s: {_seconds(points[0.0].ttft_p50_s)} s without, "
        f"{_seconds(points[MIDDLE].ttft_p50_s)} s at {MIDDLE}, {_seconds(points[4.0].ttft_p50_s)} s at 4"
        for setting, points in found.items()
    ]
    return Finding(
        claim=f"Held back, waiting requests may wait for very long ({_TGI}). Holds if the median TTFT grows from each "
        "ratio to the next",
        held=bool(np.all(rising)),
        evidence=f"median TTFT: {'; '.join(evidence)}",
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


def _bounded(setting: Setting, points: Mapping[float, Point]) -> Finding:
    more = points[4.0].ttft_p50_s - points[0.0].ttft_p50_s
    steps = more / points[4.0].tpot_p50_s
    return Finding(
        claim=f"{MAX_WAITING_STEPS} steps bound the wait, whatever the ratio (expected here): {setting.label}. Holds "
        f"if the median TTFT grows by no more than {_MAX_STEPS:g} median steps",
        held=bool(steps.max() <= _MAX_STEPS),
        evidence=f"a ratio of 4 adds {_seconds(more)} s to the median TTFT, {steps.mean():.0f} median steps",
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

`--waiting-served-ratio` does the same here, for at most 20 steps, but this scheduler computes prompts in the same steps
as running sequences. What a newcomer costs the others is then smaller from the start, and so should be what the option
can save. The rows without a bound are of an option that was there when they were measured: `max_waiting_steps`.
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
